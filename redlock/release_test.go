package redlock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/leaktest"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// stored returns a Locker on new clients, and its store.
func (x *fleet) stored(change func(*redis.Options), opts ...holdfast.Option) (*holdfast.Locker, *store) {
	x.t.Helper()
	clients := x.clients(change)
	s := &store{connect: func(s *store) (all []link) {
		for i, c := range clients {
			one, err := singleOf(c)
			require.NoError(x.t, err)
			all = append(all, newRedisLink(one, s, i))
		}
		return all
	}}
	l, err := holdfast.NewWithStore(s, append([]holdfast.Option{quiet}, opts...)...)
	require.NoError(x.t, err)
	x.t.Cleanup(func() { _ = l.Close() })
	return l, s
}

// slowly is for clients that wait for d before they give up.
func slowly(d time.Duration) func(*redis.Options) {
	return func(o *redis.Options) { o.DialTimeout, o.ReadTimeout, o.WriteTimeout = d, d, d }
}

// within fails t if fn takes longer than limit.
func within(t testing.TB, limit time.Duration, what string, fn func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { // ends with fn
		defer close(done)
		fn()
	}()
	select {
	case <-done:
	case <-time.After(limit):
		t.Errorf("%s takes more than %v", what, limit)
	}
}

// Old locks are forgotten while others are being released: neither waits for the other.
func TestSweepDuringReleases(t *testing.T) {
	x := startFleet(t, 3, 0)
	l, s := x.stored(slowly(time.Second), lasting()...)
	x.proxies[2].Down() // so that releases are sent again
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { // ended by stop
		for {
			select {
			case <-stop:
				return
			default:
				s.mu.Lock()
				s.sweep()
				s.mu.Unlock()
			}
		}
	})
	within(t, patience, "taking and releasing", func() {
		for range 100 {
			if k, err := l.Acquire(context.Background(), "k"); err == nil {
				_ = k.Release()
			}
		}
	})
	close(stop)
	wg.Wait()
	require.NoError(t, x.proxies[2].Up())
	x.clean(patience)
}

// C098: while an instance hangs nobody waits for the connection by which it would tell
// that a lock is free: neither who begins to listen, nor who stops, nor who closes it.
func TestEarOfHangingInstance(t *testing.T) {
	x := startFleet(t, 1, 0)
	_, s := x.stored(slowly(time.Second), lasting()...)
	x.proxies[0].Hang()
	link := s.nodes[0].link
	stop := link.listen("k", func() {})
	<-time.After(50 * time.Millisecond) // it connects
	within(t, time.Second/2, "another who listens", func() { link.listen("other", func() {})() })
	within(t, time.Second/2, "one who stops", stop)
	within(t, time.Second/2, "the end", link.close)
}

// C016, C017, C098: with instances that hang Close comes back within its bound, also twice
// and at the same time, whatever is pending: rollbacks, releases, waiters. Nothing panics,
// and no goroutine stays when the clients have given up too.
func TestCloseWithHangingInstances(t *testing.T) {
	leaktest.Check(t)
	for hanging, patient := range map[int]time.Duration{1: time.Second, 3: 2 * time.Second} {
		x := startFleet(t, 3, 0)
		l, _ := x.stored(slowly(patient), lasting()...)
		k, ended := acquire(t, l, "k"), acquire(t, l, "ended")
		var wg sync.WaitGroup
		for range 2 * hanging {
			wg.Go(func() { // ended by Close
				if _, err := l.Acquire(context.Background(), "k"); err == nil {
					t.Error("it is held")
				}
			})
		}
		for _, p := range x.proxies[:hanging] {
			p.Hang()
		}
		_, err := l.Acquire(t.Context(), "new", holdfast.WithWait(20*time.Millisecond))
		if err == nil {
			require.LessOrEqual(t, hanging, 1)
		}
		go func() { _ = ended.Release() }() // ends within its bound
		var closed sync.WaitGroup
		for range 3 {
			closed.Go(func() { // ends within the bound of Close
				within(t, 6*time.Second, "Close", func() { _ = l.Close() })
			})
		}
		closed.Wait()
		wg.Wait()
		require.ErrorIs(t, context.Cause(k.Context()), holdfast.ErrClosed)
		for _, p := range x.proxies {
			p.Heal()
		}
		_ = k.Release()
	}
}

