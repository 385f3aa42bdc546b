package redlock

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// taking matches the requests for the lock of key, on instances that vote at once.
func taking(key string) func(cmd []string) bool {
	s := newScripts(0, true)
	return func(cmd []string) bool {
		return len(cmd) > 4 && cmd[3] == key && (cmd[1] == s.take.Digest() || cmd[1] == s.accept.Digest())
	}
}

// giving matches the requests that give the lock of key up.
func giving(key string) func(cmd []string) bool {
	s := newScripts(0, true)
	return func(cmd []string) bool { return len(cmd) > 4 && cmd[3] == key && cmd[1] == s.giveUp.Digest() }
}

// warm makes all instances known to a Locker, and its scripts to them.
func (x *fleet) warm(l *holdfast.Locker) {
	x.t.Helper()
	k := acquire(x.t, l, "warm")
	x.everywhere(k)
	require.NoError(x.t, k.Release())
	x.clean(patience)
}

// theirs puts somebody's lock of "k" on these servers, and nothing on the others.
func (x *fleet) theirs(indexes ...int) {
	for i, s := range x.servers {
		require.NoError(x.t, s.Admin().Del(context.Background(), "k").Err())
		if slices.Contains(indexes, i) {
			require.NoError(x.t, s.Admin().Set(context.Background(), "k", "x/1", 0).Err())
		}
	}
}

// inject puts one rule into force on some proxies.
func inject(proxies []*faultproxy.Proxy, r faultproxy.Rule) (handles []*faultproxy.Handle) {
	for _, p := range proxies {
		handles = append(handles, p.Inject(r))
	}
	return handles
}

func await(t testing.TB, handles []*faultproxy.Handle) {
	t.Helper()
	for _, h := range handles {
		require.NoError(t, h.WaitTimeout(patience))
	}
}

func lift(handles []*faultproxy.Handle) {
	for _, h := range handles {
		h.Remove()
		h.Release()
	}
}

// Acquire returns with the majority, whatever becomes of its requests at the other two: held
// on their way, repeated, or answered late or never. When they run after the release that
// was sent for them, nothing stays on any instance.
func TestRequestOutlivesLock(t *testing.T) {
	x := startFleet(t, 5, 0)
	lockers := []*holdfast.Locker{x.locker(lasting()...), x.locker(lasting(holdfast.WithFencing())...)}
	for name, do := range map[string]faultproxy.Action{
		"held": faultproxy.HoldRequest(), "unanswered": faultproxy.HoldReply(),
		"lost": faultproxy.DropReplyAndClose(), "repeated": faultproxy.Duplicate(),
	} {
		for tokens, l := range lockers {
			t.Run(fmt.Sprint(name, tokens), func(t *testing.T) {
				x, key := x.with(t), fmt.Sprint(name, tokens)
				x.warm(l)
				faults := inject(x.proxies[3:], faultproxy.Rule{Match: taking(key), Times: 1, Do: do})
				given := inject(x.proxies[3:], faultproxy.Rule{Match: giving(key), Times: 1, Do: faultproxy.Delay(0)})
				k := acquire(t, l, key)
				await(t, faults)
				require.NoError(t, k.Release())
				await(t, given) // it has run there
				sets := x.servers[4].CommandStats()["set"]
				lift(faults)
				if name == "held" && tokens == 0 {
					redistest.Eventually(t, patience, "the late request has run", func() bool {
						return x.servers[4].CommandStats()["set"] > sets
					})
				}
				x.clean(patience)
			})
		}
	}
	x.clean(patience) // also later
}

