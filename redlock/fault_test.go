package redlock

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// trouble is a fault of an instance, or of the way to it.
type trouble struct {
	name        string
	begin, heal func(x *fleet, i int)
}

// troubles are all of them. The last one takes the data away.
func troubles() []trouble {
	heal := func(x *fleet, i int) { x.proxies[i].Heal() }
	return []trouble{
		{"hanging", func(x *fleet, i int) { x.proxies[i].Hang() }, heal},
		{"mute", func(x *fleet, i int) { x.proxies[i].DropReplies() }, heal},
		{"slow", func(x *fleet, i int) { x.proxies[i].Slow(time.Second) }, func(x *fleet, i int) { x.proxies[i].Slow(0) }},
		{"cut", func(x *fleet, i int) { x.proxies[i].Down() }, func(x *fleet, i int) { require.NoError(x.t, x.proxies[i].Up()) }},
		{"stopped", func(x *fleet, i int) { x.servers[i].Stop() }, func(x *fleet, i int) { x.servers[i].Cont() }},
		{"killed", func(x *fleet, i int) { x.servers[i].Kill() }, func(x *fleet, i int) { x.servers[i].Restart() }},
	}
}

// A minority that fails, in whatever way and at whatever stage of a lock's life, is not
// noticed: acquiring, renewing, extending and releasing succeed, nothing is lost, and when
// it is well again no key is left on any instance. C074, C075: each takes a moment only.
func TestMinorityFails(t *testing.T) {
	x := startFleet(t, 5, 0)
	var lost atomic.Int32
	seen := holdfast.WithObserver(holdfast.Observer{Lost: func(string, error) { lost.Add(1) }})
	plain, fenced := x.locker(lasting(seen)...), x.locker(lasting(seen, holdfast.WithFencing())...)
	for _, fault := range troubles() {
		for size := 1; size <= 2; size++ {
			l := plain
			if size == 2 {
				l = fenced
			}
			t.Run(fmt.Sprintf("%d %s", size, fault.name), func(t *testing.T) {
				x := x.with(t)
				minority := rand.Perm(5)[:size]
				name := func(stage string) string { return fmt.Sprint(fault.name, size, stage) }
				held, ending := acquire(t, l, name("held")), acquire(t, l, name("ending"))
				x.everywhere(held) // else one that has not recovered would make it a majority
				x.everywhere(ending)
				for _, i := range minority {
					defer fault.heal(x, i)
					fault.begin(x, i)
				}
				start := time.Now()
				require.NoError(t, ending.Release())
				late := acquire(t, l, name("late"))
				require.Less(t, time.Since(start), 10*time.Second, "far below what the TTL is")
				renewed(t, 3, held, late)
				start = time.Now()
				for _, k := range []*holdfast.Lock{held, late} {
					require.NoError(t, k.Extend(t.Context(), 25*time.Second))
					renewed(t, 1, k)
					require.NoError(t, k.Release())
				}
				require.Less(t, time.Since(start), 10*time.Second)
			})
		}
	}
	require.Zero(t, lost.Load())
	x.clean(patience)
}

// renewals counts the commands with the lock that a proxy has seen, releases aside: these
// name a channel.
func renewals(p *faultproxy.Proxy, k *holdfast.Lock) int {
	return p.CountMatch(func(cmd []string) bool {
		return faultproxy.Script()(cmd) && slices.Contains(cmd, k.Owner()) && !slices.Contains(cmd, channelOf(k.Key()))
	})
}