// C005, C007: the release of a lock that has ended is an error, and definite: each
// instance is asked once.
func TestReleaseOfEndedLock(t *testing.T) {
	x := startFleet(t, 5, 0)
	l := x.locker(fleeting(holdfast.WithoutRenewal(), holdfast.WithTTL(500*time.Millisecond))...)
	k := acquire(t, l, "k")
	x.everywhere(k) // and then all know the scripts
	require.NoError(t, k.Release())
	for _, taken := range []bool{false, true} {
		k := acquire(t, l, "k")
		x.clean(patience)
		for i, s := range x.servers {
			if taken && i > 0 {
				require.NoError(t, s.Admin().Set(t.Context(), "k", "x/1", time.Minute).Err())
			}
			x.proxies[i].ResetLog()
		}
		err := k.Release()
		require.ErrorIs(t, err, holdfast.ErrLost)
		var lost *holdfast.LostError
		require.ErrorAs(t, err, &lost)
		require.Equal(t, map[bool]string{false: holdfast.LostGone, true: holdfast.LostTaken}[taken], lost.Reason)
		require.ErrorIs(t, k.Release(), holdfast.ErrNotHeld)
		for i, p := range x.proxies {
			require.LessOrEqual(t, p.CountMatch(faultproxy.Any()), 1, i)
		}
	}
}

// C002, C006: a release that a majority did not answer, or refused, is an error that says
// so; a later one, or the background, deletes the key. C009: from the first on nothing is
// renewed, although what is left would be seen to rise.
func TestReleaseWithoutMajority(t *testing.T) {
	x := startFleet(t, 5, 0)
	for name, fault := range map[string]func(p *faultproxy.Proxy) (heal func()){
		"hanging": func(p *faultproxy.Proxy) func() { p.Hang(); return p.Heal },
		"cut":     func(p *faultproxy.Proxy) func() { p.Down(); return func() { require.NoError(t, p.Up()) } },
		"refusing": func(p *faultproxy.Proxy) func() {
			return p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Do: faultproxy.Error("MISCONF no disk")}).Remove
		},
	} {
		t.Run(name, func(t *testing.T) {
			x := x.with(t)
			l := x.locker(fleeting(holdfast.WithTTL(600*time.Millisecond), holdfast.WithRenewEvery(50*time.Millisecond))...)
			k := acquire(t, l, "k")
			x.everywhere(k)
			renewed(t, 1, k)
			var heals []func()
			for _, p := range x.proxies[:3] {
				heals = append(heals, fault(p))
			}
			within(t, 10*time.Second, "Release", func() {
				err := k.Release()
				require.ErrorIs(t, err, holdfast.ErrUnavailable)
				require.NotErrorIs(t, err, holdfast.ErrNotHeld)
				if name == "refusing" {
					require.ErrorContains(t, err, "MISCONF")
				}
			})
			require.ErrorIs(t, context.Cause(k.Context()), holdfast.ErrReleased)
			before := x.lefts("k")
			for range 20 {
				now := x.lefts("k")
				for i := range now {
					require.LessOrEqual(t, now[i], max(before[i], 0))
				}
				before = now
				<-time.After(5 * time.Millisecond)
			}
			for _, heal := range heals {
				heal()
			}
			err := k.Release()
			require.True(t, err == nil || errors.Is(err, holdfast.ErrLost), err) // the lease may have ended meanwhile
			require.ErrorIs(t, k.Release(), holdfast.ErrNotHeld)
			x.clean(patience)
		})
	}
}

// C014: each acquisition has a value of its own: a release whose answers were lost, and
// that is repeated when others have the lock, never takes it from them.
func TestOldReleaseSparesNewLock(t *testing.T) {
	x := startFleet(t, 5, 0)
	l := x.locker(lasting()...)
	for range 5 {
		first := acquire(t, l, "k")
		x.everywhere(first)
		for _, p := range x.proxies[:3] {
			p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 2, Do: faultproxy.HoldReply()})
		}
		err := first.Release()
		require.True(t, err == nil || errors.Is(err, holdfast.ErrUnavailable), err)
		second := acquire(t, l, "k")
		_ = first.Release()
		x.everywhere(second) // healed where the old release was still on its way
		require.NoError(t, second.Extend(t.Context(), 20*time.Second))
		require.ErrorIs(t, first.Release(), holdfast.ErrNotHeld)
		require.NoError(t, second.Release())
	}
	x.clean(patience)
}

// C010, C013, C019, C046: cancelling an Acquire at any moment, also when a majority is slow,
// leaves the lock with the caller or nobody, and nothing is renewed that nobody holds.
func TestAcquireCancelledAnyTime(t *testing.T) {
	x := startFleet(t, 5, 0)
	l := x.locker(lasting()...)
	for round := range 4 {
		for i, p := range x.proxies {
			p.Slow(time.Duration(i*round) * time.Millisecond) // from "at once" to beyond the end
		}
		for i := range 60 {
			key := fmt.Sprint("k", i%20)
			ctx, cancel := context.WithTimeout(t.Context(), rand.N(time.Duration(1+2*round)*2*time.Millisecond))
			k, err := l.Acquire(ctx, key)
			if err == nil {
				require.GreaterOrEqual(t, len(x.having(key, k.Owner())), 3)
				_ = k.Release()
			}
			cancel()
		}
	}
	for _, p := range x.proxies {
		p.Slow(0)
	}
	x.clean(patience)
}

