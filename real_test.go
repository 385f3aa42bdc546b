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

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/redistest"
)

// An uncontended cycle is one SET and one EVALSHA. The first one of a Locker also
// finds out, by one EVAL, that the server runs scripts. C105: no PUBLISH.
func TestTwoCommandsACycle(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client())
	cycle := func() {
		k, err := l.Acquire(t.Context(), "k")
		require.NoError(t, err)
		require.NoError(t, k.Release())
	}
	s.ResetStats()
	cycle()
	stats := s.CommandStats()
	require.EqualValues(t, 1, stats["eval"])
	require.EqualValues(t, 1, stats["evalsha"])
	s.ResetStats()
	for range 1000 {
		cycle()
	}
	stats = s.CommandStats()
	require.EqualValues(t, 1000, stats["evalsha"])
	require.Zero(t, stats["eval"])
	require.Zero(t, stats["publish"])
	require.EqualValues(t, 1000, stats["set"])
}

// With fencing a cycle is two script calls: grant and token are one step. C151.
func TestFencingIsOneStep(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client(), WithFencing())
	for i := range 10 {
		k, err := l.Acquire(t.Context(), "k")
		require.NoError(t, err)
		require.EqualValues(t, i+1, k.Token())
		require.NoError(t, k.Extend(t.Context(), time.Minute))
		require.EqualValues(t, i+1, k.Token())
		require.NoError(t, k.Release())
	}
	require.Equal(t, time.Duration(-1), s.Admin().PTTL(t.Context(), "{k}:fence").Val())
	require.Equal(t, "10", s.Admin().Get(t.Context(), "{k}:fence").Val())
}

// Fencing costs one script call in place of one SET, and nothing else. In the statistics,
// commands inside of scripts count too.
func TestFencingCostsOneScriptCall(t *testing.T) {
	s := redistest.Start(t)
	const cycles = 100
	count := func(opts ...Option) map[string]int64 {
		l := newTestLocker(t, s.Client(), opts...)
		cycle := func() {
			k, err := l.Acquire(t.Context(), "k")
			require.NoError(t, err)
			require.NoError(t, k.Release())
		}
		cycle()
		s.ResetStats()
		for range cycles {
			cycle()
		}
		stats := s.CommandStats()
		delete(stats, "config|resetstat")
		delete(stats, "info")
		return stats
	}
	plain := count()
	require.Equal(t, map[string]int64{"set": cycles, "evalsha": cycles, "get": cycles, "exists": cycles, "del": cycles}, plain)
	plain["evalsha"] += cycles // the grant; its SET stays, inside
	plain["get"] += 2 * cycles // a copy that was sent again finds its own lock; the token as text
	plain["incr"] += cycles
	plain["persist"] = cycles // the counter may have had a floor before
	require.Equal(t, plain, count(WithFencing()))
}

// C038, C039: the TTL on the server is what was asked, rounded up to milliseconds,
// after Acquire, after a renewal and after Extend.
func TestTTLOnServer(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client(), WithMaxHold(Unlimited))
	near := func(want time.Duration) {
		t.Helper()
		got := s.Admin().PTTL(t.Context(), "k").Val()
		require.LessOrEqual(t, got, want+time.Millisecond)
		require.Greater(t, got, want-time.Second)
	}
	for _, ttl := range []time.Duration{
		1100 * time.Millisecond, 1500*time.Millisecond + time.Microsecond, time.Hour, 30 * 24 * time.Hour,
	} {
		k, err := l.Acquire(t.Context(), "k", WithTTL(ttl), WithRenewEvery(50*time.Millisecond))
		require.NoError(t, err)
		near(ttl)
		require.NoError(t, s.Admin().PExpire(t.Context(), "k", time.Second).Err())
		redistest.Eventually(t, 5*time.Second, "a renewal", func() bool {
			return s.Admin().PTTL(t.Context(), "k").Val() > ttl-time.Second
		})
		near(ttl)
		require.NoError(t, k.Extend(t.Context(), 2*ttl))
		near(2 * ttl)
		require.NoError(t, k.Release())
	}
}

