package holdfast

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
)

// slack is what a call may take under virtual time, in which all of them take none.
const slack = 10 * time.Millisecond

// C086: how long a wait takes depends on the holder alone; the TTL plays no part.
func TestLineOutlivesTTL(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		k := hold(t, memLocker(t, m, WithTTL(500*time.Millisecond)), "k")
		time.AfterFunc(20*time.Second, func() { _ = k.Release() })
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		for _, with := range []context.Context{t.Context(), ctx} {
			l, start := memLocker(t, m, WithTTL(500*time.Millisecond)), time.Now()
			got := acquiring(with, l, "k")
			time.Sleep(time.Second)
			next := granted(t, got, time.Hour)
			require.InDelta(t, 20, time.Since(start).Seconds(), 0.01)
			k = next
			time.AfterFunc(20*time.Second, func() { _ = next.Release() })
		}
		require.NoError(t, k.Release())
	})
}

// C021, C090, C091: a wait in the queue ends at the moment its limit or its context
// says, and the options of the call count.
func TestLineWaitEnds(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		k := hold(t, memLocker(t, m), "k")
		l := memLocker(t, m, WithWait(10*time.Second))
		took := func(want time.Duration, ctx context.Context, opts ...Option) {
			t.Helper()
			start := time.Now()
			_, err := l.Acquire(ctx, "k", opts...)
			require.Equal(t, want, time.Since(start))
			require.ErrorIs(t, err, ErrNotAcquired)
			var held *HeldError
			require.ErrorAs(t, err, &held)
			require.NotEmpty(t, held.Holder)
			require.Equal(t, ctx.Err() != nil, errors.Is(err, context.DeadlineExceeded))
			time.Sleep(time.Second)
			require.Equal(t, []string{"k"}, m.Keys(), "C110: nothing is left")
		}
		took(10*time.Second, t.Context())
		took(200*time.Millisecond, t.Context(), WithWait(200*time.Millisecond))
		took(1200*time.Millisecond, t.Context(), WithWait(1200*time.Millisecond))
		took(0, t.Context(), WithWait(0))
		ctx, cancel := context.WithTimeout(t.Context(), 1234*time.Millisecond)
		defer cancel()
		took(1234*time.Millisecond, ctx, WithWait(time.Hour))
		require.NoError(t, k.Release())
	})
}

// C107: who waits for long keeps his place: order is that of arrival after sixty windows.
func TestLinePlaceIsKept(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		first := hold(t, memLocker(t, m, WithMaxHold(Unlimited)), "k")
		var waiting []<-chan outcome
		for range 5 {
			waiting = append(waiting, acquiring(t.Context(), memLocker(t, m), "k", WithTTL(time.Second)))
			time.Sleep(time.Millisecond)
		}
		time.Sleep(time.Minute)
		for i, got := range waiting {
			require.NoError(t, first.Release())
			first = granted(t, got, time.Second)
			for _, later := range waiting[i+1:] {
				require.Empty(t, later)
			}
		}
		require.NoError(t, first.Release())
		require.Empty(t, m.Keys())
	})
}

// deadWaiters puts n waiters into the queue that will never be heard of again.
func deadWaiters(t *testing.T, l *Locker, key string, n int, window, claim time.Duration) {
	t.Helper()
	for i := range n {
		answers := l.line.store.wait(t.Context(), []lineCall{{
			Lease: Lease{Key: key, Owner: fmt.Sprint("dead/", i), TTL: time.Minute}, n: 1, window: window, claim: claim,
		}})
		require.NoError(t, answers[0].err)
		require.Nil(t, answers[0].grant)
	}
}

// C109: fifty waiters that died together cost the next one no more than one window,
// one claim and the time to a call, whether the lock is released at once or later, or its holder died as well.
func TestLineOfTheDead(t *testing.T) {
	for _, ttl := range []time.Duration{20 * time.Millisecond, 300 * time.Millisecond, 2 * time.Second, 30 * time.Second} {
		for _, after := range []time.Duration{0, 100 * time.Millisecond, time.Second, 3 * time.Second} {
			bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
				l, other := memLocker(t, m), memLocker(t, m, WithTTL(ttl))
				s := &spot{k: &Lock{config: other.config}}
				k := hold(t, l, "k")
				deadWaiters(t, l, "k", 50, s.window(), s.claim())
				got := acquiring(t.Context(), other, "k")
				time.Sleep(after)
				require.NoError(t, k.Release())
				start := time.Now()
				next := granted(t, got, time.Minute)
				require.LessOrEqual(t, time.Since(start), s.window()*4/3+s.claim()+slack)
				require.NoError(t, next.Release())
			})
		}
	}
}