// A majority that refuses decides at once, although the limit for one instance is long and
// two of them hang: with errors or because others have the lock; and so does one that agrees.
func TestRefusedEarly(t *testing.T) {
	x := startFleet(t, 5, 0)
	l := x.locker(lasting(WithNodeTimeout(20 * time.Second))...)
	x.warm(l)
	hang := inject(x.proxies[3:], faultproxy.Rule{Match: taking("k"), Do: faultproxy.HoldRequest()})
	for _, text := range []string{"NOAUTH Authentication required.", "MISCONF no disk", "OOM command not allowed"} {
		refuse := inject(x.proxies[:3], faultproxy.Rule{Match: taking("k"), Do: faultproxy.Error(text)})
		for _, wait := range []time.Duration{0, patience} {
			within(t, 4*time.Second, text, func() {
				_, err := l.Acquire(t.Context(), "k", holdfast.WithWait(wait))
				require.ErrorIs(t, err, holdfast.ErrUnavailable)
				require.ErrorContains(t, err, text)
				require.ErrorAs(t, err, new(*QuorumError))
			})
		}
		lift(refuse)
	}
	x.theirs(0, 1, 2)
	within(t, 4*time.Second, "held", func() {
		_, err := l.TryAcquire(t.Context(), "k")
		require.ErrorIs(t, err, holdfast.ErrNotAcquired)
		require.ErrorAs(t, err, new(*QuorumError))
	})
	x.theirs()
	within(t, 4*time.Second, "free", func() { require.NoError(t, acquire(t, l, "k").Release()) })
	lift(hang)
	x.clean(patience)
}

// C082, C099: without a majority the error names each instance that did not agree, with the
// reason, and is nobody's context error; what the others gave is given back.
func TestNoMajority(t *testing.T) {
	x := startFleet(t, 5, 0)
	l := x.locker(lasting(WithNodeTimeout(time.Second))...)
	x.warm(l)
	full := x.proxies[2].Inject(faultproxy.Rule{Match: taking("k"), Do: faultproxy.Error("OOM command not allowed")})
	x.proxies[3].Down()
	x.proxies[4].Hang()
	_, err := l.TryAcquire(t.Context(), "k")
	require.ErrorIs(t, err, holdfast.ErrUnavailable)
	require.NotErrorIs(t, err, holdfast.ErrNotAcquired)
	require.NotErrorIs(t, err, context.DeadlineExceeded)
	var q *QuorumError
	require.ErrorAs(t, err, &q)
	require.Equal(t, []int{2, 3, 3}, []int{q.Votes, q.Needed, len(q.Nodes)}, err)
	for i, n := range q.Nodes {
		require.Equal(t, 2+i, n.Index)
		require.Equal(t, x.proxies[2+i].Addr(), n.Addr)
		require.ErrorContains(t, err, n.Error())
	}
	require.ErrorContains(t, q.Nodes[0].Err, "OOM")
	var hangs interface{ Timeout() bool }
	require.ErrorAs(t, q.Nodes[2].Err, &hangs)
	require.True(t, hangs.Timeout())
	full.Remove()
	require.NoError(t, x.proxies[3].Up())
	x.proxies[4].Heal()
	x.clean(patience)
}

// C027: a majority that agrees when the validity has already ended is an error; all is given
// back, long before the leases end, and another one gets the lock.
func TestMajorityTooLate(t *testing.T) {
	x := startFleet(t, 5, 0)
	l := x.locker(lasting(WithNodeTimeout(5 * time.Second))...)
	x.warm(l)
	for _, p := range x.proxies[:3] {
		p.Slow(400 * time.Millisecond)
	}
	_, err := l.TryAcquire(t.Context(), "k", holdfast.WithMargin(29400*time.Millisecond)) // 0.3 s are left
	require.ErrorIs(t, err, holdfast.ErrUnavailable)
	require.NotErrorIs(t, err, holdfast.ErrNotAcquired)
	other := x.direct(lasting()...)
	within(t, patience/2, "another one", func() { require.NoError(t, acquire(t, other, "k").Release()) })
	x.clean(patience)
}

// C077: what somebody has on one instance, whichever, does not matter, and stays.
// C025: what a failed attempt took is given back also where its answer was lost, and every
// instance that was asked is told. C026: so is what runs long after that.
func TestRollback(t *testing.T) {
	x := startFleet(t, 3, 0)
	l, other := x.locker(lasting()...), x.direct(lasting()...)
	x.warm(l)
	for i := range x.servers {
		x.theirs(i)
		k, err := l.TryAcquire(t.Context(), "k")
		require.NoError(t, err)
		require.NoError(t, k.Release())
		require.Equal(t, []int{i}, x.having("k", "x/1"))
	}
	x.theirs(0, 1)
	lost := inject(x.proxies[2:], faultproxy.Rule{Match: taking("k"), Times: 1, Do: faultproxy.DropReplyAndClose()})
	given := inject(x.proxies, faultproxy.Rule{Match: giving("k"), Times: 1, Do: faultproxy.Delay(0)})
	_, err := l.TryAcquire(t.Context(), "k")
	require.ErrorIs(t, err, holdfast.ErrNotAcquired)
	await(t, append(lost, given...))
	require.Equal(t, []int{0, 1}, x.having("k", "x/1"))
	x.theirs()
	x.clean(patience)

	late := inject(x.proxies[1:], faultproxy.Rule{Match: taking("k"), Times: 1, Do: faultproxy.HoldRequest()})
	_, err = l.TryAcquire(t.Context(), "k")
	require.ErrorIs(t, err, holdfast.ErrUnavailable)
	x.clean(patience)
	before := x.servers[2].CommandStats()["set"]
	lift(late)
	redistest.Eventually(t, patience, "it has run", func() bool { return x.servers[2].CommandStats()["set"] > before })
	require.NoError(t, acquire(t, other, "k").Release())
	x.clean(patience)
}

