package redisfence

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// edges are tokens that doubles confuse, or that differ in length.
var edges = []fencing.Token{
	1, 2, 9, 10, 11, 99, 100, 1<<53 - 1, 1 << 53, 1<<53 + 1, 1<<53 + 2, 1e18 - 1, 1e18, 1e18 + 1,
	math.MaxInt64 - 1, math.MaxInt64,
}

// Whatever is asked, in any order, the server decides as Check.Admit does.
func TestDecidesAsAdmit(t *testing.T) {
	s := redistest.Start(t)
	f := newFence(t, s.Client())
	rnd := rand.New(rand.NewPCG(3, 5))
	owners := []string{"", "", "a", "b"}
	for i := range 150 {
		key := fmt.Sprint("k", i)
		var seen fencing.Claim
		low := rnd.IntN(len(edges))
		for range 12 {
			// Within few neighbours, so that equal ones and steps of one are frequent.
			c := fencing.Check{Once: rnd.IntN(4) == 0}
			c.Token = edges[min(len(edges)-1, low+rnd.IntN(4))]
			c.Owner = owners[rnd.IntN(len(owners))]
			want, wantErr := c.Admit(key, seen)
			got, err := f.Raise(t.Context(), key, c)
			require.Equal(t, want, got, "%+v after %+v", c, seen)
			require.Equal(t, wantErr, err, "%+v after %+v", c, seen)
			seen = want
			got, err = f.Load(t.Context(), key)
			require.NoError(t, err)
			require.Equal(t, seen, got)
		}
	}
}

// Every operation decides so, and writes only if it is let through.
func TestEveryCallIsGuarded(t *testing.T) {
	s := redistest.Start(t)
	f := newFence(t, s.Client())
	for _, op := range calls {
		for _, at := range []fencing.Token{5, 1 << 53, math.MaxInt64} {
			t.Run(fmt.Sprint(op.name, at), func(t *testing.T) {
				key := fmt.Sprint(op.name, ":", at)
				require.NoError(t, f.Enter(t.Context(), key, at, fencing.By("me")))
				var stale *fencing.StaleError
				refused := func(err error) {
					t.Helper()
					require.ErrorAs(t, err, &stale)
					require.ErrorIs(t, err, fencing.ErrStale)
					require.Equal(t, at, stale.Seen)
					require.Equal(t, key, stale.Resource)
					require.Zero(t, s.Admin().Exists(t.Context(), key).Val())
				}
				refused(op.do(f, t, key, at-1))
				require.Equal(t, at-1, stale.Token)
				refused(op.do(f, t, key, at, fencing.Once()))
				refused(op.do(f, t, key, at, fencing.By("you")))
				require.NoError(t, op.do(f, t, key, at))
				require.NoError(t, op.do(f, t, key, at, fencing.By("me")))
				got, err := f.Load(t.Context(), key)
				require.NoError(t, err)
				require.Equal(t, fencing.Claim{Token: at, Owner: "me"}, got)
			})
		}
	}
}

func TestValues(t *testing.T) {
	s := redistest.Start(t)
	f, c := newFence(t, s.Client()), s.Admin()
	binary := string([]byte{0, 255, '\r', '\n', '}'})
	require.NoError(t, f.Set(t.Context(), "s", []byte(binary), 0, 1))
	require.Equal(t, binary, c.Get(t.Context(), "s").Val())
	require.NoError(t, f.Set(t.Context(), "s", 42, 0, 1))
	require.NoError(t, f.Append(t.Context(), "s", binary, 1))
	require.Equal(t, "42"+binary, c.Get(t.Context(), "s").Val())
	require.NoError(t, f.HSet(t.Context(), "h", "f", 1.5, 1))
	require.NoError(t, f.HSet(t.Context(), "h", "g", "x", 1))
	require.Equal(t, map[string]string{"f": "1.5", "g": "x"}, c.HGetAll(t.Context(), "h").Val())
	require.NoError(t, f.Set(t.Context(), "h", "no hash", 0, 1))

	require.NoError(t, f.Del(t.Context(), "s", 7, fencing.By("me")))
	require.Zero(t, c.Exists(t.Context(), "s").Val())
	require.Equal(t, map[string]string{"token": "7", "owner": "me"}, c.HGetAll(t.Context(), "{s}:mark").Val())
	require.Equal(t, time.Duration(-1), c.PTTL(t.Context(), "{s}:mark").Val())
	require.ErrorIs(t, f.Set(t.Context(), "s", "back", 0, 6), fencing.ErrStale)
	require.Error(t, f.Set(t.Context(), "s", struct{}{}, 0, 7))
	require.NoError(t, f.Set(t.Context(), "s", "again", 0, 7))
}

