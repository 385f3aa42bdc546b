package once_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing/once"
	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// proxied returns a real server, a proxy before it, and a Runner through it whose scripts
// the server knows.
func proxied(t *testing.T, retries int) (*redistest.Server, *faultproxy.Proxy, *once.Runner) {
	t.Helper()
	s := redistest.Start(t)
	p := faultproxy.New(t, s.Addr())
	c := redis.NewClient(&redis.Options{Addr: p.Addr(), MaxRetries: retries, ReadTimeout: 300 * time.Millisecond})
	t.Cleanup(func() { _ = c.Close() })
	store, err := once.NewRedis(c)
	require.NoError(t, err)
	r := newRunner(t, store)
	_, err = r.Run(t.Context(), "warm", gives("x", nil))
	require.NoError(t, err)
	_, err = r.Run(t.Context(), "warm2", gives("", once.NotDone(errors.New("refused"))))
	require.ErrorIs(t, err, once.ErrNotDone)
	require.NoError(t, r.Resolve(t.Context(), "warm2", nil))
	p.ResetLog()
	return s, p, r
}

// lose loses the reply to one of the next scripts.
func lose(p *faultproxy.Proxy, skip int, do faultproxy.Action) *faultproxy.Handle {
	return p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Skip: skip, Times: 1, Do: do})
}

// A claim, a result and a claim that is given back whose reply is lost are sent again, by
// the client or by Run, and find themselves.
func TestLostReplies(t *testing.T) {
	for name, do := range map[string]faultproxy.Action{
		"held back": faultproxy.HoldReply(), "closed": faultproxy.DropReplyAndClose(),
	} {
		t.Run(name, func(t *testing.T) {
			_, p, r := proxied(t, 3)
			ctx, calls := t.Context(), 0
			count := func(context.Context) ([]byte, error) { calls++; return []byte("x"), nil }
			for skip, id := range []string{"begin", "end"} {
				h := lose(p, skip, do)
				got, err := r.Run(ctx, id, count)
				require.NoError(t, err)
				require.Equal(t, "x", string(got))
				require.Equal(t, 1, h.Fired())
				got, err = r.Run(ctx, id, count)
				require.NoError(t, err)
				require.Equal(t, "x", string(got))
			}
			require.Equal(t, 2, calls)
			h := lose(p, 1, do)
			_, err := r.Run(ctx, "abandon", gives("", once.NotDone(errors.New("refused"))))
			require.ErrorIs(t, err, once.ErrNotDone)
			require.Equal(t, 1, h.Fired())
			_, err = r.Run(ctx, "abandon", count)
			require.NoError(t, err)
		})
	}
}

// Without retries of the client: a claim whose reply is lost is given back, and a result
// is told again.
func TestLostRepliesWithoutRetries(t *testing.T) {
	s, p, r := proxied(t, -1)
	lose(p, 0, faultproxy.DropReplyAndClose())
	_, err := r.Run(t.Context(), "a", nil2)
	require.ErrorIs(t, err, once.ErrNotDone)
	require.Zero(t, s.Admin().Exists(t.Context(), "once:a").Val())

	lose(p, 1, faultproxy.DropReplyAndClose())
	_, err = r.Run(t.Context(), "a", gives("x", nil))
	require.NoError(t, err)
	got, err := r.Run(t.Context(), "a", nil2)
	require.NoError(t, err)
	require.Equal(t, "x", string(got))
}

// What an operator says is sent once, whatever the client's retries.
func TestOperatorsCallsAreSentOnce(t *testing.T) {
	_, p, r := proxied(t, 3)
	p.Inject(faultproxy.Rule{
		Match: faultproxy.AnyOf("DEL", "EVALSHA"), Times: 2, Do: faultproxy.DropReplyAndClose(),
	})
	require.Error(t, r.Forget(t.Context(), "a"))
	require.Equal(t, 1, p.Count("DEL"))
	require.Error(t, r.Resolve(t.Context(), "a", []byte("x")))
	require.Equal(t, 1, p.CountMatch(faultproxy.Script()))
	require.NoError(t, r.Resolve(t.Context(), "a", []byte("x")))
}

// That nothing has happened must be said by the function itself: that something inside it
// says so, or that it is wrapped, leaves the outcome unknown.
func TestNotDoneInside(t *testing.T) {
	s, ctx := redistest.Start(t), t.Context()
	r := newRunner(t, newStore(t, s))
	_, err := r.Run(ctx, "outer", func(ctx context.Context) ([]byte, error) {
		return r.Run(ctx, "inner", gives("", once.NotDone(errors.New("refused"))))
	})
	require.ErrorIs(t, err, once.ErrUnknown)
	_, err = r.Run(ctx, "outer", nil2)
	require.ErrorIs(t, err, once.ErrUnknown)
	_, err = r.Run(ctx, "inner", gives("x", nil))
	require.NoError(t, err)
	_, err = r.Run(ctx, "nil", gives("", once.NotDone(nil)))
	require.ErrorIs(t, err, once.ErrNotDone)
}

// A Run that is told of its end while it claims gives the claim back.
func TestContextEndsAtBegin(t *testing.T) {
	s, p, r := proxied(t, -1)
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	h := lose(p, 0, faultproxy.HoldReply())
	go func() { // ends when the claim is there
		_ = h.WaitTimeout(10 * time.Second)
		cancel(cause)
		h.Release()
	}()
	_, err := r.Run(ctx, "a", nil2)
	require.ErrorIs(t, err, once.ErrNotDone)
	require.Zero(t, s.Admin().Exists(t.Context(), "once:a").Val())
}

// A Run is two script calls, also on a cluster, and one by its text after the server has
// lost its scripts. A key of another type is an error that tells so.
func TestOnServers(t *testing.T) {
	s, ctx := redistest.Start(t), t.Context()
	r := newRunner(t, newStore(t, s))
	_, err := r.Run(ctx, "warm", gives("x", nil))
	require.NoError(t, err)
	s.ResetStats()
	_, err = r.Run(ctx, "a", gives("x", nil))
	require.NoError(t, err)
	stats := s.CommandStats()
	require.EqualValues(t, 2, stats["evalsha"])
	require.Zero(t, stats["eval"])
	require.NoError(t, s.Admin().ScriptFlush(ctx).Err())
	_, err = r.Run(ctx, "b", gives("x", nil))
	require.NoError(t, err)
	require.NoError(t, s.Admin().Set(ctx, "once:text", "x", 0).Err())
	_, err = r.Run(ctx, "text", nil2)
	require.ErrorContains(t, err, "WRONGTYPE")

	store, err := once.NewRedis(redistest.StartCluster(t, 3).Client())
	require.NoError(t, err)
	r = newRunner(t, store)
	for _, id := range []string{"a", "b", "{c}d", "e}f", "{}", "g"} {
		for range 2 {
			got, err := r.Run(ctx, id, gives(id, nil))
			require.NoError(t, err)
			require.Equal(t, id, string(got))
		}
		require.NoError(t, r.Forget(ctx, id))
		require.NoError(t, r.Resolve(ctx, id, []byte("found")))
	}
}
