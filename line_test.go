package holdfast

import (
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"
)

// Waiters of several processes get the lock in the order in which they came, each
// the moment it is released.
func TestLineOrder(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		first := hold(t, memLocker(t, m), "k")
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		for i := range 8 {
			l := memLocker(t, m)
			wg.Go(func() {
				k, err := l.Acquire(t.Context(), "k")
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
				time.Sleep(time.Second)
				require.NoError(t, k.Err())
				require.NoError(t, k.Release())
			})
			time.Sleep(5 * time.Millisecond)
		}
		time.Sleep(10 * time.Second)
		start := time.Now()
		require.NoError(t, first.Release())
		wg.Wait()
		require.Equal(t, []int{0, 1, 2, 3, 4, 5, 6, 7}, order)
		require.Less(t, time.Since(start), 8*time.Second+10*time.Millisecond, "no time between holds")
		require.Empty(t, m.Keys())
	})
}
