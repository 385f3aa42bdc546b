package redlock

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// childLocker returns a child's Locker on the servers that its parent names.
func childLocker(opts ...holdfast.Option) *holdfast.Locker {
	var clients []redis.UniversalClient
	for addr := range strings.SplitSeq(os.Getenv("ADDRS"), ",") {
		clients = append(clients, redis.NewClient(&redis.Options{Addr: addr}))
	}
	l, err := New(clients, append([]holdfast.Option{quiet}, opts...)...)
	check(err)
	return l
}

func check(err error) {
	if err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
}

// addrs is ADDRS for a child, past the proxies or through them.
func (x *fleet) addrs(proxied bool) string {
	var all []string
	for i, s := range x.servers {
		if proxied {
			all = append(all, x.proxies[i].Addr())
		} else {
			all = append(all, s.Addr())
		}
	}
	return "ADDRS=" + strings.Join(all, ",")
}

const pauseTTL = 900 * time.Millisecond

// childHolder holds a lock and, for each line that it reads, says what it believes.
func childHolder() {
	l := childLocker(holdfast.WithTTL(pauseTTL))
	k, err := l.Acquire(context.Background(), "k")
	check(err)
	fmt.Println("held", k.Owner())
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		first := k.Err() // before anything else can have run
		<-k.Context().Done()
		cause := context.Cause(k.Context())
		fmt.Printf("lost=%t cause=%t release=%t\n", errors.Is(first, holdfast.ErrLost), errors.Is(cause, holdfast.ErrLost),
			errors.Is(k.Release(), holdfast.ErrLost))
	}
}

// What needs instances that have been up for long enough to vote.
func TestMatureInstances(t *testing.T) {
	x := startFleet(t, 3, pauseTTL)
	t.Run("forgotten lock", func(t *testing.T) { forgottenLock(t, x.with(t)) })
	t.Run("stopped holder", func(t *testing.T) { stoppedHolder(t, x.with(t), false) })
	t.Run("stopped holder, retaken", func(t *testing.T) { stoppedHolder(t, x.with(t), true) })
}

// C033: an instance that has forgotten the lock gets it back while a majority has it, and
// so does the next one; the lock is held on. One that has restarted gets it when it has
// been up for long enough, and not before: until then it has no vote. A fenced lock stays
// away from that one, which takes only tokens younger than its return; the next is there.
func forgottenLock(t *testing.T, x *fleet) {
	l := x.locker(holdfast.WithTTL(pauseTTL), holdfast.WithRenewEvery(100*time.Millisecond))
	plain, fenced := acquire(t, l, "plain"), acquire(t, l, "fenced", holdfast.WithFencing())
	for i := range 6 {
		x.everywhere(plain)
		x.everywhere(fenced)
		require.NoError(t, x.servers[i%3].Admin().Del(t.Context(), "plain", "fenced", "{fenced}:fence").Err())
	}
	x.everywhere(plain)
	x.everywhere(fenced)
	x.servers[0].Kill()
	renewed(t, 2, plain, fenced)
	x.servers[0].Restart()
	redistest.Eventually(t, patience, "the restarted one has both", func() bool {
		next := acquire(t, l, "next", holdfast.WithFencing())
		defer func() { require.NoError(t, next.Release()) }()
		return slices.Contains(x.having("plain", plain.Owner()), 0) && slices.Contains(x.having("next", next.Owner()), 0)
	})
	info := x.servers[0].Admin().Info(t.Context(), "server").Val()
	up, err := strconv.Atoi(field(info, "uptime_in_seconds"))
	require.NoError(t, err)
	require.GreaterOrEqual(t, up, 2, "seconds, one of which may not be full")
	renewed(t, 1, plain, fenced)
	require.NoError(t, plain.Release())
	require.NoError(t, fenced.Release())
	x.clean(patience)
}

// C033, C034, C057: a holder that was stopped for longer than its validity knows it at its
// first look. It brings no key back, not even to an instance that had lost it before, and
// leaves alone what others have had since.
func stoppedHolder(t *testing.T, x *fleet, retaken bool) {
	p := redistest.Child(t, "holder", x.addrs(false))
	_, owner, held := strings.Cut(p.ReadLine(patience), "held ")
	require.True(t, held)
	redistest.Eventually(t, patience, "it holds all, and has nothing more to send to any", func() bool {
		return len(x.having("k", owner)) == len(x.servers)
	})
	require.NoError(t, x.servers[0].Admin().FlushDB(t.Context()).Err())
	p.Stop()
	l := x.direct(holdfast.WithTTL(pauseTTL))
	k := acquire(t, l, "k") // waits for the child's lease to end
	if !retaken {
		require.NoError(t, k.Release())
		x.clean(patience)
	}
	for _, s := range x.servers {
		s.ResetStats()
	}
	_, err := fmt.Fprintln(p.Stdin, "look")
	require.NoError(t, err)
	p.Cont()
	require.Equal(t, "lost=true cause=true release=true", p.ReadLine(patience))
	if retaken {
		require.NoError(t, k.Err())
		require.NoError(t, k.Release())
		return
	}
	for i, s := range x.servers {
		require.Zero(t, s.CommandStats()["set"], "nothing is brought back: %d", i)
	}
}

