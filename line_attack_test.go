package holdfast

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// hookFn is a hook of single commands.
type hookFn func(next redis.ProcessHook) redis.ProcessHook

func (h hookFn) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (h hookFn) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return h(next) }
func (h hookFn) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// The answer to SET comes at the very moment at which time is up: the attempt sends no
// second command, which would have no bound.
func TestAnswerAtTheLastMoment(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		mustAcquire(t, memLocker(t, m, WithTTL(time.Hour), WithMaxHold(Unlimited)), "k")
		var armed atomic.Bool
		c := memClient(t, m)
		c.AddHook(hookFn(func(next redis.ProcessHook) redis.ProcessHook {
			return func(ctx context.Context, cmd redis.Cmder) error {
				if !armed.Load() {
					return next(ctx, cmd)
				}
				if cmd.Name() == "set" {
					err := next(ctx, cmd)
					end, _ := ctx.Deadline()
					time.Sleep(time.Until(end))
					return err
				}
				time.Sleep(10 * time.Minute)
				return next(ctx, cmd)
			}
		}))
		l := newTestLocker(t, c)
		warm(t, l)
		armed.Store(true)
		bad := 0
		for range 100 {
			start := time.Now()
			_, err := l.TryAcquire(t.Context(), "k")
			require.Error(t, err)
			if d := time.Since(start); d > 6*time.Second {
				bad++
				t.Logf("TryAcquire took %v: %v", d, err)
				if bad > 3 {
					break
				}
			}
		}
		armed.Store(false)
		time.Sleep(time.Hour)
		if bad > 0 {
			t.Error("TryAcquire has no bound")
		}
	})
}

// A release whose first try never reached a server is told that the lock is somebody
// else's.
func TestReleaseThatWasNotSent(t *testing.T) {
	s, p, c := proxied(t, retries(-1))
	var failed atomic.Bool
	c.AddHook(hookFn(func(next redis.ProcessHook) redis.ProcessHook {
		return func(ctx context.Context, cmd redis.Cmder) error {
			err := next(ctx, cmd)
			if err != nil && cmd.Name() == "evalsha" {
				failed.Store(true)
			}
			return err
		}
	}))
	l := newTestLocker(t, c)
	k := mustAcquire(t, l, "k", WithRenewEvery(20*time.Second))
	p.Down()
	// As in a failover to a server without the lock: somebody else takes it.
	require.NoError(t, s.Admin().FlushAll(t.Context()).Err())
	other := mustAcquire(t, newTestLocker(t, s.Client()), "k")
	got := make(chan error, 1)
	go func() { got <- k.Release() }()
	redistest.Eventually(t, 10*time.Second, "a try has failed", failed.Load)
	require.NoError(t, p.Up())
	err := <-got
	require.NoError(t, other.Err())
	require.ErrorIs(t, err, ErrLost)
}

// C022: what a waiter heard last is old when others are before it, and still the reason
// why it did not get the lock.
func TestOldKnowledgeIsNoSilence(t *testing.T) {
	s := redistest.Start(t)
	require.NoError(t, s.Admin().Set(t.Context(), "k", "dead", 150*time.Millisecond).Err())
	first := acquiring(t.Context(), newTestLocker(t, s.Client()), "k")
	queued(t, s.Admin(), "k", 1)
	_, err := newTestLocker(t, s.Client()).Acquire(t.Context(), "k", WithWait(600*time.Millisecond))
	k := granted(t, first, time.Second)
	require.NoError(t, k.Err())
	require.ErrorIs(t, err, ErrNotAcquired)
	require.False(t, errors.Is(err, ErrUnavailable))
}

// WithMaxWaiters does not refuse one who waits already, whose place ran out meanwhile.
func TestMaxWaitersKeepsWhoWaits(t *testing.T) {
	s := redistest.Start(t)
	mustAcquire(t, newTestLocker(t, s.Client()), "k")
	ctx, cancel := context.WithCancel(t.Context())
	first := acquiring(ctx, newTestLocker(t, s.Client()), "k", WithMaxWaiters(1))
	queued(t, s.Admin(), "k", 1)
	names, _ := keyspace.CompanionsOf("k")
	// As if it had been silent for long, another has got the only place.
	s.Admin().Del(ctx, names.Queue, names.Waiters)
	s.Admin().ZAdd(ctx, names.Queue, redis.Z{Score: 1, Member: "other/1"})
	s.Admin().HSet(ctx, names.Waiters, "other/1", "1 9999999999999 2000 0 PUBLISH c")
	queued(t, s.Admin(), "k", 2) // it comes back behind
	cancel()
	require.ErrorIs(t, (<-first).err, context.Canceled)
}

