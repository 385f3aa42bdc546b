package holdfast

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/leaktest"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// outcome is what came of an Acquire on a goroutine of its own.
type outcome struct {
	k   *Lock
	err error
}

// acquiring starts an Acquire.
func acquiring(ctx context.Context, l *Locker, key string, opts ...Option) <-chan outcome {
	got := make(chan outcome, 1)
	go func() { // ends with ctx, at the latest
		k, err := l.Acquire(ctx, key, opts...)
		got <- outcome{k, err}
	}()
	return got
}

// acquiringMany starts n of them, of several Lockers in turn, and returns when all have
// a place, which they have got in that order.
func acquiringMany(t *testing.T, c redis.Cmdable, n int, key string, lockers ...*Locker) (waiting []<-chan outcome) {
	t.Helper()
	for i := range n {
		waiting = append(waiting, acquiring(t.Context(), lockers[i%len(lockers)], key))
		queued(t, c, key, int64(i+1))
	}
	return waiting
}

// queued waits until n are in the queue of key.
func queued(t *testing.T, c redis.Cmdable, key string, n int64) {
	t.Helper()
	names, ok := keyspace.CompanionsOf(key)
	require.True(t, ok)
	redistest.Eventually(t, 20*time.Second, fmt.Sprintf("%d wait for %s", n, key), func() bool {
		return c.ZCard(context.Background(), names.Queue).Val() == n
	})
}

// granted returns the lock that an Acquire has got within a time that is far more
// than it needs.
func granted(t *testing.T, got <-chan outcome, within time.Duration) *Lock {
	t.Helper()
	select {
	case o := <-got:
		require.NoError(t, o.err)
		return o.k
	case <-time.After(within):
		require.FailNow(t, "still waiting", "after %v", within)
		return nil
	}
}

// channels returns those of ours that a server has subscribers for.
func channels(c *redis.Client) []string {
	ctx := context.Background()
	return append(c.PubSubChannels(ctx, channelPrefix+"*").Val(), c.PubSubShardChannels(ctx, channelPrefix+"*").Val()...)
}

// tunedIn waits until a server has subscribers on n channels of ours.
func tunedIn(t *testing.T, c *redis.Client, n int) {
	t.Helper()
	redistest.Eventually(t, 20*time.Second, fmt.Sprintf("%d channels", n), func() bool { return len(channels(c)) == n })
}

// idle waits until a Locker has no goroutine.
func idle(t *testing.T, l *Locker) {
	t.Helper()
	redistest.Eventually(t, 10*time.Second, "the Locker is idle", func() bool {
		return l.group.Running() == 0
	})
}

// others returns the commands that ran beside those named.
func others(stats map[string]int64, but ...string) (names []string) {
	for name := range stats {
		known := false
		for _, b := range append(but, "config|resetstat", "info") {
			known = known || name == b
		}
		if !known {
			names = append(names, name)
		}
	}
	return names
}

// C105: what nobody waits for costs two commands, a look at the queue inside the second
// one, and no message or subscription.
func TestLineCostsNothing(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client())
	warm(t, l)
	s.ResetStats()
	for i := range 1000 {
		require.NoError(t, mustAcquire(t, l, fmt.Sprint("k", i%10)).Release())
	}
	stats := s.CommandStats()
	for _, name := range []string{"set", "evalsha", "get", "exists", "del"} {
		require.EqualValues(t, 1000, stats[name], name)
	}
	require.Empty(t, others(stats, "set", "evalsha", "get", "exists", "del"))
	require.Empty(t, channels(s.Admin()))
}

