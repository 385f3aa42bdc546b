package group

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Group
		start := time.Now()
		g.Wait(time.Second)
		require.Zero(t, time.Since(start), "nothing is under way")
		for i := range 3 {
			g.Start(func() { time.Sleep(time.Duration(i) * time.Second) })
		}
		g.Wait(time.Second + time.Second/2)
		require.Equal(t, time.Second+time.Second/2, time.Since(start), "its limit")
		g.Start(func() {
			time.Sleep(time.Second)
			g.Start(func() { time.Sleep(time.Second) }) // it grows while somebody waits
		})
		done := make(chan time.Duration)
		go func() { // ends with the group
			g.Wait(time.Hour)
			done <- time.Since(start)
		}()
		g.Wait(time.Hour)
		require.Equal(t, 3*time.Second+time.Second/2, time.Since(start))
		require.Equal(t, 3*time.Second+time.Second/2, <-done)
	})
}
