package faultproxy

import (
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

func TestPubSub(t *testing.T) {
	for _, protocol := range []int{2, 3} {
		p, m := setup(t)
		c := newClient(t, p.Addr(), func(o *redis.Options) { o.Protocol = protocol; o.PoolSize = 2 })
		s := c.Subscribe(bg, "a", "b")
		for range 2 {
			_, err := s.Receive(bg)
			require.NoError(t, err)
		}
		require.NoError(t, s.PSubscribe(bg, "x*"))
		_, err := s.Receive(bg)
		require.NoError(t, err)
		require.Equal(t, 1, m.Publish("a", "one"))
		msg, err := s.ReceiveMessage(bg)
		require.NoError(t, err)
		require.Equal(t, "one", msg.Payload)

		// A ping of the subscriber is a request with a reply; messages that come
		// in between are not taken for it.
		h := p.Inject(Rule{Match: Command("PING"), Times: 1, Do: DropReply()})
		require.NoError(t, s.Ping(bg))
		requireFired(t, h, 1)
		require.Equal(t, 1, m.Publish("x1", "two"))
		msg, err = s.ReceiveMessage(bg)
		require.NoError(t, err)
		require.Equal(t, "two", msg.Payload)

		// So is UNSUBSCRIBE, with as many confirmations as there are channels.
		require.NoError(t, s.Unsubscribe(bg))
		require.NoError(t, s.Ping(bg, "still here"))
		for {
			got, err := s.Receive(bg)
			require.NoError(t, err)
			if pong, ok := got.(*redis.Pong); ok {
				require.Equal(t, "still here", pong.Payload)
				break
			}
		}
		require.NoError(t, s.Close())
		m.Close()
	}
}

func TestPushIsNoReply(t *testing.T) {
	const push = ">2\r\n+invalidate\r\n_\r\n"
	checkLeaks(t)
	fake := NewFake(t, func(cmd []string) []byte {
		return []byte(push + "%1\r\n+cmd\r\n$" + "1\r\n" + cmd[1] + "\r\n")
	})
	p := New(t, fake.Addr())
	h := p.Inject(Rule{Match: Command("GET"), Skip: 1, Times: 1, Do: DropReply()})
	r := dialRaw(t, p.Addr())
	r.send("GET 1", "GET 2", "GET 3")
	for _, want := range []string{
		push, "%1\r\n+cmd\r\n$1\r\n1\r\n", push, push, "%1\r\n+cmd\r\n$1\r\n3\r\n",
	} {
		require.Equal(t, want, r.receive())
	}
	require.Equal(t, 1, h.Fired())
}

func TestDropSubscribeConfirmations(t *testing.T) {
	p, m := setup(t)
	h := p.Inject(Rule{Match: Command("SUBSCRIBE"), Times: 1, Do: DropReply()})
	r := dialRaw(t, p.Addr())
	r.send("SUBSCRIBE a b", "PING")
	require.Equal(t, "*2\r\n$4\r\npong\r\n$0\r\n\r\n", r.receive(), "both confirmations are dropped")
	require.Equal(t, 1, h.Fired())
	require.Equal(t, 1, m.Publish("b", "x"))
	require.Equal(t, "*3\r\n$7\r\nmessage\r\n$1\r\nb\r\n$1\r\nx\r\n", r.receive())
}

func TestSubscriptionsCount(t *testing.T) {
	var s subscriptions
	for _, step := range []struct {
		args []string
		want int
	}{
		{[]string{"GET", "k"}, 1},
		{[]string{"UNSUBSCRIBE"}, 1},
		{[]string{"SUBSCRIBE", "a", "b"}, 2},
		{[]string{"SUBSCRIBE"}, 1},
		{[]string{"PSUBSCRIBE", "p1", "p2", "p3"}, 3},
		{[]string{"SSUBSCRIBE", "s"}, 1},
		{[]string{"UNSUBSCRIBE", "a", "x"}, 2},
		{[]string{"UNSUBSCRIBE"}, 1},
		{[]string{"PUNSUBSCRIBE"}, 3},
		{[]string{"PSUBSCRIBE", "p1", "p2"}, 2},
		{[]string{"RESET"}, 1},
		{[]string{"PUNSUBSCRIBE"}, 1},
		{[]string{"SUNSUBSCRIBE"}, 1},
	} {
		require.Equal(t, step.want, s.sent(step.args), "%q", step.args)
	}
}
