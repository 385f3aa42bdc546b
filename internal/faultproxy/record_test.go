package faultproxy

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

func TestCommands(t *testing.T) {
	p, _ := setup(t)
	start := time.Now()
	a, b := newClient(t, p.Addr()), newClient(t, p.Addr())
	p.ResetLog()
	require.Empty(t, p.Commands())
	p.Inject(Rule{Match: Command("DEL"), Do: Refuse("ERR no")})
	require.NoError(t, a.Set(bg, "k", "v", 0).Err())
	require.NoError(t, b.Get(bg, "k").Err())
	require.Error(t, b.Del(bg, "k").Err())

	got := p.Commands()
	require.Len(t, got, 3)
	require.Equal(t, []string{"set", "k", "v"}, got[0].Args)
	require.Equal(t, "SET", got[0].Name())
	require.Equal(t, 1, got[0].Conn)
	require.Equal(t, 2, got[1].Conn)
	require.False(t, got[0].Time.Before(start))
	require.False(t, got[2].Time.Before(got[0].Time))
	require.Empty(t, Cmd{}.Name())

	got[0].Args[1] = "changed"
	require.Equal(t, "k", p.Commands()[0].Args[1], "the caller gets a copy")
	require.Equal(t, 1, p.Count("Set"))
	require.Equal(t, 1, p.Count("DEL"))
	require.Equal(t, 3, p.CountMatch(func(cmd []string) bool { return cmd[1] == "k" }))
	p.ResetLog()
	require.Zero(t, p.Count("SET"))
}

func TestMatchers(t *testing.T) {
	tests := []struct {
		name  string
		match func([]string) bool
		yes   [][]string
		no    [][]string
	}{
		{"Command", Command("set"), [][]string{{"SET"}, {"set", "a"}}, [][]string{{"SETEX"}, {"GET", "set"}, {}}},
		{"two words", Command("SCRIPT LOAD"), [][]string{{"script", "load", "x"}}, [][]string{{"SCRIPT"}, {"SCRIPT", "FLUSH"}}},
		{"no name", Command(""), nil, [][]string{{"SET"}, {}}},
		{"AnyOf", AnyOf("GET", "SET"), [][]string{{"get"}, {"set"}}, [][]string{{"DEL"}}},
		{"Script", Script(), [][]string{{"evalsha"}, {"EVAL"}}, [][]string{{"EVAL_RO"}, {"SCRIPT", "LOAD"}}},
		{"Any", Any(), [][]string{{"SET"}, {"SCRIPT", "LOAD"}}, [][]string{
			{"hello", "3"}, {"AUTH"}, {"client", "SETINFO"}, {"SELECT"}, {"COMMAND"}, {"READONLY"}, {"ping"},
		}},
		{"AfterHandshake", AfterHandshake(func(cmd []string) bool { return len(cmd) == 2 }),
			[][]string{{"GET", "k"}}, [][]string{{"HELLO", "3"}, {"GET"}}},
	}
	for _, tt := range tests {
		for _, cmd := range tt.yes {
			require.True(t, tt.match(cmd), "%s %q", tt.name, cmd)
		}
		for _, cmd := range tt.no {
			require.False(t, tt.match(cmd), "%s %q", tt.name, cmd)
		}
	}
}

func TestHandshakeIsMatchedOnRequestOnly(t *testing.T) {
	p, _ := setup(t)
	anything := p.Inject(Rule{Times: 1, Do: Refuse("ERR any")})
	c := newClient(t, p.Addr()) // HELLO, CLIENT and PING pass
	require.Zero(t, anything.Fired())
	require.EqualError(t, c.Get(bg, "k").Err(), "ERR any")

	hello := p.Inject(Rule{Match: Command("HELLO"), Times: 1, Do: Refuse("NOPERM no")})
	other := redis.NewClient(&redis.Options{Addr: p.Addr(), MaxRetries: -1})
	defer func() { require.NoError(t, other.Close()) }()
	_ = other.Ping(bg)
	requireFired(t, hello, 1)
}

func TestRuleOrder(t *testing.T) {
	p, _ := setup(t)
	c := newClient(t, p.Addr())
	first := p.Inject(Rule{Match: Command("GET"), Skip: 1, Times: 1, Do: Refuse("ERR first")})
	second := p.Inject(Rule{Match: Command("GET"), Do: Refuse("ERR second")})
	for _, want := range []string{"ERR second", "ERR first", "ERR second"} {
		require.EqualError(t, c.Get(bg, "k").Err(), want)
	}
	require.Equal(t, 1, first.Fired())
	require.Equal(t, 2, second.Fired())
	second.Remove()
	require.ErrorIs(t, c.Get(bg, "k").Err(), redis.Nil)
	require.Panics(t, func() { p.Inject(Rule{}) })
}

func TestMatchMayUseTheProxy(t *testing.T) {
	p, _ := setup(t)
	c := newClient(t, p.Addr())
	p.Inject(Rule{
		Match: func(cmd []string) bool { return p.Count("SET") == 2 && Command("SET")(cmd) },
		Do:    Refuse("ERR second"),
	})
	require.NoError(t, c.Set(bg, "k", "v", 0).Err())
	require.EqualError(t, c.Set(bg, "k", "v", 0).Err(), "ERR second")
}
