package holdfast

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/refusal"
)

// A context that has ended touches nothing.
func TestAcquireWithEndedContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s)
		mine := errors.New("mine")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(mine)
		for _, acquire := range []func(context.Context, string, ...Option) (*Lock, error){l.Acquire, l.TryAcquire} {
			k, err := acquire(ctx, "k")
			require.Nil(t, k)
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorIs(t, err, mine)
			//lint:ignore SA1012 it is what is tested
			_, err = acquire(nil, "k") //nolint:staticcheck
			require.ErrorIs(t, err, ErrInvalid)
		}
		require.Empty(t, s.calls)
	})
}

// C023, C025, C114: an attempt that failed after it had taken the key is settled,
// with a second look a second later.
func TestAmbiguousAcquireIsSettled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		s.acquire = func(_ context.Context, r Request) (Grant, error) {
			_, _ = s.server.Acquire(r)
			// ... and once more, by an abandoned connection, after the clean-up.
			time.AfterFunc(500*time.Millisecond, func() { _, _ = s.server.Acquire(r) })
			return Grant{}, errors.New("broken pipe")
		}
		l := fakeLocker(t, s)
		k, err := l.TryAcquire(t.Context(), "k")
		require.Nil(t, k)
		require.ErrorIs(t, err, ErrUnavailable)
		require.NotErrorIs(t, err, ErrNotAcquired)
		time.Sleep(400 * time.Millisecond)
		require.Zero(t, s.server.left("k"))
		time.Sleep(1200 * time.Millisecond)
		require.Zero(t, s.server.left("k"), "the second look")
		require.Equal(t, 2, s.count("release"))
		require.Zero(t, s.count("renew"))
		idleSoon(t, l)
	})
}

// C046, C010, C026, C093: cancelled in flight: it comes back at once, and the grant
// that arrives later is given back.
func TestAcquireCancelledInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		s.acquire = func(_ context.Context, r Request) (Grant, error) {
			time.Sleep(2 * time.Second)
			return s.server.Acquire(r)
		}
		l := fakeLocker(t, s)
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		start := time.Now()
		k, err := l.Acquire(ctx, "k")
		require.Nil(t, k)
		require.Equal(t, 200*time.Millisecond, time.Since(start))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, ErrUnavailable)
		require.NotErrorIs(t, err, ErrNotAcquired)
		time.Sleep(2800 * time.Millisecond)
		require.Zero(t, s.server.left("k"))
		require.Zero(t, s.count("renew"))
		idleSoon(t, l)
	})
}

// C013, C019, C046: cancel at every offset, the moment of the answer included.
func TestAcquireCancelledAtAnyTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		s.acquire = func(_ context.Context, r Request) (Grant, error) {
			time.Sleep(time.Millisecond)
			g, err := s.server.Acquire(r)
			time.Sleep(time.Millisecond)
			return g, err
		}
		l := fakeLocker(t, s, WithTTL(time.Minute))
		both := 0
		for i := range 600 {
			key := fmt.Sprint(i)
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%30)*100*time.Microsecond)
			k, err := l.Acquire(ctx, key)
			require.True(t, (k == nil) != (err == nil))
			if err != nil {
				time.Sleep(time.Second)
				require.Zero(t, s.server.left(key))
			} else {
				both++
				require.Positive(t, s.server.left(key))
				require.NoError(t, k.Release())
			}
			cancel()
		}
		require.NotZero(t, both)
		require.Zero(t, s.count("renew"))
	})
}

// C027: a grant that arrives when its validity has ended is refused and settled.
func TestGrantTooLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		s.acquire = func(_ context.Context, r Request) (Grant, error) {
			_, err := s.server.Acquire(r)
			return Grant{Left: 2 * time.Millisecond}, err
		}
		l := fakeLocker(t, s, WithTTL(300*time.Millisecond))
		_, err := l.TryAcquire(t.Context(), "k")
		require.ErrorIs(t, err, errTooLate)
		require.ErrorIs(t, err, ErrUnavailable)
		synctest.Wait()
		require.Zero(t, s.server.left("k"))
		// An answer that does not come in time is not waited for.
		s.change(func() {
			s.acquire = func(_ context.Context, r Request) (Grant, error) {
				g, err := s.server.Acquire(r)
				time.Sleep(350 * time.Millisecond)
				return g, err
			}
		})
		start := time.Now()
		_, err = l.TryAcquire(t.Context(), "k")
		require.ErrorIs(t, err, ErrUnavailable)
		require.Less(t, time.Since(start), 300*time.Millisecond)
		synctest.Wait()
		require.Zero(t, s.server.left("k"))
	})
}

