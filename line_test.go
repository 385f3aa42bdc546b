package holdfast

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"
)

// Waiters of several processes get the lock in the order in which they came, each
// the moment it is released.
func TestLineOrder(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		first := hold(t, memLocker(t, m), "k")
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		for i := range 8 {
			l := memLocker(t, m)
			wg.Go(func() {
				k, err := l.Acquire(t.Context(), "k")
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
				time.Sleep(time.Second)
				require.NoError(t, k.Err())
				require.NoError(t, k.Release())
			})
			time.Sleep(5 * time.Millisecond)
		}
		time.Sleep(10 * time.Second)
		start := time.Now()
		require.NoError(t, first.Release())
		wg.Wait()
		require.Equal(t, []int{0, 1, 2, 3, 4, 5, 6, 7}, order)
		require.Less(t, time.Since(start), 8*time.Second+10*time.Millisecond, "no time between holds")
		require.Empty(t, m.Keys())
	})
}

// A hand-over is one command however many wait: the release. The waiter asks nothing
// before it starts, and a short critical section needs no renewal.
func TestHandOverIsOneCommand(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		var asked, released atomic.Int32
		newLocker := func() *Locker {
			store, err := newRedisStore(memClient(t, m))
			require.NoError(t, err)
			l, err := NewWithStore(&countingStore{store, &asked, &released}, quiet())
			require.NoError(t, err)
			t.Cleanup(func() { _ = l.Close() })
			return l
		}
		held := hold(t, newLocker(), "k")
		var wg sync.WaitGroup
		for range 20 {
			l := newLocker()
			wg.Go(func() {
				k, err := l.Acquire(t.Context(), "k")
				require.NoError(t, err)
				require.Greater(t, time.Until(k.ValidUntil()), maxClaim/2)
				require.NoError(t, k.Release())
			})
		}
		time.Sleep(time.Minute + 100*time.Millisecond) // between the calls that keep places
		require.Greater(t, asked.Load(), int32(20*60), "places are kept")
		asked.Store(0)
		require.NoError(t, held.Release())
		wg.Wait()
		require.Zero(t, asked.Load())
		require.EqualValues(t, 21, released.Load())
		require.Empty(t, m.Keys())
	})
}

// countingStore counts what is asked of the store, and the releases.
type countingStore struct {
	*redisStore
	asked, released *atomic.Int32
}

func (s *countingStore) wait(ctx context.Context, calls []lineCall) []lineAnswer {
	s.asked.Add(1)
	return s.redisStore.wait(ctx, calls)
}

func (s *countingStore) Renew(ctx context.Context, leases []Lease) []error {
	s.asked.Add(1)
	return s.redisStore.Renew(ctx, leases)
}

func (s *countingStore) handOn(ctx context.Context, l Lease) (*handed, error) {
	s.released.Add(1)
	return s.redisStore.handOn(ctx, l)
}

// A process that dies with waiters in it delays the others by its place and one
// claim, however many there were. C109.
func TestDeadWaiters(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		held := hold(t, memLocker(t, m), "k")
		store, err := newRedisStore(memClient(t, m))
		require.NoError(t, err)
		dead, err := NewWithStore(&mortalStore{redisStore: store}, quiet())
		require.NoError(t, err)
		t.Cleanup(func() { _ = dead.Close() })
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				_, err := dead.Acquire(ctx, "k")
				require.Error(t, err)
			})
		}
		time.Sleep(time.Second)
		dead.store.Store.(*mortalStore).dead.Store(true)
		got := make(chan time.Time, 1)
		wg.Go(func() {
			k, err := memLocker(t, m).Acquire(t.Context(), "k")
			require.NoError(t, err)
			got <- time.Now()
			require.NoError(t, k.Release())
		})
		time.Sleep(time.Second)
		start := time.Now()
		require.NoError(t, held.Release())
		waited := (<-got).Sub(start)
		require.LessOrEqual(t, waited, maxClaim+maxClaim/3+10*time.Millisecond, "one claim, and the next call")
		cancel()
		wg.Wait()
	})
}

