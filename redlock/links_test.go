package redlock

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// pair is a real instance and a simulated one, which are asked and told the same.
type pair struct {
	t    *testing.T
	rand *rand.Rand
	link *redisLink
	sim  *simServer
	real *redis.Client
}

// linkTo returns a link to a real server, as a Locker has it.
func linkTo(t *testing.T, s *redistest.Server, opts ...holdfast.Option) *redisLink {
	t.Helper()
	var made *redisLink
	on := &store{connect: func(on *store) []link {
		made = newRedisLink(s.Client(), on, 0)
		return []link{made}
	}}
	l, err := holdfast.NewWithStore(on, append([]holdfast.Option{quiet}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return made
}

const linkTTL = 30 * time.Second

// draw makes a request. Values and tokens are few, so that they meet.
func (p *pair) draw() request {
	key := []string{"a", "b{x}"}[p.rand.IntN(2)]
	token := int64(1 + p.rand.IntN(12))
	if p.rand.IntN(10) == 0 {
		token = time.Now().Add(time.Hour).UnixMicro()
	}
	fenced := p.rand.IntN(3) > 0
	value := fencedValue(fmt.Sprint("h/", p.rand.IntN(2)), token)
	if !fenced {
		value, token = fmt.Sprint("h/", p.rand.IntN(3)), 0
	}
	r := request{
		kind: kind(p.rand.IntN(5)), lease: lease{key, value, linkTTL + time.Duration(p.rand.IntN(3))*10*time.Second},
		names: &names{key, fenceOf(key), channelOf(key)}, token: token, fenced: fenced, silent: p.rand.IntN(2) == 0,
	}
	switch {
	case r.kind == drop && p.rand.IntN(4) == 0:
		r.keep = linkTTL
	case r.kind == renew:
		for range 1 + p.rand.IntN(3) {
			r.leases = append(r.leases, lease{[]string{"a", "b{x}", "c"}[p.rand.IntN(3)], value, r.ttl})
		}
	}
	return r
}

// disturb does the same to both that others may do.
func (p *pair) disturb() {
	key := []string{"a", "b{x}"}[p.rand.IntN(2)]
	switch p.rand.IntN(4) {
	case 0:
		require.NoError(p.t, p.real.Del(p.t.Context(), key).Err())
		delete(p.sim.keys, key)
	case 1:
		require.NoError(p.t, p.real.Set(p.t.Context(), key, "other", linkTTL).Err())
		p.sim.put(key, "other", linkTTL)
	case 2:
		require.NoError(p.t, p.real.Del(p.t.Context(), fenceOf(key)).Err())
		delete(p.sim.fences, key)
	case 3:
		p.sim.floor = int64(p.rand.IntN(8))
		require.NoError(p.t, p.real.Set(p.t.Context(), floorKey, p.sim.floor, 0).Err())
	}
}

// state is what both have, each key with what is left of it in tens of seconds.
func (p *pair) state() (real, sim string) {
	var a, b strings.Builder
	for _, key := range []string{"a", "b{x}", "c"} {
		value, _ := p.real.Get(p.t.Context(), key).Result()
		left := p.real.PTTL(p.t.Context(), key).Val()
		fence, _ := p.real.Get(p.t.Context(), fenceOf(key)).Int64()
		simValue, simLeft := p.sim.get(key)
		fmt.Fprintf(&a, "%s=%s(%d) %d; ", key, value, tens(left), fence)
		fmt.Fprintf(&b, "%s=%s(%d) %d; ", key, simValue, tens(simLeft), p.sim.fences[key])
	}
	return a.String(), b.String()
}

func tens(d time.Duration) int64 { return int64((max(d, 0) + 10*time.Second - 1) / (10 * time.Second)) }

// What the schedules run on does what the scripts do on a real server: random requests to
// both get the same answers and leave the same behind.
func TestLinks(t *testing.T) {
	s := redistest.Start(t)
	seed := rand.Uint64()
	t.Log("seed", seed)
	for run := range uint64(40) {
		require.NoError(t, s.Admin().FlushAll(t.Context()).Err())
		p := &pair{
			t: t, rand: rand.New(rand.NewPCG(seed, run)), link: linkTo(t, s, WithDurableInstances(), holdfast.WithTTL(time.Minute)),
			sim: newSimServer("sim"), real: s.Admin(),
		}
		for step := range 100 {
			if p.rand.IntN(8) == 0 {
				p.disturb()
			}
			r := p.draw()
			simulated := r
			p.link.send(t.Context(), []*request{&r})
			p.sim.do(&simulated, p.link.s.maturity, true)
			at := fmt.Sprintf("seed %d, run %d, step %d: %+v", seed, run, step, r.lease)
			require.NoError(t, r.err, at)
			require.True(t, r.sent, at)
			require.Equal(t, simulated.code, r.code, at)
			require.Equal(t, fmt.Sprint(simulated.codes), fmt.Sprint(r.codes), at)
			if r.kind == take { // healing tells nothing of others
				require.Equal(t, simulated.holder, r.holder, at)
				require.Equal(t, tens(simulated.left), tens(r.left), at)
			}
			if r.code == codeLow {
				require.Equal(t, simulated.counter, r.counter, at)
			}
			real, sim := p.state()
			require.Equal(t, sim, real, at)
		}
	}
}

// C143: what is no lock stands in the way, or is an error that says so; it is never
// overwritten nor deleted.
func TestLinksMeetOtherTypes(t *testing.T) {
	s := redistest.Start(t)
	a := s.Admin()
	link := linkTo(t, s, WithDurableInstances(), holdfast.WithTTL(time.Minute))
	ask := func(r request) *request {
		r.lease, r.names = lease{"k", "h/1", linkTTL}, &names{"k", fenceOf("k"), channelOf("k")}
		if r.kind == renew {
			r.leases = []lease{r.lease}
		}
		link.send(t.Context(), []*request{&r})
		return &r
	}
	require.NoError(t, a.RPush(t.Context(), "k", 1).Err())
	for _, token := range []int64{0, 5} {
		fenced := token > 0
		r := ask(request{kind: take, token: token, fenced: fenced})
		require.ErrorContains(t, r.err, "WRONGTYPE")
		require.True(t, isFinal(r.err))
		require.False(t, r.mayHaveRun())
		require.Equal(t, codeTaken, ask(request{kind: drop, token: token, fenced: fenced}).code)
	}
	require.Equal(t, codeTaken, ask(request{kind: heal, token: 5, fenced: true}).code)
	require.Equal(t, codeTaken, ask(request{kind: set}).code)
	require.Equal(t, []any{int64(codeTaken)}, ask(request{kind: renew}).codes)
	require.Equal(t, []string{"1"}, a.LRange(t.Context(), "k", 0, -1).Val())
	require.NoError(t, a.Del(t.Context(), "k", fenceOf("k")).Err())

	for _, key := range []string{fenceOf("k"), floorKey} {
		require.NoError(t, a.Set(t.Context(), key, "many", 0).Err())
		r := ask(request{kind: take, token: 5, fenced: true})
		require.ErrorContains(t, r.err, "not a number", key)
		require.Equal(t, codeTaken, ask(request{kind: heal, token: 5, fenced: true}).code, key)
		require.Zero(t, a.Exists(t.Context(), "k").Val(), key)
		require.Equal(t, "many", a.Get(t.Context(), key).Val())
		require.NoError(t, a.Del(t.Context(), key).Err())
		require.NoError(t, a.RPush(t.Context(), key, 1).Err())
		require.ErrorContains(t, ask(request{kind: take, token: 5, fenced: true}).err, "WRONGTYPE", key)
		require.Zero(t, a.Exists(t.Context(), "k").Val(), key)
		require.NoError(t, a.Del(t.Context(), key).Err())
	}
}

// Many requests of all kinds that share one flight get the answers that are theirs, also
// when the server knows none of the scripts.
func TestLinkAnswersInOrder(t *testing.T) {
	s := redistest.Start(t)
	link := linkTo(t, s, WithDurableInstances(), holdfast.WithTTL(time.Minute))
	for range 3 {
		require.NoError(t, s.Admin().FlushAll(t.Context()).Err())
		require.NoError(t, s.Admin().ScriptFlush(t.Context()).Err())
		var takes, rest []*request
		for i := range 30 {
			key := fmt.Sprint("k", i)
			r := request{lease: lease{key, "h/" + key, linkTTL}, names: &names{key, fenceOf(key), channelOf(key)}}
			taken := r
			takes = append(takes, &taken)
			if r.kind = []kind{set, renew, drop}[i%3]; r.kind == renew {
				r.leases = []lease{r.lease, {"none", "h/x", linkTTL}}
			}
			rest = append(rest, &r)
		}
		link.send(context.Background(), takes)
		link.send(context.Background(), rest)
		for i, r := range append(takes, rest...) {
			require.NoError(t, r.err, i)
			if r.kind == renew {
				require.Equal(t, []any{int64(1), int64(0)}, r.codes, i)
			} else {
				require.Equal(t, codeYes, r.code, i)
			}
		}
	}
}
