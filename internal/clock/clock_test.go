package clock

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestNowFollowsRealTime(t *testing.T) {
	i, start := Now(), time.Now()
	require.Positive(t, i)
	for time.Since(start) < 2*time.Millisecond {
	}
	passed := time.Since(start)
	require.GreaterOrEqual(t, Now().Sub(i), passed)
}

func TestNowFollowsVirtualTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		i := Now()
		time.Sleep(time.Hour)
		require.Equal(t, time.Hour, Now().Sub(i))
		require.Equal(t, time.Now().Add(time.Minute), Now().Add(time.Minute).Wall())
	})
}

func BenchmarkNow(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		Now()
	}
}

// Early is not later than Now, and follows it.
func TestEarly(t *testing.T) {
	for range 10000 {
		before := Now()
		early := Early()
		after := Now()
		require.LessOrEqual(t, early, after)
		require.GreaterOrEqual(t, early, before-Instant(time.Millisecond))
	}
	synctest.Test(t, func(t *testing.T) {
		require.Equal(t, Now(), Early())
		time.Sleep(time.Hour)
		require.Equal(t, Now(), Early())
	})
}

func BenchmarkEarly(b *testing.B) {
	for b.Loop() {
		Early()
	}
}
