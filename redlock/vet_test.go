package redlock

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// minority gives the lock to the first two of three servers for a time that is not
// renewed, and then restarts the second without its data.
func minority(x *fleet, opts []holdfast.Option) *holdfast.Lock {
	x.t.Helper()
	holder := x.locker(opts...)
	x.proxies[2].Down()
	k := acquire(x.t, holder, "k", holdfast.WithoutRenewal())
	require.Equal(x.t, []int{0, 1}, x.having("k", k.Owner()))
	x.servers[1].Kill()
	x.servers[1].Restart()
	return k
}

// C033, C067: an instance that forgot its vote in a restart makes two holders at once if it
// votes again at once, which is what WithDurableInstances allows; with what is the default
// the second gets the lock when the first has lost it.
func TestForgottenVote(t *testing.T) {
	for _, fenced := range []bool{false, true} {
		t.Run(map[bool]string{false: "plain", true: "fenced"}[fenced], func(t *testing.T) {
			var opts []holdfast.Option
			if fenced {
				opts = append(opts, holdfast.WithFencing())
			}
			t.Run("two holders", func(t *testing.T) {
				x := startFleet(t, 3, 0)
				opts := lasting(opts...)
				first := minority(x, opts)
				second, err := x.direct(opts...).TryAcquire(t.Context(), "k")
				require.NoError(t, err)
				require.NoError(t, first.Err(), "both are held, which is the fault")
				require.NoError(t, second.Release())
				require.ErrorIs(t, first.Release(), holdfast.ErrLost)
			})
			t.Run("one", func(t *testing.T) {
				const ttl = 2 * time.Second
				x := startFleet(t, 3, ttl)
				opts := append([]holdfast.Option{holdfast.WithTTL(ttl)}, opts...)
				first := minority(x, opts)
				other := x.direct(opts...)
				_, err := other.TryAcquire(t.Context(), "k")
				var young *YoungError
				require.ErrorAs(t, err, &young)
				require.LessOrEqual(t, young.Left, ttl+2*time.Second)
				second := acquire(t, other, "k")
				require.ErrorIs(t, first.Err(), holdfast.ErrLost)
				if fenced {
					require.Greater(t, second.Token(), first.Token())
				}
				require.NoError(t, second.Release())
			})
		})
	}
}

// Who may not wait is told of each fresh instance and how long it has to be up yet, and
// nothing is written to any. Who may wait does, and asks little meanwhile.
func TestYoungInstances(t *testing.T) {
	x := startFleet(t, 5, 0)
	const ttl = 30 * time.Second
	l := x.locker(holdfast.WithTTL(ttl))
	for _, wait := range []bool{false, true} {
		_, err := l.TryAcquire(t.Context(), "k", holdfast.WithFencing())
		if wait {
			_, err = l.Acquire(t.Context(), "k", holdfast.WithWait(300*time.Millisecond))
		}
		require.ErrorIs(t, err, holdfast.ErrUnavailable)
		require.NotErrorIs(t, err, holdfast.ErrInvalid)
		var q *QuorumError
		require.ErrorAs(t, err, &q)
		require.Zero(t, q.Votes)
		require.Len(t, q.Nodes, 5)
		for i, n := range q.Nodes {
			var young *YoungError
			require.ErrorAs(t, n.Err, &young)
			require.Greater(t, young.Left, ttl/2)
			require.LessOrEqual(t, young.Left, ttl+ttl/100+2*time.Millisecond+time.Second, "up to a second that is not full")
			require.Equal(t, i, n.Index)
			require.ErrorContains(t, err, x.proxies[i].Addr()+": has not been up for long enough to vote, for another ")
		}
	}
	for i, s := range x.servers {
		require.Zero(t, s.Admin().DBSize(t.Context()).Val(), i)
		stats := s.CommandStats()
		require.Zero(t, stats["set"]+stats["script|load"], i)
	}
}

// A minority of fresh instances takes nothing from the others.
func TestYoungMinority(t *testing.T) {
	const ttl = 2 * time.Second
	x := startFleet(t, 3, ttl)
	x.servers[2].Kill()
	x.servers[2].Restart()
	l := x.locker(holdfast.WithTTL(ttl))
	for _, opts := range [][]holdfast.Option{nil, {holdfast.WithFencing()}} {
		k, err := l.TryAcquire(t.Context(), "k", opts...)
		require.NoError(t, err)
		renewed(t, 1, k)
		require.NoError(t, k.Release())
	}
	x.clean(patience)
}

// An instance that has been up long enough for short leases has no vote yet for longer
// ones, of another Locker; and a user of long ones does not take the vote from short ones.
func TestVettingIsForOneLength(t *testing.T) {
	const ttl, long = time.Second, time.Hour
	x := startFleet(t, 3, ttl)
	short, other := x.locker(holdfast.WithTTL(ttl)), x.locker(holdfast.WithTTL(long))
	for _, opts := range [][]holdfast.Option{nil, {holdfast.WithFencing()}} {
		for range 2 {
			_, err := other.TryAcquire(t.Context(), "k", opts...)
			var young *YoungError
			require.ErrorAs(t, err, &young)
			require.Greater(t, young.Left, long/2)
			k := acquire(t, short, "k", opts...)
			require.NoError(t, k.Release())
		}
	}
	_, err := x.locker(holdfast.WithTTL(ttl), WithLongestTTL(long)).TryAcquire(t.Context(), "k")
	var young *YoungError
	require.ErrorAs(t, err, &young)
	x.clean(patience)
}