// mortalStore is a store whose process may die: from then on nothing is sent.
type mortalStore struct {
	*redisStore
	dead atomic.Bool
}

var errDead = errors.New("connection refused")

func (s *mortalStore) wait(ctx context.Context, calls []lineCall) []lineAnswer {
	if !s.dead.Load() {
		return s.redisStore.wait(ctx, calls)
	}
	answers := make([]lineAnswer, len(calls))
	for i := range answers {
		answers[i].err = errDead
	}
	return answers
}

func (s *mortalStore) handOn(ctx context.Context, l Lease) (*handed, error) {
	if s.dead.Load() {
		return nil, errDead
	}
	return s.redisStore.handOn(ctx, l)
}

func (s *mortalStore) listen(hear func(string), ready func(string), start func(func())) {
	s.redisStore.listen(func(text string) {
		if !s.dead.Load() {
			hear(text)
		}
	}, ready, start)
}

// With a fixed lease, or little left of the claim, the lease is made full before
// the work starts.
func TestWeakGrants(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		for name, opts := range map[string][]Option{
			"fixed lease":  {WithoutRenewal()},
			"large margin": {WithMargin(5 * time.Second)},
		} {
			held := hold(t, memLocker(t, m), "k")
			l := memLocker(t, m, opts...)
			done := make(chan struct{})
			go func() {
				defer close(done)
				k, err := l.Acquire(t.Context(), "k")
				require.NoError(t, err)
				require.Equal(t, 30*time.Second, m.TTL("k"), name)
				require.Greater(t, time.Until(k.ValidUntil()), 20*time.Second, name)
				require.NoError(t, k.Release())
			}()
			time.Sleep(5 * time.Second)
			require.NoError(t, held.Release())
			<-done
		}
	})
}

// A handed lock that is held for longer gets its full TTL soon, and keeps it.
func TestHandedLockIsRenewed(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		held := hold(t, memLocker(t, m), "k")
		done := make(chan *Lock)
		go func() { done <- hold(t, memLocker(t, m), "k") }()
		time.Sleep(time.Second)
		require.NoError(t, held.Release())
		k := <-done
		require.LessOrEqual(t, m.TTL("k"), maxClaim)
		time.Sleep(tick + 10*time.Millisecond)
		require.Greater(t, m.TTL("k"), 29*time.Second)
		time.Sleep(5 * time.Minute)
		require.NoError(t, k.Err())
		require.NoError(t, k.Release())
	})
}

func TestMaxWaiters(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		held := hold(t, memLocker(t, m), "k", WithHolder("first"))
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range 2 {
			l := memLocker(t, m, WithMaxWaiters(2))
			wg.Go(func() {
				_, err := l.Acquire(ctx, "k")
				require.ErrorIs(t, err, context.Canceled)
			})
		}
		time.Sleep(time.Second)
		start := time.Now()
		l := memLocker(t, m, WithMaxWaiters(2))
		_, err := l.Acquire(ctx, "k")
		var refused *HeldError
		require.ErrorAs(t, err, &refused)
		require.ErrorIs(t, err, ErrNotAcquired)
		require.Equal(t, "first", refused.Holder)
		require.Equal(t, "k", refused.Key)
		require.Less(t, time.Since(start), 100*time.Millisecond)
		cancel()
		wg.Wait()
		time.Sleep(time.Second)
		require.Equal(t, []string{"k"}, m.Keys(), "who gives up leaves the queue")
		_, err = l.Acquire(t.Context(), "k", WithWait(time.Second))
		require.ErrorIs(t, err, ErrNotAcquired)
		require.GreaterOrEqual(t, time.Since(start), 2*time.Second, "there is room again")
		require.NoError(t, held.Release())
	})
}

