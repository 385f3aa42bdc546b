package faultproxy

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

const (
	// patience limits what must happen; a good run never waits that long.
	patience = 10 * time.Second
	// silence is how long a test listens before it believes that nothing comes.
	silence = 60 * time.Millisecond
)

var bg = context.Background()

// checkLeaks fails the test if it ends with more goroutines than it began with.
// It must be called before anything registers a cleanup, so as to run last.
func checkLeaks(t *testing.T) {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		for deadline := time.Now().Add(patience); runtime.NumGoroutine() > before; {
			if time.Now().After(deadline) {
				buf := make([]byte, 1<<20)
				t.Errorf("%d goroutines before, %d after:\n%s",
					before, runtime.NumGoroutine(), buf[:runtime.Stack(buf, true)])
				return
			}
			time.Sleep(time.Millisecond)
		}
	})
}

func setup(t *testing.T) (*Proxy, *miniredis.Miniredis) {
	t.Helper()
	checkLeaks(t)
	m := miniredis.RunT(t)
	return New(t, m.Addr()), m
}

// newClient returns a client that does not retry, keeps one connection and has
// already opened it.
func newClient(t *testing.T, addr string, change ...func(*redis.Options)) *redis.Client {
	t.Helper()
	opt := &redis.Options{
		Addr: addr, MaxRetries: -1, DialerRetries: 1,
		PoolSize: 1, PipelinePoolSize: -1,
		ReadTimeout: patience, WriteTimeout: patience, DialTimeout: patience,
		ContextTimeoutEnabled: true,
	}
	for _, f := range change {
		f(opt)
	}
	c := redis.NewClient(opt)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.Ping(bg).Err())
	return c
}

// short is a context for calls that are not going to be answered.
func short(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(bg, silence)
	t.Cleanup(cancel)
	return ctx
}

func requireTimeout(t *testing.T, err error) {
	t.Helper()
	var ne net.Error
	require.Error(t, err)
	require.Truef(t, errors.Is(err, context.DeadlineExceeded) || errors.As(err, &ne) && ne.Timeout(),
		"want a timeout, got %v", err)
}

func requireFired(t *testing.T, h *Handle, n int) {
	t.Helper()
	require.NoError(t, h.WaitTimeout(patience))
	eventually(t, func() bool { return h.Fired() == n })
}

func eventually(t *testing.T, cond func() bool) {
	t.Helper()
	require.Eventually(t, cond, patience, time.Millisecond)
}

// rawConn is a client without any cleverness.
type rawConn struct {
	t *testing.T
	net.Conn
	r *respReader
}

func dialRaw(t *testing.T, addr string) *rawConn {
	t.Helper()
	conn, err := net.DialTimeout("tcp", addr, patience)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return &rawConn{t: t, Conn: conn, r: newRespReader(conn)}
}

// send sends the commands, each a line of words, in one piece.
func (c *rawConn) send(commands ...string) {
	c.t.Helper()
	var out []byte
	for _, cmd := range commands {
		var words [][]byte
		for _, w := range strings.Fields(cmd) {
			words = append(words, BulkReply(w))
		}
		out = append(out, ArrayReply(words...)...)
	}
	c.sendRaw(string(out))
}

func (c *rawConn) sendRaw(s string) {
	c.t.Helper()
	_, err := io.WriteString(c.Conn, s)
	require.NoError(c.t, err)
}

// receive returns the next message.
func (c *rawConn) receive() string {
	c.t.Helper()
	require.NoError(c.t, c.SetReadDeadline(time.Now().Add(patience)))
	f, err := c.r.readFrame()
	require.NoError(c.t, err)
	return string(f.raw)
}

// requireSilence fails if anything comes, the end of the connection included.
func (c *rawConn) requireSilence() {
	c.t.Helper()
	require.NoError(c.t, c.SetReadDeadline(time.Now().Add(silence)))
	b, err := c.r.br.ReadByte()
	require.ErrorIsf(c.t, err, os.ErrDeadlineExceeded, "byte %q", b)
}

// requireClosed fails unless the connection ends before anything else comes.
func (c *rawConn) requireClosed() {
	c.t.Helper()
	require.NoError(c.t, c.SetReadDeadline(time.Now().Add(patience)))
	b, err := c.r.br.ReadByte()
	require.Errorf(c.t, err, "byte %q", b)
	require.NotErrorIs(c.t, err, os.ErrDeadlineExceeded)
}
