package holdfast

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
)

// C151: nested Locks of a flow share one grant and its token; the key goes with the last
// Release, in whatever order, and one too many is an error.
func TestReentrant(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		client := memClient(t, m)
		l, other := newTestLocker(t, client, WithFencing()), newTestLocker(t, client)
		for _, order := range [][]int{{2, 1, 0}, {0, 1, 2}, {1, 0, 2}, {0, 2, 1}} {
			root := hold(t, l, "k")
			inner, err := l.Acquire(root.Context(), "k", Reentrant())
			require.NoError(t, err)
			deep, err := other.TryAcquire(context.WithoutCancel(inner.Context()), "k", Reentrant(), WithFencing())
			require.NoError(t, err)
			all := []*Lock{root, inner, deep}
			for _, k := range all {
				require.NoError(t, k.Err())
				require.Equal(t, root.Owner(), k.Owner())
				require.Equal(t, "k", k.Key())
				require.Equal(t, root.Token(), k.Token())
				require.Equal(t, root.ValidUntil(), k.ValidUntil())
				claim, _ := fencing.ClaimFrom(k.Context())
				require.Equal(t, fencing.Claim{Token: root.Token(), Owner: root.Owner()}, claim)
				require.NoError(t, k.Extend(t.Context(), time.Minute))
			}
			for n, i := range order {
				require.True(t, m.Exists("k"))
				require.NoError(t, all[i].Release())
				require.ErrorIs(t, all[i].Release(), ErrNotHeld, "one too many")
				if n < 2 {
					require.NoError(t, all[order[2]].Err(), "the others hold on")
				}
			}
			require.False(t, m.Exists("k"))
			for _, k := range all {
				require.ErrorIs(t, k.Err(), ErrReleased)
				require.ErrorIs(t, k.Release(), ErrNotHeld)
			}
		}
		require.Equal(t, []string{"{k}:fence"}, m.Keys())
	})
}

// A loss ends all of them, and each Release tells it.
func TestReentrantLoss(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := memLocker(t, m, Reentrant())
		root := hold(t, l, "k")
		inner, err := l.Acquire(context.WithoutCancel(root.Context()), "k")
		require.NoError(t, err)
		m.Del("k")
		<-inner.Context().Done()
		for _, k := range []*Lock{inner, root} {
			require.ErrorIs(t, context.Cause(k.Context()), ErrLost)
			require.ErrorIs(t, k.Err(), ErrLost)
			require.ErrorIs(t, k.Extend(t.Context(), time.Minute), ErrLost)
		}
		require.ErrorIs(t, inner.Release(), ErrLost)
		require.ErrorIs(t, root.Release(), ErrLost)
		require.ErrorIs(t, inner.Release(), ErrNotHeld)
		require.Empty(t, m.Keys())
	})
}

// The context that a nested Acquire is given bounds only that Lock; Close ends all.
func TestReentrantContexts(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := memLocker(t, m, Reentrant())
		root := hold(t, l, "k")
		ctx, cancel := context.WithCancelCause(root.Context())
		inner, err := l.Acquire(ctx, "k")
		require.NoError(t, err)
		reason := errors.New("reason")
		cancel(reason)
		<-inner.Context().Done()
		require.ErrorIs(t, inner.Err(), reason)
		require.NoError(t, root.Err())
		require.NoError(t, inner.Release())
		_, err = l.Acquire(inner.Context(), "k")
		require.Error(t, err, "that context has ended")

		inner, err = l.Acquire(root.Context(), "k")
		require.NoError(t, err)
		_, err = l.Acquire(root.Context(), "k", WithFencing())
		require.ErrorIs(t, err, ErrInvalid, "the grant has no token")
		_, err = memLocker(t, m).TryAcquire(root.Context(), "k", Reentrant())
		require.ErrorIs(t, err, ErrNotAcquired, "on another client it is another's lock")
		require.NoError(t, l.Close())
		require.ErrorIs(t, inner.Err(), ErrClosed)
		require.ErrorIs(t, root.Err(), ErrClosed)
		require.Empty(t, m.Keys())
	})
}

// Any number of goroutines of a flow may take and give back at once: the key is there until
// the last has gone.
func TestReentrantAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := memLocker(t, m, Reentrant())
		for range 20 {
			root := hold(t, l, "k")
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() { // ends with its rounds
					for range 20 {
						k, err := l.Acquire(context.WithoutCancel(root.Context()), "k")
						if err != nil {
							t.Error(err)
							return
						}
						if !m.Exists("k") {
							t.Error("the key has gone under a Lock")
						}
						if err := k.Release(); err != nil {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			require.NoError(t, root.Release())
			require.Empty(t, m.Keys())
		}
	})
}
