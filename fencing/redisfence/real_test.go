package redisfence

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// One script call an operation, and by text once after the server has lost its scripts.
func TestOneCall(t *testing.T) {
	s := redistest.Start(t)
	f := newFence(t, s.Client())
	load := func(f *Fence, t *testing.T, key string, _ fencing.Token, _ ...fencing.Rule) error {
		_, err := f.Load(t.Context(), key)
		return err
	}
	all := append(calls, struct {
		name string
		do   func(f *Fence, t *testing.T, key string, token fencing.Token, rules ...fencing.Rule) error
	}{"load", load})
	for _, op := range all {
		require.NoError(t, op.do(f, t, op.name, 1))
		s.ResetStats()
		for i := range 10 {
			require.NoError(t, op.do(f, t, op.name, fencing.Token(i+1)))
		}
		stats := s.CommandStats()
		require.EqualValues(t, 10, stats["evalsha"], op.name)
		require.Zero(t, stats["eval"], op.name)
		require.Zero(t, stats["hgetall"]+stats["get"], op.name)

		require.NoError(t, s.Admin().ScriptFlush(t.Context()).Err())
		s.ResetStats()
		require.NoError(t, op.do(f, t, op.name, 20))
		require.NoError(t, op.do(f, t, op.name, 20))
		stats = s.CommandStats()
		require.EqualValues(t, 2, stats["evalsha"], op.name)
		require.EqualValues(t, 1, stats["eval"], op.name)
	}
}

