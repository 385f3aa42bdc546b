package holdfast

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/redistest"
)

func TestInspect(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client(), WithPrefix("p:"), WithHolder("web-1"), WithFencing())
	info, err := l.Inspect(t.Context(), "k")
	require.NoError(t, err)
	require.True(t, info.Free())
	require.Equal(t, LockInfo{Key: "k", TTL: -1}, info)

	k := hold(t, l, "k")
	waiter := newTestLocker(t, s.Client(), WithPrefix("p:"), WithHolder("web-2"))
	odd := "a b:c,d{1}%+"
	outer := hold(t, waiter, odd)
	results := make(chan *Lock, 2)
	for i, ctx := range []context.Context{outer.Context(), t.Context()} {
		go func() { // ends with its lock
			k, err := waiter.Acquire(context.WithoutCancel(ctx), "k")
			if err != nil {
				t.Error(err)
			}
			results <- k
		}()
		redistest.Eventually(t, 5*time.Second, "it waits", func() bool {
			info, err = l.Inspect(t.Context(), "k")
			return err == nil && len(info.Waiters) == i+1
		})
	}
	require.Equal(t, k.Owner(), info.Owner)
	require.Equal(t, "web-1", info.Holder)
	require.InDelta(t, 30*time.Second, info.TTL, float64(20*time.Second))
	require.EqualValues(t, 1, info.Token)
	for _, w := range info.Waiters {
		require.Equal(t, "web-2", w.Holder)
		require.Less(t, w.Waits, time.Minute)
	}
	require.GreaterOrEqual(t, info.Waiters[0].Waits, info.Waiters[1].Waits, "in order")
	require.Equal(t, []string{"p:" + odd}, info.Waiters[0].Holds)
	require.Empty(t, info.Waiters[1].Holds)
	require.NoError(t, k.Release())
	first := <-results
	require.Equal(t, info.Waiters[0].Owner, first.Owner(), "the first in the list is the next")
	require.NoError(t, first.Release())
	require.NoError(t, (<-results).Release())
	require.NoError(t, outer.Release())

	for _, key := range []string{"", strings.Repeat("x", maxKey)} {
		_, err = l.Inspect(t.Context(), key)
		require.ErrorIs(t, err, ErrInvalid)
	}
	_, err = newTestLocker(t, s.Client()).Inspect(t.Context(), "x}y") // without companions
	require.NoError(t, err)
	require.NoError(t, s.Admin().LPush(t.Context(), "p:list", "x").Err())
	_, err = l.Inspect(t.Context(), "list")
	require.ErrorIs(t, err, ErrUnavailable)
	stranger := newTestLocker(t, s.Client(func(o *redis.Options) { o.Username, o.Password = "nobody", "wrong" }))
	_, err = stranger.Inspect(t.Context(), "k")
	require.ErrorIs(t, err, ErrUnavailable, "and not free")
	require.ErrorContains(t, err, "WRONGPASS")
	for _, err := range stranger.List(t.Context(), "*") {
		require.ErrorIs(t, err, ErrUnavailable)
	}
	s.Kill()
	_, err = l.Inspect(t.Context(), "k")
	require.ErrorIs(t, err, ErrUnavailable)
}

// keysOf collects the keys of a List.
func keysOf(t *testing.T, l *Locker, pattern string) (keys []string) {
	t.Helper()
	for info, err := range l.List(t.Context(), pattern) {
		require.NoError(t, err)
		require.NotEmpty(t, info.Owner)
		require.Positive(t, info.TTL)
		keys = append(keys, info.Key)
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

func TestList(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client(), WithPrefix("[p]*:"), WithHolder("h"), WithFencing())
	var want []string
	for i := range 700 { // more than a page
		key := fmt.Sprint("order:", i)
		hold(t, l, key)
		want = append(want, key)
	}
	slices.Sort(want)
	hold(t, l, "other")
	admin := s.Admin()
	require.NoError(t, admin.Set(t.Context(), "[p]*:order:data", "a value", 0).Err())
	require.NoError(t, admin.LPush(t.Context(), "[p]*:order:list", "x").Err())
	require.NoError(t, admin.Set(t.Context(), "p:order:1", "h/0b6d0d9e-1111-4222-8333-0123456789ab", 0).Err())
	s.ResetStats()
	require.Equal(t, want, keysOf(t, l, "order:*"))
	require.Equal(t, []string{"other"}, keysOf(t, l, "o[t]her"))
	require.Empty(t, keysOf(t, l, "none*"))
	require.Zero(t, s.CommandStats()["keys"])
	n := 0
	for range l.List(t.Context(), "*") {
		if n++; n == 3 {
			break
		}
	}
	require.Equal(t, 3, n)
	last := func(ctx context.Context, l *Locker, pattern string) (err error) {
		for _, err = range l.List(ctx, pattern) {
		}
		return err
	}
	require.ErrorIs(t, last(t.Context(), l, ""), ErrInvalid)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, last(ended, l, "*"), context.Canceled)
}

func TestInspectOnClusterAndRing(t *testing.T) {
	set := redistest.StartCluster(t, 3)
	a, b := redistest.Start(t), redistest.Start(t)
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": a.Addr(), "b": b.Addr()}})
	t.Cleanup(func() { _ = ring.Close() })
	for name, client := range map[string]redis.UniversalClient{"cluster": set.Client(), "ring": ring} {
		t.Run(name, func(t *testing.T) {
			l := newTestLocker(t, client, WithTTL(5*time.Second))
			var want []string
			for i := range 20 {
				key := fmt.Sprint("k", i)
				want = append(want, key)
				hold(t, l, key)
			}
			slices.Sort(want)
			require.Equal(t, want, keysOf(t, l, "k*"))
			k := hold(t, l, "broken")
			info, err := l.Inspect(t.Context(), "broken")
			require.NoError(t, err)
			require.Equal(t, k.Owner(), info.Owner)
			other := newTestLocker(t, client, WithTTL(5*time.Second))
			require.NoError(t, other.Break(t.Context(), "broken", info.Owner))
			<-k.Context().Done() // with its next renewal, at the latest
			require.ErrorIs(t, k.Err(), ErrLost)
		})
	}
}