// Messages come for keys with any bytes in their hash tag: the server keeps the channel
// as it is.
func TestLineNULChannel(t *testing.T) {
	cl := redistest.StartCluster(t, 1)
	for _, key := range []string{"ab", "a\x00b", "a b\nc", "x{t\x00u}y"} {
		k := mustAcquire(t, newTestLocker(t, cl.Client()), key)
		l := newTestLocker(t, cl.Client())
		got := acquiring(t.Context(), l, key)
		c := cl.Nodes[0].Admin()
		queued(t, c, key, 1)
		names, _ := keyspace.CompanionsOf(key)
		place := strings.Join(c.HVals(t.Context(), names.Waiters).Val(), "")
		ears := &l.store.Store.(*redisStore).ears
		require.True(t, strings.HasSuffix(place, " SPUBLISH "+ears.nameFor(key)), "%q: %q", key, place)
		require.NoError(t, k.Release())
		require.NoError(t, granted(t, got, 10*time.Second).Release())
	}
}

// Calls that hang do not keep a waiter from asking again.
func TestLineHungCalls(t *testing.T) {
	s, p, c := proxied(t, func(o *redis.Options) { o.ReadTimeout = -1 })
	l := newTestLocker(t, c)
	warm(t, l)
	require.NoError(t, s.Admin().Set(t.Context(), "k", "dead", 2500*time.Millisecond).Err())
	got := acquiring(t.Context(), l, "k")
	queued(t, s.Admin(), "k", 1)
	p.Inject(faultproxy.Rule{Match: isWait, Times: 3, Do: faultproxy.HoldRequest()})
	select {
	case o := <-got:
		t.Log(o)
	case <-time.After(15 * time.Second):
		t.Error("free for 12 s, and nobody asks")
	}
}

// panicHook panics for commands that name "spoilt".
type panicHook struct{ on atomic.Bool }

func (h *panicHook) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h *panicHook) has(cmd redis.Cmder) bool {
	return h.on.Load() && strings.Contains(fmt.Sprint(cmd.Args()...), "spoilt")
}
func (h *panicHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if h.has(cmd) {
			panic("spoilt key")
		}
		return next(ctx, cmd)
	}
}
func (h *panicHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, c := range cmds {
			if h.has(c) {
				panic("spoilt key")
			}
		}
		return next(ctx, cmds)
	}
}

// A hook that panics for one key costs the others of its batch time, not their keys.
func TestPipelinePanicForOne(t *testing.T) {
	s := redistest.Start(t)
	c := s.Client()
	h := &panicHook{}
	c.AddHook(h)
	l := newTestLocker(t, c)
	bad := mustAcquire(t, l, "spoilt")
	var locks []*Lock
	for i := range 200 {
		locks = append(locks, mustAcquire(t, l, fmt.Sprint("k", i)))
	}
	h.on.Store(true)
	var wg sync.WaitGroup
	for i, k := range locks {
		if i%20 == 0 {
			wg.Go(func() { _ = bad.Release() })
		}
		wg.Go(func() { _ = k.Release() })
	}
	wg.Wait()
	redistest.Eventually(t, 10*time.Second, "only the spoilt key is left", func() bool {
		return s.Admin().DBSize(t.Context()).Val() <= 1
	})
}

// What a Locker sends first, to learn that the server runs scripts, may run late, when
// the acquisition that it was sent for holds the lock: it must not give that back.
func TestProbeThatRunsLate(t *testing.T) {
	s, p, c := proxied(t, impatient, retries(-1))
	late := p.Inject(faultproxy.Rule{Match: faultproxy.Command("EVAL"), Times: 1, Do: faultproxy.HoldRequest()})
	k := mustAcquire(t, newTestLocker(t, c), "k")
	require.NoError(t, late.WaitTimeout(10*time.Second))
	s.ResetStats()
	late.Release()
	redistest.Eventually(t, 10*time.Second, "it has run", func() bool { return s.CommandStats()["eval"] > 0 })
	require.Equal(t, k.Owner(), s.Admin().Get(t.Context(), "k").Val())
	require.NoError(t, k.Release())
}
