package holdfast

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/redistest"
)

// childPod is a pod of a StatefulSet that holds a few locks, with long leases.
func childPod() {
	l, err := newPod()
	check(err)
	n, err := l.ReleaseHolder(context.Background(), "pod-0")
	check(err)
	for i := range 3 {
		_, err := l.Acquire(context.Background(), fmt.Sprint("k", i))
		check(err)
	}
	fmt.Println("freed", n)
	select {}
}

// A process with a stable name that was killed frees, when it is back, what it has left, and
// nothing of others; while it lives nobody else does.
func TestReleaseHolder(t *testing.T) {
	s := redistest.Start(t)
	other := newTestLocker(t, s.Client(), WithHolder("pod-10"))
	kept := hold(t, other, "other")
	p := redistest.Child(t, "pod", "ADDR="+s.Addr())
	require.Equal(t, "freed 0", p.ReadLine(10*time.Second))

	_, err := newTestLocker(t, s.Client(), WithHolder("pod-0")).ReleaseHolder(t.Context(), "pod-0")
	require.ErrorIs(t, err, ErrNotAcquired)
	require.ErrorContains(t, err, "in use")
	require.EqualValues(t, 1, s.Admin().Exists(t.Context(), "k0").Val())

	p.Kill()
	start := time.Now()
	p = redistest.Child(t, "pod", "ADDR="+s.Addr())
	require.Equal(t, "freed 3", p.ReadLine(15*time.Second))
	require.Less(t, time.Since(start), time.Minute, "and not after an hour")
	require.NoError(t, kept.Err())

	n, err := other.BreakHolder(t.Context(), "pod-0")
	require.NoError(t, err)
	require.Equal(t, 3, n)
	n, err = other.BreakHolder(t.Context(), "pod-10")
	require.NoError(t, err)
	require.Zero(t, n, "its own")
	require.NoError(t, kept.Err())

	again := newTestLocker(t, s.Client(), WithHolder("job"))
	for range 2 {
		n, err = again.ReleaseHolder(t.Context(), "job")
		require.NoError(t, err)
		require.Zero(t, n)
	}
	for range again.List(t.Context(), "*job*") {
		t.Error("the name is no lock of anybody's")
	}
	require.NoError(t, again.Close())
	require.Zero(t, s.Admin().Exists(t.Context(), holderKey+"job").Val())

	for _, name := range []string{"", "a/b"} {
		_, err = other.ReleaseHolder(t.Context(), name)
		require.ErrorIs(t, err, ErrInvalid)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = other.ReleaseHolder(ended, "x")
	require.ErrorIs(t, err, context.Canceled)
}

func newPod() (*Locker, error) {
	c := redis.NewClient(&redis.Options{Addr: os.Getenv("ADDR")})
	return New(c, WithHolder("pod-0"), WithTTL(time.Hour), WithLogger(slog.New(slog.DiscardHandler)))
}