// rounds is how often each child takes the lock.
func rounds() int {
	n, err := strconv.Atoi(os.Getenv("ROUNDS"))
	check(err)
	return n
}

// Children compete for two keys. Each reports to a server of its own kind, which is not
// one of those that vote: who is inside, and in which order with which tokens.
func childVoter() {
	l := childLocker(holdfast.WithTTL(pauseTTL), holdfast.WithFencing())
	judge := redis.NewClient(&redis.Options{Addr: os.Getenv("JUDGE")})
	key, ctx := os.Getenv("KEY"), context.Background()
	fmt.Println("ready")
	check(judge.BLPop(ctx, 0, "start:"+os.Getenv("ID")).Err())
	for range rounds() {
		k, err := l.Acquire(ctx, key, holdfast.WithWait(time.Minute))
		check(err)
		inside, err := judge.Incr(ctx, "inside:"+key).Result()
		check(err)
		check(judge.RPush(ctx, "tokens:"+key, fmt.Sprint(int64(k.Token()))).Err())
		left, err := judge.Decr(ctx, "inside:"+key).Result()
		check(err)
		if valid := k.Err() == nil; valid && (inside != 1 || left != 0) {
			check(fmt.Errorf("%d inside, %d left", inside, left))
		} else if !valid {
			check(judge.Incr(ctx, "lost").Err())
		}
		_ = k.Release()
	}
	check(l.Close())
	fmt.Println("done")
}

// C069, C071: sixteen processes compete for two keys on five instances, with votes split
// all the time; then also with one instance killed and one that hangs. There are never
// two inside, tokens grow in the order of holding, and everybody is served.
func TestProcessesCompete(t *testing.T) {
	x := startFleet(t, 5, pauseTTL)
	judge := redistest.Start(t)
	a := judge.Admin()
	for _, faulty := range []bool{false, true} {
		rounds := 4
		if faulty {
			rounds = 1
			x.servers[0].Kill()
			x.proxies[1].Hang()
		}
		require.NoError(t, a.FlushAll(t.Context()).Err())
		var children []*redistest.Process
		for i := range 16 {
			children = append(children, redistest.Child(t, "voter", x.addrs(true), "JUDGE="+judge.Addr(),
				fmt.Sprint("KEY=k", i%2), fmt.Sprint("ID=", i), fmt.Sprint("ROUNDS=", rounds)))
		}
		for _, p := range children {
			require.Equal(t, "ready", p.ReadLine(patience))
		}
		start := time.Now()
		for i := range children {
			require.NoError(t, a.RPush(t.Context(), fmt.Sprint("start:", i), "go").Err())
		}
		for _, p := range children {
			require.Equal(t, "done", p.ReadLine(2*time.Minute))
			require.Zero(t, p.Wait())
		}
		lost, _ := a.Get(t.Context(), "lost").Int()
		for _, key := range []string{"k0", "k1"} {
			tokens := a.LRange(t.Context(), "tokens:"+key, 0, -1).Val()
			require.Len(t, tokens, 8*rounds)
			for i := 1; i < len(tokens) && lost == 0; i++ { // 16 digits each: texts compare as numbers
				require.Greater(t, tokens[i], tokens[i-1], key)
			}
		}
		t.Logf("%d lost, %v", lost, time.Since(start))
	}
	x.proxies[1].Heal()
	x.servers[0].Restart()
	x.clean(patience)
}

// What others have on a minority is neither overwritten nor deleted, by renewals, healing,
// Extend or release, whether it was there before or came during the hold.
func TestOthersOnMinority(t *testing.T) {
	x := startFleet(t, 5, 0)
	for _, opts := range [][]holdfast.Option{nil, {holdfast.WithFencing()}} {
		l := x.locker(lasting(opts...)...)
		theirs := func(i int) {
			require.NoError(t, x.servers[i].Admin().Set(t.Context(), "k", "x/1", time.Minute).Err())
		}
		theirs(0)
		k := acquire(t, l, "k")
		redistest.Eventually(t, patience, "four have it", func() bool { return len(x.having("k", k.Owner())) == 4 })
		theirs(1)
		renewed(t, 5, k)
		require.NoError(t, k.Extend(t.Context(), 20*time.Second))
		renewed(t, 2, k)
		require.NoError(t, k.Release())
		require.Equal(t, []int{0, 1}, x.having("k", "x/1"))
		for _, s := range x.servers[:2] {
			require.NoError(t, s.Admin().Del(t.Context(), "k").Err())
		}
		x.clean(patience)
	}
}