// C011, C061: whatever the outcome of a hold, nothing stays behind: no goroutine for it,
// and none of any kind after Close.
func TestNothingStaysBehind(t *testing.T) {
	leaktest.Check(t)
	x := startFleet(t, 3, 0)
	l, store := x.stored(slowly(time.Second), lasting()...)
	outcomes := []func(k *holdfast.Lock) error{
		func(*holdfast.Lock) error { return nil },
		func(*holdfast.Lock) error { // gone
			for _, s := range x.servers[1:] {
				s.Admin().Del(context.Background(), "k")
			}
			return nil
		},
		func(*holdfast.Lock) error { // taken
			for _, s := range x.servers[1:] {
				s.Admin().Set(context.Background(), "k", "x/1", time.Millisecond)
			}
			return nil
		},
		func(*holdfast.Lock) error { // an instance that cannot be reached
			x.proxies[0].Down()
			return nil
		},
		func(*holdfast.Lock) error { return x.proxies[0].Up() },
	}
	for i := range 100 {
		k := acquire(t, l, "k")
		require.NoError(t, outcomes[i%5](k))
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		if got, err := l.Acquire(ctx, "k"); err == nil { // it was lost
			_ = got.Release()
		}
		cancel()
		_ = k.Release()
	}
	redistest.Eventually(t, patience, "k is gone", func() bool { return slices.Max(x.lefts("k")) < 0 })
	redistest.Eventually(t, patience, "one goroutine for each instance is left, and no record", func() bool {
		buf := make([]byte, 1<<20)
		own := 0
		for stack := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
			if strings.Contains(stack, "holdfast/internal/group.") || strings.Contains(stack, "holdfast.(*group)") {
				own++
			}
		}
		store.mu.Lock()
		defer store.mu.Unlock()
		return own <= len(x.servers) && len(store.holds) == 0
	})
	require.NoError(t, l.Close())
}

// C058: a renewal that meets a release is no loss. C059: of many who release one lock at
// the same time, while it is renewed and perhaps stolen, one gets the answer.
func TestReleaseMeetsRenewal(t *testing.T) {
	x := startFleet(t, 3, 0)
	var lost atomic.Int32
	often := holdfast.WithRenewEvery(time.Millisecond)
	seen := holdfast.WithObserver(holdfast.Observer{Lost: func(string, error) { lost.Add(1) }})
	l := x.locker(lasting(often, seen)...)
	for i := range 150 {
		k := acquire(t, l, "k")
		if i%3 == 0 {
			<-time.After(rand.N(3 * time.Millisecond))
		}
		require.NoError(t, k.Release())
		require.ErrorIs(t, k.Err(), holdfast.ErrReleased)
	}
	require.Zero(t, lost.Load())
	for i := range 40 {
		k := acquire(t, l, "k")
		var wg sync.WaitGroup
		var nils, losts, others atomic.Int32
		for range 16 {
			wg.Go(func() { // ends with the release
				switch err := k.Release(); {
				case err == nil:
					nils.Add(1)
				case errors.Is(err, holdfast.ErrLost):
					losts.Add(1)
				case !errors.Is(err, holdfast.ErrNotHeld):
					others.Add(1)
				}
			})
		}
		if i%2 == 0 {
			for _, s := range x.servers[:2] {
				require.NoError(t, s.Admin().Set(t.Context(), "k", "x/1", time.Millisecond).Err())
			}
		}
		wg.Wait()
		require.Zero(t, others.Load())
		require.EqualValues(t, 1, nils.Load()+losts.Load())
		if i%2 != 0 {
			require.EqualValues(t, 1, nils.Load())
		}
	}
	x.clean(patience)
}

// C098: a release comes back at once, whether nobody waits, one or many; and they get it.
func TestReleaseWithWaiters(t *testing.T) {
	x := startFleet(t, 3, 0)
	l := x.locker(lasting()...)
	for _, waiters := range []int{0, 1, 50} {
		k := acquire(t, l, "k")
		var wg sync.WaitGroup
		for range waiters {
			wg.Go(func() { // ends when all before it have had the lock
				if err := l.Do(context.Background(), "k", func(ctx context.Context) error { return ctx.Err() }); err != nil {
					t.Error(err)
				}
			})
		}
		<-time.After(50 * time.Millisecond)
		within(t, 5*time.Second, "Release", func() { require.NoError(t, k.Release()) })
		wg.Wait()
	}
	x.clean(patience)
}
