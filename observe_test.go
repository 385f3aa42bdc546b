package holdfast

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// events is an Observer that writes down what it is told.
type events struct {
	mu   sync.Mutex
	list []string
}

func (e *events) add(format string, args ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = append(e.list, fmt.Sprintf(format, args...))
}

// take returns what was told since it was last called.
func (e *events) take() []string {
	synctest.Wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	list := e.list
	e.list = nil
	return list
}

func (e *events) observer() Observer {
	return Observer{
		Acquired:      func(key string, wait time.Duration, n int) { e.add("acquired %s %v %d", key, wait, n) },
		Refused:       func(key string, err error) { e.add("refused %s %v", key, errors.Is(err, ErrNotAcquired)) },
		Renewed:       func(key string) { e.add("renewed %s", key) },
		RenewalFailed: func(key string, err error) { e.add("failed %s %v", key, err) },
		Lost: func(key string, err error) {
			var lost *LostError
			e.add("lost %s %v", key, errors.As(err, &lost))
		},
		Released: func(key string, d time.Duration) { e.add("released %s %v", key, d) },
	}
}

// Every event is told, once.
func TestObserver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var e events
		var log bytes.Buffer
		s := &fakeStore{}
		l := fakeLocker(t, s, WithTTL(3*time.Second), WithObserver(e.observer()),
			WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		k := hold(t, l, "k")
		require.Equal(t, []string{"acquired k 0s 1"}, e.take())
		_, err := l.TryAcquire(t.Context(), "k")
		require.ErrorIs(t, err, ErrNotAcquired)
		require.Equal(t, []string{"refused k true"}, e.take())
		time.Sleep(1500 * time.Millisecond)
		require.Equal(t, []string{"renewed k"}, e.take())
		s.change(func() { s.renew = func(_ context.Context, ls []Lease) []error { return each(ls, errors.New("BUSY")) } })
		time.Sleep(550 * time.Millisecond)
		require.Equal(t, []string{"failed k BUSY"}, e.take())
		s.change(func() { s.renew = nil })
		time.Sleep(150 * time.Millisecond)
		require.Equal(t, []string{"renewed k"}, e.take())
		require.NoError(t, k.Release())
		require.Equal(t, []string{"released k 2.2s"}, e.take())
		require.Empty(t, log.String())

		k = hold(t, l, "k")
		e.take()
		s.server.set("k", "", 0)
		ends(k)
		require.Equal(t, []string{"lost k true"}, e.take())
		require.Equal(t, 1, bytes.Count(log.Bytes(), []byte("level=WARN")))
		require.Contains(t, log.String(), k.Owner())
		require.ErrorIs(t, k.Release(), ErrLost)
		require.NotContains(t, e.take(), "lost k true", "one loss is told once")

		// A loss that only Release finds.
		k = hold(t, l, "k")
		e.take()
		log.Reset()
		s.server.set("k", "", 0)
		require.ErrorIs(t, k.Release(), ErrLost)
		require.Contains(t, e.take(), "lost k true")
		require.Equal(t, 1, bytes.Count(log.Bytes(), []byte("level=WARN")))
	})
}

// Refused tells of every Acquire that ended without the lock.
func TestObserverRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var e events
		s := &fakeStore{}
		l := fakeLocker(t, s, WithObserver(e.observer()))
		k := hold(t, l, "k")
		e.take()
		_, err := l.Acquire(t.Context(), "k", WithWait(time.Second))
		require.ErrorIs(t, err, ErrNotAcquired)
		require.Equal(t, []string{"refused k true"}, e.take())
		_, err = l.Acquire(k.Context(), "k")
		require.ErrorIs(t, err, ErrDeadlock)
		require.Equal(t, []string{"refused k false"}, e.take())
		s.change(func() {
			s.acquire = func(context.Context, Request) (Grant, error) { return Grant{}, errors.New("down") }
		})
		_, err = l.TryAcquire(t.Context(), "other")
		require.ErrorIs(t, err, ErrUnavailable)
		require.Equal(t, []string{"refused other false"}, e.take())
	})
}

// An observer that blocks delays neither renewals nor the loss.
func TestObserverBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		g := s.newGate()
		l := fakeLocker(t, s, WithTTL(3*time.Second), WithObserver(Observer{
			Renewed:       func(string) { g.wait() },
			RenewalFailed: func(string, error) { g.wait() },
			Lost:          func(string, error) { g.wait() },
		}))
		a, b := hold(t, l, "a"), hold(t, l, "b")
		time.Sleep(9 * time.Minute)
		require.NoError(t, a.Err())
		s.server.set("a", "", 0)
		start := time.Now()
		require.LessOrEqual(t, ends(a).Sub(start), time.Second)
		s.change(func() { s.renew = func(_ context.Context, ls []Lease) []error { return each(ls, errors.New("down")) } })
		time.Sleep(time.Until(b.ValidUntil()) - 1)
		until := b.ValidUntil()
		require.NoError(t, b.Err())
		require.Equal(t, until, ends(b))
		lostBecause(t, b, LostExpired)
		g.open()
	})
}

// An observer that panics harms nothing. C063.
func TestObserverPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		var log bytes.Buffer
		l := fakeLocker(t, s, WithTTL(3*time.Second), WithLogger(slog.New(slog.NewTextHandler(&log, nil))),
			WithObserver(Observer{
				Acquired:      func(string, time.Duration, int) { panic("boo") },
				Refused:       func(string, error) { panic("boo") },
				Renewed:       func(string) { panic("boo") },
				RenewalFailed: func(string, error) { panic("boo") },
				Lost:          func(string, error) { panic("boo") },
				Released:      func(string, time.Duration) { panic("boo") },
			}))
		k := hold(t, l, "k")
		_, err := l.TryAcquire(t.Context(), "k")
		require.ErrorIs(t, err, ErrNotAcquired)
		time.Sleep(time.Minute)
		require.NoError(t, k.Err())
		require.NoError(t, k.Release())
		k = hold(t, l, "k")
		s.change(func() { s.renew = func(_ context.Context, ls []Lease) []error { return each(ls, errors.New("down")) } })
		until := k.ValidUntil()
		require.Equal(t, until, ends(k))
		synctest.Wait()
		require.Contains(t, log.String(), "observer panicked")
	})
}

// A store that panics is an error, not the end of the process. C063.
func TestStorePanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		s.change(func() { s.renew = func(context.Context, []Lease) []error { panic("boo") } })
		s.extend = func(context.Context, Lease) error { panic("boo") }
		l := fakeLocker(t, s, WithTTL(3*time.Second))
		k := hold(t, l, "k")
		require.ErrorContains(t, k.Extend(t.Context(), time.Minute), "boo")
		ends(k)
		s.change(func() { s.acquire = func(context.Context, Request) (Grant, error) { panic("boo") } })
		s.change(func() { s.release = func(context.Context, Lease) error { panic("boo") } })
		_, err := l.TryAcquire(t.Context(), "x")
		require.ErrorIs(t, err, ErrUnavailable)
		require.ErrorContains(t, err, "boo")
		require.ErrorContains(t, k.Release(), "boo")
		s.change(func() { s.renew = func(context.Context, []Lease) []error { return nil } })
		s.change(func() { s.acquire, s.release = nil, nil })
		k = hold(t, l, "y")
		ends(k)
		require.ErrorContains(t, k.Err(), "wrong number")
	})
}