// C022, C083, C099: which error comes when.
func TestAcquireErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s)
		s.server.set("k", "bob/1", time.Hour)
		var held *HeldError

		_, err := l.TryAcquire(t.Context(), "k")
		require.ErrorIs(t, err, ErrNotAcquired)
		require.NotErrorIs(t, err, ErrUnavailable)
		require.ErrorAs(t, err, &held)
		require.Equal(t, HeldError{Key: "k", Holder: "bob", TTL: time.Hour}, *held)

		start := time.Now()
		_, err = l.Acquire(t.Context(), "k", WithWait(time.Second))
		require.Equal(t, time.Second, time.Since(start)) // C090
		require.ErrorIs(t, err, ErrNotAcquired)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, context.Canceled)
		n := s.count("acquire")
		_, err = l.Acquire(t.Context(), "k", WithWait(0))
		require.ErrorIs(t, err, ErrNotAcquired)
		require.Equal(t, n+1, s.count("acquire"))

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = l.Acquire(ctx, "k")
		require.ErrorIs(t, err, ErrNotAcquired)
		require.ErrorAs(t, err, &held)
		require.ErrorIs(t, err, context.DeadlineExceeded)

		mine := errors.New("mine")
		ctx2, cancel2 := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel2(mine) })
		start = time.Now()
		_, err = l.Acquire(ctx2, "k")
		require.Equal(t, time.Second, time.Since(start)) // C021
		require.ErrorIs(t, err, ErrNotAcquired)
		require.ErrorAs(t, err, &held)
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, mine)

		g := s.newGate()
		s.change(func() {
			s.acquire = func(ctx context.Context, _ Request) (Grant, error) {
				g.wait()
				return Grant{}, context.DeadlineExceeded
			}
		})
		start = time.Now()
		_, err = l.TryAcquire(t.Context(), "k")
		require.Equal(t, attemptLimit, time.Since(start))
		require.ErrorIs(t, err, ErrUnavailable)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
		start = time.Now()
		_, err = l.Acquire(t.Context(), "k", WithWait(time.Second)) // C094
		require.Equal(t, time.Second, time.Since(start))
		require.ErrorIs(t, err, ErrUnavailable)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
		g.open()
		_, err = l.Acquire(t.Context(), "k", WithWait(time.Second))
		require.ErrorIs(t, err, ErrUnavailable)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
	})
}

// C122, C094: what heals is tried again and is in the chain of the final error;
// what does not ends the wait at once.
func TestAcquireHealingAndFinal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s)
		busy := errors.New("BUSY")
		var bad atomic.Int32
		s.acquire = func(_ context.Context, r Request) (Grant, error) {
			if bad.Add(-1) >= 0 {
				return Grant{}, busy
			}
			return s.server.Acquire(r)
		}
		bad.Store(20)
		k := hold(t, l, "k")
		for _, n := range []int32{1, 5, 1000} {
			bad.Store(n)
			_, err := l.Acquire(t.Context(), "k", WithWait(5*time.Second))
			require.ErrorIs(t, err, busy)
			if n == 1000 {
				require.ErrorIs(t, err, ErrUnavailable)
			} else {
				require.ErrorIs(t, err, ErrNotAcquired)
			}
		}
		bad.Store(0)
		require.NoError(t, k.Release())
		final := refusal.Final(errors.New("NOPERM"))
		s.change(func() { s.acquire = func(context.Context, Request) (Grant, error) { return Grant{}, final } })
		start, n := time.Now(), s.count("acquire")
		_, err := l.Acquire(t.Context(), "k")
		require.Zero(t, time.Since(start))
		require.Equal(t, n+1, s.count("acquire"))
		require.ErrorIs(t, err, final)
		require.ErrorIs(t, err, ErrUnavailable)
		require.NotErrorIs(t, err, ErrNotAcquired)
	})
}

// C141, nested: a flow that asks for what it holds is told.
func TestNested(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		client := memClient(t, m)
		l, other := newTestLocker(t, client), newTestLocker(t, client)
		a := hold(t, l, "a", WithHolder("me"))
		b, err := l.Acquire(a.Context(), "b")
		require.NoError(t, err)
		type tag struct{}
		derived, cancel := context.WithTimeout(context.WithValue(b.Context(), tag{}, 1), time.Hour)
		defer cancel()
		for _, ctx := range []context.Context{a.Context(), b.Context(), derived, context.WithoutCancel(derived)} {
			for _, locker := range []*Locker{l, other} {
				start := time.Now()
				_, err = locker.Acquire(ctx, "a")
				require.Zero(t, time.Since(start))
				require.ErrorIs(t, err, ErrDeadlock)
				require.NotErrorIs(t, err, ErrNotAcquired)
				var dead *DeadlockError
				require.ErrorAs(t, err, &dead)
				require.Equal(t, "a", dead.Key)
				require.Len(t, dead.Cycle, 1)
				require.Equal(t, "me", dead.Cycle[0].Holder)
				require.Equal(t, "a", dead.Cycle[0].Key)
				require.Equal(t, "a", dead.Cycle[0].WaitsFor)
				_, err = locker.TryAcquire(ctx, "a")
				require.ErrorIs(t, err, ErrDeadlock)
				require.ErrorIs(t, err, ErrNotAcquired)
			}
		}
		_, err = l.TryAcquire(derived, "b")
		require.ErrorIs(t, err, ErrDeadlock)
		_, err = l.TryAcquire(derived, "a", WithPrefix("x:"))
		require.NoError(t, err, "another key")
		kept := context.WithoutCancel(derived)
		require.NoError(t, a.Release())
		require.Error(t, b.Err(), "its parent is a's context")
		again, err := l.Acquire(kept, "a")
		require.NoError(t, err)
		require.NoError(t, again.Release())
	})
}

