package lua_test

import (
	"context"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/leaktest"
	"github.com/holdfast-go/holdfast/lua"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const (
	mine  = "me/1"
	other = "you/2"
	fence = "{k}:fence"
)

type server struct {
	*miniredis.Miniredis
	t *testing.T
	c *redis.Client
}

func newServer(t *testing.T) *server {
	m := miniredis.NewMiniRedis()
	t.Cleanup(m.Close)
	c := redis.NewClient(&redis.Options{
		Dialer:          func(context.Context, string, string) (net.Conn, error) { return m.Dial() },
		DisableIdentity: true, MaxRetries: -1,
	})
	t.Cleanup(func() { _ = c.Close() })
	return &server{m, t, c}
}

// eval returns the answer of a script, or the text of its error.
func (s *server) eval(script string, keys []string, args ...any) any {
	s.t.Helper()
	reply, err := s.c.Eval(s.t.Context(), script, keys, args...).Result()
	if err != nil {
		return "error: " + err.Error()
	}
	return reply
}

func (s *server) put(key, value string, ttl time.Duration) {
	s.t.Helper()
	require.NoError(s.t, s.Set(key, value))
	if ttl > 0 {
		s.SetTTL(key, ttl)
	}
}

func (s *server) requireKey(key, value string, ttl time.Duration) {
	s.t.Helper()
	got, err := s.Get(key)
	require.NoError(s.t, err)
	require.Equal(s.t, value, got)
	require.Equal(s.t, ttl, s.TTL(key))
}

var k = []string{"k"}

func TestAcquireFree(t *testing.T) {
	s := newServer(t)
	require.Equal(t, []any{int64(1), "0"}, s.eval(lua.Acquire, k, mine, 1500))
	s.requireKey("k", mine, 1500*time.Millisecond)
	require.Equal(t, []string{"k"}, s.Keys())
}

func TestAcquireRepeated(t *testing.T) {
	s := newServer(t)
	s.put("k", mine, 700*time.Millisecond)
	require.Equal(t, []any{int64(2), "0", int64(700)}, s.eval(lua.Acquire, k, mine, 1500))
	s.requireKey("k", mine, 700*time.Millisecond) // the lease is not started anew
}

func TestAcquireHeld(t *testing.T) {
	s := newServer(t)
	s.put("k", other, 700*time.Millisecond)
	require.Equal(t, []any{int64(0), other, int64(700)}, s.eval(lua.Acquire, k, mine, 1500))
	s.requireKey("k", other, 700*time.Millisecond)
}

func TestAcquireHeldByForeignValue(t *testing.T) {
	for name, value := range map[string]string{
		"empty": "", "prefix of ours": mine[:2], "ours and more": mine + "x", "binary": "\x00\xff", "a number": "1",
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			s.put("k", value, 0)
			require.Equal(t, []any{int64(0), value, int64(-1)}, s.eval(lua.Acquire, k, mine, 1500))
			s.requireKey("k", value, 0)
		})
	}
	t.Run("long", func(t *testing.T) {
		s := newServer(t)
		s.put("k", strings.Repeat("x", 1000), 0)
		require.Equal(t, []any{int64(0), strings.Repeat("x", 256), int64(-1)}, s.eval(lua.Acquire, k, mine, 1500))
	})
}

func TestAcquireWrongType(t *testing.T) {
	s := newServer(t)
	_, err := s.Push("k", "element")
	require.NoError(t, err)
	for _, keys := range [][]string{k, {"k", fence}} {
		require.Contains(t, s.eval(lua.Acquire, keys, mine, 1500), "WRONGTYPE")
	}
	require.Equal(t, []string{"k"}, s.Keys(), "no counter is left behind")
}

func TestAcquireFenced(t *testing.T) {
	s := newServer(t)
	keys := []string{"k", fence}
	require.Equal(t, []any{int64(1), "1"}, s.eval(lua.Acquire, keys, mine, 1500))
	require.Equal(t, []any{int64(2), "1", int64(1500)}, s.eval(lua.Acquire, keys, mine, 1500), "the same grant")
	require.Equal(t, []any{int64(0), mine, int64(1500)}, s.eval(lua.Acquire, keys, other, 1500))
	s.requireKey(fence, "1", 0)
	s.Del("k")
	require.Equal(t, []any{int64(1), "2"}, s.eval(lua.Acquire, keys, other, 1500))
}

