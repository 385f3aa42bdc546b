package once_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing/once"
	"github.com/holdfast-go/holdfast/fencing/once/oncetest"
	"github.com/holdfast-go/holdfast/internal/leaktest"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

func TestMain(m *testing.M) {
	redistest.RunChild(map[string]func(){"work": work})
	leaktest.Main(m)
}

func newStore(t *testing.T, s *redistest.Server, opts ...once.RedisOption) *once.RedisStore {
	t.Helper()
	store, err := once.NewRedis(s.Client(), opts...)
	require.NoError(t, err)
	return store
}

func newRunner(t *testing.T, store once.Store, opts ...once.Option) *once.Runner {
	t.Helper()
	r, err := once.New(store, opts...)
	require.NoError(t, err)
	return r
}

func gives(result string, err error) func(context.Context) ([]byte, error) {
	return func(context.Context) ([]byte, error) { return []byte(result), err }
}

func TestRedisStore(t *testing.T) {
	s := redistest.Start(t)
	oncetest.Run(t, newStore(t, s))
	require.NoError(t, s.Admin().ScriptFlush(t.Context()).Err())
	oncetest.Run(t, newStore(t, s, once.WithPrefix("{x}:")))
}

func TestKeep(t *testing.T) {
	s, ctx := redistest.Start(t), t.Context()
	for keep, most := range map[time.Duration]time.Duration{0: -1, time.Hour: time.Hour} {
		r := newRunner(t, newStore(t, s, once.WithKeep(keep), once.WithPrefix(keep.String())))
		_, err := r.Run(ctx, "done", gives("x", nil))
		require.NoError(t, err)
		_, err = r.Run(ctx, "open", gives("", errors.New("reset")))
		require.ErrorIs(t, err, once.ErrUnknown)
		ttl := s.Admin().PTTL(ctx, keep.String()+"done").Val()
		require.LessOrEqual(t, ttl, most)
		require.Equal(t, keep == 0, ttl < 0)
		require.Negative(t, s.Admin().PTTL(ctx, keep.String()+"open").Val(), "for ever")
	}
	_, err := once.NewRedis(s.Client(), once.WithKeep(time.Microsecond))
	require.Error(t, err)
	_, err = once.NewRedis(nil)
	require.Error(t, err)
	_, err = once.New(nil)
	require.Error(t, err)
}

func TestRun(t *testing.T) {
	s, ctx := redistest.Start(t), t.Context()
	r := newRunner(t, newStore(t, s))
	never := func(context.Context) ([]byte, error) { t.Error("called"); return nil, nil }

	got, err := r.Run(ctx, "a", gives("first", nil))
	require.NoError(t, err)
	require.Equal(t, "first", string(got))
	got, err = r.Run(ctx, "a", never)
	require.NoError(t, err)
	require.Equal(t, "first", string(got))

	refused, reset := errors.New("refused"), errors.New("reset")
	_, err = r.Run(ctx, "b", gives("", once.NotDone(refused)))
	require.ErrorIs(t, err, once.ErrNotDone)
	require.ErrorIs(t, err, refused)
	_, err = r.Run(ctx, "b", gives("", reset))
	require.ErrorIs(t, err, once.ErrUnknown)
	require.ErrorIs(t, err, reset)
	_, err = r.Run(ctx, "b", never)
	var unknown *once.UnknownError
	require.ErrorAs(t, err, &unknown)
	require.Equal(t, "reset", unknown.Reason)
	require.False(t, unknown.Since.IsZero())
	require.NoError(t, r.Resolve(ctx, "b", []byte("found")))
	got, err = r.Run(ctx, "b", never)
	require.NoError(t, err)
	require.Equal(t, "found", string(got))
	require.Error(t, r.Resolve(ctx, "b", []byte("other")))
	require.NoError(t, r.Forget(ctx, "b"))
	_, err = r.Run(ctx, "b", gives("again", nil))
	require.NoError(t, err)

	got, err = r.Run(ctx, "long", gives(strings.Repeat("x", once.MaxResult+1), nil))
	require.ErrorIs(t, err, once.ErrNotRemembered)
	require.Len(t, got, once.MaxResult+1)
	_, err = r.Run(ctx, "long", never)
	require.ErrorIs(t, err, once.ErrUnknown)

	for _, id := range []string{"", "a\x00", "\xff", strings.Repeat("x", once.MaxID+1)} {
		_, err = r.Run(ctx, id, never)
		require.Error(t, err, "%q", id)
	}
	_, err = r.Run(ctx, "nil", nil)
	require.Error(t, err)
	ended, cancel := context.WithCancel(ctx)
	cancel()
	_, err = r.Run(ended, "ended", never)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, once.ErrNotDone)
}