// C146: any non-empty byte string is a name.
func TestNames(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client(), WithPrefix("locks:"))
	names := []string{":", "::", "{", "}", "{}", "%s", " ", "\n", "\x00", "\xff", "🔒", "a{b}c",
		strings.Repeat("k", 64<<10-len("locks:"))}
	for _, name := range names {
		k, err := l.Acquire(t.Context(), name)
		require.NoError(t, err, "%.20q", name)
		require.Equal(t, k.Owner(), s.Admin().Get(t.Context(), "locks:"+name).Val())
		_, err = l.TryAcquire(t.Context(), name)
		var held *HeldError
		require.ErrorAs(t, err, &held)
		require.Equal(t, name, held.Key)
		require.NoError(t, k.Extend(t.Context(), time.Minute))
		require.NoError(t, k.Release())
	}
	require.Zero(t, s.Admin().DBSize(t.Context()).Val())
}

// C142: data under the lock's name is never changed or deleted.
func TestDataUnderTheName(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client())
	a := s.Admin()
	require.NoError(t, a.HSet(t.Context(), "hash", "f", "v").Err())
	require.NoError(t, a.Set(t.Context(), "string", "data", 0).Err())
	require.NoError(t, a.Set(t.Context(), "empty", "", 0).Err())
	_, err := l.Acquire(t.Context(), "hash")
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "WRONGTYPE")
	for _, key := range []string{"string", "empty"} {
		_, err = l.TryAcquire(t.Context(), key)
		require.ErrorIs(t, err, ErrNotAcquired)
	}
	require.ErrorIs(t, new(Lock).Release(), ErrNotHeld) // C138
	require.Equal(t, "v", a.HGet(t.Context(), "hash", "f").Val())
	require.Equal(t, "data", a.Get(t.Context(), "string").Val())
	require.EqualValues(t, 1, a.Exists(t.Context(), "empty").Val())
}

// C003, C049, C143: a key that was deleted, stolen or overwritten by data, of
// whatever type, ends the lock at the next renewal, and is left alone.
func TestKeyTakenAway(t *testing.T) {
	s := redistest.Start(t)
	a := s.Admin()
	for name, c := range map[string]struct {
		fault  func(ctx context.Context)
		reason string
	}{
		"deleted":     {func(ctx context.Context) { a.Del(ctx, "k") }, LostGone},
		"flushed":     {func(ctx context.Context) { a.FlushAll(ctx) }, LostGone},
		"stolen":      {func(ctx context.Context) { a.Set(ctx, "k", "x/1", time.Minute) }, LostTaken},
		"overwritten": {func(ctx context.Context) { a.Set(ctx, "k", "data", 0) }, LostTaken},
		"other type": {func(ctx context.Context) {
			a.Del(ctx, "k")
			a.HSet(ctx, "k", "f", "v")
		}, LostTaken},
	} {
		t.Run(name, func(t *testing.T) {
			l := newTestLocker(t, s.Client(), WithTTL(10*time.Second), WithRenewEvery(50*time.Millisecond))
			k, err := l.Acquire(t.Context(), "k")
			require.NoError(t, err)
			c.fault(t.Context())
			before := a.Dump(t.Context(), "k").Val()
			<-k.Context().Done()
			var lost *LostError
			require.ErrorAs(t, context.Cause(k.Context()), &lost)
			require.Contains(t, []string{c.reason, LostGone}, lost.Reason)
			require.ErrorIs(t, k.Err(), ErrLost)
			require.ErrorIs(t, k.Release(), ErrLost)
			require.Equal(t, before, a.Dump(t.Context(), "k").Val())
			a.Del(t.Context(), "k")
		})
	}
}

// A server that restarted without the key: the holder is told at the next renewal
// and does not re-create it. C050: the next lock on the key is renewed.
func TestServerRestartsEmpty(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client(), WithTTL(10*time.Second), WithRenewEvery(100*time.Millisecond))
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	s.Kill()
	s.Restart()
	<-k.Context().Done()
	var lost *LostError
	require.ErrorAs(t, context.Cause(k.Context()), &lost)
	require.Equal(t, LostGone, lost.Reason)
	require.Zero(t, s.Admin().Exists(t.Context(), "k").Val())
	k, err = l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	require.NoError(t, s.Admin().PExpire(t.Context(), "k", time.Second).Err())
	redistest.Eventually(t, 5*time.Second, "a renewal", func() bool {
		return s.Admin().PTTL(t.Context(), "k").Val() > 5*time.Second
	})
	require.NoError(t, k.Release())
}