// Scripts that an operator flushes cost one look at how long the instance has been up, and
// not one per acquisition.
func TestVettingIsRare(t *testing.T) {
	const ttl = time.Second
	x := startFleet(t, 3, ttl)
	l := x.locker(holdfast.WithTTL(ttl))
	for _, opts := range [][]holdfast.Option{nil, {holdfast.WithFencing()}} {
		for i := range 5 {
			if i == 1 || i == 3 {
				for _, s := range x.servers {
					require.NoError(t, s.Admin().ScriptFlush(t.Context()).Err())
				}
			}
			if i == 2 || i == 4 {
				for _, p := range x.proxies {
					require.Zero(t, p.CountMatch(faultproxy.Command("INFO")), "scripts are known")
				}
			}
			k := acquire(t, l, "k", opts...)
			x.everywhere(k)
			require.NoError(t, k.Release())
			x.clean(patience)
			for j, p := range x.proxies {
				if i == 1 || i == 3 {
					require.Equal(t, 1, p.CountMatch(faultproxy.Command("INFO")), j)
				}
				p.ResetLog()
			}
		}
	}
}

// An instance that returns takes no token from before: its floor is the moment from which
// it may vote, by its own clock. What is counted there later stands above it.
func TestFloorAfterReturn(t *testing.T) {
	const ttl = time.Second
	x := startFleet(t, 3, ttl)
	l := x.locker(holdfast.WithTTL(ttl))
	old := acquire(t, l, "k", holdfast.WithFencing())
	x.everywhere(old)
	require.NoError(t, old.Release())
	s := x.servers[0]
	s.Kill()
	s.Restart()
	started := s.Admin().Time(t.Context()).Val()
	redistest.Eventually(t, patience, "it votes again", func() bool {
		k := acquire(t, l, "k", holdfast.WithFencing())
		defer func() { require.NoError(t, k.Release()) }()
		require.Greater(t, k.Token(), old.Token())
		return len(x.having("k", k.Owner())) == 3
	})
	floor, err := s.Admin().Get(t.Context(), floorKey).Int64()
	require.NoError(t, err)
	require.Greater(t, floor, int64(old.Token()))
	lead := time.UnixMicro(floor).Sub(started)
	require.Greater(t, lead, ttl-2*time.Second, "a second that is not full, and one that is cut off")
	require.Less(t, lead, ttl+3*time.Second)
	counter, err := strconv.ParseInt(s.Admin().Get(t.Context(), fenceOf("k")).Val(), 10, 64)
	require.NoError(t, err)
	require.Greater(t, counter, floor)
}

// An instance that restarts while others wait gets no vote by their waiting, however often
// they ask: here it is the majority's last.
func TestRestartsWhileOthersWait(t *testing.T) {
	const ttl = time.Second
	x := startFleet(t, 3, ttl)
	x.servers[2].Kill()
	l, other := x.locker(holdfast.WithTTL(ttl)), x.direct(holdfast.WithTTL(ttl))
	for range 2 {
		k := acquire(t, l, "k", holdfast.WithoutRenewal())
		waits := make(chan error, 1)
		go func() { // ends with the other's turn
			waits <- other.Do(context.WithoutCancel(t.Context()), "k", func(context.Context) error {
				if k.Err() == nil {
					return errors.New("two holders")
				}
				return nil
			}, holdfast.WithWait(patience))
		}()
		x.servers[1].Kill()
		x.servers[1].Restart()
		require.NoError(t, <-waits)
	}
}

// old is a hook under which a server says that it is of an older version.
type old string

func (old) DialHook(next redis.DialHook) redis.DialHook { return next }
func (v old) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if info, ok := cmd.(*redis.StringCmd); ok && cmd.Name() == "info" {
			info.SetVal(strings.Replace(info.Val(), "redis_version:", "redis_version:"+string(v)+"\r\nwas:", 1))
		}
		return err
	}
}

func (old) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook { return next }

// A server before 7.0 may know its scripts still after a restart, and so would vote at once
// then: it has no vote, unless it forgets nothing else either.
func TestOldServers(t *testing.T) {
	const ttl = time.Second
	x := startFleet(t, 3, ttl)
	for version, ok := range map[string]bool{"5.0.14": false, "6.2.14": false, "": false, "x": false, "7.0.0": true, "10.1": true, "7": true} {
		clients := x.clients(func(o *redis.Options) { o.ContextTimeoutEnabled = true }) // else there are no hooks
		for _, c := range clients {
			c.AddHook(old(version))
		}
		for _, opts := range [][]holdfast.Option{{holdfast.WithTTL(ttl)}, lasting()} {
			for _, s := range x.servers {
				require.NoError(t, s.Admin().ScriptFlush(t.Context()).Err())
			}
			l, err := New(clients, append(opts, quiet)...)
			require.NoError(t, err)
			t.Cleanup(func() { _ = l.Close() })
			k, err := l.TryAcquire(t.Context(), "k")
			if ok || len(opts) == len(lasting()) {
				require.NoError(t, err, version)
				require.NoError(t, k.Release())
			} else {
				require.ErrorIs(t, err, holdfast.ErrUnavailable, version)
				require.ErrorContains(t, err, "needs Redis 7.0 or later, or WithDurableInstances", version)
			}
		}
	}
	x.clean(patience)
}
