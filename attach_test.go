package holdfast

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// C151: a lock changes hands with its token, and never are there two who believe to have it: who
// leaves it knows before anything is sent, and of many who attach one gets it.
func TestAttach(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l, other := memLocker(t, m, WithFencing()), memLocker(t, m, WithHolder("other"), WithFencing())
		k := hold(t, l, "k")
		_, err := other.Attach(t.Context(), "k", k.Owner())
		require.ErrorIs(t, err, ErrNotAcquired, "it was not left")
		require.NoError(t, k.Err())
		require.NoError(t, k.Detach())
		require.ErrorIs(t, k.Err(), ErrReleased)
		require.ErrorIs(t, k.Detach(), ErrNotHeld)
		require.ErrorIs(t, k.Release(), ErrNotHeld)
		_, err = other.TryAcquire(t.Context(), "k")
		require.ErrorIs(t, err, ErrNotAcquired, "nobody else gets it meanwhile")
		time.Sleep(defaultTTL - time.Second)

		var mu sync.Mutex
		var wg sync.WaitGroup
		var got []*Lock
		for range 8 {
			wg.Go(func() { // ends with its answer
				k, err := other.Attach(t.Context(), "k", k.Owner())
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					got = append(got, k)
				} else if !errors.Is(err, ErrNotAcquired) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		require.Len(t, got, 1)
		require.Equal(t, k.Token(), got[0].Token())
		require.NotEqual(t, k.Owner(), got[0].Owner())
		time.Sleep(5 * defaultTTL)
		require.NoError(t, got[0].Err(), "it is renewed")
		_, err = other.Attach(t.Context(), "k", k.Owner())
		require.ErrorIs(t, err, ErrNotAcquired)
		require.NoError(t, got[0].Detach()) // and on
		last, err := l.Attach(t.Context(), "k", got[0].Owner())
		require.NoError(t, err)
		require.NoError(t, last.Release())
		require.Equal(t, []string{"{k}:fence"}, m.Keys())
	})
}

// A lock that nobody attaches to ends with its TTL, and goes to who waits.
func TestDetachedEnds(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := memLocker(t, m, WithTTL(5*time.Second))
		k := hold(t, l, "k")
		require.NoError(t, k.Detach())
		start := time.Now()
		next := hold(t, memLocker(t, m), "k")
		require.InDelta(t, 5*time.Second, time.Since(start), float64(time.Second))
		_, err := l.Attach(t.Context(), "k", k.Owner())
		require.ErrorIs(t, err, ErrNotAcquired)
		require.NoError(t, next.Release())
		_, err = l.Attach(t.Context(), "k", k.Owner())
		require.ErrorIs(t, err, ErrNotAcquired, "gone")
		require.Empty(t, m.Keys())

		k = hold(t, l, "lost")
		m.Del("lost")
		require.ErrorIs(t, k.Detach(), ErrLost)
	})
}

func TestAttachArguments(t *testing.T) {
	require.ErrorIs(t, (*Lock)(nil).Detach(), ErrNotHeld)
	require.ErrorIs(t, new(Lock).Detach(), ErrNotHeld)
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := memLocker(t, m, Reentrant())
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for _, f := range []func() error{
			func() error { _, err := l.Attach(t.Context(), "", "o"); return err },
			func() error { _, err := l.Attach(t.Context(), "k", ""); return err },
			func() error { _, err := l.Attach(t.Context(), "k", "o", WithFencing(&counting{})); return err },
			func() error { _, err := l.Attach(t.Context(), "k", "o", WithReplicas(1, time.Second)); return err },
		} {
			require.ErrorIs(t, f(), ErrInvalid)
		}
		_, err := l.Attach(ended, "k", "o")
		require.ErrorIs(t, err, context.Canceled)
		k := hold(t, l, "k")
		inner, err := l.Acquire(k.Context(), "k")
		require.NoError(t, err)
		require.ErrorIs(t, k.Detach(), ErrInvalid)
		require.ErrorIs(t, inner.Detach(), ErrInvalid)
		require.NoError(t, k.Err())
		require.NoError(t, inner.Release())
		require.NoError(t, k.Detach())
		m.Del("{k}:fence")
		_, err = l.Attach(t.Context(), "k", k.Owner(), WithFencing())
		require.ErrorIs(t, err, ErrUnavailable, "its token is not known")
		require.NoError(t, l.Close())
		_, err = l.Attach(t.Context(), "k", k.Owner())
		require.ErrorIs(t, err, ErrClosed)
	})
	synctest.Test(t, func(t *testing.T) {
		l := fakeLocker(t, &fakeStore{})
		require.ErrorIs(t, hold(t, l, "k").Detach(), ErrInvalid)
		_, err := l.Attach(t.Context(), "k", "o")
		require.ErrorIs(t, err, ErrInvalid)
	})
}

// Lost answers change nothing: both calls may be sent again.
func TestAttachLostReplies(t *testing.T) {
	s := redistest.Start(t)
	p := faultproxy.New(t, s.Addr())
	c := s.Client(func(o *redis.Options) { o.Addr = p.Addr() })
	l := newTestLocker(t, c)
	for range 3 {
		k := hold(t, l, "k")
		for _, call := range []func() error{
			k.Detach,
			func() (err error) { k, err = l.Attach(t.Context(), "k", k.Owner()); return err },
		} {
			h := p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.DropReplyAndClose()})
			require.NoError(t, call())
			require.NoError(t, h.WaitTimeout(5*time.Second))
		}
		require.NoError(t, k.Release())
	}
	require.Zero(t, s.Admin().Exists(t.Context(), "k").Val())
}
