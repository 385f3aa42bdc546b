package faultproxy

import (
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

func TestPassThrough(t *testing.T) {
	p, m := setup(t)
	for _, protocol := range []int{2, 3} {
		c := newClient(t, p.Addr(), func(o *redis.Options) { o.Protocol = protocol })
		require.NoError(t, c.HSet(bg, "h", "a", "1", "b", "2").Err())
		// A map in RESP3, an array in RESP2.
		all, err := c.HGetAll(bg, "h").Result()
		require.NoError(t, err)
		require.Equal(t, map[string]string{"a": "1", "b": "2"}, all)
		require.ErrorIs(t, c.Get(bg, "none").Err(), redis.Nil)
		require.NoError(t, c.Eval(bg, "return {1,{'x','y'},false}", nil).Err())
	}
	require.Equal(t, "1", m.HGet("h", "a"))

	r := dialRaw(t, p.Addr())
	r.sendRaw("*0\r\n*1\r\n:1\r\n") // the second is not a request
	r.requireClosed()
}

func TestInlineCommands(t *testing.T) {
	checkLeaks(t)
	fake := NewFake(t, func(cmd []string) []byte { return BulkReply(strings.Join(cmd, "|")) })
	p := New(t, fake.Addr())
	p.Inject(Rule{Match: Command("GET"), Times: 1, Do: Refuse("ERR no")})
	r := dialRaw(t, p.Addr())
	r.sendRaw("SET k  v\r\n\r\nget k\r\nGET k\n")
	require.Equal(t, "$7\r\nSET|k|v\r\n", r.receive())
	require.Equal(t, "-ERR no\r\n", r.receive())
	require.Equal(t, "$5\r\nGET|k\r\n", r.receive())
	require.Equal(t, 3, len(p.Commands()))
	require.Equal(t, 2, len(fake.Commands()))
}

func TestDropReply(t *testing.T) {
	p, m := setup(t)
	c := newClient(t, p.Addr())
	h := p.Inject(Rule{Match: Command("set"), Times: 1, Do: DropReply()})
	requireTimeout(t, c.Set(short(t), "k", "v", 0).Err())
	requireFired(t, h, 1)
	got, err := m.Get("k")
	require.NoError(t, err)
	require.Equal(t, "v", got)
	require.NoError(t, c.Set(bg, "k", "w", 0).Err(), "the rule is used up")

	p.Inject(Rule{Match: Command("GET"), Do: DropReply()})
	r := dialRaw(t, p.Addr())
	r.send("GET k")
	r.requireSilence()
}

func TestDropSecondReplyOfThree(t *testing.T) {
	p, m := setup(t)
	c := newClient(t, p.Addr())
	h := p.Inject(Rule{Match: Command("INCR"), Skip: 1, Times: 1, Do: DropReply()})
	pipe := c.Pipeline()
	a, b, d := pipe.Incr(bg, "n"), pipe.Incr(bg, "n"), pipe.Incr(bg, "n")
	_, err := pipe.Exec(short(t))
	requireTimeout(t, err)
	require.EqualValues(t, 1, a.Val())
	require.EqualValues(t, 3, b.Val(), "the third reply comes in the place of the second")
	requireTimeout(t, d.Err())
	requireFired(t, h, 1)
	n, err := m.Get("n")
	require.NoError(t, err)
	require.Equal(t, "3", n, "all three have been executed")
}

func TestDropReplyAndClose(t *testing.T) {
	p, m := setup(t)
	h := p.Inject(Rule{Match: Command("SET"), Times: 1, Do: DropReplyAndClose()})
	r := dialRaw(t, p.Addr())
	r.send("PING", "SET k v", "PING")
	require.Equal(t, "+PONG\r\n", r.receive())
	r.requireClosed()
	requireFired(t, h, 1)
	require.True(t, m.Exists("k"))
}

func TestRefuse(t *testing.T) {
	p, m := setup(t)
	c := newClient(t, p.Addr())
	h := p.Inject(Rule{Match: Command("SET"), Times: 1, Do: Refuse("MISCONF not\r\nnow")})
	p.Inject(Rule{Match: Command("DEL"), Times: 1, Do: Error("READONLY no")})
	require.EqualError(t, c.Set(bg, "k", "v", 0).Err(), "MISCONF not  now")
	require.Equal(t, 1, h.Fired())
	require.False(t, m.Exists("k"))
	require.EqualError(t, c.Del(bg, "k").Err(), "READONLY no")
	require.NoError(t, c.Set(bg, "k", "v", 0).Err())
}

func TestRefuseKeepsOrderInPipeline(t *testing.T) {
	p, m := setup(t)
	p.Inject(Rule{Match: Command("INCR"), Skip: 1, Times: 1, Do: Refuse("ERR second")})
	hold := p.Inject(Rule{Match: Command("INCR"), Times: 1, Do: HoldReply()})
	r := dialRaw(t, p.Addr())
	r.send("INCR n", "INCR n", "INCR n")
	requireFired(t, hold, 1)
	r.requireSilence()
	hold.Release()
	require.Equal(t, ":1\r\n", r.receive())
	require.Equal(t, "-ERR second\r\n", r.receive())
	require.Equal(t, ":2\r\n", r.receive())
	n, _ := m.Get("n")
	require.Equal(t, "2", n)
}

func TestReplyError(t *testing.T) {
	p, m := setup(t)
	c := newClient(t, p.Addr())
	h := p.Inject(Rule{Match: Command("SET"), Times: 1, Do: ReplyError("ERR lost")})
	require.EqualError(t, c.Set(bg, "k", "v", 0).Err(), "ERR lost")
	require.True(t, m.Exists("k"))
	require.Equal(t, 1, h.Fired())
	require.NoError(t, c.Get(bg, "k").Err(), "later replies are in step")
}

func TestRaw(t *testing.T) {
	p, m := setup(t)
	p.Inject(Rule{Match: Command("SET"), Times: 1, Do: Raw([]byte("@what\r\n"))})
	p.Inject(Rule{Match: Command("SET"), Times: 1, Do: RawInstead([]byte("$3\r\nab"))})
	c := newClient(t, p.Addr())
	require.ErrorContains(t, c.Set(bg, "a", "v", 0).Err(), "@what")
	require.False(t, m.Exists("a"))
	requireTimeout(t, c.Set(short(t), "b", "v", 0).Err()) // waits for the third byte
	require.True(t, m.Exists("b"))
}

func TestDelay(t *testing.T) {
	const d = 150 * time.Millisecond
	p, _ := setup(t)
	slow, other := newClient(t, p.Addr()), newClient(t, p.Addr())
	h := p.Inject(Rule{Match: Command("INCR"), Times: 2, Do: Delay(d)})
	start := time.Now()
	done := make(chan error, 1)
	go func() { // ends with the pipeline
		pipe := slow.Pipeline()
		a, b := pipe.Incr(bg, "n"), pipe.Incr(bg, "n")
		_, err := pipe.Exec(bg)
		if a.Val() != 1 || b.Val() != 2 {
			t.Errorf("replies out of order: %d, %d", a.Val(), b.Val())
		}
		done <- err
	}()
	requireFired(t, h, 2)
	require.NoError(t, other.Get(bg, "n").Err(), "another connection is not delayed")
	select {
	case <-done:
		require.GreaterOrEqual(t, time.Since(start), d)
	default: // still waiting, as it should
		require.NoError(t, <-done)
	}
	require.GreaterOrEqual(t, time.Since(start), d)
}

func TestDelayRequest(t *testing.T) {
	const d = 100 * time.Millisecond
	p, m := setup(t)
	c := newClient(t, p.Addr())
	p.Inject(Rule{Match: Command("SET"), Do: DelayRequest(d)})
	start := time.Now()
	require.NoError(t, c.Set(bg, "a", "v", 0).Err())
	require.GreaterOrEqual(t, time.Since(start), d)

	// The client goes away before the time has come.
	r := dialRaw(t, p.Addr())
	start = time.Now()
	r.send("SET b v")
	eventually(t, func() bool { return p.Count("SET") == 2 })
	require.NoError(t, r.Close())
	eventually(t, func() bool { return m.Exists("b") })
	require.GreaterOrEqual(t, time.Since(start), d)
}

func TestHangAction(t *testing.T) {
	p, m := setup(t)
	h := p.Inject(Rule{Match: Command("SET"), Times: 1, Do: Hang()})
	r, other := dialRaw(t, p.Addr()), newClient(t, p.Addr())
	r.send("PING", "SET k v", "INCR n")
	require.Equal(t, "+PONG\r\n", r.receive())
	requireFired(t, h, 1)
	r.requireSilence()
	require.ErrorIs(t, other.Get(bg, "none").Err(), redis.Nil, "other connections work")
	require.False(t, m.Exists("k"))
	require.False(t, m.Exists("n"), "what follows on the connection hangs too")
	require.Equal(t, 1, p.Count("INCR"))
}

func TestDuplicate(t *testing.T) {
	p, m := setup(t)
	c := newClient(t, p.Addr())
	h := p.Inject(Rule{Match: Command("INCR"), Times: 1, Do: Duplicate()})
	require.EqualValues(t, 1, c.Incr(bg, "n").Val())
	requireFired(t, h, 1)
	n, err := m.Get("n")
	require.NoError(t, err)
	require.Equal(t, "2", n)
	require.EqualValues(t, 3, c.Incr(bg, "n").Val(), "later replies are in step")
	require.Equal(t, 2, p.Count("INCR"), "the client has sent two")
}

func TestCut(t *testing.T) {
	p, m := setup(t)
	h := p.Inject(Rule{Match: Command("SET"), Times: 1, Do: Cut()})
	r := dialRaw(t, p.Addr())
	r.send("SET k v")
	r.requireClosed()
	requireFired(t, h, 1)
	require.False(t, m.Exists("k"))
	c := newClient(t, p.Addr())
	require.NoError(t, c.Set(bg, "k", "v", 0).Err())
}