// A token is a string all the way: Lua's numbers are exact to 53 bits only.
func TestAcquireFencedLargeToken(t *testing.T) {
	s := newServer(t)
	s.put(fence, "9223372036854775806", 0)
	require.Equal(t, []any{int64(1), "9223372036854775807"}, s.eval(lua.Acquire, []string{"k", fence}, mine, 1500))
	require.Equal(t, []any{int64(2), "9223372036854775807", int64(1500)},
		s.eval(lua.Acquire, []string{"k", fence}, mine, 1500))
}

// A counter that was lost during the hold gives no token, and is not made anew.
func TestAcquireFencedRepeatedWithoutCounter(t *testing.T) {
	s := newServer(t)
	s.put("k", mine, 700*time.Millisecond)
	require.Equal(t, []any{int64(2), "0", int64(700)}, s.eval(lua.Acquire, []string{"k", fence}, mine, 1500))
	require.Equal(t, []string{"k"}, s.Keys())
}

// When no token can be drawn nothing is taken.
func TestAcquireFencedBadCounter(t *testing.T) {
	t.Run("wrong type", func(t *testing.T) {
		s := newServer(t)
		_, err := s.Push(fence, "element")
		require.NoError(t, err)
		require.Contains(t, s.eval(lua.Acquire, []string{"k", fence}, mine, 1500), "WRONGTYPE")
		require.False(t, s.Exists("k"))
	})
	t.Run("no number", func(t *testing.T) {
		s := newServer(t)
		s.put(fence, "x", 0)
		require.Contains(t, s.eval(lua.Acquire, []string{"k", fence}, mine, 1500), "error: ERR")
		require.False(t, s.Exists("k"))
	})
}

// What release, extend and renew share: they touch the owner's key only.
func TestOwnershipIsCompared(t *testing.T) {
	one := func(s *server, script string) any {
		switch script {
		case lua.Release:
			return s.eval(script, k, mine)
		case lua.Extend:
			return s.eval(script, k, mine, 1500)
		}
		return s.eval(script, k, mine, 1500).([]any)[0]
	}
	for name, script := range map[string]string{"release": lua.Release, "extend": lua.Extend, "renew": lua.Renew} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			require.Equal(t, int64(0), one(s, script), "absent")
			require.False(t, s.Exists("k"), "nothing is created")

			for _, value := range []string{other, "", mine + "x", mine[:3], strings.ToUpper(mine)} {
				s.put("k", value, time.Second)
				require.Equal(t, int64(-1), one(s, script), "value %q", value)
				s.requireKey("k", value, time.Second)
			}

			s.Del("k")
			_, err := s.Push("k", "element")
			require.NoError(t, err)
			require.Equal(t, int64(-1), one(s, script), "no lock at all")
			require.Equal(t, "list", s.Type("k"))

			s.Del("k")
			s.put("k", mine, time.Second)
			require.Equal(t, int64(1), one(s, script), "ours")
		})
	}
}

func TestReleaseDeletes(t *testing.T) {
	s := newServer(t)
	s.put("k", mine, time.Second)
	s.put("l", mine, time.Second)
	require.Equal(t, int64(1), s.eval(lua.Release, k, mine))
	require.Equal(t, []string{"l"}, s.Keys())
	require.Equal(t, int64(0), s.eval(lua.Release, k, mine))
}

func TestExtendSets(t *testing.T) {
	for name, before := range map[string]time.Duration{
		"raises": time.Second, "shortens": time.Minute, "equal": 1500 * time.Millisecond, "no expiry": 0,
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			s.put("k", mine, before)
			require.Equal(t, int64(1), s.eval(lua.Extend, k, mine, 1500))
			s.requireKey("k", mine, 1500*time.Millisecond)
		})
	}
}

func TestRenewRaisesOnly(t *testing.T) {
	for name, c := range map[string]struct{ before, after time.Duration }{
		"raises":   {time.Second, 1500 * time.Millisecond},
		"shortens": {time.Minute, time.Minute},
		"equal":    {1500 * time.Millisecond, 1500 * time.Millisecond},
		// A key without expiry gets one: PTTL answers -1.
		"no expiry": {0, 1500 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			s.put("k", mine, c.before)
			require.Equal(t, []any{int64(1)}, s.eval(lua.Renew, k, mine, 1500))
			s.requireKey("k", mine, c.after)
		})
	}
}

