package faultproxy

import (
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

func TestFake(t *testing.T) {
	checkLeaks(t)
	fake := NewFake(t, func(cmd []string) []byte {
		switch strings.ToUpper(cmd[0]) {
		case "PING":
			return SimpleReply("PONG")
		case "GET":
			if cmd[1] == "none" {
				return NilReply()
			}
			return BulkReply("value of " + cmd[1])
		case "INCR":
			return IntReply(-7)
		case "LRANGE":
			return ArrayReply(BulkReply("a"), BulkReply(""), SimpleReply("c"))
		case "DEL":
			return ErrorReply("LOADING not\r\nyet")
		}
		return nil
	})
	c := newClient(t, fake.Addr()) // asks for RESP3 and falls back
	v, err := c.Get(bg, "k").Result()
	require.NoError(t, err)
	require.Equal(t, "value of k", v)
	require.ErrorIs(t, c.Get(bg, "none").Err(), redis.Nil)
	require.EqualValues(t, -7, c.Incr(bg, "n").Val())
	require.Equal(t, []string{"a", "", "c"}, c.LRange(bg, "l", 0, -1).Val())
	require.EqualError(t, c.Del(bg, "k").Err(), "LOADING not  yet")
	requireTimeout(t, c.Set(short(t), "k", "v", 0).Err())
	require.Equal(t, 1, fake.Count("SET"))
	require.Equal(t, 1, fake.Count("HELLO"))
	all := fake.Commands()
	require.Equal(t, []string{"set", "k", "v"}, all[len(all)-1].Args)

	fake.Close()
	require.Error(t, c.Get(bg, "k").Err())
}

func TestFakeHandlerComesFirst(t *testing.T) {
	checkLeaks(t)
	fake := NewFake(t, func(cmd []string) []byte {
		if Command("HELLO")(cmd) {
			return []byte("%1\r\n+proto\r\n:3\r\n")
		}
		return SimpleReply("PONG")
	})
	c := newClient(t, fake.Addr())
	require.NoError(t, c.Ping(bg).Err())
	require.Equal(t, 1, fake.Count("HELLO"))
}
