package holdfast

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// pipeHook is a hook on all commands, by themselves and in batches.
type pipeHook struct {
	before  func(cmds []redis.Cmder) error // its error ends the commands, unsent
	alone   atomic.Int32
	batches atomic.Int32
	batched atomic.Int32
}

func (h *pipeHook) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *pipeHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		h.alone.Add(1)
		if h.before != nil {
			if err := h.before([]redis.Cmder{cmd}); err != nil {
				return err
			}
		}
		return next(ctx, cmd)
	}
}

func (h *pipeHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if cmds[0].Name() == "client" { // go-redis sets up a connection
			return next(ctx, cmds)
		}
		h.batches.Add(1)
		h.batched.Add(int32(len(cmds)))
		if h.before != nil {
			if err := h.before(cmds); err != nil {
				return err
			}
		}
		return next(ctx, cmds)
	}
}

// together runs fn n times at the same time.
func together(n int, fn func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { fn(i) })
	}
	wg.Wait()
}

// cycles has n goroutines take and release keys of their own.
func cycles(t *testing.T, l *Locker, n, times int) {
	t.Helper()
	together(n, func(i int) {
		for range times {
			k, err := l.Acquire(context.Background(), fmt.Sprint("k", i))
			if err != nil {
				t.Error(err)
				return
			}
			if err := k.Release(); err != nil {
				t.Error(err)
				return
			}
		}
	})
}

// Many commands at the same time share writes; one after the other each goes by
// itself, and without any delay. The bubble proves that no goroutine is left.
func TestPipelineByLoad(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		h := &pipeHook{}
		c := memClient(t, m)
		c.AddHook(h)
		l := newTestLocker(t, c)
		start := time.Now()
		cycles(t, l, 1, 20)
		require.Zero(t, h.batches.Load())
		cycles(t, l, 100, 5)
		require.Zero(t, time.Since(start)) // none has waited for a timer
		require.Greater(t, h.batches.Load(), int32(10))
		require.Greater(t, h.batched.Load(), 3*h.batches.Load())
		synctest.Wait()
		before := runtime.NumGoroutine()
		require.NoError(t, l.Close())
		require.LessOrEqual(t, runtime.NumGoroutine(), before)
	})
}

// When the client hangs and heeds no context, calls come back in time all the same,
// what had not been sent never is, and all is well when it goes on.
func TestPipelineHangs(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		h := &pipeHook{}
		c := memClient(t, m)
		c.AddHook(h)
		l := newTestLocker(t, c)
		warm(t, l)
		open := make(chan struct{})
		var hung atomic.Int32
		h.before = func(cmds []redis.Cmder) error { hung.Add(int32(len(cmds))); <-open; return nil }
		start := time.Now()
		together(100, func(i int) {
			// Some give up before they can have been sent.
			limit := time.Millisecond
			if i < 50 {
				limit = time.Second
			}
			_, err := l.Acquire(context.Background(), fmt.Sprint("k", i), WithWait(limit))
			if !errors.Is(err, ErrUnavailable) {
				t.Error(err)
			}
			if took := time.Since(start); took > limit {
				t.Error(took)
			}
		})
		sent := hung.Load()
		require.LessOrEqual(t, sent, int32(50+2*(fewFlights+settleCalls)), "connections say HELLO through the hook, too")
		require.GreaterOrEqual(t, sent, int32(50))
		close(open)
		time.Sleep(20 * time.Second)
		require.Empty(t, m.Keys())
		h.before = nil
		cycles(t, l, 100, 2)
	})
}

// A hook that panics, ends the goroutine or lets nothing through fails the commands
// that it was called for, and the pipeline works on.
func TestPipelineHooks(t *testing.T) {
	errShut := errors.New("shut")
	for name, before := range map[string]func() error{
		"panic": func() error { panic("hook") },
		"exit":  func() error { runtime.Goexit(); return nil },
		"shut":  func() error { return errShut },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
				h := &pipeHook{}
				c := memClient(t, m)
				c.AddHook(h)
				l := newTestLocker(t, c)
				warm(t, l)
				h.before = func([]redis.Cmder) error { return before() }
				together(50, func(i int) {
					_, err := l.TryAcquire(context.Background(), fmt.Sprint("k", i))
					if !errors.Is(err, ErrUnavailable) || name == "shut" && !errors.Is(err, errShut) {
						t.Error(err)
					}
				})
				require.Positive(t, h.batches.Load())
				synctest.Wait()
				h.before = nil
				cycles(t, l, 50, 2)
				require.NoError(t, l.Close())
			})
		})
	}
}

// Shards and wrappers are not piped: one that hangs must not delay the others, and of
// a wrapper nothing is known.
func TestPipelineOnlyForOneServer(t *testing.T) {
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	defer func() { _ = ring.Close() }()
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	defer func() { _ = cluster.Close() }()
	single := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer func() { _ = single.Close() }()
	for _, c := range []redis.UniversalClient{ring, cluster, struct{ *redis.Client }{single}} {
		s, err := newRedisStore(c)
		require.NoError(t, err)
		require.False(t, s.piped(&Request{}), "%T", c)
	}
	s, err := newRedisStore(single)
	require.NoError(t, err)
	require.True(t, s.piped(&Request{}))
	require.False(t, s.piped(&Request{Replicas: 1}))
}