// A hand-over costs the same however many wait, and one message if it goes to another
// Locker.
func TestLineHandOverCost(t *testing.T) {
	for _, n := range []int{2, 20, 200} {
		s := redistest.Start(t)
		lockers := []*Locker{newTestLocker(t, s.Client()), newTestLocker(t, s.Client())}
		first := mustAcquire(t, lockers[1], "k")
		waiting := acquiringMany(t, s.Admin(), n, "k", lockers...)
		tunedIn(t, s.Admin(), 2)
		done := make(chan error, n)
		for _, got := range waiting {
			go func() { o := <-got; done <- errors.Join(o.err, o.k.Release()) }() // ends when it was served
		}
		s.ResetStats()
		start := time.Now()
		require.NoError(t, first.Release())
		for range n {
			require.NoError(t, <-done)
		}
		rounds := int64(time.Since(start)/(maxClaim/3)) + 2
		stats := s.CommandStats()
		calls := rounds * 2 * int64(n/maxLineCalls+1)
		require.EqualValues(t, n, stats["publish"])
		require.LessOrEqual(t, stats["evalsha"], int64(n)+1+4*calls, "%d waiters", n)
		require.LessOrEqual(t, stats["exists"], int64(n)+1, "%d waiters", n)
		require.LessOrEqual(t, stats["hget"]+stats["hdel"], 2*int64(n)+4*calls, "%d waiters", n)
		require.Zero(t, stats["subscribe"])
		nothingLeft(t, s, 5*time.Second)
	}
}

// C089: the calls of many waiters, for whatever keys, share script calls: their number
// grows with time alone.
func TestLineCallsAreShared(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client())
	ctx, cancel := context.WithCancel(t.Context())
	var waiting []<-chan outcome
	for i := range 300 {
		key := fmt.Sprint("k", i)
		require.NoError(t, s.Admin().Set(t.Context(), key, "x/1", time.Hour).Err())
		waiting = append(waiting, acquiring(ctx, l, key))
	}
	for i := range waiting {
		queued(t, s.Admin(), fmt.Sprint("k", i), 1)
	}
	tunedIn(t, s.Admin(), 1)
	s.ResetStats()
	start := time.Now()
	redistest.Eventually(t, 30*time.Second, "each of them has called three times", func() bool { return s.CommandStats()["hset"] >= 900 })
	stats := s.CommandStats()
	rounds := int64(time.Since(start)/(maxClaim/3)) + 2
	require.LessOrEqual(t, stats["evalsha"], 2*3*rounds)
	require.LessOrEqual(t, stats["hset"], 400*rounds)
	cancel()
	for _, got := range waiting {
		require.ErrorIs(t, (<-got).err, context.Canceled)
	}
	redistest.Eventually(t, 10*time.Second, "all places are given up", func() bool { return s.Admin().DBSize(t.Context()).Val() == 300 })
}

// C061, C103: when nobody waits any more there is no subscription, no connection for one
// and no goroutine, however many keys were waited for; one connection serves them all.
func TestLineSubscriptionsEnd(t *testing.T) {
	leaktest.Check(t)
	s := redistest.Start(t)
	c := redis.NewClient(&redis.Options{Addr: s.Addr()})
	l := newTestLocker(t, c)
	defer func() { require.NoError(t, l.Close()); require.NoError(t, c.Close()) }()
	const keys = 200
	listeners := func() int {
		return strings.Count(s.Admin().ClientList(context.Background()).Val(), "sub=1")
	}
	for range 2 {
		var wg sync.WaitGroup
		for i := range keys {
			k := mustAcquire(t, l, fmt.Sprint("k", i))
			got := acquiring(t.Context(), l, k.Key())
			wg.Go(func() {
				if o := <-got; errors.Join(o.err, o.k.Release()) != nil {
					t.Error(o.err)
				}
			})
			if i == keys-1 {
				queued(t, s.Admin(), k.Key(), 1)
			}
		}
		tunedIn(t, s.Admin(), 1)
		require.Equal(t, 1, listeners())
		for _, k := range lockedBy(l) {
			require.NoError(t, k.Release())
		}
		wg.Wait()
		tunedIn(t, s.Admin(), 0)
		redistest.Eventually(t, 5*time.Second, "no connection listens", func() bool { return listeners() == 0 })
		idle(t, l)
		nothingLeft(t, s, 5*time.Second)
	}
}

// lockedBy returns the locks that l holds.
func lockedBy(l *Locker) []*Lock {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.watch.all()
}

// C019: a waiter that is cancelled at the moment of the release has the lock, or an
// error and nothing; 2,000 times.
func TestLineCancelledAtRelease(t *testing.T) {
	s := redistest.Start(t)
	a, b := newTestLocker(t, s.Client()), newTestLocker(t, s.Client())
	var won atomic.Int32
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			for i := range 500 {
				if !cancelledAtRelease(t, s, a, b, fmt.Sprint("k", worker, i%20), i, &won) {
					return
				}
			}
		})
	}
	wg.Wait()
	require.Positive(t, won.Load())
	require.Less(t, won.Load(), int32(2000))
	nothingLeft(t, s, 10*time.Second)
}

