package holdfast

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/redistest"
)

// WithMaxWaiters counts those of all processes, refuses at once, and does not count the
// dead for longer than their place is kept.
func TestLineMaxWaiters(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		a, b := memLocker(t, m), memLocker(t, m)
		k := hold(t, a, "k")
		ctx, cancel := context.WithCancel(t.Context())
		var waiting []<-chan outcome
		for i := range 4 {
			waiting = append(waiting, acquiring(ctx, []*Locker{a, b}[i%2], "k", WithMaxWaiters(4)))
			synctest.Wait()
		}
		refused := func(l *Locker, n int) bool {
			t.Helper()
			start := time.Now()
			got, err := l.Acquire(t.Context(), "k", WithMaxWaiters(n), WithWait(time.Second))
			require.Nil(t, got)
			var held *HeldError
			require.ErrorAs(t, err, &held)
			require.ErrorIs(t, err, ErrNotAcquired)
			require.Equal(t, k.config.holder, held.Holder)
			require.Positive(t, held.TTL)
			return time.Since(start) == 0
		}
		for range 3 {
			require.True(t, refused(a, 4))
			require.True(t, refused(b, 1))
			require.False(t, refused(a, 5), "there was room")
			time.Sleep(slack) // its place is given up
		}
		cancel() // all four, and their places are free
		for _, got := range waiting {
			require.Error(t, (<-got).err)
		}
		time.Sleep(time.Second)
		deadWaiters(t, a, "k", 4, 2*time.Second, 2*time.Second)
		require.True(t, refused(b, 4))
		time.Sleep(2*time.Second + slack)
		require.False(t, refused(b, 1), "the dead do not count")
		require.NoError(t, k.Release())
	})
}

// WithMinHold: the key stays after Release, for the time that was left; the next has it
// when that is over, and a holder that dies does not keep it longer than its lease.
func TestLineMinHold(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l, other := memLocker(t, m, WithMinHold(10*time.Second)), memLocker(t, m)
		start := time.Now()
		k := hold(t, l, "k", WithTTL(2*time.Second))
		got := acquiring(t.Context(), other, "k")
		time.Sleep(4 * time.Second)
		require.NoError(t, k.Err(), "renewed as usual")
		require.NoError(t, k.Release())
		require.ErrorIs(t, k.Err(), ErrReleased)
		require.ErrorIs(t, k.Release(), ErrNotHeld)
		require.InDelta(t, 6, m.TTL("k").Seconds(), 0.01)
		time.Sleep(3 * time.Second)
		require.InDelta(t, 3, m.TTL("k").Seconds(), 0.01, "nothing renews or ends it")
		_, err := other.TryAcquire(t.Context(), "k")
		require.ErrorIs(t, err, ErrNotAcquired)
		next := granted(t, got, time.Minute)
		require.GreaterOrEqual(t, time.Since(start), 10*time.Second)
		require.LessOrEqual(t, time.Since(start), 10*time.Second+2*leastCall)
		require.NoError(t, next.Release())
		require.Empty(t, m.Keys())

		k = hold(t, l, "k")
		got = acquiring(t.Context(), other, "k")
		time.Sleep(11 * time.Second) // the least time is over already
		start = time.Now()
		require.NoError(t, k.Release())
		require.NoError(t, granted(t, got, time.Minute).Release())
		require.LessOrEqual(t, time.Since(start), slack, "handed over")

		require.NoError(t, m.Set("k", "dead/1"))
		m.SetTTL("k", 2*time.Second)
		start = time.Now()
		require.NoError(t, hold(t, other, "k").Release())
		require.LessOrEqual(t, time.Since(start), 2*time.Second+2*leastCall)
	})
}