// Random schedules on an adverse network: no two handles of a key are valid at the
// same time, but for the time until the next renewal after an admin took the key
// away; and in the end no key is left. C042, C078.
func TestExclusionAtRandom(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for round := range uint64(6) {
		bubble(t, func(t *testing.T, m *miniredis.Miniredis) { exclusion(t, m, rand.New(rand.NewPCG(seed, round))) })
	}
}

const exclusionTTL = 300 * time.Millisecond

func exclusion(t *testing.T, m *miniredis.Miniredis, r *rand.Rand) {
	var mu sync.Mutex
	random := func(n int) int { mu.Lock(); defer mu.Unlock(); return r.IntN(n) }
	pause := func(most int) { time.Sleep(time.Duration(random(most)) * time.Millisecond) }
	var handles sync.Map // *Lock → *time.Time: when its key was tampered with
	tampered := func(k *Lock) bool { at, _ := handles.Load(k); return !at.(time.Time).IsZero() }
	check := func() {
		var valid []*Lock
		handles.Range(func(h, at any) bool {
			k := h.(*Lock)
			if k.Err() != nil {
				return true
			}
			// The next renewal tells, if one gets through; else the validity ends.
			if since := at.(time.Time); !since.IsZero() {
				require.Less(t, time.Since(since), 10*exclusionTTL)
				return true
			}
			valid = append(valid, k)
			return true
		})
		require.LessOrEqual(t, len(valid), 1)
		if len(valid) == 1 && !tampered(valid[0]) && valid[0].Err() == nil {
			owner, err := m.Get("k")
			require.NoError(t, err)
			require.Equal(t, valid[0].Owner(), owner)
		}
	}
	tamper := func(fn func()) {
		// What is on its way may still be granted before; so stop the world for it.
		mu.Lock()
		defer mu.Unlock()
		fn()
		handles.Range(func(h, at any) bool {
			if at.(time.Time).IsZero() {
				handles.Store(h, time.Now())
			}
			return true
		})
	}
	var wg sync.WaitGroup
	var flushed atomic.Int64
	for range 3 {
		inner, err := newRedisStore(memClient(t, m))
		require.NoError(t, err)
		s := &fakeStore{}
		net := func(fn func() error) error { // request and answer are late or lost
			if pause(20); random(20) == 0 {
				pause(400)
			}
			if random(20) == 0 {
				return errors.New("connection reset")
			}
			err := fn()
			if pause(20); random(20) == 0 {
				pause(400)
			}
			if random(20) == 0 {
				return errors.New("i/o timeout")
			}
			return err
		}
		free := context.WithoutCancel
		s.acquire = func(ctx context.Context, q Request) (g Grant, err error) {
			err = net(func() (err error) { g, err = inner.Acquire(free(ctx), q); return err })
			return g, err
		}
		s.renew = func(ctx context.Context, ls []Lease) (errs []error) {
			if err := net(func() error { errs = inner.Renew(free(ctx), ls); return nil }); err != nil {
				return each(ls, err)
			}
			return errs
		}
		s.extend = func(ctx context.Context, q Lease) error {
			return net(func() error { return inner.Extend(free(ctx), q) })
		}
		s.release = func(ctx context.Context, q Lease) error {
			return net(func() error { return inner.Release(free(ctx), q) })
		}
		l := fakeLocker(t, s, WithTTL(exclusionTTL))
		for range 2 {
			wg.Go(func() {
				for range 8 {
					var opts []Option
					if random(4) == 0 {
						opts = append(opts, WithoutRenewal())
					}
					if random(4) == 0 {
						opts = append(opts, WithMaxHold(exclusionTTL*2))
					}
					before := flushed.Load()
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(random(2000))*time.Millisecond)
					k, err := l.Acquire(ctx, "k", opts...)
					if err == nil {
						at := time.Time{}
						if flushed.Load() != before { // granted before, told after
							at = time.Now()
						}
						handles.Store(k, at)
						check()
						for range random(4) {
							pause(200)
							check()
							if random(2) == 0 {
								_ = k.Extend(ctx, time.Duration(50+random(600))*time.Millisecond)
								check()
							}
						}
						if random(5) > 0 {
							_ = k.Release()
						} // else it is left to the end of ctx
					}
					if pause(50); random(2) == 0 {
						cancel()
					} else {
						defer cancel()
					}
				}
			})
		}
	}
	stop := make(chan struct{})
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(1+random(20)) * time.Millisecond):
			}
			check()
			if random(100) == 0 {
				tamper(func() {
					flushed.Add(1)
					switch n % 3 {
					case 0:
						m.Del("k")
					case 1:
						m.FlushAll()
					default:
						_ = m.Set("k", "thief/1")
						m.SetTTL("k", 100*time.Millisecond)
					}
				})
			}
		}
	}()
	wg.Wait()
	close(stop)
	<-watched
	time.Sleep(5 * time.Second)
	check()
	require.Empty(t, m.Keys())
}
