package redlock

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/fencing"
)

// schedule is one run at random: some Lockers compete for one key, on instances whose
// clocks differ by up to the drift, over a network that delays, loses and repeats, while
// instances restart without their data.
//
// It checks: no two locks are valid at the same true time; a token is greater than those
// of all grants that were complete when its attempt began; and, where no request runs
// twice, nothing is left behind on any instance.
type schedule struct {
	rand    *rand.Rand
	servers []*simServer
	net     *simNet
	ttl     time.Duration
	longest time.Duration // that anybody holds or waits
	fenced  bool
	exact   bool // no request runs twice

	mu      sync.Mutex
	held    map[*holdfast.Lock]bool
	highest fencing.Token
	grants  int
	fault   string
}

// setup says what schedules are like.
type setup struct {
	nodes    int
	durable  bool // instances that forget are not vetted
	restarts bool
	drift    float64 // of the clocks; the Locker allows for 1 %
}

// run runs a schedule and returns what went wrong, and how many grants there were.
func (set setup) run(t *testing.T, seed uint64) (fault string, grants int) {
	synctest.Test(t, func(t *testing.T) {
		x := &schedule{rand: rand.New(rand.NewPCG(seed, uint64(set.nodes))), held: map[*holdfast.Lock]bool{}}
		x.prepare(set)
		opts := []holdfast.Option{holdfast.WithTTL(x.ttl), holdfast.WithMargin(0), quiet}
		if x.fenced {
			opts = append(opts, holdfast.WithFencing())
		}
		if set.durable {
			opts = append(opts, WithDurableInstances())
		}
		var lockers []*holdfast.Locker
		var work, trouble sync.WaitGroup
		for range 3 {
			l, _ := simLocker(t, x.servers, x.net, opts...)
			lockers = append(lockers, l)
			for range 2 {
				r := rand.New(rand.NewPCG(x.rand.Uint64(), 0))
				work.Go(func() { x.compete(t.Context(), l, r) }) // ends after its rounds
			}
		}
		stop := make(chan struct{})
		trouble.Go(func() { x.trouble(set, stop) }) // ended by stop
		work.Wait()
		close(stop)
		trouble.Wait()
		if x.exact {
			x.leftovers()
		}
		for _, l := range lockers {
			_ = l.Close()
		}
		time.Sleep(time.Minute) // late requests arrive
		fault, grants = x.fault, x.grants
	})
	return fault, grants
}

// prepare draws what the schedule is like.
func (x *schedule) prepare(set setup) {
	x.ttl = []time.Duration{300 * time.Millisecond, time.Second, 20 * time.Second}[x.rand.IntN(3)]
	x.longest = 2 * time.Second
	x.fenced = x.rand.IntN(2) == 0
	x.servers = simServers(set.nodes)
	for _, s := range x.servers {
		s.rate = 1 + set.drift*(2*x.rand.Float64()-1)
		s.offset = x.upTo(x.rand, x.ttl/4)
	}
	limit := min(x.ttl/10, mostNodeTimeout)
	bad := x.rand.Float64() * 0.2
	x.net = &simNet{
		rand:  rand.New(rand.NewPCG(x.rand.Uint64(), 1)),
		delay: x.upTo(x.rand, limit),
		loss:  bad, late: bad,
	}
	if x.exact = x.rand.IntN(2) == 0; !x.exact {
		x.net.duplicate = bad
	}
}

