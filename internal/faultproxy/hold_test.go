package faultproxy

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHoldRequestIsExecutedLate(t *testing.T) {
	p, m := setup(t)
	c, other := newClient(t, p.Addr()), newClient(t, p.Addr())
	h := p.Inject(Rule{Match: Command("SET"), Times: 1, Do: HoldRequest()})
	requireTimeout(t, c.Set(short(t), "k", "late", 0).Err())
	requireFired(t, h, 1)
	require.NoError(t, c.Close())

	require.False(t, m.Exists("k"))
	require.NoError(t, other.Set(bg, "k", "early", 0).Err(), "other connections are not held")
	h.Release()
	eventually(t, func() bool { v, _ := m.Get("k"); return v == "late" })
	// The connection to the server goes when there is nothing left to forward.
	require.NoError(t, other.Close())
	eventually(t, func() bool { return m.CurrentConnectionCount() == 0 })
}

func TestHoldRequestInPipeline(t *testing.T) {
	p, m := setup(t)
	h := p.Inject(Rule{Match: Command("INCR"), Skip: 1, Times: 1, Do: HoldRequest()})
	r := dialRaw(t, p.Addr())
	r.send("INCR n", "INCR n", "INCR n")
	require.Equal(t, ":1\r\n", r.receive())
	requireFired(t, h, 1)
	r.requireSilence()
	require.Equal(t, 3, p.Count("INCR"))
	n, _ := m.Get("n")
	require.Equal(t, "1", n)
	h.Release()
	require.Equal(t, ":2\r\n", r.receive())
	require.Equal(t, ":3\r\n", r.receive())
}

func TestHeldPipelineIsExecutedAfterCutAndDown(t *testing.T) {
	p, m := setup(t)
	h := p.Inject(Rule{Match: Command("INCR"), Do: HoldRequest()})
	for i, interrupt := range []func(){p.CutAll, p.Down} {
		r := dialRaw(t, p.Addr())
		r.send("INCR n", "SET last v")
		eventually(t, func() bool { return p.Count("SET") == i+1 })
		interrupt()
		r.requireClosed()
		require.False(t, m.Exists("last"))
		h.Release()
		eventually(t, func() bool { return m.Exists("last") })
		m.Del("last")
	}
	n, _ := m.Get("n")
	require.Equal(t, "2", n)
}

func TestHoldReply(t *testing.T) {
	p, m := setup(t)
	r, other := dialRaw(t, p.Addr()), newClient(t, p.Addr())
	h := p.Inject(Rule{Match: Command("SET"), Times: 1, Do: HoldReply()})
	r.send("SET k v", "PING")
	requireFired(t, h, 1)
	require.True(t, m.Exists("k"), "fired means executed")
	r.requireSilence()
	require.NoError(t, other.Get(bg, "k").Err(), "other connections are not held")
	h.Remove()
	r.requireSilence() // Remove does not release
	h.Release()
	require.Equal(t, "+OK\r\n", r.receive())
	require.Equal(t, "+PONG\r\n", r.receive())
}

func TestReleaseIsForTheHeldOnly(t *testing.T) {
	p, m := setup(t)
	h := p.Inject(Rule{Match: Command("INCR"), Do: HoldRequest()})
	h.Release() // nothing is held yet
	r := dialRaw(t, p.Addr())
	for _, want := range []string{":1\r\n", ":2\r\n"} {
		r.send("INCR n")
		r.requireSilence()
		h.Release()
		require.Equal(t, want, r.receive())
	}
	h.Remove()
	r.send("INCR n")
	require.Equal(t, ":3\r\n", r.receive())
	require.Equal(t, 2, h.Fired())
	require.True(t, m.Exists("n"))
}

func TestCloseWithEverythingPending(t *testing.T) {
	p, m := setup(t)
	actions := map[string]Action{
		"a": HoldRequest(), "b": HoldReply(), "c": Delay(time.Hour),
		"d": DelayRequest(time.Hour), "e": Hang(), "f": DropReply(),
	}
	var handles []*Handle
	for key, act := range actions {
		h := p.Inject(Rule{Do: act, Match: func(cmd []string) bool { return cmd[1] == key }})
		handles = append(handles, h)
		r, abandoned := dialRaw(t, p.Addr()), dialRaw(t, p.Addr())
		r.send("SET " + key + " v")
		abandoned.send("SET " + key + " v")
		requireFired(t, h, 2)
		require.NoError(t, abandoned.Close())
	}
	p.Close()
	p.Close() // again does nothing
	for _, h := range handles {
		h.Release() // too late
	}
	require.False(t, m.Exists("a"))
	require.False(t, m.Exists("d"))
	require.ErrorIs(t, p.Up(), errClosed)
}

func TestWait(t *testing.T) {
	p, _ := setup(t)
	h := p.Inject(Rule{Do: Cut()})
	require.ErrorIs(t, h.WaitTimeout(time.Millisecond), context.DeadlineExceeded)
	ctx, cancel := context.WithCancel(bg)
	cancel()
	require.ErrorIs(t, h.Wait(ctx), context.Canceled)
	require.Zero(t, h.Fired())
}