// C003, C049, C135, C143: a key that has gone, for whatever reason (such as a jump of the
// instances' clocks), or carries another value, on a majority is a loss at the next renewal, by whatever protocol; what is left of the lock goes at once,
// and what others have put there is left alone. C145: Extend and Release tell it as well.
func TestMajorityTakesItAway(t *testing.T) {
	x := startFleet(t, 5, 0)
	for name, fault := range map[string]func(a *redis.Client) error{
		"deleted": func(a *redis.Client) error { return a.Del(context.Background(), "k").Err() },
		"flushed": func(a *redis.Client) error { return a.FlushAll(context.Background()).Err() },
		"stolen":  func(a *redis.Client) error { return a.Set(context.Background(), "k", "x/1", time.Minute).Err() },
		"data":    func(a *redis.Client) error { return a.Set(context.Background(), "k", "data", 0).Err() },
		"other type": func(a *redis.Client) error {
			return a.Eval(context.Background(), "redis.call('DEL', 'k') return redis.call('HSET', 'k', 'f', 'v')", nil).Err()
		},
	} {
		for protocol := 2; protocol <= 3; protocol++ {
			for _, how := range []string{"renewal", "extend", "release"} {
				t.Run(fmt.Sprint(name, protocol, how), func(t *testing.T) {
					clients := x.clients(func(o *redis.Options) { o.Protocol = protocol })
					every := holdfast.WithRenewEvery(10 * time.Second)
					if how == "renewal" {
						every = holdfast.WithRenewEvery(50 * time.Millisecond)
					}
					l, err := New(clients, append(lasting(every), quiet)...)
					require.NoError(t, err)
					defer l.Close()
					k := acquire(t, l, "k")
					x.with(t).everywhere(k)
					for _, s := range x.servers[:3] {
						require.NoError(t, fault(s.Admin()))
					}
					before := x.servers[0].Admin().Dump(t.Context(), "k").Val()
					switch how {
					case "renewal":
						<-k.Context().Done()
						require.ErrorIs(t, context.Cause(k.Context()), holdfast.ErrLost)
						require.ErrorIs(t, k.Release(), holdfast.ErrLost)
						// Three told the loss: what went out to the other two beside them may still be
						// on its way. After that there is none.
						redistest.Eventually(t, patience, "nothing renews it", func() bool {
							before := 0
							for _, p := range x.proxies {
								before += renewals(p, k)
							}
							<-time.After(110 * time.Millisecond) // two intervals of renewal
							for _, p := range x.proxies {
								before -= renewals(p, k)
							}
							return before == 0
						})
					case "extend":
						require.ErrorIs(t, k.Extend(t.Context(), 20*time.Second), holdfast.ErrLost)
						require.ErrorIs(t, k.Err(), holdfast.ErrLost)
					case "release":
						require.ErrorIs(t, k.Release(), holdfast.ErrLost)
						require.ErrorIs(t, context.Cause(k.Context()), holdfast.ErrReleased)
						require.ErrorIs(t, k.Release(), holdfast.ErrNotHeld)
					}
					redistest.Eventually(t, patience, "the rest has gone", func() bool {
						return len(x.having("k", k.Owner())) == 0
					})
					require.Equal(t, before, x.servers[0].Admin().Dump(t.Context(), "k").Val())
					for _, s := range x.servers[:3] {
						require.NoError(t, s.Admin().Del(t.Context(), "k").Err())
					}
				})
			}
		}
	}
}

// extending matches the command of an Extend of k.
func extending(k *holdfast.Lock, ttl time.Duration) func(cmd []string) bool {
	digest := newScripts(0, true).extend.Digest()
	return func(cmd []string) bool {
		return len(cmd) == 6 && cmd[1] == digest && cmd[4] == k.Owner() && cmd[5] == fmt.Sprint(ttl.Milliseconds())
	}
}

// An Extend to a shorter lease that reaches a minority late does not let anybody in while a
// longer one is believed, which stands on those instances: whether it was still waited for
// when the longer one was asked for, or had been given up.
func TestShorterExtendRunsLate(t *testing.T) {
	const short, long = time.Second, 20 * time.Second
	for _, limit := range []time.Duration{2 * time.Second, 50 * time.Millisecond} {
		t.Run(fmt.Sprint("node timeout ", limit), func(t *testing.T) {
			t.Parallel() // they wait most of the time
			x := startFleet(t, 5, 0)
			l := x.locker(WithDurableInstances(), holdfast.WithTTL(30*time.Second), WithNodeTimeout(limit))
			k := acquire(t, l, "k")
			x.everywhere(k)
			var held []*faultproxy.Handle
			for _, p := range x.proxies[3:] {
				held = append(held, p.Inject(faultproxy.Rule{Match: extending(k, short), Times: 1, Do: faultproxy.HoldRequest()}))
			}
			require.NoError(t, k.Extend(t.Context(), short))
			for _, h := range held {
				require.NoError(t, h.WaitTimeout(patience))
			}
			if limit < short/4 {
				<-time.After(3 * limit)
			}
			for _, p := range x.proxies[:2] {
				p.Down()
			}
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			_ = k.Extend(ctx, long) // it may fail
			for i, h := range held {
				runs := x.servers[3+i].CommandStats()["pexpire"]
				h.Release()
				redistest.Eventually(t, patience, "the late request has run", func() bool {
					return x.servers[3+i].CommandStats()["pexpire"] > runs
				})
			}
			other := x.direct(WithDurableInstances(), holdfast.WithTTL(5*time.Second))
			if got, err := other.Acquire(t.Context(), "k", holdfast.WithWait(short*3/2)); err == nil {
				require.ErrorIs(t, k.Err(), holdfast.ErrLost, "nobody else had it before the end of validity")
				require.NoError(t, got.Err())
			}
		})
	}
}