func TestTTL(t *testing.T) {
	s := redistest.Start(t)
	f := newFence(t, s.Client())
	left := func() time.Duration { return s.Admin().PTTL(t.Context(), "k").Val() }
	set := func(ttl time.Duration) {
		t.Helper()
		require.NoError(t, f.Set(t.Context(), "k", "v", ttl, 1))
	}
	set(time.Hour + 1)
	require.Greater(t, left(), 59*time.Minute)
	require.LessOrEqual(t, left(), time.Hour+time.Millisecond)
	set(redis.KeepTTL)
	require.Greater(t, left(), 59*time.Minute)
	set(0)
	require.Equal(t, time.Duration(-1), left())
	set(redis.KeepTTL)
	require.Equal(t, time.Duration(-1), left())
	for _, bad := range []time.Duration{1, time.Millisecond - 1, -2, -time.Second, math.MinInt64} {
		require.ErrorContains(t, f.Set(t.Context(), "k", "v", bad, 1), "1ms")
	}
	for ttl, want := range map[time.Duration]int64{
		0: 0, redis.KeepTTL: -1, time.Millisecond: 1, time.Millisecond + 1: 2, math.MaxInt64: 9223372036855,
	} {
		got, err := milliseconds(ttl)
		require.NoError(t, err)
		require.Equal(t, want, got, "%v", ttl)
	}
	set(math.MaxInt64)
	require.Greater(t, s.Admin().Do(t.Context(), "PTTL", "k").Val(), int64(9e12))
}

// What a server answers is told with its text, never as a stale token, and the value
// stays.
func TestServerErrors(t *testing.T) {
	s := redistest.Start(t)
	f, c := newFence(t, s.Client()), s.Admin()
	failed := func(err error, text string) {
		t.Helper()
		require.ErrorContains(t, err, text)
		require.NotErrorIs(t, err, fencing.ErrStale)
		require.NotErrorIs(t, err, fencing.ErrNoToken)
	}
	require.NoError(t, c.Set(t.Context(), "s", "v", 0).Err())
	require.NoError(t, c.LPush(t.Context(), "l", "v").Err())
	failed(f.HSet(t.Context(), "s", "f", "v", 3), "WRONGTYPE")
	failed(f.Append(t.Context(), "l", "v", 3), "WRONGTYPE")
	require.Equal(t, "v", c.Get(t.Context(), "s").Val())
	got, err := f.Load(t.Context(), "s")
	require.NoError(t, err)
	require.EqualValues(t, 3, got.Token, "it has entered")

	require.NoError(t, c.Set(t.Context(), "{a}:mark", "v", 0).Err())
	for _, bad := range []string{"x", "-1", "01", "1.5", "1e3", " 1", "9223372036854775808", "10000000000000000000"} {
		require.NoError(t, c.HSet(t.Context(), "{b}:mark", "token", bad).Err())
		_, err = f.Load(t.Context(), "b")
		if bad != "01" {
			failed(err, "holds no token")
		}
		failed(f.Enter(t.Context(), "b", 5), "holds no token")
		require.Equal(t, bad, c.HGet(t.Context(), "{b}:mark", "token").Val())
	}
	for _, op := range calls {
		failed(op.do(f, t, "a", 1), "WRONGTYPE")
	}
	_, err = f.Load(t.Context(), "a")
	failed(err, "WRONGTYPE")

	require.NoError(t, c.ConfigSet(t.Context(), "maxmemory", "1").Err())
	for _, op := range calls {
		failed(op.do(f, t, "full", 1), "OOM")
	}
	require.Zero(t, c.Exists(t.Context(), "full", "{full}:mark").Val())
	s.Kill()
	failed(f.Set(t.Context(), "k", "v", 0, 1), "connect")
}

func TestBadInput(t *testing.T) {
	_, err := New(nil)
	require.Error(t, err)
	_, err = New((*redis.Client)(nil))
	require.Error(t, err)
	m := miniredis.RunT(t)
	c := redis.NewClient(&redis.Options{Addr: m.Addr()})
	defer func() { _ = c.Close() }()
	_, err = New(c, nil)
	require.Error(t, err)

	f := newFence(t, c)
	for _, op := range calls {
		for _, token := range []fencing.Token{0, -1, math.MinInt64} {
			require.ErrorIs(t, op.do(f, t, "k", token), fencing.ErrNoToken)
		}
		for _, key := range []string{"", "a}b", "{}", "{a}:mark", "a{b}c:mark", "{a}:mark{}"} {
			require.ErrorContains(t, op.do(f, t, key, 1), "redisfence: key")
		}
	}
	_, err = f.Raise(t.Context(), "k", fencing.Check{})
	require.ErrorIs(t, err, fencing.ErrNoToken)
	_, err = f.Load(t.Context(), "a}b")
	require.Error(t, err)

	cause := fmt.Errorf("why")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	err = f.Set(ctx, "k", "v", 0, 1)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, cause)
	require.Empty(t, m.Keys())
}

func TestNamesOfMarks(t *testing.T) {
	m := miniredis.RunT(t)
	c := redis.NewClient(&redis.Options{Addr: m.Addr()})
	defer func() { _ = c.Close() }()
	f := newFence(t, c)
	for i, key := range []string{"order:1", "{order:1}", "a{b}c", "a{b}", "exam:mark"} {
		require.NoError(t, f.Set(t.Context(), key, i, 0, fencing.Token(i+1)))
	}
	f = newFence(t, c, WithPrefix("p:"))
	require.NoError(t, f.Set(t.Context(), "order:1", 9, 0, 1))
	require.NoError(t, f.Set(t.Context(), "{x}", 9, 0, 1))
	require.ElementsMatch(t, []string{
		"order:1", "{order:1}:mark", "{order:1}", "{order:1}:mark{}", "a{b}c", "a{b}c:mark", "a{b}", "a{b}:mark",
		"exam:mark", "{exam:mark}:mark", "p:order:1", "{p:order:1}:mark", "p:{x}", "p:{x}:mark",
	}, m.Keys())
}
