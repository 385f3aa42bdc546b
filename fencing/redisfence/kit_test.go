package redisfence

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/leaktest"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func newFence(t *testing.T, c redis.UniversalClient, opts ...Option) *Fence {
	t.Helper()
	f, err := New(c, opts...)
	require.NoError(t, err)
	return f
}

// proxied returns a real server, a proxy before it, and a Fence through it that knows
// all scripts, with go-redis's default retries.
func proxied(t *testing.T) (*redistest.Server, *faultproxy.Proxy, *Fence) {
	t.Helper()
	s := redistest.Start(t)
	p := faultproxy.New(t, s.Addr())
	c := redis.NewClient(&redis.Options{Addr: p.Addr(), ReadTimeout: 300 * time.Millisecond})
	t.Cleanup(func() { _ = c.Close() })
	f := newFence(t, c)
	require.NoError(t, f.Enter(t.Context(), "warm", 1))
	for _, op := range writes {
		require.NoError(t, op.do(f, t, "warm:"+op.name, 1))
	}
	return s, p, f
}

// writes are all operations that change a value; they leave text in it.
var writes = []struct {
	name string
	do   func(f *Fence, t *testing.T, key string, token fencing.Token, rules ...fencing.Rule) error
}{
	{"set", func(f *Fence, t *testing.T, key string, token fencing.Token, rules ...fencing.Rule) error {
		return f.Set(t.Context(), key, "v", 0, token, rules...)
	}},
	{"hset", func(f *Fence, t *testing.T, key string, token fencing.Token, rules ...fencing.Rule) error {
		return f.HSet(t.Context(), key, "field", "v", token, rules...)
	}},
	{"append", func(f *Fence, t *testing.T, key string, token fencing.Token, rules ...fencing.Rule) error {
		return f.Append(t.Context(), key, "v", token, rules...)
	}},
	{"del", func(f *Fence, t *testing.T, key string, token fencing.Token, rules ...fencing.Rule) error {
		return f.Del(t.Context(), key, token, rules...)
	}},
}

// calls are all operations with a token.
var calls = append(writes, struct {
	name string
	do   func(f *Fence, t *testing.T, key string, token fencing.Token, rules ...fencing.Rule) error
}{"enter", func(f *Fence, t *testing.T, key string, token fencing.Token, rules ...fencing.Rule) error {
	return f.Enter(t.Context(), key, token, rules...)
}})