// An Extend whose fate is unknown on a majority: the shorter of both leases counts, before
// and after the late requests have run, and a longer one is not believed any more. The
// lock is held on by renewals all the time.
func TestExtendOfUnknownFate(t *testing.T) {
	const short = 3 * time.Second
	x := startFleet(t, 5, 0)
	l := x.locker(lasting()...)
	k := acquire(t, l, "k")
	x.everywhere(k)
	var held []*faultproxy.Handle
	for _, p := range x.proxies[:3] {
		held = append(held, p.Inject(faultproxy.Rule{Match: extending(k, short), Do: faultproxy.HoldRequest()}))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	err := k.Extend(ctx, short)
	require.ErrorIs(t, err, holdfast.ErrUnavailable)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	renewed(t, 2, k)
	ctx, cancel = context.WithTimeout(t.Context(), patience/2)
	defer cancel()
	err = k.Extend(ctx, 20*time.Second)
	require.NoError(t, ctx.Err(), "it comes back by itself: %v", err)
	require.Less(t, time.Until(k.ValidUntil()), short)
	for _, h := range held {
		h.Remove()
		h.Release()
	}
	renewed(t, 5, k)
	require.Less(t, time.Until(k.ValidUntil()), short)
	require.NoError(t, k.Release())
	x.clean(patience)
}

// C055: a holder that is cut off from a majority knows that its validity has ended before
// anybody else, who is not cut off, can have the lock; every time.
func TestCutOffHolderEndsFirst(t *testing.T) {
	for n, fault := range map[int]string{3: "hanging", 5: "cut"} {
		x := startFleet(t, n, 0)
		l, other := x.locker(fleeting()...), x.direct(fleeting()...)
		var locks []*holdfast.Lock
		for i := range 40 {
			locks = append(locks, acquire(t, l, fmt.Sprint("k", i)))
		}
		for _, p := range x.proxies[:needed(n)] {
			if fault == "cut" {
				p.Down()
			} else {
				p.Hang()
			}
		}
		var wg sync.WaitGroup
		for _, k := range locks {
			wg.Go(func() { // ends when it has had the lock
				got, err := other.Acquire(context.Background(), k.Key(), holdfast.WithWait(patience))
				if k.Err() == nil || err != nil {
					t.Errorf("%s: the holder says %v, the next one %v", k.Key(), k.Err(), err)
				}
				_ = got.Release()
			})
		}
		wg.Wait()
		for _, k := range locks {
			<-k.Context().Done()
			require.ErrorIs(t, context.Cause(k.Context()), holdfast.ErrLost)
		}
		for _, p := range x.proxies[:needed(n)] {
			p.Heal()
			require.NoError(t, p.Up())
		}
		require.ErrorIs(t, locks[0].Release(), holdfast.ErrLost)
		x.clean(patience)
	}
}

// C047, C063: what a majority answers to renewals does not end a lock while its validity
// lasts: neither refusals that pass, nor rubbish; nor does an observer that panics.
func TestStrangeAnswersToRenewals(t *testing.T) {
	x := startFleet(t, 5, 0)
	l := x.locker(lasting(holdfast.WithObserver(holdfast.Observer{
		Renewed: func(string) { panic("observer") }, RenewalFailed: func(string, error) { panic("observer") },
	}))...)
	k := acquire(t, l, "k")
	x.everywhere(k)
	for _, do := range []faultproxy.Action{
		faultproxy.Error("BUSY Redis is busy running a script"), faultproxy.Error("LOADING Redis is loading"),
		faultproxy.Error("OOM command not allowed"), faultproxy.Error("ERR what is this"),
		faultproxy.Raw([]byte("rubbish\r\n")), faultproxy.Raw([]byte("*3\r\n:1\r\n")), faultproxy.Raw(faultproxy.ArrayReply()),
		faultproxy.Raw(faultproxy.ArrayReply(faultproxy.ErrorReply("BUSY inside"))), faultproxy.Raw(faultproxy.NilReply()),
		faultproxy.Raw(faultproxy.ArrayReply(faultproxy.IntReply(7))), faultproxy.Raw(faultproxy.BulkReply("1")), faultproxy.Cut(),
	} {
		for _, p := range x.proxies[:3] {
			h := p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: do})
			require.NoError(t, h.WaitTimeout(patience))
		}
		renewed(t, 2, k)
	}
	require.NoError(t, k.Release())
	x.clean(patience)
}