func TestRenewMany(t *testing.T) {
	s := newServer(t)
	s.put("a", "o/a", time.Second)
	s.put("b", other, time.Second)
	_, err := s.Push("d", "element")
	require.NoError(t, err)
	s.put("e", "o/e", time.Second)
	got := s.eval(lua.Renew, []string{"a", "b", "c", "d", "e"},
		"o/a", 2000, "o/b", 3000, "o/c", 4000, "o/d", 5000, "o/e", 6000)
	require.Equal(t, []any{int64(1), int64(-1), int64(0), int64(-1), int64(1)}, got)
	s.requireKey("a", "o/a", 2*time.Second) // each gets its own TTL
	s.requireKey("b", other, time.Second)
	s.requireKey("e", "o/e", 6*time.Second)
	require.False(t, s.Exists("c"))
	require.Equal(t, []any{}, s.eval(lua.Renew, nil))
}

var line = []string{"k", "{k}:queue", "{k}:waiters", fence}

// place returns the keys and arguments of one call of a waiter.
func place(owner string, n int, most int, data string) []any {
	return []any{owner, n, 30000, 2000, most, data}
}

func (s *server) wait(owner string, n int) any {
	s.t.Helper()
	reply := s.eval(lua.Wait, line, place(owner, n, 0, "2000 0 PUBLISH chan-"+owner)...)
	return reply.([]any)[0]
}

func TestWaitTakesAFreeLock(t *testing.T) {
	s := newServer(t)
	require.Equal(t, []any{int64(1), "0"}, s.wait(mine, 1))
	s.requireKey("k", mine, 30*time.Second)
	require.Equal(t, []string{"k"}, s.Keys())
	s.FastForward(time.Second)
	require.Equal(t, []any{int64(2), "0", int64(29000)}, s.wait(mine, 2), "a repeated call")
}

func TestWaitQueuesAndReleaseHandsOver(t *testing.T) {
	s := newServer(t)
	s.put("k", "holder/0", 10*time.Second)
	require.Equal(t, []any{int64(0), "holder/0", int64(10000), int64(0)}, s.wait(mine, 1))
	require.Equal(t, []any{int64(0), "holder/0", int64(10000), int64(1)}, s.wait(other, 1))
	require.Equal(t, []any{int64(0), "holder/0", int64(10000), int64(0)}, s.wait(mine, 2), "it keeps its place")
	require.Equal(t, 5*time.Second, s.TTL(line[1]))
	require.Equal(t, 5*time.Second, s.TTL(line[2]))
	require.Equal(t, []any{int64(1), mine, int64(2), "0"}, s.eval(lua.Release, line, "holder/0", ""))
	s.requireKey("k", mine, 2*time.Second)
	require.Equal(t, []any{int64(2), "0", int64(2000)}, s.wait(mine, 3))
	require.Equal(t, []any{int64(1), other, int64(1), "0"}, s.eval(lua.Release, line, mine, ""))
	require.Equal(t, int64(1), s.eval(lua.Release, line, other, ""))
	require.Empty(t, s.Keys())
}

func TestHandOverPassesOverTheDead(t *testing.T) {
	s := newServer(t)
	start := time.Now()
	s.SetTime(start)
	s.put("k", "holder/0", 10*time.Second)
	s.wait("dead/1", 1)
	s.wait("dead/2", 1)
	s.SetTime(start.Add(1500 * time.Millisecond))
	s.wait(mine, 1)
	s.SetTime(start.Add(2001 * time.Millisecond))
	require.Equal(t, []any{int64(1), mine, int64(1), "0"}, s.eval(lua.Release, line, "holder/0", ""))
	require.Equal(t, []string{"k"}, s.Keys())
}

// The lock ended with its holder: whoever calls gives it to the first in the queue.
func TestWaitAfterExpiry(t *testing.T) {
	s := newServer(t)
	s.put("k", "holder/0", 10*time.Second)
	s.wait(mine, 7)
	s.wait(other, 1)
	s.Del("k")
	require.Equal(t, []any{int64(0), mine, int64(2000), int64(0)}, s.wait(other, 2))
	s.requireKey("k", mine, 2*time.Second)
}