// C117: a server that restarted with its data, but without its scripts, is not
// noticed.
func TestServerRestartsWithData(t *testing.T) {
	s := redistest.Start(t, redistest.Persistent())
	l := newTestLocker(t, s.Client(), WithTTL(20*time.Second), WithRenewEvery(100*time.Millisecond))
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	s.Kill()
	s.Restart()
	require.NoError(t, s.Admin().PExpire(t.Context(), "k", 5*time.Second).Err())
	redistest.Eventually(t, 10*time.Second, "a renewal", func() bool {
		return s.Admin().PTTL(t.Context(), "k").Val() > 10*time.Second
	})
	require.NoError(t, k.Err())
	require.NoError(t, k.Release())
}

// wrapErrors is a hook that decorates every error.
type wrapErrors struct{}

func (wrapErrors) DialHook(next redis.DialHook) redis.DialHook { return next }
func (wrapErrors) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if err := next(ctx, cmd); err != nil {
			return fmt.Errorf("decorated: %w", err)
		}
		return nil
	}
}
func (wrapErrors) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// C117, C118: scripts that the server has forgotten, at any moment, and through
// hooks that decorate errors, are not noticed.
func TestScriptFlush(t *testing.T) {
	s := redistest.Start(t)
	for _, hooked := range []bool{false, true} {
		c := s.Client()
		if hooked {
			c.AddHook(wrapErrors{})
		}
		l := newTestLocker(t, c, WithTTL(20*time.Second), WithRenewEvery(20*time.Millisecond))
		flush := func() { require.NoError(t, s.Admin().ScriptFlush(t.Context()).Err()) }
		for range 5 {
			flush()
			k, err := l.Acquire(t.Context(), "k")
			require.NoError(t, err)
			flush()
			_, err = l.TryAcquire(t.Context(), "k")
			require.ErrorIs(t, err, ErrNotAcquired)
			flush()
			require.NoError(t, k.Extend(t.Context(), 30*time.Second))
			require.NoError(t, s.Admin().PExpire(t.Context(), "k", 5*time.Second).Err())
			flush()
			redistest.Eventually(t, 5*time.Second, "a renewal", func() bool {
				return s.Admin().PTTL(t.Context(), "k").Val() > 20*time.Second
			})
			flush()
			require.NoError(t, k.Release())
		}
	}
}

// C141: one Locker, one key, many goroutines: never two holders, and all are
// served. C145: by RESP2 and RESP3.
func TestExclusionOnServer(t *testing.T) {
	s := redistest.Start(t)
	for _, protocol := range []int{2, 3} {
		var inside, most, served atomic.Int32
		var wg sync.WaitGroup
		for range 4 {
			l := newTestLocker(t, s.Client(func(o *redis.Options) { o.Protocol = protocol }), WithTTL(5*time.Second))
			for range 8 {
				wg.Go(func() {
					err := l.Do(t.Context(), "k", func(context.Context) error {
						most.Store(max(most.Load(), inside.Add(1)))
						time.Sleep(time.Millisecond)
						inside.Add(-1)
						served.Add(1)
						return nil
					})
					if err != nil {
						t.Error(err)
					}
				})
			}
		}
		wg.Wait()
		require.EqualValues(t, 1, most.Load())
		require.EqualValues(t, 32, served.Load())
	}
}

// C102: waiting holds no connection: with a pool of one, release and renewal of
// the holder do not wait behind twenty waiters.
func TestPoolOfOne(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client(func(o *redis.Options) { o.PoolSize = 1 }), WithTTL(time.Second))
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if err := l.Do(t.Context(), "k", func(context.Context) error { return nil }); err != nil {
				t.Error(err)
			}
		})
	}
	redistest.Eventually(t, 10*time.Second, "three renewals", func() bool {
		return clockOf(k) > 3*time.Second
	})
	require.NoError(t, k.Err())
	require.NoError(t, k.Release())
	wg.Wait()
}

// clockOf returns how far validity reaches beyond the grant.
func clockOf(k *Lock) time.Duration { return k.validUntil().Sub(k.since) }