// compete takes the lock a few times.
func (x *schedule) compete(ctx context.Context, l *holdfast.Locker, r *rand.Rand) {
	for range 4 {
		time.Sleep(x.upTo(r, min(x.ttl, x.longest)) / 8)
		x.mu.Lock()
		before := x.highest
		x.mu.Unlock()
		opts := []holdfast.Option{holdfast.WithWait(min(2*x.ttl, x.longest))}
		fixed := x.ttl < x.longest && r.IntN(2) == 0
		if fixed {
			opts = append(opts, holdfast.WithoutRenewal())
		}
		k, err := l.Acquire(ctx, "k", opts...)
		if err != nil {
			continue
		}
		x.granted(k, before)
		if fixed && r.IntN(2) == 0 {
			<-k.Context().Done() // trusted to its very end
		}
		time.Sleep(x.upTo(r, min(x.ttl, x.longest)) / []time.Duration{64, 8, 1}[r.IntN(3)])
		if r.IntN(4) == 0 {
			_ = k.Extend(ctx, x.ttl/2+x.upTo(r, x.ttl/2))
			time.Sleep(x.upTo(r, min(x.ttl, x.longest)))
		}
		if k.Err() == nil && k.Token() > 0 {
			x.mu.Lock()
			x.highest = max(x.highest, k.Token())
			x.mu.Unlock()
		}
		_ = k.Release()
		x.mu.Lock()
		delete(x.held, k)
		x.mu.Unlock()
	}
}

// upTo draws a time.
func (x *schedule) upTo(r *rand.Rand, most time.Duration) time.Duration {
	return time.Duration(r.Int64N(int64(most) + 1))
}

// granted checks a new lock against all that are held. Validity never comes back, so two
// can be valid at the same time only if they are when one of them begins.
func (x *schedule) granted(k *holdfast.Lock, before fencing.Token) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if k.Err() != nil {
		return // it has ended since
	}
	x.grants++
	for other := range x.held {
		if other.Err() == nil {
			x.fault = fmt.Sprintf("%s and %s are valid at once", k.Owner(), other.Owner())
		}
	}
	if x.fenced && k.Token() <= before {
		x.fault = fmt.Sprintf("token %d after %d", k.Token(), before)
	}
	x.highest = max(x.highest, k.Token())
	x.held[k] = true
}

// trouble restarts instances, and cuts them off.
func (x *schedule) trouble(set setup, stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			for _, s := range x.servers {
				x.net.set(s.addr, false)
			}
			return
		case <-time.After(x.upTo(x.rand, min(x.ttl, x.longest))):
		}
		s := x.servers[x.rand.IntN(len(x.servers))]
		switch {
		case set.restarts && x.rand.IntN(3) == 0:
			s.forget()
		default:
			x.net.set(s.addr, x.rand.IntN(3) == 0)
		}
	}
}

// leftovers waits until all that was given up must be gone once the network is well again,
// long before a lease of 20 s ends by itself.
func (x *schedule) leftovers() {
	x.net.calm()
	time.Sleep(12 * time.Second)
	for _, s := range x.servers {
		if keys := s.all(); len(keys) > 0 && x.fault == "" {
			x.fault = fmt.Sprintf("%s still has %q", s.addr, s.keys[keys[0]].value)
		}
	}
}

const schedules = 300

// quiet keeps what is expected out of the log.
var quiet = holdfast.WithLogger(slog.New(slog.DiscardHandler))

// What keeps the holders apart is needed: without it schedules find two.
func TestSchedulesFindFaults(t *testing.T) {
	for _, set := range []setup{
		{nodes: 3, drift: 0.01, restarts: true, durable: true}, // instances that forget vote at once
		{nodes: 3, drift: 0.15},                                // clocks differ by more than the drift
	} {
		t.Run(fmt.Sprintf("%+v", set), func(t *testing.T) {
			for seed := range uint64(20 * schedules) {
				if fault, _ := set.run(t, seed); fault != "" {
					t.Logf("seed %d: %s", seed, fault)
					return
				}
			}
			t.Fatal("no fault was found")
		})
	}
}

func TestSchedules(t *testing.T) {
	for _, set := range []setup{
		{nodes: 3, drift: 0.01}, {nodes: 5, drift: 0.01},
		{nodes: 3, drift: 0.01, restarts: true}, {nodes: 5, drift: 0.01, restarts: true},
	} {
		t.Run(fmt.Sprintf("%+v", set), func(t *testing.T) {
			grants := 0
			for seed := range uint64(schedules) {
				fault, n := set.run(t, seed)
				require.Empty(t, fault, "seed %d", seed)
				grants += n
			}
			t.Logf("%d schedules, %d grants", schedules, grants)
			require.Greater(t, grants, 2*schedules, "there was something to check")
		})
	}
}
