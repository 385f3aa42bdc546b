package redlock

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// A client whose clock is far ahead is refused, and shuts nobody out: its proposal raises no
// counter, also where the answer was lost. C151.
func TestClientClockAhead(t *testing.T) {
	const ttl = 2 * time.Second
	x := startFleet(t, 3, ttl)
	wrong, s := x.stored(func(*redis.Options) {}, holdfast.WithTTL(ttl))
	right := x.locker(holdfast.WithTTL(ttl), holdfast.WithFencing())
	k := acquire(t, right, "k")
	last := k.Token()
	require.NoError(t, k.Release())
	for range 2 {
		s.lead.Store((24 * time.Hour).Microseconds()) // as if its clock were a day ahead
		k, err := wrong.TryAcquire(t.Context(), "k", holdfast.WithFencing())
		if err == nil { // it has learned the servers' time
			require.NoError(t, k.Release())
		}
		k = acquire(t, right, "k")
		require.Greater(t, k.Token(), last)
		last = k.Token()
		require.NoError(t, k.Release())
		inject(x.proxies, faultproxy.Rule{Match: taking("k"), Times: 1, Do: faultproxy.DropReply()})
	}
	x.clean(patience)
}

// As before, in virtual time: all servers' clocks are an hour behind the client's.
func TestServerClocksBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		servers := simServers(3)
		for _, s := range servers {
			s.offset = -time.Hour
			s.started = s.now().Add(-24 * time.Hour)
		}
		l, _ := simLocker(t, servers, &simNet{}, holdfast.WithTTL(10*time.Second), holdfast.WithFencing(), quiet)
		for range 3 {
			k, err := l.TryAcquire(t.Context(), "k")
			require.NoError(t, err)
			require.NoError(t, k.Release())
		}
	})
}

// All clients are right. One instance of three has a clock an hour ahead and was restarted a
// while ago; another one is away for some seconds. When that is back, two good instances are
// a majority, and the key can be taken.
func TestOneServerClockAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 10 * time.Second
		servers := simServers(3)
		servers[0].offset = time.Hour
		servers[0].forget() // restarted, by its own clock
		net := &simNet{}
		time.Sleep(2 * ttl)
		l, _ := simLocker(t, servers, net, holdfast.WithTTL(ttl), holdfast.WithFencing(), quiet)
		k, err := l.TryAcquire(t.Context(), "k")
		require.NoError(t, err, "two good instances")
		require.NoError(t, k.Release())
		net.set(servers[1].addr, true)
		_, err = l.Acquire(t.Context(), "k", holdfast.WithWait(3*time.Second))
		require.Error(t, err)
		net.set(servers[1].addr, false)
		time.Sleep(ttl)
		k, err = l.Acquire(t.Context(), "k", holdfast.WithWait(time.Minute))
		require.NoError(t, err)
		require.NoError(t, k.Release())
	})
}

// A longest TTL without end would make every instance old enough, by an overflow.
func TestLongestTTLIsBounded(t *testing.T) {
	for _, d := range []time.Duration{holdfast.Unlimited, mostLongest + 1, 1 << 62} {
		_, err := New([]redis.UniversalClient{nowhere(t)}, WithLongestTTL(d), quiet)
		require.ErrorIs(t, err, holdfast.ErrInvalid, d)
	}
}

// C025, C114: what gives a lock up is sent again also after a refusal that waiting does not
// usually heal; no key is left for its whole TTL.
func TestGivingUpRefusedOnce(t *testing.T) {
	x := startFleet(t, 3, 0)
	l := x.locker(lasting()...)
	x.warm(l)
	for _, text := range []string{"MISCONF Errors writing to the AOF file", "NOPERM for now", "ERR restarting", "BUSY x", "NOAUTH Authentication required."} {
		refuse := faultproxy.Rule{Match: giving("k"), Times: 1, Do: faultproxy.Refuse(text)}
		x.theirs(0, 1)
		h := x.proxies[2].Inject(refuse)
		_, err := l.TryAcquire(t.Context(), "k")
		require.ErrorIs(t, err, holdfast.ErrNotAcquired)
		require.NoError(t, h.WaitTimeout(patience), text)
		redistest.Eventually(t, patience, "the failed attempt has left nothing: "+text, func() bool {
			return x.servers[2].Admin().Exists(t.Context(), "k").Val() == 0
		})
		for _, s := range x.servers[:2] {
			require.NoError(t, s.Admin().Del(t.Context(), "k").Err())
		}
		k := acquire(t, l, "k")
		x.everywhere(k)
		h = x.proxies[2].Inject(refuse)
		require.NoError(t, k.Release())
		require.NoError(t, h.WaitTimeout(patience), text)
		x.clean(patience)
	}
}