func TestMinHold(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		a, b := memLocker(t, m), memLocker(t, m)
		for _, min := range []time.Duration{10 * time.Second, time.Hour} { // below and above the TTL
			start := time.Now()
			k := hold(t, a, "k", WithMinHold(min), WithHolder("first"))
			time.Sleep(time.Second)
			require.NoError(t, k.Release())
			require.ErrorIs(t, k.Release(), ErrNotHeld)
			require.ErrorIs(t, context.Cause(k.Context()), ErrReleased)
			require.Equal(t, min-time.Second, m.TTL("k").Round(10*time.Millisecond))
			_, err := b.TryAcquire(t.Context(), "k")
			var refused *HeldError
			require.ErrorAs(t, err, &refused)
			require.Equal(t, "first", refused.Holder)
			next := hold(t, b, "k")
			require.GreaterOrEqual(t, time.Since(start), min)
			require.Less(t, time.Since(start), min+100*time.Millisecond)
			require.NoError(t, next.Release())
			// One that was held for longer is free at once.
			k = hold(t, a, "k", WithMinHold(time.Second))
			time.Sleep(2 * time.Second)
			require.NoError(t, k.Release())
			require.Empty(t, m.Keys())
		}
	})
}

// One renewal without an answer does not cost a lock that was handed over, though what
// is left of its lease is much less than a TTL.
func TestHandedLockOutlivesAHungRenewal(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		held := hold(t, memLocker(t, m), "k")
		store, err := newRedisStore(memClient(t, m))
		require.NoError(t, err)
		hung := &hungRenewal{redisStore: store, open: make(chan struct{})}
		l, err := NewWithStore(hung, quiet())
		require.NoError(t, err)
		t.Cleanup(func() { close(hung.open); _ = l.Close() })
		done := make(chan *Lock)
		go func() { done <- hold(t, l, "k") }()
		time.Sleep(time.Second)
		require.NoError(t, held.Release())
		k := <-done
		time.Sleep(10 * time.Second)
		require.NoError(t, k.Err())
		require.GreaterOrEqual(t, hung.renewals.Load(), int32(2))
		require.NoError(t, k.Release())
	})
}

// hungRenewal never answers its first renewal.
type hungRenewal struct {
	*redisStore
	renewals atomic.Int32
	open     chan struct{}
}

func (s *hungRenewal) Renew(ctx context.Context, leases []Lease) []error {
	if s.renewals.Add(1) == 1 {
		<-s.open
	}
	return s.redisStore.Renew(ctx, leases)
}

// What makes a weak grant full may run late, after an Extend: it must not shorten that.
func TestConfirmationThatRunsLate(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		held := hold(t, memLocker(t, m), "k")
		store, err := newRedisStore(memClient(t, m))
		require.NoError(t, err)
		late := &lateConfirmation{redisStore: store}
		l, err := NewWithStore(late, quiet(), WithoutRenewal())
		require.NoError(t, err)
		t.Cleanup(func() { _ = l.Close() })
		done := make(chan *Lock)
		go func() { done <- hold(t, l, "k") }()
		time.Sleep(time.Second)
		require.NoError(t, held.Release())
		k := <-done
		require.NotNil(t, late.run)
		require.NoError(t, k.Extend(t.Context(), time.Hour))
		late.run()
		require.NoError(t, k.Err())
		require.GreaterOrEqual(t, m.TTL("k"), time.Until(k.ValidUntil()))
		require.NoError(t, k.Release())
	})
}

// lateConfirmation loses the first request that lengthens a lease, and keeps it.
type lateConfirmation struct {
	*redisStore
	run func()
}

func (s *lateConfirmation) Renew(ctx context.Context, leases []Lease) []error {
	if s.run != nil {
		return s.redisStore.Renew(ctx, leases)
	}
	s.run = func() { s.redisStore.Renew(context.WithoutCancel(ctx), leases) }
	return each(leases, errDead)
}

func (s *lateConfirmation) Extend(ctx context.Context, l Lease) error {
	if s.run != nil {
		return s.redisStore.Extend(ctx, l)
	}
	s.run = func() { _ = s.redisStore.Extend(context.WithoutCancel(ctx), l) }
	return errDead
}