// Of many writers at once the accepted tokens never go down.
func TestAcceptedTokensNeverGoDown(t *testing.T) {
	s := redistest.Start(t)
	f := newFence(t, s.Client())
	const base = 1<<53 - 40 // steps of one that doubles cannot tell apart
	var next, group = make(chan int, 400), sync.WaitGroup{}
	for i := range 400 {
		next <- base + i/4
	}
	close(next)
	for range 8 {
		group.Go(func() {
			for token := range next {
				err := f.Append(t.Context(), "log", strconv.Itoa(token)+" ", fencing.Token(token))
				if err != nil && !strings.Contains(err.Error(), "stale") {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	var got []int
	for _, word := range strings.Fields(s.Admin().Get(t.Context(), "log").Val()) {
		n, err := strconv.Atoi(word)
		require.NoError(t, err)
		got = append(got, n)
	}
	require.True(t, slices.IsSorted(got))
	require.NotEmpty(t, got)
	require.Equal(t, base+99, got[len(got)-1])
}

// The old holder is paused between its read and its write, the new one between its
// read and its write too. Only Enter keeps the old write from being lost.
func TestEnterPreventsLostUpdates(t *testing.T) {
	for _, enters := range []bool{false, true} {
		t.Run(fmt.Sprint("enter ", enters), func(t *testing.T) {
			s := redistest.Start(t)
			c := s.Client()
			f := newFence(t, c)
			add := func(token fencing.Token, paused func()) error {
				if enters {
					if err := f.Enter(t.Context(), "n", token); err != nil {
						return err
					}
				}
				n, err := c.Get(t.Context(), "n").Int()
				if err != nil {
					return err
				}
				paused()
				return f.Set(t.Context(), "n", n+1, 0, token)
			}
			require.NoError(t, f.Set(t.Context(), "n", 0, 0, 1))
			var newer error
			readNewer, wroteOlder := make(chan struct{}), make(chan struct{})
			var group sync.WaitGroup
			older := add(2, func() {
				group.Go(func() { newer = add(3, func() { close(readNewer); <-wroteOlder }) })
				<-readNewer
			})
			close(wroteOlder)
			group.Wait()
			require.NoError(t, newer)
			n, err := c.Get(t.Context(), "n").Int()
			require.NoError(t, err)
			require.Equal(t, 1, n)
			if enters {
				require.ErrorIs(t, older, fencing.ErrStale) // it knows
			} else {
				require.NoError(t, older) // its addition is lost, and nobody knows
			}
		})
	}
}

// A write whose reply is lost is not sent again; an Enter is, and succeeds.
func TestLostReplies(t *testing.T) {
	for name, do := range map[string]faultproxy.Action{
		"held back": faultproxy.HoldReply(), "closed": faultproxy.DropReplyAndClose(),
	} {
		t.Run(name, func(t *testing.T) {
			s, p, f := proxied(t)
			lose := func() *faultproxy.Handle {
				p.ResetLog()
				return p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: do})
			}
			for _, op := range writes {
				lose()
				err := op.do(f, t, op.name, 7)
				require.Error(t, err, op.name)
				require.NotErrorIs(t, err, fencing.ErrStale)
				require.Equal(t, 1, p.CountMatch(faultproxy.Script()), op.name)
				require.Equal(t, "7", s.Admin().HGet(t.Context(), "{"+op.name+"}:mark", "token").Val(), "it ran")
			}
			require.Equal(t, "v", s.Admin().Get(t.Context(), "append").Val())

			lose()
			require.NoError(t, f.Enter(t.Context(), "enter", 7))
			require.Equal(t, 2, p.CountMatch(faultproxy.Script()))
			lose()
			err := f.Enter(t.Context(), "once", 7, fencing.Once())
			require.Error(t, err)
			require.NotErrorIs(t, err, fencing.ErrStale, "refused by its own first copy")
			require.Equal(t, 1, p.CountMatch(faultproxy.Script()))
			lose()
			got, err := f.Load(t.Context(), "enter")
			require.NoError(t, err)
			require.EqualValues(t, 7, got.Token)
		})
	}
}

// A write that was on its way while its holder was replaced comes too late.
func TestLateWriteIsRefused(t *testing.T) {
	s, p, f := proxied(t)
	h := p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.HoldRequest()})
	require.Error(t, f.Set(t.Context(), "k", "old", 0, 1))
	require.NoError(t, f.Enter(t.Context(), "k", 2))
	s.ResetStats()
	h.Release()
	redistest.Eventually(t, 5*time.Second, "the late write has come", func() bool {
		return s.CommandStats()["evalsha"] == 1
	})
	require.Zero(t, s.Admin().Exists(t.Context(), "k").Val())
}

func TestCluster(t *testing.T) {
	set := redistest.StartCluster(t, 3)
	c := set.Client()
	f := newFence(t, c)
	keys := []string{"{all}", "a{b}c", "x{", "{}y{z"}
	for i := range 20 {
		keys = append(keys, fmt.Sprint("order:", i), fmt.Sprintf("{user%d}:cart", i))
	}
	for _, key := range keys {
		if _, _, err := f.keys(key); err != nil {
			require.Contains(t, key, "}")
			continue
		}
		for _, op := range writes {
			key := op.name + key
			mark, _, err := f.keys(key)
			require.NoError(t, err)
			require.Equal(t, keyspace.Slot(key), keyspace.Slot(mark))
			require.NoError(t, f.Enter(t.Context(), key, 5), key)
			require.NoError(t, op.do(f, t, key, 5), key)
			require.ErrorIs(t, op.do(f, t, key, 4), fencing.ErrStale)
		}
	}

	// A slot that moves: redirects are followed, also by what is sent once.
	slot := keyspace.Slot("{m}")
	to := (set.SlotOwner(slot) + 1) % 3
	require.NoError(t, f.Append(t.Context(), "{m}1", "a", 5))
	set.BeginMove(slot, to)
	err := f.Append(t.Context(), "{m}2", "a", 5) // not there yet: neither server takes two keys
	require.ErrorContains(t, err, "TRYAGAIN")
	require.NotErrorIs(t, err, fencing.ErrStale)
	require.NoError(t, f.Append(t.Context(), "{m}1", "b", 5))
	set.MoveKeys(slot, to)
	set.FinishMove(slot, to)
	require.NoError(t, f.Append(t.Context(), "{m}1", "c", 5))
	require.NoError(t, f.Append(t.Context(), "{m}2", "a", 5))
	require.ErrorIs(t, f.Append(t.Context(), "{m}1", "d", 4), fencing.ErrStale)
	require.Equal(t, "abc", c.Get(t.Context(), "{m}1").Val())
}

// A user with the rights that the scripts need, and no more.
func TestRights(t *testing.T) {
	s := redistest.Start(t)
	require.NoError(t, s.Admin().Do(t.Context(), "ACL", "SETUSER", "app", "reset", "on", ">x", "~p:*", "~{p:*",
		"+eval", "+evalsha", "+hmget", "+hset", "+set", "+append", "+del").Err())
	c := s.Client(func(o *redis.Options) { o.Username, o.Password = "app", "x" })
	f := newFence(t, c, WithPrefix("p:"))
	for _, op := range calls {
		require.NoError(t, op.do(f, t, op.name, 1))
	}
	_, err := f.Load(t.Context(), "k")
	require.NoError(t, err)
	err = newFence(t, c).Enter(t.Context(), "q", 1)
	require.ErrorContains(t, err, "permission")
	require.NotErrorIs(t, err, fencing.ErrStale)
	// Without the right to mark, nothing is written.
	require.NoError(t, s.Admin().Do(context.Background(), "ACL", "SETUSER", "app", "-hset").Err())
	require.Error(t, f.Set(t.Context(), "unmarked", "v", 0, 1))
	require.Zero(t, s.Admin().Exists(t.Context(), "p:unmarked").Val())
}

// A token is compared as text: as a number it would lose what is above 2^53.
func TestScriptsKeepTokens(t *testing.T) {
	paths, err := filepath.Glob("lua/*.lua")
	require.NoError(t, err)
	require.Len(t, paths, 7)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		require.NotContains(t, string(text), "tonumber", path)
	}
}