func TestHandOverDrawsATokenForWhoWantsOne(t *testing.T) {
	s := newServer(t)
	s.put("k", "holder/0", 10*time.Second)
	s.eval(lua.Wait, line, place(mine, 1, 0, "2000 1 PUBLISH c")...)
	s.eval(lua.Wait, line, place(other, 1, 0, "1500 0 PUBLISH c")...)
	require.Equal(t, []any{int64(1), mine, int64(1), "1"}, s.eval(lua.Release, line, "holder/0", "c"))
	require.Equal(t, []any{int64(1), other, int64(1), "0"}, s.eval(lua.Release, line, mine, "c"))
	s.requireKey("k", other, 1500*time.Millisecond)
}

// A counter that is no number is the trouble of those who want a token.
func TestHandOverWithABrokenCounter(t *testing.T) {
	s := newServer(t)
	s.put("k", "holder/0", 10*time.Second)
	s.put(fence, "x", 0)
	s.eval(lua.Wait, line, place(mine, 1, 0, "2000 1 PUBLISH c")...)
	s.wait(other, 1)
	require.Equal(t, []any{int64(1), other, int64(1), "0"}, s.eval(lua.Release, line, "holder/0", ""))
	reply := s.eval(lua.Wait, line, place(mine, 2, 0, "2000 1 PUBLISH c")...).([]any)[0].([]any)
	require.Equal(t, int64(0), reply[0])
	s.eval(lua.Release, line, mine, "")
	s.Del("k")
	reply = s.eval(lua.Wait, line, place(mine, 3, 0, "2000 1 PUBLISH c")...).([]any)[0].([]any)
	require.Equal(t, int64(-2), reply[0])
	require.Contains(t, reply[1], "not an integer")
}

func TestMessages(t *testing.T) {
	s := newServer(t)
	sub := s.NewSubscriber()
	defer sub.Close()
	sub.Subscribe("chan-" + mine)
	got := make(chan miniredis.PubsubMessage, 2)
	go func() { // ended by sub.Close; a publisher waits for its readers
		for m := range sub.Messages() {
			got <- m
		}
	}()
	s.put("k", "holder/0", 10*time.Second)
	s.wait(mine, 3)
	s.eval(lua.Release, line, "holder/0", "")
	require.Equal(t, miniredis.PubsubMessage{Channel: "chan-" + mine, Message: "3 0 " + mine}, <-got)
	s.wait(other, 1)
	s.wait(mine, 4) // its own: {2, ...}
	s.eval(lua.Release, line, mine, "chan-"+other)
	select {
	case m := <-got:
		t.Fatalf("a message for nobody: %v", m)
	default:
	}
}

// Who gives up loses his place, or passes on what he was given.
func TestReleaseOfAPlace(t *testing.T) {
	s := newServer(t)
	s.put("k", "holder/0", 10*time.Second)
	s.wait(mine, 1)
	s.wait(other, 1)
	require.Equal(t, int64(-1), s.eval(lua.Release, line, mine, ""))
	require.Equal(t, []any{int64(1), other, int64(1), "0"}, s.eval(lua.Release, line, "holder/0", ""))
	require.Equal(t, []string{"k"}, s.Keys())
}

func TestMostWaiters(t *testing.T) {
	s := newServer(t)
	start := time.Now()
	s.SetTime(start)
	s.put("k", "holder/0", 10*time.Second)
	s.wait("dead/1", 1)
	s.SetTime(start.Add(time.Second))
	s.wait("dead/2", 1)
	full := []any{[]any{int64(-1), "holder/0", int64(10000)}}
	require.Equal(t, full, s.eval(lua.Wait, line, place(mine, 1, 2, "2000 0 PUBLISH c")...))
	require.Equal(t, int64(0), s.eval(lua.Wait, line, place("dead/2", 2, 2, "2000 0 PUBLISH c")...).([]any)[0].([]any)[0],
		"who has a place keeps it")
	s.SetTime(start.Add(2500 * time.Millisecond)) // the first has died
	require.Equal(t, []any{[]any{int64(0), "holder/0", int64(10000), int64(1)}},
		s.eval(lua.Wait, line, place(mine, 1, 2, "2000 0 PUBLISH c")...))
}