// Short leases, fixed or renewed, with many who wait: never two at once, all are served,
// and nobody asks without end.
func TestLineShortLeases(t *testing.T) {
	for _, ttl := range []time.Duration{10 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 300 * time.Millisecond} {
		for _, fixed := range []bool{false, true} {
			t.Run(fmt.Sprint(ttl, " fixed ", fixed), func(t *testing.T) {
				bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
					opts := []Option{WithTTL(ttl)}
					if fixed {
						opts = append(opts, WithoutRenewal())
					}
					var calls atomic.Int64
					lockers := make([]*Locker, 4)
					for i := range lockers {
						c := memClient(t, m)
						c.AddHook(&counter{&calls})
						lockers[i] = newTestLocker(t, c, opts...)
					}
					var inside atomic.Int32
					done := make(chan struct{}, 20)
					for i := range 20 {
						go func() { // ends when it was served
							defer func() { done <- struct{}{} }()
							k, err := lockers[i%4].Acquire(t.Context(), "k")
							if err != nil {
								t.Error(err)
								return
							}
							if inside.Add(1) > 1 {
								t.Error("two at once")
							}
							select {
							case <-time.After(ttl / 3):
							case <-k.Context().Done():
							}
							inside.Add(-1)
							_ = k.Release()
						}()
						time.Sleep(100 * time.Microsecond)
					}
					start := time.Now()
					for range 20 {
						<-done
					}
					took := time.Since(start)
					require.LessOrEqual(t, took, 20*(ttl/3+slack))
					perSecond := float64(calls.Load()) / (took.Seconds() + 1)
					require.Less(t, perSecond, 2000.0)
					time.Sleep(10 * time.Second)
					require.Empty(t, m.Keys())
				})
			})
		}
	}
}

// counter counts commands.
type counter struct{ n *atomic.Int64 }

func (c *counter) DialHook(next redis.DialHook) redis.DialHook { return next }
func (c *counter) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { c.n.Add(1); return next(ctx, cmd) }
}
func (c *counter) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error { c.n.Add(int64(len(cmds))); return next(ctx, cmds) }
}

// A margin longer than the lease of a hand-over leaves that no validity: the lock is
// renewed first.
func TestLineMargin(t *testing.T) {
	for _, opts := range [][]Option{
		{WithTTL(30 * time.Second), WithMargin(20 * time.Second), WithRenewEvery(time.Second)},
		{WithTTL(30 * time.Second), WithMargin(20 * time.Second), WithoutRenewal()},
		{WithTTL(30 * time.Second), WithMargin(1950 * time.Millisecond)},
		{WithTTL(time.Second), WithMargin(0)},
		{WithTTL(10 * time.Millisecond), WithMargin(0), WithFencing()},
	} {
		bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
			k, l := hold(t, memLocker(t, m), "k"), memLocker(t, m, opts...)
			got := acquiring(t.Context(), l, "k")
			time.Sleep(time.Second)
			start := time.Now()
			require.NoError(t, k.Release())
			next := granted(t, got, time.Minute)
			require.LessOrEqual(t, time.Since(start), slack)
			require.NoError(t, next.Err())
			require.LessOrEqual(t, time.Until(next.ValidUntil()), m.TTL("k"))
			require.NoError(t, next.Release())
			time.Sleep(time.Second) // a call that was under way is settled
			require.LessOrEqual(t, len(m.Keys()), 1)
		})
	}
}

