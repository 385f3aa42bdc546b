package faultproxy

import (
	"fmt"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

func TestDownUp(t *testing.T) {
	p, _ := setup(t)
	addr := p.Addr()
	for range 3 {
		c, r := newClient(t, addr), dialRaw(t, addr)
		p.Down()
		p.Down()
		r.requireClosed()
		_, err := net.Dial("tcp", addr)
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
		require.ErrorIs(t, c.Set(bg, "k", "v", 0).Err(), syscall.ECONNREFUSED)
		require.NoError(t, p.Up())
		require.NoError(t, p.Up())
		require.Equal(t, addr, p.Addr())
		require.NoError(t, newClient(t, addr).Set(bg, "k", "v", 0).Err())
	}
	p.Down()
	blocker, err := net.Listen("tcp", addr)
	require.NoError(t, err)
	defer func() { require.NoError(t, blocker.Close()) }()
	require.ErrorIs(t, p.Up(), syscall.EADDRINUSE)
}

func TestHangSwitch(t *testing.T) {
	p, m := setup(t)
	idle, used := newClient(t, p.Addr()), dialRaw(t, p.Addr())
	hold := p.Inject(Rule{Match: Command("INCR"), Times: 1, Do: HoldReply()})
	used.send("INCR n")
	requireFired(t, hold, 1)

	p.Hang()
	hold.Release()
	used.requireSilence()
	fresh := dialRaw(t, p.Addr())
	fresh.send("SET k v")
	fresh.requireSilence()
	require.False(t, m.Exists("k"))
	require.Equal(t, 1, p.Count("SET"), "read all the same")

	p.Heal()
	require.NoError(t, idle.Set(bg, "idle", "v", 0).Err(), "a connection that lost nothing works again")
	for _, r := range []*rawConn{used, fresh} {
		r.send("PING")
		r.requireSilence() // would be taken for the missing reply
	}
	newClient(t, p.Addr())
}

func TestHangHidesTheEndOfTheServer(t *testing.T) {
	p, m := setup(t)
	r := dialRaw(t, p.Addr())
	r.send("PING")
	require.Equal(t, "+PONG\r\n", r.receive())
	p.Hang()
	m.Close()
	r.requireSilence()
	p.Heal()
	r.send("PING")
	r.requireClosed()
}

func TestDropReplies(t *testing.T) {
	p, m := setup(t)
	c, idle := newClient(t, p.Addr()), newClient(t, p.Addr())
	r := dialRaw(t, p.Addr())
	p.Inject(Rule{Match: Command("DEL"), Do: Refuse("ERR no")})
	p.DropReplies()
	requireTimeout(t, c.Set(short(t), "k", "v", 0).Err())
	eventually(t, func() bool { return m.Exists("k") })
	r.send("DEL k")
	r.requireSilence()
	p.Heal()
	r.send("PING")
	r.requireSilence()
	require.NoError(t, idle.Get(bg, "k").Err())
	require.NoError(t, c.Get(bg, "k").Err(), "on a new connection")
}

func TestSlow(t *testing.T) {
	const d = 100 * time.Millisecond
	p, _ := setup(t)
	c := newClient(t, p.Addr())
	p.Slow(d)
	start := time.Now()
	pipe := c.Pipeline()
	pipe.Set(bg, "k", "v", 0)
	pipe.Get(bg, "k")
	_, err := pipe.Exec(bg)
	require.NoError(t, err)
	require.GreaterOrEqual(t, time.Since(start), d)
	p.Slow(time.Hour)
	requireTimeout(t, c.Get(short(t), "k").Err())
	p.Slow(0)
	require.NoError(t, c.Get(bg, "k").Err())
}

func TestCutAllAndSetBackend(t *testing.T) {
	p, m := setup(t)
	m2 := miniredis.RunT(t)
	c, r := newClient(t, p.Addr()), dialRaw(t, p.Addr())
	r.send("PING")
	require.Equal(t, "+PONG\r\n", r.receive())

	p.SetBackend(m2.Addr())
	require.NoError(t, c.Set(bg, "old", "v", 0).Err())
	p.CutAll()
	r.requireClosed()
	eventually(t, func() bool { return m.CurrentConnectionCount() == 0 })
	// The pool may notice the loss only when it uses the connection.
	eventually(t, func() bool { return c.Set(bg, "new", "v", 0).Err() == nil })
	require.True(t, m.Exists("old"))
	require.False(t, m.Exists("new"))
	require.True(t, m2.Exists("new"))
}

func TestServerEnds(t *testing.T) {
	p, m := setup(t)
	r, waiting := dialRaw(t, p.Addr()), dialRaw(t, p.Addr())
	r.send("PING")
	require.Equal(t, "+PONG\r\n", r.receive())
	hold := p.Inject(Rule{Match: Command("INCR"), Do: HoldReply()})
	waiting.send("INCR n")
	requireFired(t, hold, 1)
	m.Close()
	r.requireClosed()
	hold.Release()
	require.Equal(t, ":1\r\n", waiting.receive(), "what the server has sent is delivered")
	waiting.requireClosed()

	// Nobody is there, but what the proxy answers itself is answered.
	p.Inject(Rule{Match: Command("SET"), Do: Refuse("ERR no")})
	alone := dialRaw(t, p.Addr())
	alone.send("SET k v", "GET k")
	require.Equal(t, "-ERR no\r\n", alone.receive())
	alone.requireClosed()
}

func TestServerSendsGarbage(t *testing.T) {
	checkLeaks(t)
	fake := NewFake(t, func(cmd []string) []byte {
		if cmd[0] == "GET" {
			return []byte("garbage\r\n")
		}
		return SimpleReply("OK")
	})
	p := New(t, fake.Addr())
	r := dialRaw(t, p.Addr())
	r.send("SET k v", "GET k")
	require.Equal(t, "+OK\r\n", r.receive())
	line, err := r.r.br.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "garbage\r\n", line)
	r.requireClosed()
}

// TestUnrest lets everything happen at once; it is for the race detector and
// the check for goroutines that are left.
func TestUnrest(t *testing.T) {
	p, _ := setup(t)
	held := p.Inject(Rule{Match: Command("SET"), Skip: 5, Do: HoldRequest()})
	for _, act := range []Action{
		DropReply(), DropReplyAndClose(), Refuse("ERR x"), RawInstead([]byte("?\r\n")), Hang(),
		Delay(time.Millisecond), DelayRequest(time.Millisecond), HoldReply(), Duplicate(), Cut(),
	} {
		p.Inject(Rule{Match: Script(), Skip: 3, Times: 3, Do: act})
	}
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() { // ends after its commands, which have a time limit
			c := redis.NewClient(&redis.Options{
				Addr: p.Addr(), MaxRetries: 1, PoolSize: 3,
				ReadTimeout: 10 * time.Millisecond, DialTimeout: 50 * time.Millisecond, DialerRetries: 1,
			})
			defer func() { _ = c.Close() }()
			for n := range 30 {
				c.Eval(bg, "return redis.call('INCR', KEYS[1])", []string{"n"})
				c.Set(bg, fmt.Sprint(i), n, 0)
			}
		})
	}
	wg.Go(func() { // ends after its rounds
		for range 10 {
			for _, f := range []func(){
				p.Hang, p.Heal, p.DropReplies, p.CutAll, p.Heal, held.Release, p.Down,
				func() { _ = p.Up() }, func() { p.Slow(time.Millisecond) }, func() { p.Slow(0) },
				func() { p.Count("SET") }, p.ResetLog,
			} {
				f()
				_ = held.WaitTimeout(2 * time.Millisecond)
			}
		}
	})
	wg.Wait()
}