// C101: connections that are killed while others wait are nobody's concern.
func TestConnectionsKilled(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client(), WithTTL(10*time.Second), WithRenewEvery(20*time.Millisecond))
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	other := newTestLocker(t, s.Client())
	done := make(chan error, 1)
	go func() { // ends with the lock, which is released below
		got, err := other.Acquire(t.Context(), "k")
		if err == nil {
			err = got.Release()
		}
		done <- err
	}()
	for range 20 {
		require.NoError(t, s.Admin().ClientKillByFilter(t.Context(), "TYPE", "normal", "SKIPME", "yes").Err())
		time.Sleep(10 * time.Millisecond)
	}
	require.NoError(t, k.Err())
	require.NoError(t, k.Release())
	require.NoError(t, <-done)
}

// A client that its owner has closed is an error at once, and ends a wait.
func TestClientClosed(t *testing.T) {
	s := redistest.Start(t)
	c := redis.NewClient(&redis.Options{Addr: s.Addr()})
	l := newTestLocker(t, c, WithTTL(500*time.Millisecond))
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	require.NoError(t, c.Close())
	_, err = l.Acquire(t.Context(), "other")
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorIs(t, err, redis.ErrClosed)
	require.NotErrorIs(t, err, ErrClosed)
	require.ErrorIs(t, k.Release(), ErrUnavailable)
}

// C094: with the server gone a timed Acquire fails at its limit; one without a
// limit gets the lock when the server is back.
func TestServerGoneAtAcquire(t *testing.T) {
	s := redistest.Start(t)
	c := s.Client(func(o *redis.Options) { o.MaxRetries = -1 })
	l := newTestLocker(t, c)
	s.Kill()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := l.Acquire(ctx, "k")
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NotErrorIs(t, err, ErrNotAcquired)
	_, err = l.Acquire(t.Context(), "k", WithWait(200*time.Millisecond))
	require.ErrorIs(t, err, ErrUnavailable)
	require.NotErrorIs(t, err, context.DeadlineExceeded, "the caller's context is fine")
	got := make(chan error, 1)
	go func() { // ends when the server is back
		k, err := l.Acquire(t.Context(), "k")
		got <- errors.Join(err, k.Release())
	}()
	s.Restart()
	require.NoError(t, <-got)
}

// C054: with the server stopped, every holder is told when validity ends, by its
// own clock and before anybody else can get the lock.
func TestServerStopped(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client(), WithTTL(2*time.Second))
	var locks []*Lock
	for i := range 100 {
		k, err := l.Acquire(t.Context(), fmt.Sprint("k", i))
		require.NoError(t, err)
		locks = append(locks, k)
	}
	s.Stop()
	for _, k := range locks {
		<-k.Context().Done()
		require.ErrorIs(t, context.Cause(k.Context()), ErrLost)
		require.False(t, time.Now().Before(k.ValidUntil()), "not before its time")
	}
	s.Cont()
}

// C047: a server that is busy with a script for a while is no loss.
func TestServerBusy(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client(), WithTTL(3*time.Second), WithRenewEvery(100*time.Millisecond))
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	require.NoError(t, s.Admin().Do(t.Context(), "DEBUG", "SLEEP", "1").Err())
	redistest.Eventually(t, 5*time.Second, "a renewal", func() bool { return clockOf(k) > 4*time.Second })
	require.NoError(t, k.Err())
	require.NoError(t, k.Release())
}

// C131: a key that was evicted is reported lost.
func TestEvicted(t *testing.T) {
	s := redistest.Start(t, redistest.WithConfig("maxmemory", "4mb", "maxmemory-policy", "allkeys-random"))
	l := newTestLocker(t, s.Client(), WithTTL(20*time.Second), WithRenewEvery(50*time.Millisecond))
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	data := strings.Repeat("x", 10_000)
	for i := 0; k.Context().Err() == nil; i++ {
		require.NoError(t, s.Admin().Set(t.Context(), fmt.Sprint("d", i), data, 0).Err())
	}
	require.ErrorIs(t, k.Err(), ErrLost)
}

// At maxmemory an Acquire fails at once, and what is held is renewed and released.
func TestOutOfMemory(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client(), WithTTL(20*time.Second), WithRenewEvery(50*time.Millisecond))
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	require.NoError(t, s.Admin().ConfigSet(t.Context(), "maxmemory", "1").Err())
	_, err = l.Acquire(t.Context(), "other")
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "OOM")
	before := k.ValidUntil()
	redistest.Eventually(t, 5*time.Second, "a renewal", func() bool { return k.ValidUntil().Sub(before) > time.Second })
	require.NoError(t, k.Release())
}
