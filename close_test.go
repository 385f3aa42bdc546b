package holdfast

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/refusal"
)

// Close releases what is held, ends the contexts and the waits; further calls do
// nothing. The bubble proves that no goroutine is left. C017, C101.
func TestClose(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := memLocker(t, m, quiet())
		require.NoError(t, m.Set("taken", "somebody/else"))
		locks := []*Lock{hold(t, l, "a"), hold(t, l, "b"), hold(t, l, "c")}
		var wg sync.WaitGroup
		for range 50 {
			for _, key := range []string{"a", "taken"} {
				wg.Go(func() {
					k, err := l.Acquire(t.Context(), key)
					require.Nil(t, k)
					require.ErrorIs(t, err, ErrClosed)
				})
			}
		}
		time.Sleep(3 * time.Second)
		for range 8 {
			wg.Go(func() { require.NoError(t, l.Close()) })
		}
		start := time.Now()
		wg.Wait()
		require.Less(t, time.Since(start), time.Second)
		for _, k := range locks {
			require.ErrorIs(t, k.Err(), ErrClosed)
			require.NotErrorIs(t, k.Err(), ErrLost)
			require.False(t, m.Exists(k.Key()))
			require.ErrorIs(t, k.Release(), ErrNotHeld)
		}
		require.NoError(t, l.Close())
		n := m.CommandCount()
		_, err := l.Acquire(t.Context(), "x")
		require.ErrorIs(t, err, ErrClosed)
		_, err = l.TryAcquire(t.Context(), "x")
		require.ErrorIs(t, err, ErrClosed)
		require.ErrorIs(t, l.Do(t.Context(), "x", func(context.Context) error { panic("not reached") }), ErrClosed)
		require.ErrorIs(t, locks[0].Extend(t.Context(), time.Minute), ErrNotHeld)
		require.Equal(t, n, m.CommandCount())
	})
}

// C098: Close is bounded when the store hangs, however many locks are held.
func TestCloseWhileStoreHangs(t *testing.T) {
	for _, n := range []int{1, 16, 100} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &fakeStore{}
				g := s.newGate()
				s.release = func(context.Context, Lease) error { g.wait(); return errors.New("down") }
				l := fakeLocker(t, s)
				locks := make([]*Lock, n)
				for i := range locks {
					locks[i] = hold(t, l, fmt.Sprint(i))
				}
				start := time.Now()
				err := l.Close()
				took := time.Since(start)
				g.open()
				require.ErrorIs(t, err, ErrUnavailable)
				require.LessOrEqual(t, took, 5*time.Second+10*time.Millisecond)
				for _, k := range locks {
					require.ErrorIs(t, k.Err(), ErrClosed)
				}
			})
		})
	}
}

// Close while an Acquire hangs in the store: the caller is told at once, and what
// the attempt may have taken is settled.
func TestCloseDuringAcquire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		s.acquire = func(_ context.Context, r Request) (Grant, error) {
			g, err := s.server.Acquire(r)
			time.Sleep(time.Second)
			return g, err
		}
		l := fakeLocker(t, s)
		failed := make(chan error)
		go func() {
			_, err := l.Acquire(t.Context(), "k")
			failed <- err
		}()
		time.Sleep(500 * time.Millisecond)
		start := time.Now()
		go func() { _ = l.Close() }()
		require.ErrorIs(t, <-failed, ErrClosed)
		require.Zero(t, time.Since(start))
		require.NoError(t, l.Close())
		require.LessOrEqual(t, time.Since(start), 5*time.Second)
		require.Zero(t, s.server.left("k"))
		time.Sleep(3 * time.Second)
		require.Zero(t, s.server.left("k"))
	})
}

// Close waits for a settlement under way. C017.
func TestCloseSettles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		bad := true
		s.acquire = func(_ context.Context, r Request) (Grant, error) {
			_, _ = s.server.Acquire(r)
			return Grant{}, errors.New("broken pipe")
		}
		s.release = func(_ context.Context, l Lease) error {
			if bad {
				bad = false
				return errors.New("broken pipe")
			}
			return s.server.Release(l)
		}
		l := fakeLocker(t, s)
		_, err := l.TryAcquire(t.Context(), "k")
		require.ErrorIs(t, err, ErrUnavailable)
		synctest.Wait()
		require.Positive(t, s.server.left("k"))
		require.NoError(t, l.Close())
		require.Zero(t, s.server.left("k"))
	})
}

// The error of a release is Close's, and such a lock can be released later.
func TestCloseError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		boom := refusal.Final(errors.New("MISCONF"))
		s.release = func(context.Context, Lease) error { return boom }
		l := fakeLocker(t, s)
		k := hold(t, l, "k")
		err := l.Close()
		require.ErrorIs(t, err, ErrUnavailable)
		require.ErrorContains(t, err, "MISCONF")
		require.Equal(t, err, l.Close())
		s.change(func() { s.release = nil })
		require.NoError(t, k.Release())
		require.Zero(t, s.server.left("k"))
	})
}

// What the background could not settle by the end of Close is given up: nothing is
// sent long after it.
func TestCloseEndsSettling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		s.acquire = func(context.Context, Request) (Grant, error) { return Grant{}, errors.New("EOF") }
		s.release = func(context.Context, Lease) error {
			time.Sleep(3 * time.Second)
			return errors.New("i/o timeout")
		}
		l := fakeLocker(t, s, WithTTL(10*time.Minute))
		for i := range 200 {
			_, err := l.TryAcquire(t.Context(), fmt.Sprint(i))
			require.ErrorIs(t, err, ErrUnavailable)
		}
		require.NoError(t, l.Close())
		time.Sleep(10 * time.Second)
		n := s.count("release")
		require.Positive(t, n)
		time.Sleep(time.Hour)
		require.Equal(t, n, s.count("release"))
		idleSoon(t, l)
	})
}

// An observer that ends its goroutine (a test's FailNow does) keeps Close from
// releasing nothing.
func TestCloseDespiteGoexit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s, WithObserver(Observer{Released: func(string, time.Duration) { runtime.Goexit() }}))
		for i := range 40 {
			hold(t, l, fmt.Sprint(i))
		}
		require.Error(t, l.Close(), "it does not know what came of the releases")
		for i := range 40 {
			require.Zero(t, s.server.left(fmt.Sprint(i)))
		}
	})
}