// C098: Release and Close come back in bounded time in every state, whether nobody, one
// or fifty wait, and those get ErrClosed or the lock.
func TestLineClose(t *testing.T) {
	for _, n := range []int{0, 1, 50} {
		for _, handed := range []bool{false, true} {
			t.Run(fmt.Sprint(n, " waiters, handed ", handed), func(t *testing.T) {
				bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
					holder, l, outside := memLocker(t, m), memLocker(t, m), memLocker(t, m)
					k := hold(t, holder, "k")
					own := hold(t, l, "own")
					var waiting []<-chan outcome
					for range n {
						waiting = append(waiting, acquiring(t.Context(), l, "k"), acquiring(t.Context(), holder, "own"))
						synctest.Wait()
					}
					last := acquiring(t.Context(), outside, "k")
					time.Sleep(time.Second)
					if handed {
						go func() { _ = k.Release() }() // at the moment of Close
					}
					start := time.Now()
					require.NoError(t, l.Close())
					require.LessOrEqual(t, time.Since(start), 5*time.Second)
					require.ErrorIs(t, context.Cause(own.Context()), ErrClosed)
					for i, got := range waiting {
						if i%2 == 0 {
							if o := <-got; o.err == nil {
								require.ErrorIs(t, context.Cause(o.k.Context()), ErrClosed)
							} else {
								require.ErrorIs(t, o.err, ErrClosed)
							}
							continue
						}
						require.NoError(t, granted(t, got, 10*time.Second).Release())
					}
					if !handed {
						require.NoError(t, k.Release())
					}
					start = time.Now()
					require.NoError(t, granted(t, last, time.Minute).Release())
					require.LessOrEqual(t, time.Since(start), maxClaim)
					require.ErrorIs(t, own.Release(), ErrNotHeld)
					idleSoon(t, l)
					require.Empty(t, m.Keys())
				})
			})
		}
	}
}

// Keys that leave no room for a queue are waited for all the same.
func TestLineWithoutQueue(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		a, b := memLocker(t, m), memLocker(t, m)
		for _, key := range []string{"x}y", "{}", "}"} {
			k := hold(t, a, key)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_, err := b.Acquire(ctx, key)
			cancel()
			require.ErrorIs(t, err, ErrNotAcquired)
			got := acquiring(t.Context(), b, key)
			time.Sleep(5 * time.Second)
			require.NoError(t, k.Release())
			require.NoError(t, granted(t, got, 2*mostPause).Release())
			require.Empty(t, m.Keys())
		}
	})
}

// A value without TTL is not a lock, but it keeps everybody out; when it is deleted the
// first in the queue has the lock by its next call.
func TestLineForeignValue(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := memLocker(t, m)
		require.NoError(t, m.Set("k", "data"))
		_, err := l.Acquire(t.Context(), "k", WithWait(5*time.Second))
		var held *HeldError
		require.ErrorAs(t, err, &held)
		require.Negative(t, held.TTL)
		require.Equal(t, "data", held.Holder)
		got := acquiring(t.Context(), l, "k")
		time.Sleep(time.Millisecond)
		next := acquiring(t.Context(), memLocker(t, m), "k")
		time.Sleep(time.Minute)
		m.Del("k")
		require.NoError(t, granted(t, got, maxClaim).Release())
		require.NoError(t, granted(t, next, slack).Release())
	})
}

// C117, C119: scripts that are forgotten at any moment of a wait are not noticed, and
// their texts are sent no oftener than they are forgotten.
func TestLineScriptFlush(t *testing.T) {
	s := redistest.Start(t)
	a, b := newTestLocker(t, s.Client()), newTestLocker(t, s.Client())
	k := mustAcquire(t, a, "k")
	for i := range 10 {
		flush := func() { require.NoError(t, s.Admin().ScriptFlush(t.Context()).Err()) }
		flush()
		got := acquiring(t.Context(), []*Locker{b, a}[i%2], "k")
		queued(t, s.Admin(), "k", 1)
		flush()
		require.NoError(t, k.Release())
		k = granted(t, got, 20*time.Second)
	}
	require.NoError(t, k.Release())
	warm(t, a)
	k = mustAcquire(t, a, "k")
	mustWait := acquiring(t.Context(), b, "k")
	queued(t, s.Admin(), "k", 1)
	s.ResetStats()
	for i := range 100 {
		require.NoError(t, k.Release())
		k = granted(t, mustWait, 20*time.Second)
		mustWait = acquiring(t.Context(), []*Locker{a, b}[i%2], "k")
		queued(t, s.Admin(), "k", 1)
	}
	require.Zero(t, s.CommandStats()["eval"])
	require.NotContains(t, s.Admin().Info(t.Context(), "errorstats").Val(), "NOSCRIPT")
	require.NoError(t, k.Release())
	require.NoError(t, granted(t, mustWait, 20*time.Second).Release())
	require.NoError(t, errors.Join(a.Close(), b.Close()))
}
