package holdfast

import (
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"
)

func TestHoldAndRelease(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := memLocker(t, m, WithTTL(3*time.Second))
		k, err := l.Acquire(t.Context(), "a")
		require.NoError(t, err)
		time.Sleep(5 * time.Minute)
		require.NoError(t, k.Err(), "the watchdog renews")
		_, err = l.TryAcquire(t.Context(), "a")
		require.ErrorIs(t, err, ErrNotAcquired)
		require.NoError(t, k.Release())
		require.False(t, m.Exists("a"))
		require.ErrorIs(t, k.Err(), ErrReleased)
		require.ErrorIs(t, k.Release(), ErrNotHeld)
	})
}