// Of split votes the one who has most is named.
func TestSplitVotesAreNamed(t *testing.T) {
	x := startFleet(t, 5, 0)
	for i, value := range []string{"y/1", "x/1", "x/1"} {
		require.NoError(t, x.servers[i].Admin().Set(t.Context(), "k", value, time.Minute).Err())
	}
	_, err := x.locker(lasting(WithNodeTimeout(5*time.Second))...).TryAcquire(t.Context(), "k")
	require.ErrorIs(t, err, holdfast.ErrNotAcquired)
	var held *holdfast.HeldError
	require.ErrorAs(t, err, &held)
	require.Equal(t, "x", held.Holder)
}

// Lockers that split the votes, because each instance hears another one of them first, all get
// the lock in the end, one after the other; also where no majority can come of the first try.
func TestSplitVotes(t *testing.T) {
	for n := 3; n <= 5; n++ {
		x := startFleet(t, n, 0)
		var lockers []*holdfast.Locker
		for _, name := range []string{"0", "1", "2"} {
			lockers = append(lockers, x.locker(lasting(holdfast.WithHolder(name))...))
			x.warm(lockers[len(lockers)-1])
		}
		for round := range 3 {
			for i, p := range x.proxies {
				first := fmt.Sprint((i+round)%3, "/")
				p.Inject(faultproxy.Rule{Match: func(cmd []string) bool {
					return taking("k")(cmd) && !strings.HasPrefix(cmd[4], first)
				}, Times: 4, Do: faultproxy.DelayRequest(30 * time.Millisecond)})
			}
			var wg sync.WaitGroup
			var inside atomic.Int32
			for _, l := range lockers {
				wg.Go(func() { // ends when it has had the lock
					k, err := l.Acquire(context.Background(), "k", holdfast.WithWait(patience))
					if others := inside.Add(1) - 1; err != nil || others > 0 || k.Err() != nil {
						t.Error(n, err, others, k.Err())
					}
					inside.Add(-1)
					_ = k.Release()
				})
			}
			wg.Wait()
		}
		x.clean(patience)
	}
}

// C021, C022, C093: an Acquire that hangs on a majority ends at once with its context, its
// wait or Close, and the error tells which; what runs later is given back.
func TestAcquireInterrupted(t *testing.T) {
	x := startFleet(t, 5, 0)
	const soon = time.Second
	ends := []error{context.Canceled, context.DeadlineExceeded, holdfast.ErrUnavailable, holdfast.ErrClosed, holdfast.ErrNotAcquired}
	for i, how := range []string{"cancel", "deadline", "wait", "close"} {
		l := x.locker(lasting(WithNodeTimeout(20 * time.Second))...)
		x.warm(l)
		late := inject(x.proxies[:3], faultproxy.Rule{Match: taking(how), Times: 1, Do: faultproxy.HoldRequest()})
		ctx, cancel := context.WithCancel(t.Context())
		wait := patience
		switch how {
		case "deadline":
			ctx, cancel = context.WithTimeout(t.Context(), soon)
		case "wait":
			wait = soon
		}
		done := make(chan error, 1)
		go func() { // ends with the interruption
			_, err := l.Acquire(ctx, how, holdfast.WithWait(wait))
			done <- err
		}()
		await(t, late)
		start := time.Now()
		switch how {
		case "cancel":
			cancel()
		case "close":
			go func() { _ = l.Close() }() // ends when what is late has run, or within its bound
		}
		err := <-done
		require.Less(t, time.Since(start), soon+3*time.Second)
		for j, end := range ends {
			require.Equal(t, i == j || j == 2 && how != "close", errors.Is(err, end), "%s: %v", how, err)
		}
		cancel()
		lift(late)
		x.clean(patience)
	}
}