// Who breaks a lock gives it to the first who waits, also in the same process, and its holder
// hears of it at once if it listens, else with its next renewal. Another one's lock is not touched.
func TestBreak(t *testing.T) {
	s := redistest.Start(t)
	holder := newTestLocker(t, s.Client(), WithHolder("stuck"))
	operator := newTestLocker(t, s.Client(), WithTTL(time.Hour))
	for _, waits := range []bool{true, false} {
		opts := []Option{WithTTL(time.Hour)}
		if !waits {
			opts = []Option{WithRenewEvery(500 * time.Millisecond)}
		}
		k := hold(t, holder, "k", opts...)
		require.ErrorIs(t, operator.Break(t.Context(), "k", "stuck"), ErrNotHeld)
		require.ErrorIs(t, operator.Break(t.Context(), "k", k.Owner()+"x"), ErrNotHeld)
		require.NoError(t, k.Err())
		next := make(chan *Lock, 1)
		go func() { // ends with its lock
			got, err := operator.Acquire(context.WithoutCancel(t.Context()), "k")
			if err != nil {
				t.Error(err)
			}
			next <- got
		}()
		redistest.Eventually(t, 5*time.Second, "somebody waits", func() bool {
			info, err := operator.Inspect(t.Context(), "k")
			return err == nil && len(info.Waiters) == 1
		})
		if waits { // for something else, and so listens
			hold(t, operator, "another")
			go func() { _, _ = holder.Acquire(t.Context(), "another") }() // ends with the test
			redistest.Eventually(t, 5*time.Second, "it listens", func() bool {
				return len(s.Admin().PubSubChannels(t.Context(), channelPrefix+"*").Val()) == 2
			})
		}
		require.NoError(t, operator.Break(t.Context(), "k", k.Owner()))
		<-k.Context().Done()
		var lost *LostError
		require.ErrorAs(t, k.Err(), &lost)
		if waits {
			require.Equal(t, LostBroken, lost.Reason)
		}
		require.ErrorIs(t, k.Release(), ErrLost)
		got := <-next
		require.NoError(t, got.Err())
		require.ErrorIs(t, operator.Break(t.Context(), "k", k.Owner()), ErrNotHeld)
		require.NoError(t, got.Release())
	}
	own := hold(t, operator, "own")
	require.NoError(t, operator.Break(t.Context(), "own", own.Owner()))
	<-own.Context().Done()
	require.ErrorIs(t, operator.Break(t.Context(), "own", ""), ErrInvalid)
	require.ErrorIs(t, operator.Break(t.Context(), "free", own.Owner()), ErrNotHeld)
}

// What WithInspect and WithLabels tell is there for as long as the lock, also after a hand-over and
// renewals, and is not taken for that of the next holder.
func TestLabels(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client(), WithTTL(3*time.Second), WithRenewEvery(300*time.Millisecond))
	labels := map[string]string{"request": "17"}
	told := func(k *Lock, want map[string]string) {
		t.Helper()
		redistest.Eventually(t, 5*time.Second, "it is told", func() bool {
			info, err := l.Inspect(t.Context(), "k")
			return err == nil && info.Owner == k.Owner() && info.PID == os.Getpid() && info.Host != "" &&
				time.Since(info.Since) < time.Minute && maps.Equal(info.Labels, want)
		})
	}
	k := hold(t, l, "k", WithLabels(labels))
	labels["request"] = "18"
	want := map[string]string{"request": "17"}
	told(k, want)
	require.NoError(t, s.Admin().Del(t.Context(), "{k}:about").Err())
	told(k, want) // with a renewal
	ttl := s.Admin().PTTL(t.Context(), "{k}:about").Val()
	require.Positive(t, ttl)
	require.LessOrEqual(t, ttl, 3*time.Second)
	next := make(chan *Lock, 1)
	go func() { // ends with its lock
		k, err := l.Acquire(context.WithoutCancel(t.Context()), "k", WithInspect())
		if err != nil {
			t.Error(err)
		}
		next <- k
	}()
	redistest.Eventually(t, 5*time.Second, "it waits", func() bool {
		info, err := l.Inspect(t.Context(), "k")
		return err == nil && len(info.Waiters) == 1
	})
	require.NoError(t, k.Release())
	k = <-next
	told(k, nil)
	require.NoError(t, k.Release())
	k = hold(t, l, "k")
	info, err := l.Inspect(t.Context(), "k")
	require.NoError(t, err)
	require.Zero(t, info.PID, "it tells nothing")
	require.NoError(t, k.Release())
	_, err = l.TryAcquire(t.Context(), "k", WithLabels(map[string]string{"x": strings.Repeat("y", mostLabels)}))
	require.ErrorIs(t, err, ErrInvalid)
}

func TestInspectOtherStores(t *testing.T) {
	l, err := NewWithStore(&fakeStore{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	_, err = l.Inspect(t.Context(), "k")
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorIs(t, l.Break(t.Context(), "k", "o"), ErrInvalid)
	for _, err := range l.List(t.Context(), "*") {
		require.ErrorIs(t, err, ErrInvalid)
	}
}