func TestReleaseThatKeeps(t *testing.T) {
	s := newServer(t)
	s.put("k", mine, 10*time.Second)
	require.Equal(t, int64(1), s.eval(lua.Release, line, mine, "", 60000))
	s.requireKey("k", mine+".kept", time.Minute)
	require.Equal(t, int64(1), s.eval(lua.Release, line, mine, "", 50000), "a repeated one")
	s.requireKey("k", mine+".kept", time.Minute)
	require.Equal(t, int64(-1), s.eval(lua.Release, line, mine, ""))
	require.Equal(t, []any{int64(-1)}, s.eval(lua.Renew, k, mine, 90000))
}

// C113: any companion may be missing, or be something else.
func TestBrokenCompanions(t *testing.T) {
	for _, broken := range line[1:3] {
		s := newServer(t)
		s.put("k", "holder/0", 10*time.Second)
		s.wait(mine, 1)
		s.Del(broken)
		reply := s.wait(other, 1).([]any)
		require.Equal(t, int64(0), reply[0])
		s.wait(mine, 2)
		require.Len(t, s.eval(lua.Release, line, "holder/0", ""), 4)

		s = newServer(t)
		s.put("k", "holder/0", 10*time.Second)
		s.put(broken, "a string", 0)
		require.Contains(t, s.eval(lua.Wait, line, place(mine, 1, 0, "2000 0 PUBLISH c")...), "WRONGTYPE")
		require.Equal(t, int64(1), s.eval(lua.Release, line, "holder/0", ""))
		s.requireKey(broken, "a string", 0)
	}
}

// Where the queue cannot be changed the call fails, and does not go round in circles.
func TestWaitWhenTheHeadCannotBeTaken(t *testing.T) {
	s := newServer(t)
	s.put("k", "holder/0", 10*time.Second)
	s.wait(mine, 1)
	s.Del("k")
	broken := strings.Replace(lua.Wait, "'ZPOPMIN'", "'ZPOPMINE'", 1)
	reply := s.eval(broken, line, place(other, 1, 0, "2000 0 PUBLISH c")...).([]any)[0].([]any)
	require.Equal(t, int64(-2), reply[0])
}

// With a floor a token is the clock in us, unless the counter is ahead of it.
func TestTokensWithAFloor(t *testing.T) {
	s := newServer(t)
	now := time.Date(2026, 1, 2, 3, 4, 5, 42_000, time.UTC) // the microseconds begin with zeros
	s.SetTime(now)
	const week = 7 * 24 * time.Hour
	first := strconv.FormatInt(now.UnixMicro(), 10)
	second := strconv.FormatInt(now.UnixMicro()+1, 10)
	keys := []string{"k", fence}
	require.Equal(t, []any{int64(1), first}, s.eval(lua.Acquire, keys, mine, 1500, 1))
	s.requireKey(fence, first, week)
	require.Equal(t, []any{int64(2), first, int64(1500)}, s.eval(lua.Acquire, keys, mine, 1500, 1))
	s.eval(lua.Wait, line, place(other, 1, 0, "1500 2 PUBLISH c")...)
	require.Equal(t, []any{int64(1), other, int64(1), second}, s.eval(lua.Release, line, mine, ""))
	s.requireKey(fence, second, week)
	s.Del("k")
	s.Del(fence)
	require.Equal(t, []any{[]any{int64(1), first}}, s.eval(lua.Wait, line, place(mine, 1, 0, "1500 2 PUBLISH c")...))
	s.Del("k")
	s.put(fence, "9223372036854775806", 0)
	require.Equal(t, []any{int64(1), "9223372036854775807"}, s.eval(lua.Acquire, keys, mine, 1500, 1))
	s.Del("k")
	require.Contains(t, s.eval(lua.Acquire, keys, mine, 1500, 1), "overflow")
	require.False(t, s.Exists("k"))
	s.put(fence, second, time.Hour)
	require.Equal(t, []any{int64(1), strconv.FormatInt(now.UnixMicro()+2, 10)}, s.eval(lua.Acquire, keys, mine, 1500))
	s.requireKey(fence, strconv.FormatInt(now.UnixMicro()+2, 10), 0)
}
