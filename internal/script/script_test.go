package script

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const text = "return {KEYS[1], ARGV[1]}"

// recorder notes the names of the commands that a client sends.
type recorder struct {
	mu    sync.Mutex
	names []string
	fail  func(cmd redis.Cmder) error // not nil: the answer
}

func (r *recorder) DialHook(next redis.DialHook) redis.DialHook { return next }

func (r *recorder) note(cmd redis.Cmder) {
	if cmd.Name() == "hello" {
		return // a new connection
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.names = append(r.names, cmd.Name())
}

func (r *recorder) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		r.note(cmd)
		if r.fail != nil {
			if err := r.fail(cmd); err != nil {
				cmd.SetErr(err)
				return err
			}
		}
		return next(ctx, cmd)
	}
}

func (r *recorder) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			r.note(cmd)
		}
		return next(ctx, cmds)
	}
}

// take returns the names, and forgets them.
func (r *recorder) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	names := r.names
	r.names = nil
	return names
}

func newClient(t *testing.T) (*redis.Client, *recorder) {
	m := miniredis.NewMiniRedis()
	t.Cleanup(m.Close)
	c := redis.NewClient(&redis.Options{
		Dialer:          func(context.Context, string, string) (net.Conn, error) { return m.Dial() },
		DisableIdentity: true, MaxRetries: -1,
	})
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.Ping(t.Context()).Err())
	r := &recorder{}
	c.AddHook(r)
	return c, r
}

func requireAnswer(t *testing.T, cmd *redis.Cmd) {
	t.Helper()
	got, err := cmd.StringSlice()
	require.NoError(t, err)
	require.Equal(t, []string{"k", "v"}, got)
}

func TestRunLoadsWhatTheServerDoesNotKnow(t *testing.T) {
	c, r := newClient(t)
	s := New(text)
	requireAnswer(t, s.Run(t.Context(), c, []string{"k"}, "v"))
	require.Equal(t, []string{"evalsha", "eval"}, r.take())
	requireAnswer(t, s.Run(t.Context(), c, []string{"k"}, "v"))
	require.Equal(t, []string{"evalsha"}, r.take())
	require.NoError(t, c.ScriptFlush(t.Context()).Err())
	r.take()
	requireAnswer(t, s.Run(t.Context(), c, []string{"k"}, "v"))
	require.Equal(t, []string{"evalsha", "eval"}, r.take())
}

func TestDigestIsTheServers(t *testing.T) {
	c, _ := newClient(t)
	sha, err := c.ScriptLoad(t.Context(), text).Result()
	require.NoError(t, err)
	require.Equal(t, sha, New(text).sha)
}

func TestLoadSendsTheText(t *testing.T) {
	c, r := newClient(t)
	s := New(text)
	requireAnswer(t, s.ByText(t.Context(), c, []string{"k"}, "v"))
	requireAnswer(t, s.ByDigest(t.Context(), c, []string{"k"}, "v"))
	require.Equal(t, []string{"eval", "evalsha"}, r.take())
}

func TestQueueInPipeline(t *testing.T) {
	c, r := newClient(t)
	s := New(text)
	p := c.Pipeline()
	cmd := s.ByDigest(t.Context(), p, []string{"k"}, "v")
	_, err := p.Exec(t.Context())
	require.True(t, Missing(err))
	require.True(t, Missing(cmd.Err()))
	require.Equal(t, []string{"evalsha"}, r.take(), "it is the caller who repeats")

	s.ByText(t.Context(), p, []string{"k"}, "v")
	cmd = s.ByDigest(t.Context(), p, []string{"k"}, "v")
	_, err = p.Exec(t.Context())
	require.NoError(t, err)
	requireAnswer(t, cmd)
}

// Without a digest, as where SHA-1 may not be computed, the text is sent.
func TestWithoutDigest(t *testing.T) {
	c, r := newClient(t)
	s := &Script{text: text}
	requireAnswer(t, s.Run(t.Context(), c, []string{"k"}, "v"))
	requireAnswer(t, s.ByDigest(t.Context(), c, []string{"k"}, "v"))
	require.Equal(t, []string{"eval", "eval"}, r.take())
}

func TestRunFindsMissingInsideAHooksError(t *testing.T) {
	c, r := newClient(t)
	r.fail = func(cmd redis.Cmder) error {
		if cmd.Name() == "evalsha" {
			return fmt.Errorf("hook: %w", errors.New("NOSCRIPT No matching script. Please use EVAL."))
		}
		return nil
	}
	requireAnswer(t, New(text).Run(t.Context(), c, []string{"k"}, "v"))
	require.Equal(t, []string{"evalsha", "eval"}, r.take())
}

func TestOtherErrorsAreNotRepeated(t *testing.T) {
	c, r := newClient(t)
	refusal := errors.New("LOADING Redis is loading the dataset in memory")
	r.fail = func(redis.Cmder) error { return refusal }
	require.ErrorIs(t, New(text).Run(t.Context(), c, []string{"k"}, "v").Err(), refusal)
	require.Equal(t, []string{"evalsha"}, r.take())
}

func TestMissing(t *testing.T) {
	require.False(t, Missing(nil))
	require.False(t, Missing(redis.Nil))
	require.False(t, Missing(errors.New("ERR unknown command")))
	require.True(t, Missing(errors.New("NOSCRIPT No matching script. Please use EVAL.")))
	require.True(t, Missing(fmt.Errorf("a hook: %w", errors.New("NOSCRIPT No matching script."))))
	require.True(t, Missing(errors.New("trace 7: NOSCRIPT No matching script.")))
}
