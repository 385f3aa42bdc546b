package holdfast

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// First come, first served in one process, and only the first asks. C089, C098.
func TestWaitingInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s)
		k := hold(t, l, "k")
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() {
				k, err := l.Acquire(t.Context(), "k")
				require.NoError(t, err)
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
				time.Sleep(10 * time.Millisecond)
				require.NoError(t, k.Release())
			})
			time.Sleep(time.Millisecond)
		}
		n := s.count("acquire")
		time.Sleep(10 * time.Second)
		require.LessOrEqual(t, s.count("acquire")-n, 100, "50 waiters ask like one")
		n = s.count("acquire")
		start := time.Now()
		require.NoError(t, k.Release())
		wg.Wait()
		for i := range order {
			require.Equal(t, i, order[i])
		}
		// A local release passes the lock on at once.
		require.LessOrEqual(t, time.Since(start), 50*20*time.Millisecond)
		require.LessOrEqual(t, s.count("acquire")-n, 150)
		l.mu.Lock()
		require.Empty(t, l.queues)
		l.mu.Unlock()
	})
}

// Pauses grow from 10 to 250 ms, and each acquisition starts at the first. C087, C089.
func TestPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s)
		s.server.set("k", "somebody/else", time.Hour)
		for range 20 {
			n := s.count("acquire")
			_, err := l.Acquire(t.Context(), "k", WithWait(5*time.Second))
			require.ErrorIs(t, err, ErrNotAcquired)
			calls := s.got("acquire")[n:]
			for i := 1; i < len(calls); i++ {
				pause, want := calls[i].at.Sub(calls[i-1].at), min(mostPause, firstPause<<min(i-1, 9))
				require.GreaterOrEqual(t, pause, want/2)
				require.LessOrEqual(t, pause, want)
			}
			require.Greater(t, len(calls), 20)
		}
	})
}

// C097: a pause never reaches past the end of the holder's lease.
func TestPauseEndsWithLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s)
		for i := range 50 {
			s.server.set("k", "somebody/else", 5*time.Second+time.Duration(i)*7*time.Millisecond)
			end := time.Now().Add(s.server.left("k"))
			k := hold(t, l, "k")
			require.LessOrEqual(t, time.Since(end), 2*leastPause)
			require.NoError(t, k.Release())
		}
	})
}

// C021: whatever the waiter is at, it returns when its context ends. C086: the TTL
// plays no part in it. C091: options of the call count.
func TestWaitEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s, WithTTL(500*time.Millisecond), WithWait(10*time.Second))
		g := s.newGate()
		s.acquire = func(_ context.Context, r Request) (Grant, error) {
			if s.count("acquire") > 100 {
				g.wait()
			}
			return s.server.Acquire(r)
		}
		s.server.set("k", "somebody/else", time.Hour)
		took := func(limit time.Duration, opts ...Option) {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			start := time.Now()
			k, err := l.Acquire(ctx, "k", opts...)
			require.Nil(t, k)
			require.Error(t, err)
			require.Equal(t, min(limit, 10*time.Second), time.Since(start))
		}
		took(3 * time.Second)
		took(time.Minute)
		start := time.Now()
		_, err := l.Acquire(t.Context(), "k", WithWait(200*time.Millisecond))
		require.ErrorIs(t, err, ErrNotAcquired)
		require.Equal(t, 200*time.Millisecond, time.Since(start))
		var wg sync.WaitGroup
		for i := range 20 { // the first hangs in the store soon, the others are queued
			wg.Go(func() { took(time.Duration(i+1) * 300 * time.Millisecond) })
		}
		wg.Wait()
		l.mu.Lock()
		require.Empty(t, l.queues)
		l.mu.Unlock()
	})
}

// C086: the lock comes when the holder is through, however long that takes.
func TestWaitOutlivesTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l, other := fakeLocker(t, s, WithTTL(500*time.Millisecond)), fakeLocker(t, s, WithTTL(500*time.Millisecond))
		k := hold(t, other, "k")
		time.AfterFunc(3*time.Minute, func() { _ = k.Release() })
		start := time.Now()
		require.NoError(t, hold(t, l, "k").Release())
		require.InDelta(t, (3 * time.Minute).Seconds(), time.Since(start).Seconds(), mostPause.Seconds())
	})
}

// A waiter gets the lock at the moment of a Release in its own process.
func TestLocalRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s)
		k := hold(t, l, "k")
		got := make(chan *Lock)
		go func() { got <- hold(t, l, "k") }()
		time.Sleep(10 * time.Second)
		start := time.Now()
		require.NoError(t, k.Release())
		next := <-got
		require.Zero(t, time.Since(start))
		require.NoError(t, next.Release())
	})
}

// C019: cancel a waiter at the moment of the release.
func TestCancelAtRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s, WithTTL(time.Minute))
		for range 500 {
			k := hold(t, l, "k")
			ctx, cancel := context.WithCancel(t.Context())
			type result struct {
				k   *Lock
				err error
			}
			got := make(chan result)
			go func() {
				k, err := l.Acquire(ctx, "k")
				got <- result{k, err}
			}()
			time.Sleep(30 * time.Millisecond)
			go cancel()
			require.NoError(t, k.Release())
			r := <-got
			require.True(t, (r.k == nil) != (r.err == nil))
			if synctest.Wait(); r.k != nil {
				require.ErrorIs(t, context.Cause(r.k.Context()), context.Canceled)
				require.NoError(t, r.k.Release())
			}
			time.Sleep(time.Second)
			require.Zero(t, s.server.left("k"))
		}
	})
}

// A key without a queue at the server counts the waiters of this Locker.
func TestMaxWaitersOfAPolledKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fakeLocker(t, &fakeStore{})
		held := hold(t, l, "k")
		got := make(chan *Lock)
		go func() { got <- hold(t, l, "k", WithMaxWaiters(1)) }()
		time.Sleep(time.Second)
		start := time.Now()
		_, err := l.Acquire(t.Context(), "k", WithMaxWaiters(1))
		require.ErrorIs(t, err, ErrNotAcquired)
		require.Zero(t, time.Since(start))
		require.NoError(t, held.Release())
		require.NoError(t, (<-got).Release())
	})
}