// C073: an address that comes to lead to a server with a vote, while a lock is held, gives it
// no second one: the lock is lost, and not held twice.
func TestRepointed(t *testing.T) {
	const ttl = 2 * time.Second
	for _, durable := range []bool{true, false} {
		opts := []holdfast.Option{holdfast.WithTTL(ttl)}
		x := startFleet(t, 3, ttl)
		if durable {
			opts = append(opts, WithDurableInstances())
		}
		l := x.locker(opts...)
		k := acquire(t, l, "k")
		x.everywhere(k)
		x.proxies[2].SetBackend(x.servers[0].Addr())
		x.proxies[2].CutAll()
		require.NoError(t, k.Err())
		renewed(t, 2, k) // two of three are what they were
		x.proxies[1].Down()
		second := acquire(t, x.direct(opts...), "k")
		require.ErrorIs(t, k.Err(), holdfast.ErrLost)
		require.NoError(t, second.Release())
	}
}

// C023: an acquisition is not refused because of what an earlier try of its own has left.
func TestNotContendedByItself(t *testing.T) {
	for _, fenced := range []bool{false, true} {
		x := startFleet(t, 3, 0)
		opts := lasting(WithNodeTimeout(100*time.Millisecond), holdfast.WithHolder("a.1:2"))
		if fenced {
			opts = append(opts, holdfast.WithFencing())
		}
		l := x.locker(opts...)
		x.warm(l)
		lost := inject(x.proxies[:2], faultproxy.Rule{Match: taking("k"), Times: 1, Do: faultproxy.DropReply()})
		busy := faultproxy.Rule{Match: giving("k"), Times: 50, Do: faultproxy.Refuse("BUSY Redis is busy running a script")}
		inject(x.proxies[:2], busy)
		_, err := l.Acquire(t.Context(), "k", holdfast.WithWait(time.Second))
		await(t, lost)
		require.ErrorIs(t, err, holdfast.ErrUnavailable)
		require.NotErrorIs(t, err, holdfast.ErrNotAcquired)
	}
}

// The key of the floor under all counters is no lock.
func TestFloorIsNoLock(t *testing.T) {
	x := startFleet(t, 3, 0)
	_, err := x.locker(lasting()...).TryAcquire(t.Context(), floorKey)
	require.ErrorIs(t, err, holdfast.ErrInvalid)
	x.clean(patience)
}

// C073: the members of a cluster are no instances, and that is said at once.
func TestClusterMembers(t *testing.T) {
	set := redistest.StartCluster(t, 3)
	var clients []redis.UniversalClient
	for _, s := range set.Nodes {
		clients = append(clients, s.Client())
	}
	for _, opts := range [][]holdfast.Option{{holdfast.WithTTL(time.Second)}, lasting()} {
		l, err := New(clients, append(opts, quiet)...)
		require.NoError(t, err)
		t.Cleanup(func() { _ = l.Close() })
		_, err = l.Acquire(t.Context(), "k", holdfast.WithWait(time.Minute))
		require.ErrorIs(t, err, holdfast.ErrInvalid)
		require.ErrorContains(t, err, "cluster")
	}
}

// Of a Release that nobody answers the error says what each server did, though its last try
// was short. No context error of ours is in it.
func TestReleaseSaysWhatEachDid(t *testing.T) {
	x := startFleet(t, 3, 0)
	l := x.locker(WithDurableInstances(), holdfast.WithTTL(time.Second))
	for range 3 {
		k := acquire(t, l, "k")
		for _, p := range x.proxies[:2] {
			p.Hang()
		}
		err := k.Release()
		for _, p := range x.proxies[:2] {
			p.Heal()
		}
		require.ErrorIs(t, err, holdfast.ErrUnavailable)
		var quorum *QuorumError
		require.True(t, errors.As(err, &quorum), err)
		for _, n := range quorum.Nodes {
			require.NotErrorIs(t, n.Err, context.DeadlineExceeded)
			require.NotContains(t, n.Error(), "context")
		}
		x.clean(patience)
	}
}

// counted is a hook that counts scripts.
type counted struct{ *atomic.Int64 }

func (counted) DialHook(next redis.DialHook) redis.DialHook { return next }
func (c counted) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "evalsha" {
			c.Add(1)
		}
		return next(ctx, cmd)
	}
}

func (counted) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// Clients made with ContextTimeoutEnabled are asked as they are: their hooks are called, and
// the limit of a node holds all the same, whatever limits the clients have.
func TestHooksAreCalled(t *testing.T) {
	x := startFleet(t, 3, 0)
	for _, enabled := range []bool{true, false} {
		clients := x.clients(func(o *redis.Options) {
			o.ContextTimeoutEnabled, o.ReadTimeout, o.WriteTimeout = enabled, time.Hour, time.Hour
		})
		var calls atomic.Int64
		for _, c := range clients {
			c.AddHook(counted{&calls})
		}
		l, err := New(clients, lasting(quiet)...)
		require.NoError(t, err)
		t.Cleanup(func() { _ = l.Close() })
		x.warm(l)
		require.Equal(t, enabled, calls.Load() >= 6, calls.Load())
		x.proxies[1].Hang()
		k := acquire(t, l, "k")
		require.NoError(t, k.Release())
		x.proxies[1].Heal()
		x.warm(l) // it is asked again soon
	}
	x.clean(patience)
}