// C029: validity ends before any instance that gave its vote can let the key go, whatever the
// lease, and however slow each instance is.
func TestValidityWithinLeases(t *testing.T) {
	x := startFleet(t, 5, 0)
	l := x.locker(WithDurableInstances(), holdfast.WithTTL(time.Minute), holdfast.WithoutRenewal())
	x.warm(l)
	for i := range 40 {
		ttl := time.Duration(float64(50*time.Millisecond) * math.Pow(1200, rand.Float64()))
		for _, p := range x.proxies {
			p.Slow(rand.N(min(ttl/10, 20*time.Millisecond)))
		}
		k := acquire(t, l, fmt.Sprint("k", i), holdfast.WithTTL(ttl))
		require.LessOrEqual(t, time.Until(k.ValidUntil()), ttl-ttl/100-2*time.Millisecond-ttl/10)
		votes := 0
		for _, s := range x.servers {
			left := s.Admin().PTTL(t.Context(), k.Key()).Val()
			if valid := time.Until(k.ValidUntil()); left > 0 {
				require.LessOrEqual(t, valid, left+5*time.Millisecond)
				votes++
			}
		}
		require.True(t, votes >= 3 || k.Err() != nil, "%d have it, for %v", votes, ttl)
		_ = k.Release() // a short one may have ended
	}
}

// C023: replies that a majority loses are not somebody else's lock, whatever the client
// repeats: an error, or the lock; and then it can be had.
func TestReplyLostOnMajority(t *testing.T) {
	x := startFleet(t, 3, 0)
	for _, retries := range []int{-1, 3} {
		l, _ := x.stored(func(o *redis.Options) { o.MaxRetries = retries }, lasting()...)
		x.warm(l)
		lost := inject(x.proxies[1:], faultproxy.Rule{Match: taking("k"), Times: 1, Do: faultproxy.DropReplyAndClose()})
		k, err := l.TryAcquire(t.Context(), "k")
		require.True(t, err == nil || errors.Is(err, holdfast.ErrUnavailable) && !errors.Is(err, holdfast.ErrNotAcquired), err)
		await(t, lost)
		_ = k.Release()
		x.clean(patience)
		require.NoError(t, acquire(t, l, "k").Release())
	}
}

// C081: whoever has won three of five soon has all, and loses none of it by the loss of one.
func TestWinnerGetsAll(t *testing.T) {
	x := startFleet(t, 5, 0)
	a, b := x.locker(lasting()...), x.direct(lasting()...)
	x.warm(a)
	late := inject(x.proxies[3:], faultproxy.Rule{Match: taking("k"), Times: 1, Do: faultproxy.HoldRequest()})
	k := acquire(t, a, "k")
	_, err := b.TryAcquire(t.Context(), "k") // gets the other two, and gives them back
	require.ErrorIs(t, err, holdfast.ErrNotAcquired)
	x.everywhere(k)
	lift(late)
	require.NoError(t, x.servers[0].Admin().FlushAll(t.Context()).Err())
	_, err = b.TryAcquire(t.Context(), "k")
	require.ErrorIs(t, err, holdfast.ErrNotAcquired)
	x.everywhere(k)
	require.NoError(t, k.Release())
	x.clean(patience)
}

// Tokens grow from lock to lock, whoever takes it and whichever minority is away.
func TestTokensGrow(t *testing.T) {
	x := startFleet(t, 5, 0)
	fenced := func() *holdfast.Locker { return x.locker(lasting(holdfast.WithFencing())...) }
	lockers := []*holdfast.Locker{fenced(), fenced(), fenced()}
	last := fencing.Token(0)
	for i := range 30 {
		minority := rand.Perm(5)[:2]
		for _, j := range minority {
			x.proxies[j].Hang()
		}
		k := acquire(t, lockers[i%3], "k")
		require.Greater(t, k.Token(), last)
		last = k.Token()
		require.NoError(t, k.Release())
		for _, j := range minority {
			x.proxies[j].Heal()
		}
	}
	x.clean(patience)
}