// storm makes every link lose, delay, repeat and cut at random, and returns what ends it.
func (x *fleet) storm() (end func()) {
	var handles []*faultproxy.Handle
	sometimes := func(n int) func([]string) bool {
		return func(cmd []string) bool { return faultproxy.Any()(cmd) && rand.IntN(100) < n }
	}
	for _, p := range x.proxies {
		for _, r := range []faultproxy.Rule{
			{Match: sometimes(1), Do: faultproxy.HoldRequest()}, {Match: sometimes(1), Do: faultproxy.HoldReply()},
			{Match: sometimes(1), Do: faultproxy.Hang()}, {Match: sometimes(2), Do: faultproxy.DropReplyAndClose()},
			{Match: sometimes(1), Do: faultproxy.Cut()}, {Match: sometimes(4), Do: faultproxy.Duplicate()},
			{Match: sometimes(3), Do: faultproxy.DelayRequest(150 * time.Millisecond)},
			{Match: sometimes(3), Do: faultproxy.Delay(150 * time.Millisecond)},
			{Match: sometimes(1), Do: faultproxy.Error("BUSY Redis is busy")},
		} {
			handles = append(handles, p.Inject(r))
		}
	}
	return func() {
		for _, h := range handles {
			h.Remove()
			h.Release() // what was held runs now
		}
	}
}

// On links that lose, delay and repeat at random there are never two holders, and when
// they are well again nothing is left on any instance: with leases that end soon, so that
// locks are lost and others follow, and with such that do not, so that all that is gone was
// deleted.
func TestRandomFaults(t *testing.T) {
	for _, ttl := range []time.Duration{300 * time.Millisecond, 30 * time.Second} {
		t.Run(fmt.Sprint(ttl), func(t *testing.T) {
			t.Parallel() // they wait most of the time
			x := startFleet(t, 5, 0)
			var mu sync.Mutex
			held := map[*holdfast.Lock]bool{}
			grants := 0
			end := x.storm()
			began := time.Now()
			stormy := func() bool { // for a while, and until there was something to see
				mu.Lock()
				defer mu.Unlock()
				lasted := time.Since(began)
				return lasted < 2*time.Second || grants <= 3 && lasted < patience
			}
			var wg sync.WaitGroup
			for w := range 4 {
				l := x.locker(WithDurableInstances(), holdfast.WithTTL(ttl), WithNodeTimeout(50*time.Millisecond), holdfast.WithRenewEvery(60*time.Millisecond))
				wg.Go(func() { // ends soon after the storm
					for stormy() {
						k, err := l.Acquire(context.Background(), "k", holdfast.WithWait(time.Second))
						if err != nil {
							continue
						}
						mu.Lock()
						grants++
						for other := range held { // validity never comes back: a look at each grant is enough
							if k.Err() == nil && other.Err() == nil {
								t.Errorf("%s and %s", k.Owner(), other.Owner())
							}
						}
						held[k] = true
						mu.Unlock()
						<-time.After(rand.N(300 * time.Millisecond / time.Duration(1+100*w)))
						_ = k.Release()
					}
				})
			}
			wg.Wait()
			end()
			require.Greater(t, grants, 3)
			t.Logf("%d grants", grants)
			x.clean(patience)
		})
	}
}