// C111: when the holder dies without a word the first in the queue has the lock at the
// moment its key ends, and the others in turn.
func TestLineAfterDeadHolder(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		require.NoError(t, m.Set("k", "dead/1"))
		m.SetTTL("k", 7*time.Second)
		end := time.Now().Add(7 * time.Second)
		l := memLocker(t, m)
		var waiting []<-chan outcome
		for range 5 {
			waiting = append(waiting, acquiring(t.Context(), l, "k", WithWait(20*time.Second)))
			time.Sleep(time.Millisecond)
		}
		for _, got := range waiting {
			k := granted(t, got, time.Minute)
			require.LessOrEqual(t, time.Since(end), 2*leastCall)
			require.NoError(t, k.Release())
		}
	})
}

// C106: a message that comes late, twice, for nobody, or with numbers that cannot be,
// grants nothing, and makes nobody ask without end.
func TestLineMessagesFromElsewhere(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		k := hold(t, memLocker(t, m), "k")
		l := memLocker(t, m, WithFencing())
		got := acquiring(t.Context(), l, "k")
		time.Sleep(time.Minute)
		l.mu.Lock()
		require.Len(t, l.line.spots, 1)
		var s *spot
		for _, s = range l.line.spots {
		}
		owner, calls := s.k.owner, s.calls
		l.mu.Unlock()
		require.Less(t, calls, 100, "a call each 667 ms")
		for _, text := range []string{
			fmt.Sprint(calls-3, " 1 ", owner), // of a call that is remembered, but older than a hand-over can be
			"", " ", "x", "1", "1 1", "1 1 ", "0 1 " + owner, "-1 1 " + owner, "1 1 " + owner, "5 1 " + owner,
			fmt.Sprint(calls+1000, " 1 ", owner), "99999999999999999999 1 " + owner, fmt.Sprint(calls, " 0 ", owner),
			fmt.Sprint(calls, " -1 ", owner), fmt.Sprint(calls, " 1 somebody/else"),
			"\xff\x00 \xff " + owner,
		} {
			for range 10 {
				l.hear(text)
			}
			time.Sleep(10 * time.Millisecond)
			require.Empty(t, got, "%q", text)
		}
		time.Sleep(time.Minute)
		l.mu.Lock()
		calls = s.calls - calls
		l.mu.Unlock()
		require.Less(t, calls, 100+17)
		require.NoError(t, k.Release())
		next := granted(t, got, time.Second)
		l.hear(fmt.Sprint(calls, " 1 ", owner))
		require.NoError(t, next.Release())
		l.hear(fmt.Sprint(calls, " 1 ", owner))
		time.Sleep(time.Second)
		require.Equal(t, []string{"{k}:fence"}, m.Keys())
	})
}

// TryAcquire never gets the lock at a hand-over, nor takes a place.
func TestLineTryAcquire(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		k, l := hold(t, memLocker(t, m), "k"), memLocker(t, m)
		var waiting []<-chan outcome
		for range 20 {
			waiting = append(waiting, acquiring(t.Context(), l, "k"))
			time.Sleep(time.Millisecond)
		}
		stop := make(chan struct{})
		var wg sync.WaitGroup
		for range 3 {
			other := memLocker(t, m)
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					_, err := other.TryAcquire(t.Context(), "k")
					require.ErrorIs(t, err, ErrNotAcquired)
					time.Sleep(100 * time.Microsecond)
				}
			})
		}
		for i, got := range waiting {
			require.NoError(t, k.Release())
			k = granted(t, got, time.Second)
			time.Sleep(time.Millisecond)
			n, _ := m.ZMembers("{k}:queue")
			require.Len(t, n, 19-i)
		}
		close(stop)
		wg.Wait()
		require.NoError(t, k.Release())
	})
}

// Tokens grow from one hand-over to the next, and are those of the lock that is held.
func TestLineTokensGrow(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		var last fencing.Token
		k := hold(t, memLocker(t, m, WithFencing()), "k")
		var waiting []<-chan outcome
		for i := range 20 {
			opts := []Option{WithFencing(), WithTTL([]time.Duration{50 * time.Millisecond, time.Second, time.Minute}[i%3])}
			if i%2 == 0 {
				opts = append(opts, WithoutRenewal())
			}
			waiting = append(waiting, acquiring(t.Context(), memLocker(t, m), "k", opts...))
			time.Sleep(time.Millisecond)
		}
		for _, got := range waiting {
			require.Greater(t, k.Token(), last)
			last = k.Token()
			counter, err := m.Get("{k}:fence")
			require.NoError(t, err)
			require.Equal(t, counter, fmt.Sprint(last))
			require.NoError(t, k.Release())
			k = granted(t, got, time.Second)
			ctxToken, ok := fencing.FromContext(k.Context())
			require.True(t, ok)
			require.Equal(t, k.Token(), ctxToken)
		}
		require.NoError(t, k.Release())
	})
}