func cancelledAtRelease(t *testing.T, s *redistest.Server, a, b *Locker, key string, i int, won *atomic.Int32) bool {
	k, err := a.Acquire(t.Context(), key, WithWait(20*time.Second)) // one given up before may have had it
	if !assert.NoError(t, err) {
		return false
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	got := acquiring(ctx, b, key)
	for n := 0; i%4 > 0 && n < 10_000 && s.Admin().ZCard(t.Context(), "{"+key+"}:queue").Val() == 0; n++ {
	}
	timer := time.AfterFunc(rand.N(time.Millisecond), cancel)
	defer timer.Stop()
	ok := assert.NoError(t, k.Release())
	o := <-got
	if o.err != nil {
		return ok && assert.Nil(t, o.k) && assert.ErrorIs(t, o.err, context.Canceled)
	}
	won.Add(1)
	// The end of its context does not end the hold of the key.
	return ok && assert.Equal(t, o.k.Owner(), s.Admin().Get(t.Context(), key).Val()) && assert.NoError(t, o.k.Release())
}

// childLine waits for a lock whenever it reads a line, says when it has it, and gives it
// back at the next line.
func childLine() {
	l, err := New(redis.NewClient(&redis.Options{Addr: os.Getenv("ADDR")}), WithLogger(slog.New(slog.DiscardHandler)))
	check(err)
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		k, err := l.Acquire(context.Background(), "k")
		check(err)
		fmt.Println("held", k.Owner())
		in.Scan()
		check(k.Release())
		fmt.Println("released")
	}
}

// childCrowd has fifty waiters.
func childCrowd() {
	l, err := New(redis.NewClient(&redis.Options{Addr: os.Getenv("ADDR")}), WithLogger(slog.New(slog.DiscardHandler)))
	check(err)
	for range 50 {
		go func() { // ends with the process
			_, err := l.Acquire(context.Background(), "k")
			check(err)
		}()
	}
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
}

// Waiters of several processes get the lock in the order in which they came.
func TestLineOverProcesses(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client())
	k := mustAcquire(t, l, "k")
	var children []*redistest.Process
	say := func(p *redistest.Process) {
		_, err := fmt.Fprintln(p.Stdin, "go")
		require.NoError(t, err)
	}
	for range 3 {
		children = append(children, redistest.Child(t, "line-one", "ADDR="+s.Addr()))
	}
	for round := range 2 {
		for i, p := range children {
			say(p)
			queued(t, s.Admin(), "k", int64(i+1))
		}
		mine := acquiring(t.Context(), l, "k")
		queued(t, s.Admin(), "k", int64(len(children)+1))
		require.NoError(t, k.Release())
		for _, p := range children {
			require.Equal(t, "held "+s.Admin().Get(t.Context(), "k").Val(), p.ReadLine(20*time.Second), "round %d", round)
			say(p)
			require.Equal(t, "released", p.ReadLine(20*time.Second))
		}
		k = granted(t, mine, 20*time.Second)
	}
	require.NoError(t, k.Release())
	nothingLeft(t, s, 5*time.Second)
}

// C109, C111: a holder that is killed, and fifty waiters that are killed with it, cost
// one who waits no more than the lease and one grace time.
func TestLineKilledProcesses(t *testing.T) {
	s := redistest.Start(t)
	holder := redistest.Child(t, "holder", "ADDR="+s.Addr(), "KEY=k")
	require.Contains(t, holder.ReadLine(20*time.Second), "held")
	crowd := redistest.Child(t, "line-crowd", "ADDR="+s.Addr())
	queued(t, s.Admin(), "k", 50)
	got := acquiring(t.Context(), newTestLocker(t, s.Client()), "k", WithWait(time.Minute))
	queued(t, s.Admin(), "k", 51)
	crowd.Kill()
	holder.Kill()
	k := granted(t, got, 20*time.Second) // 5 s and some more
	require.NoError(t, k.Release())
	nothingLeft(t, s, 10*time.Second)
}
