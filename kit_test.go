package holdfast

import (
	"context"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// bubble runs fn under virtual time, with a miniredis whose keys expire by it.
// Everything that fn starts must have ended when it returns.
func bubble(t *testing.T, fn func(t *testing.T, m *miniredis.Miniredis)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := miniredis.NewMiniRedis()
		m.ClockTTL(true)
		t.Cleanup(m.Close)
		fn(t, m)
	})
}

// memClient returns a client of m that uses no sockets, so that it may be used in
// a bubble. It is closed at the end of the test.
func memClient(t *testing.T, m *miniredis.Miniredis, change ...func(*redis.Options)) *redis.Client {
	t.Helper()
	o := &redis.Options{
		Addr: "127.0.0.1:1", Protocol: 2, DisableIdentity: true,
		Dialer: func(context.Context, string, string) (net.Conn, error) { return m.Dial() },
	}
	for _, f := range change {
		f(o)
	}
	c := redis.NewClient(o)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// memLocker returns a Locker on m, closed at the end of the test.
func memLocker(t *testing.T, m *miniredis.Miniredis, opts ...Option) *Locker {
	t.Helper()
	return newTestLocker(t, memClient(t, m), opts...)
}

// newTestLocker returns a Locker that is closed at the end of the test.
func newTestLocker(t *testing.T, client redis.UniversalClient, opts ...Option) *Locker {
	t.Helper()
	quiet := WithLogger(slog.New(slog.DiscardHandler))
	l, err := New(client, append([]Option{quiet}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l
}
