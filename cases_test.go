package holdfast

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/leaktest"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// C011, C061: whatever comes of it, Release leaves no goroutine behind, and a
// Locker that is not used has none.
func TestNoGoroutineIsLeft(t *testing.T) {
	leaktest.Check(t)
	s := redistest.Start(t)
	p := faultproxy.New(t, s.Addr())
	c := redis.NewClient(&redis.Options{Addr: p.Addr(), MaxRetries: -1})
	defer func() { _ = c.Close() }()
	l := newTestLocker(t, c, WithTTL(5*time.Second))
	warm(t, l)
	for i := range 200 {
		key := fmt.Sprint("k", i)
		k, err := l.Acquire(t.Context(), key)
		require.NoError(t, err)
		switch i % 4 {
		case 1:
			s.Admin().Del(t.Context(), key)
		case 2:
			s.Admin().Set(t.Context(), key, "x/1", time.Second)
		case 3:
			p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.Cut()})
		}
		err = k.Release()
		if i%4 == 1 || i%4 == 2 {
			require.ErrorIs(t, err, ErrLost)
		} else if err != nil {
			require.ErrorIs(t, err, ErrUnavailable)
		}
	}
	redistest.Eventually(t, 5*time.Second, "the Locker is idle", func() bool {
		return l.group.Running() == 0
	})
}

// childJob runs jobs longer than the TTL under a lock, and says if another ran.
func childJob() {
	c := redis.NewClient(&redis.Options{Addr: os.Getenv("ADDR")})
	l, err := New(c, WithTTL(200*time.Millisecond))
	check(err)
	for range 5 {
		check(l.Do(context.Background(), "job", func(ctx context.Context) error {
			f, err := os.OpenFile(os.Getenv("FILE"), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
			if err != nil {
				return fmt.Errorf("another job runs: %w", err)
			}
			time.Sleep(500 * time.Millisecond)
			return errors.Join(f.Close(), os.Remove(f.Name()), ctx.Err())
		}))
	}
	fmt.Println("done")
}

// C069: Do keeps the lock for the whole callback, in three processes at once.
func TestJobsDoNotOverlap(t *testing.T) {
	s := redistest.Start(t)
	file := "FILE=" + t.TempDir() + "/running"
	var children []*redistest.Process
	for range 3 {
		children = append(children, redistest.Child(t, "job", "ADDR="+s.Addr(), file))
	}
	for _, p := range children {
		require.Equal(t, "done", p.ReadLine(time.Minute))
	}
}

// C095: waiting is idle: few commands, and hardly any processor time.
func TestWaitingIsIdle(t *testing.T) {
	s := redistest.Start(t)
	require.NoError(t, s.Admin().Set(t.Context(), "k", "x/1", time.Minute).Err())
	l := newTestLocker(t, s.Client())
	s.ResetStats()
	before := processorTime(t)
	_, err := l.Acquire(t.Context(), "k", WithWait(2*time.Second))
	require.ErrorIs(t, err, ErrNotAcquired)
	require.Less(t, processorTime(t)-before, time.Second, "half of one processor, on a busy machine")
	stats := s.CommandStats()
	require.Less(t, stats["set"]+stats["evalsha"]+stats["eval"], int64(40))
}

func processorTime(t *testing.T) time.Duration {
	var u syscall.Rusage
	require.NoError(t, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// C113, C151: a fence counter that is gone, or is no counter, is an answer, never a
// wrong token and never a lock without one.
func TestFenceCounterGone(t *testing.T) {
	s := redistest.Start(t)
	a := s.Admin()
	l := newTestLocker(t, s.Client(), WithFencing())
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	require.NoError(t, a.Del(t.Context(), "{k}:fence").Err())
	require.NoError(t, k.Extend(t.Context(), time.Minute))
	require.NoError(t, k.Release())
	for _, set := range []func(){
		func() { a.HSet(t.Context(), "{k}:fence", "f", "v") },
		func() { a.Set(t.Context(), "{k}:fence", "words", 0) },
		func() { a.Set(t.Context(), "{k}:fence", "9223372036854775807", 0) },
	} {
		a.Del(t.Context(), "{k}:fence")
		set()
		_, err = l.Acquire(t.Context(), "k")
		require.ErrorIs(t, err, ErrUnavailable)
		require.Zero(t, a.Exists(t.Context(), "k").Val(), "nothing was taken")
	}
	// The counter is gone when the repeated try of an owner asks for its token.
	store := l.store.Store
	a.Del(t.Context(), "{k}:fence")
	r := Request{Lease: Lease{Key: "k", Owner: "x/1", TTL: time.Minute}, Fencing: true}
	_, err = store.Acquire(t.Context(), r)
	require.NoError(t, err)
	again, err := store.Acquire(t.Context(), r)
	require.NoError(t, err)
	require.EqualValues(t, 1, again.Token)
	require.InDelta(t, time.Minute, again.Left, float64(time.Second))
	a.Del(t.Context(), "{k}:fence")
	_, err = store.Acquire(t.Context(), r)
	require.ErrorContains(t, err, "counter is gone")
}

// C135: when the wall clock has moved by itself everything is renewed at once, and
// nothing is declared lost for it.
func TestWallClockJumps(t *testing.T) {
	for _, jump := range []time.Duration{time.Hour, -time.Hour} {
		bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
			l := memLocker(t, m, WithTTL(30*time.Second))
			k, err := l.Acquire(t.Context(), "k")
			require.NoError(t, err)
			time.Sleep(5 * time.Second)
			before := k.ValidUntil()
			l.mu.Lock()
			l.watch.wallSkew -= jump
			l.mu.Unlock()
			time.Sleep(2 * tick)
			require.NoError(t, k.Err())
			require.GreaterOrEqual(t, k.ValidUntil().Sub(before), 5*time.Second, "renewed now")
			require.NoError(t, k.Release())
		})
	}
}

// A wait without end does not hide that the server is gone behind an old refusal.
func TestUnlimitedWait(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := memLocker(t, m)
		k, err := l.Acquire(t.Context(), "k")
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		time.AfterFunc(time.Second, func() { m.SetError("LOADING for a while") })
		_, err = l.Acquire(ctx, "k", WithWait(Unlimited))
		m.SetError("")
		require.ErrorIs(t, err, ErrUnavailable)
		require.NotErrorIs(t, err, ErrNotAcquired)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NoError(t, k.Release())
	})
}

// A wrapped client cannot be asked for its servers, and WithReplicas says so
// before anything is sent.
func TestReplicasOfUnknownClient(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, struct{ redis.UniversalClient }{s.Client()})
	s.ResetStats()
	_, err := l.Acquire(t.Context(), "k", WithReplicas(1, time.Second))
	require.ErrorIs(t, err, ErrInvalid)
	stats := s.CommandStats()
	require.Zero(t, stats["eval"]+stats["evalsha"]+stats["set"])
}