// Many that come at once: one works, and all that come later get its result.
func TestRunAtOnce(t *testing.T) {
	s, ctx := redistest.Start(t), t.Context()
	r := newRunner(t, newStore(t, s))
	var calls atomic.Int32
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() { // ends with its Run
			_, err := r.Run(ctx, "a", func(context.Context) ([]byte, error) {
				calls.Add(1)
				return []byte("x"), nil
			})
			if err != nil && !errors.Is(err, once.ErrInProgress) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 1, calls.Load())
}

// A function that panics, or ends its goroutine, leaves an unknown outcome.
func TestRunDoesNotReturn(t *testing.T) {
	s, ctx := redistest.Start(t), t.Context()
	r := newRunner(t, newStore(t, s))
	require.PanicsWithValue(t, "mine", func() {
		_, _ = r.Run(ctx, "panic", func(context.Context) ([]byte, error) { panic("mine") })
	})
	done := make(chan struct{})
	go func() { // ends itself
		defer close(done)
		_, _ = r.Run(ctx, "exit", func(context.Context) ([]byte, error) { runtime.Goexit(); return nil, nil })
	}()
	<-done
	for _, id := range []string{"panic", "exit"} {
		_, err := r.Run(ctx, id, gives("x", nil))
		require.ErrorIs(t, err, once.ErrUnknown)
	}
}

// What the function has done is remembered though its context has ended; and when the
// store cannot be told, the caller has the result and knows that others do not.
func TestRunWithoutStore(t *testing.T) {
	s := redistest.Start(t)
	r := newRunner(t, newStore(t, s), once.WithGrace(200*time.Millisecond))
	ctx, cancel := context.WithCancel(t.Context())
	_, err := r.Run(ctx, "a", func(context.Context) ([]byte, error) { cancel(); return []byte("x"), nil })
	require.NoError(t, err)
	got, err := r.Run(t.Context(), "a", nil2)
	require.NoError(t, err)
	require.Equal(t, "x", string(got))

	got, err = r.Run(t.Context(), "b", func(context.Context) ([]byte, error) { s.Kill(); return []byte("y"), nil })
	require.ErrorIs(t, err, once.ErrNotRemembered)
	require.Equal(t, "y", string(got))
	_, err = r.Run(t.Context(), "c", nil2)
	require.ErrorIs(t, err, once.ErrNotDone, "the store is down: it was not called")
}

func nil2(context.Context) ([]byte, error) { panic("called") }

// work claims an id and says so, and then does not end.
func work() {
	client := redis.NewClient(&redis.Options{Addr: os.Getenv("ADDR")})
	store, err := once.NewRedis(client)
	if err != nil {
		panic(err)
	}
	r, err := once.New(store)
	if err != nil {
		panic(err)
	}
	_, err = r.Run(context.Background(), "a", func(context.Context) ([]byte, error) {
		fmt.Println("begun")
		select {}
	})
	panic(err)
}

// A process that dies at work leaves a claim that does not end by itself.
func TestKilledAtWork(t *testing.T) {
	s := redistest.Start(t)
	child := redistest.Child(t, "work", "ADDR="+s.Addr())
	require.Equal(t, "begun", child.ReadLine(20*time.Second))
	child.Kill()
	r := newRunner(t, newStore(t, s))
	_, err := r.Run(t.Context(), "a", nil2)
	require.ErrorIs(t, err, once.ErrInProgress)
	require.NoError(t, r.Forget(t.Context(), "a"))
	_, err = r.Run(t.Context(), "a", gives("x", nil))
	require.NoError(t, err)
}

// C129: the rights that the README names are enough.
func TestRights(t *testing.T) {
	s, ctx := redistest.Start(t), t.Context()
	require.NoError(t, s.Admin().Do(ctx, "ACL", "SETUSER", "app", "reset", "on", ">x", "~once:*",
		"+eval", "+evalsha", "+hmget", "+hset", "+pexpire", "+time", "+del").Err())
	store, err := once.NewRedis(s.Client(func(o *redis.Options) { o.Username, o.Password = "app", "x" }))
	require.NoError(t, err)
	oncetest.Run(t, store)
	require.NoError(t, s.Admin().Do(ctx, "ACL", "SETUSER", "app", "-evalsha", "-eval").Err())
	_, err = newRunner(t, store).Run(ctx, "a", nil2)
	require.ErrorContains(t, err, "NOPERM")
	require.ErrorIs(t, err, once.ErrNotDone)
}