// C050: whatever has become of an earlier lock on the key, the next one is renewed.
func TestNextLockIsRenewed(t *testing.T) {
	x := startFleet(t, 3, 0)
	l := x.locker(fleeting(holdfast.WithRenewEvery(100 * time.Millisecond))...)
	for _, cut := range []bool{true, false} {
		k := acquire(t, l, "k")
		for i, p := range x.proxies {
			if cut {
				p.Down()
			} else {
				require.NoError(t, x.servers[i].Admin().Del(t.Context(), "k").Err())
			}
		}
		<-k.Context().Done()
		require.ErrorIs(t, k.Err(), holdfast.ErrLost)
		for _, p := range x.proxies {
			if cut {
				require.NoError(t, p.Up())
			}
		}
		next := acquire(t, l, "k")
		renewed(t, 3, next)
		require.ErrorIs(t, k.Release(), holdfast.ErrLost)
		renewed(t, 1, next)
		require.NoError(t, next.Release())
	}
	x.clean(patience)
}

// C053, C062: thousands of locks are held by one Locker, with every instance 20 ms away and
// the processor busy. None is lost, each renewal sets the full lease, and the commands are
// few: many locks share one.
func TestThousandsOfLocks(t *testing.T) {
	const locks, ttl = 1200, 3 * time.Second
	x := startFleet(t, 5, 0)
	l := x.locker(WithDurableInstances(), holdfast.WithTTL(ttl))
	for _, p := range x.proxies {
		p.Slow(20 * time.Millisecond)
	}
	all := make([]*holdfast.Lock, locks)
	var wg sync.WaitGroup
	for w := range 40 {
		wg.Go(func() { // ends after its share
			for i := w; i < locks; i += 40 {
				k, err := l.Acquire(context.Background(), fmt.Sprint("k", i))
				if err != nil {
					t.Error(err)
				}
				all[i] = k
			}
		})
	}
	wg.Wait()
	for _, s := range x.servers {
		s.ResetStats()
	}
	start := time.Now()
	renewed(t, 2, all[0], all[locks-1])
	spent := time.Since(start)
	for i, k := range all {
		require.NoError(t, k.Err(), i)
	}
	for i, s := range x.servers {
		// A call has up to 500 locks, and locks that were taken at different moments share one.
		n := s.CommandStats()["evalsha"]
		require.LessOrEqual(t, n, int64(20+60*spent/(ttl/3)), "calls to %d in %v", i, spent)
	}
	for _, p := range x.proxies {
		p.Slow(0)
	}
	within(t, patience, "Close", func() { require.NoError(t, l.Close()) })
	x.clean(patience)
}

// A lock that is kept for a while after its release (WithMinHold) is over for its holder
// at once, nobody else gets it before, and then somebody does. So it is with a minority
// that fails, on which nothing is left either.
func TestMinHold(t *testing.T) {
	x := startFleet(t, 5, 0)
	const keep = time.Second
	l, other := x.locker(lasting()...), x.direct(lasting()...)
	for _, fenced := range []bool{false, true} {
		opts := []holdfast.Option{holdfast.WithMinHold(keep)}
		if fenced {
			opts = append(opts, holdfast.WithFencing())
		}
		before := time.Now()
		k := acquire(t, l, "k", opts...)
		granted := time.Now()
		x.everywhere(k)
		x.proxies[0].Hang()
		x.proxies[1].DropReplies()
		require.NoError(t, k.Release())
		require.ErrorIs(t, k.Err(), holdfast.ErrReleased)
		require.ErrorIs(t, k.Release(), holdfast.ErrNotHeld)
		_, err := other.TryAcquire(t.Context(), "k")
		if time.Since(granted) < keep {
			require.ErrorIs(t, err, holdfast.ErrNotAcquired)
		}
		x.proxies[0].Heal()
		x.proxies[1].Heal()
		got := acquire(t, other, "k")
		require.GreaterOrEqual(t, time.Since(before), keep-20*time.Millisecond) // clocks may differ
		require.NoError(t, got.Release())
		x.clean(patience)
	}
}

// C086, C089: how long a wait lasts has nothing to do with the TTL, and it is cheap: of all
// who wait in one Locker one asks, with pauses.
func TestWaitingIsCheap(t *testing.T) {
	x := startFleet(t, 3, 0)
	holder, l := x.direct(fleeting()...), x.locker(fleeting(holdfast.WithTTL(500*time.Millisecond))...)
	k := acquire(t, holder, "k")
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() { // ends when all before it have had the lock
			if err := l.Do(context.Background(), "k", func(context.Context) error { return nil }); err != nil {
				t.Error(err)
			}
		})
	}
	<-time.After(200 * time.Millisecond) // pauses grow at first
	for _, p := range x.proxies {
		p.ResetLog()
	}
	start := time.Now()
	<-time.After(1500 * time.Millisecond)
	for i, p := range x.proxies { // each attempt is two commands, if it has to give something back
		require.LessOrEqual(t, p.CountMatch(faultproxy.Any()), int(2*20*time.Since(start)/time.Second), i)
	}
	require.NoError(t, k.Err())
	require.NoError(t, k.Release())
	wg.Wait()
	x.clean(patience)
}
