package holdfast

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/clock"
)

// C054, C030: without any answer the context ends exactly at validUntil, and Err
// is not nil from that moment on.
func TestLossAtValidUntil(t *testing.T) {
	for _, n := range []int{1, 1000} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &fakeStore{}
				g := s.newGate()
				s.renew = func(_ context.Context, ls []Lease) []error {
					g.wait()
					return each(ls, errors.New("too late"))
				}
				l := fakeLocker(t, s, WithTTL(3*time.Second))
				locks := make([]*Lock, n)
				for i := range locks {
					locks[i] = hold(t, l, fmt.Sprint(i))
					time.Sleep(200 * time.Microsecond)
				}
				for _, k := range locks {
					until := k.ValidUntil()
					require.NoError(t, k.Err())
					require.Equal(t, until, ends(k))
					lostBecause(t, k, LostExpired)
				}
				require.LessOrEqual(t, s.count("renew"), maxCalls)
				g.open()
			})
		})
	}
}

// C057: Err knows the end even if no timer has run, and counts it as the loss.
func TestErrNeedsNoTimer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s, WithTTL(3*time.Second), WithoutRenewal())
		k := hold(t, l, "k")
		k.until.Store(int64(clock.Now())) // the watchdog does not know, as if it had been stopped
		require.NoError(t, k.ctx.Err())
		require.ErrorIs(t, k.Err(), ErrLost)
		lostBecause(t, k, LostExpired)
	})
}

// Errors match as their documentation says.
func TestLossErrors(t *testing.T) {
	require.ErrorIs(t, ErrMaxHold, ErrLost)
	require.ErrorIs(t, ErrMaxHold, ErrNotHeld)
	require.ErrorIs(t, ErrLost, ErrNotHeld)
	require.NotErrorIs(t, ErrNotHeld, ErrLost)
	require.NotErrorIs(t, ErrReleased, ErrNotHeld)
	plain := &LostError{Key: "k", Reason: LostGone}
	require.NotErrorIs(t, plain, ErrMaxHold)
	// C085: through any wrapping.
	wrapped := errors.Join(errors.New("x"), fmt.Errorf("y: %w", &LostError{Err: ErrMaxHold}))
	for _, target := range []error{ErrMaxHold, ErrLost, ErrNotHeld} {
		require.ErrorIs(t, wrapped, target)
	}
}

// C034: a renewal that is confirmed after the end does not revive the lock, and its
// key is compare-and-deleted.
func TestLateRenewalDoesNotRevive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		g := s.newGate()
		s.renew = func(_ context.Context, ls []Lease) []error {
			errs := s.server.Renew(ls) // the server renews, the answer is on its way
			g.wait()
			return errs
		}
		l := fakeLocker(t, s, WithTTL(3*time.Second))
		k := hold(t, l, "k")
		ends(k)
		require.Positive(t, s.server.left("k"))
		g.open()
		synctest.Wait()
		lostBecause(t, k, LostExpired)
		require.Zero(t, s.server.left("k"), "settled")
		s.server.set("k", "somebody/else", time.Hour)
		time.Sleep(5 * time.Second)
		require.Positive(t, s.server.left("k"), "by compare-and-delete")
		require.ErrorIs(t, k.Release(), ErrLost)
	})
}

// Renewal errors are tried again with growing pauses until validity ends. C047.
func TestRenewalErrorsAreRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		boom := errors.New("BUSY Redis is busy running a script")
		s := &fakeStore{renew: func(_ context.Context, ls []Lease) []error { return each(ls, boom) }}
		l := fakeLocker(t, s, WithTTL(30*time.Second))
		k := hold(t, l, "k")
		until := k.ValidUntil()
		require.Equal(t, until, ends(k))
		lostBecause(t, k, LostExpired)
		require.ErrorIs(t, k.Err(), boom, "the last failure stands behind it")
		calls := s.got("renew")
		require.Greater(t, len(calls), 4)
		require.Less(t, len(calls), 40)
		first, second := calls[1].at.Sub(calls[0].at), calls[2].at.Sub(calls[1].at)
		require.GreaterOrEqual(t, first, 10*time.Second/16)
		require.LessOrEqual(t, first, 10*time.Second/8+1)
		require.GreaterOrEqual(t, second, 10*time.Second/8)
		require.LessOrEqual(t, second, 10*time.Second/4+2)
		require.True(t, calls[len(calls)-1].at.Before(until))
		require.Less(t, until.Sub(calls[len(calls)-1].at), 100*time.Millisecond, "to the end")
		time.Sleep(time.Minute)
		require.Len(t, s.got("renew"), len(calls), "nothing after the end")
	})
}

// C047: one error, or some, do not end the lock.
func TestRenewalHealsAfterErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		var bad atomic.Int32
		s.renew = func(_ context.Context, ls []Lease) []error {
			if bad.Add(-1) >= 0 {
				return each(ls, errors.New("LOADING"))
			}
			return s.server.Renew(ls)
		}
		l := fakeLocker(t, s, WithTTL(3*time.Second))
		k := hold(t, l, "k")
		for range 50 {
			bad.Store(3)
			time.Sleep(10 * time.Second)
			require.NoError(t, k.Err())
		}
		require.NoError(t, k.Release())
	})
}

// A single lost renewal reply does not cost the lock: the next try goes out
// before validity ends. The abandoned one then fails at its own limit.
func TestLostRenewalReply(t *testing.T) {
	for name, late := range map[string]error{"fails late": errors.New("i/o timeout"), "succeeds late": nil} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &fakeStore{}
				s.renew = func(ctx context.Context, ls []Lease) []error {
					if s.count("renew")%3 == 1 {
						<-ctx.Done()
						return each(ls, late)
					}
					return s.server.Renew(ls)
				}
				l := fakeLocker(t, s, WithTTL(3*time.Second))
				k := hold(t, l, "k")
				for range 300 {
					time.Sleep(100 * time.Millisecond)
					require.NoError(t, k.Err())
				}
				require.NoError(t, k.Release())
			})
		})
	}
}

// A renewal that fails after an Extend was confirmed is nothing to worry about.
func TestRenewalFailsAfterExtend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		g := s.newGate()
		s.renew = func(_ context.Context, ls []Lease) []error {
			if s.count("renew") == 1 {
				g.wait()
				return each(ls, errors.New("i/o timeout"))
			}
			return s.server.Renew(ls)
		}
		l := fakeLocker(t, s, WithTTL(3*time.Second))
		k := hold(t, l, "k")
		time.Sleep(1100 * time.Millisecond)
		require.NoError(t, k.Extend(t.Context(), 3*time.Second))
		g.open()
		time.Sleep(10 * time.Second)
		require.NoError(t, k.Err())
		require.NoError(t, k.Release())
	})
}

// C131, C143, C034, C049: "not yours" ends the lock at the next renewal, and no
// renewal follows. The foreign value stays.
func TestNotYours(t *testing.T) {
	for reason, admin := range map[string]func(m *miniredis.Miniredis){
		LostGone:  func(m *miniredis.Miniredis) { m.Del("k") },
		LostTaken: func(m *miniredis.Miniredis) { require.NoError(t, m.Set("k", "data")) },
	} {
		t.Run(reason, func(t *testing.T) {
			bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
				l := memLocker(t, m, WithTTL(3*time.Second), quiet())
				k := hold(t, l, "k")
				time.Sleep(1500 * time.Millisecond)
				admin(m)
				start := time.Now()
				require.LessOrEqual(t, ends(k).Sub(start), time.Second)
				lostBecause(t, k, reason)
				before := m.CommandCount()
				time.Sleep(time.Minute)
				require.Equal(t, before, m.CommandCount(), "no command follows")
				require.Equal(t, reason == LostTaken, m.Exists("k"))
				require.ErrorIs(t, k.Release(), ErrLost)
				require.Equal(t, before, m.CommandCount(), "a known loss asks nothing")
				require.Equal(t, reason == LostTaken, m.Exists("k"))
			})
		})
	}
}

// C045: the cap on the hold.
func TestMaxHold(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := memLocker(t, m, WithTTL(2*time.Second), quiet())
		k := hold(t, l, "k", WithMaxHold(7*time.Second))
		start := time.Now()
		require.Equal(t, 7*time.Second, ends(k).Sub(start))
		lostBecause(t, k, LostMaxHold)
		require.ErrorIs(t, k.Err(), ErrMaxHold)
		other := memLocker(t, m)
		hold(t, other, "k")
		require.LessOrEqual(t, time.Since(start), 9*time.Second)
		require.ErrorIs(t, k.Release(), ErrLost, "somebody else has it")

		k = hold(t, l, "default")
		start = time.Now()
		require.Equal(t, 10*time.Minute, ends(k).Sub(start))
		require.NoError(t, k.Release(), "the key was its own until then")
	})
}

// C067: a fixed lease.
func TestWithoutRenewal(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := memLocker(t, m, WithTTL(3*time.Second), WithoutRenewal(), quiet())
		k := hold(t, l, "k")
		start := time.Now()
		deadline, ok := k.Context().Deadline()
		require.True(t, ok)
		require.Equal(t, k.ValidUntil(), deadline)
		require.Equal(t, deadline, ends(k))
		lostBecause(t, k, LostExpired)
		time.Sleep(time.Until(start.Add(2999 * time.Millisecond)))
		require.True(t, m.Exists("k"))
		time.Sleep(2 * time.Millisecond)
		require.False(t, m.Exists("k"))
		require.ErrorIs(t, k.Release(), ErrLost) // C007
		// A parent's earlier deadline counts.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		k, err := l.Acquire(ctx, "k")
		require.NoError(t, err)
		deadline, _ = k.Context().Deadline()
		require.Equal(t, time.Now().Add(time.Second), deadline)
		// With renewal there is none.
		_, ok = hold(t, l, "other", WithRenewEvery(time.Second)).Context().Deadline()
		require.False(t, ok)
	})
}

// When the parent context ends, the lock's has ended with the parent's cause;
// nothing is renewed; the key stays, and Release deletes it.
func TestParentEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		var lost atomic.Int32
		l := fakeLocker(t, s, WithTTL(3*time.Second), WithObserver(Observer{Lost: func(string, error) { lost.Add(1) }}))
		mine := errors.New("mine")
		ctx, cancel := context.WithCancelCause(t.Context())
		k, err := l.Acquire(ctx, "k")
		require.NoError(t, err)
		time.Sleep(1500 * time.Millisecond)
		cancel(mine)
		require.ErrorIs(t, k.Err(), mine)
		require.ErrorIs(t, context.Cause(k.Context()), mine)
		require.NotErrorIs(t, k.Err(), ErrLost)
		n := s.count("renew")
		time.Sleep(2400 * time.Millisecond)
		require.Equal(t, n, s.count("renew"))
		require.Positive(t, s.server.left("k"))
		require.NoError(t, k.Release())
		require.Zero(t, s.server.left("k"))
		require.ErrorIs(t, k.Err(), mine, "the first cause stays")
		require.Zero(t, lost.Load())
		idleSoon(t, l)
	})
}

// C061: the watchdog's goroutine is gone when no lock is held.
func TestWatchdogEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fakeLocker(t, &fakeStore{})
		for range 3 {
			k := hold(t, l, "k")
			l.mu.Lock()
			require.True(t, l.watch.running)
			l.mu.Unlock()
			require.NoError(t, k.Release())
			idleSoon(t, l)
			l.mu.Lock()
			require.False(t, l.watch.running)
			l.mu.Unlock()
		}
	})
}

// C062: 10,000 locks cost few calls, and all are renewed.
func TestManyLocks(t *testing.T) {
	for name, spread := range map[string]time.Duration{"at once": 0, "spread": 150 * time.Microsecond} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &fakeStore{}
				s.renew = func(_ context.Context, ls []Lease) []error {
					time.Sleep(20 * time.Millisecond) // F-SLOW
					return s.server.Renew(ls)
				}
				l := fakeLocker(t, s, WithTTL(3*time.Second))
				locks := make([]*Lock, 10_000)
				for i := range locks {
					locks[i] = hold(t, l, fmt.Sprint(i))
					if spread > 0 {
						time.Sleep(spread)
					}
				}
				time.Sleep(2 * time.Second) // settle down
				for range 4 {
					n := s.count("renew")
					time.Sleep(time.Second)
					require.LessOrEqual(t, s.count("renew")-n, 40)
				}
				for _, c := range s.got("renew") {
					require.LessOrEqual(t, c.keys, maxBatch)
				}
				for _, k := range locks {
					require.NoError(t, k.Err())
				}
			})
		})
	}
}

// A server that is down for a while must not be stormed: the retries of many
// locks share calls as well.
func TestManyLocksWhileServerIsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		var down atomic.Bool
		s.renew = func(_ context.Context, ls []Lease) []error {
			if time.Sleep(time.Millisecond); down.Load() {
				return each(ls, errors.New("connection refused"))
			}
			return s.server.Renew(ls)
		}
		l := fakeLocker(t, s, WithTTL(3*time.Second))
		locks := make([]*Lock, 2000)
		for i := range locks {
			locks[i] = hold(t, l, fmt.Sprint(i))
		}
		time.Sleep(5500 * time.Millisecond)
		down.Store(true)
		n := s.count("renew")
		time.Sleep(1500 * time.Millisecond)
		require.LessOrEqual(t, s.count("renew")-n, 200, "calls in 1.5 s, for 2000 keys in batches of up to 500")
		down.Store(false)
		time.Sleep(5 * time.Second)
		for _, k := range locks {
			require.NoError(t, k.Err())
		}
	})
}

// C053: each renewal counts from its own sending, so delays do not add up.
func TestRenewalsDoNotDrift(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		s.renew = func(_ context.Context, ls []Lease) []error {
			errs := s.server.Renew(ls)
			time.Sleep(90 * time.Millisecond)
			return errs
		}
		l := fakeLocker(t, s, WithTTL(3*time.Second))
		k := hold(t, l, "k")
		start := time.Now()
		for range 590 {
			time.Sleep(time.Second)
			require.NoError(t, k.Err())
			require.GreaterOrEqual(t, s.server.left("k"), 1800*time.Millisecond)
		}
		calls := s.got("renew")
		require.InDelta(t, 590, len(calls), 1)
		for i, c := range calls {
			require.Equal(t, time.Duration(i+1)*time.Second, c.at.Sub(start))
			require.Equal(t, 3*time.Second, c.ttl)
		}
	})
}

// A day in the life of a lock.
func TestOneDay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s, WithMaxHold(Unlimited))
		k := hold(t, l, "k")
		time.Sleep(24*time.Hour + time.Second)
		require.NoError(t, k.Err())
		require.Equal(t, 8640, s.count("renew"))
		require.NoError(t, k.Release())
	})
}

// C050: a lock that follows a loss has a renewal of its own.
func TestRenewalAfterLoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		var down atomic.Bool
		s.renew = func(_ context.Context, ls []Lease) []error {
			if down.Load() {
				return each(ls, errors.New("connection refused"))
			}
			return s.server.Renew(ls)
		}
		l := fakeLocker(t, s, WithTTL(2*time.Second))
		for range 5 {
			down.Store(true)
			ends(hold(t, l, "k"))
			down.Store(false)
			k := hold(t, l, "k")
			for range 100 {
				time.Sleep(100 * time.Millisecond)
				require.Positive(t, s.server.left("k"))
			}
			require.NoError(t, k.Err())
			s.server.set("k", "", 0)
			ends(k)
		}
	})
}

// Renewals that hang for ever in a store that heeds no context do not take the
// renewal away from locks that come after it has healed.
func TestRenewalAfterManyHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		g := s.newGate()
		var hang atomic.Bool
		s.renew = func(_ context.Context, ls []Lease) []error {
			if hang.Load() {
				g.wait()
			}
			return s.server.Renew(ls)
		}
		l := fakeLocker(t, s, WithTTL(2*time.Second))
		hang.Store(true)
		for i := range 2 * maxCalls {
			ends(hold(t, l, fmt.Sprint(i)))
		}
		hang.Store(false)
		k := hold(t, l, "k")
		time.Sleep(10 * time.Second)
		require.NoError(t, k.Err())
	})
}

// C099: what a renewal's own limit ended is not the caller's context error.
func TestLossIsNoContextError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{renew: func(_ context.Context, ls []Lease) []error {
			return each(ls, fmt.Errorf("dial: %w", context.DeadlineExceeded))
		}}
		var told error
		l := fakeLocker(t, s, WithTTL(2*time.Second), WithObserver(Observer{Lost: func(_ string, err error) { told = err }}))
		k := hold(t, l, "k")
		ends(k)
		lostBecause(t, k, LostExpired)
		synctest.Wait()
		for _, err := range []error{k.Err(), told} {
			require.ErrorContains(t, err, "dial")
			require.NotErrorIs(t, err, context.DeadlineExceeded)
		}
	})
}

// No renewal starts once Release has begun, not even one that was due before.
func TestNoRenewalStartsAfterRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s, WithTTL(3*time.Second))
		k := hold(t, l, "k")
		l.mu.Lock() // the watchdog has taken the lock into a batch, and sends it when it gets to run
		batches := l.due(clock.Now().Add(time.Second))
		l.mu.Unlock()
		require.Len(t, batches, 1)
		s.change(func() { s.release = func(context.Context, Lease) error { return errors.New("down") } })
		require.ErrorIs(t, k.Release(), ErrUnavailable)
		l.renew(batches[0])
		require.Zero(t, s.count("renew"))
	})
}

// C009: renewal is off from the moment Release is called, whatever comes of it.
func TestNoRenewalAfterRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		g := s.newGate()
		s.release = func(context.Context, Lease) error { g.wait(); return errors.New("broken pipe") }
		l := fakeLocker(t, s, WithTTL(2*time.Second))
		k := hold(t, l, "k")
		time.Sleep(3 * time.Second)
		n, left, start := s.count("renew"), s.server.left("k"), time.Now()
		released := make(chan error, 1)
		go func() { released <- k.Release() }()
		for s.server.left("k") > 0 {
			time.Sleep(50 * time.Millisecond)
			require.LessOrEqual(t, s.server.left("k"), left)
			left = s.server.left("k")
		}
		require.LessOrEqual(t, time.Since(start), 2*time.Second)
		require.ErrorIs(t, <-released, ErrUnavailable)
		require.Equal(t, n, s.count("renew"))
		require.ErrorIs(t, k.Err(), ErrReleased)
	})
}

// C058: a renewal in flight that finds the key deleted by Release reports nothing.
func TestRenewalMeetsRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		s.renew = func(_ context.Context, ls []Lease) []error {
			time.Sleep(300 * time.Microsecond)
			return s.server.Renew(ls)
		}
		var lost atomic.Int32
		l := fakeLocker(t, s, WithTTL(time.Second), WithRenewEvery(time.Millisecond),
			WithObserver(Observer{Lost: func(string, error) { lost.Add(1) }}))
		for i := range 1000 {
			k := hold(t, l, "k")
			time.Sleep(time.Duration(i%40) * 50 * time.Microsecond)
			require.NoError(t, k.Release())
			require.ErrorIs(t, context.Cause(k.Context()), ErrReleased)
		}
		time.Sleep(time.Second)
		require.Zero(t, lost.Load())
	})
}

// C065: a short TTL gives no hot loop.
func TestShortTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s)
		for _, ttl := range []time.Duration{10 * time.Millisecond, 11 * time.Millisecond, 100 * time.Millisecond} {
			n := s.count("renew")
			k := hold(t, l, "k", WithTTL(ttl))
			time.Sleep(2 * time.Second)
			require.NoError(t, k.Err())
			require.LessOrEqual(t, s.count("renew")-n, int(2*time.Second/(ttl/3))+1)
			require.NoError(t, k.Release())
		}
	})
}

// Settings belong to one acquisition. C051.
func TestSettingsAreTheLocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s)
		for i, ttl := range []time.Duration{time.Second, 500 * time.Millisecond, 3 * time.Second} {
			k := hold(t, l, "k", WithTTL(ttl))
			for range 50 {
				time.Sleep(ttl / 10)
				require.Positive(t, s.server.left("k"))
				require.LessOrEqual(t, s.server.left("k"), ttl)
			}
			require.NoError(t, k.Err(), i)
			require.NoError(t, k.Release())
			k = hold(t, l, "k", WithTTL(ttl), WithoutRenewal())
			ends(k)
			s.server.set("k", "", 0)
		}
	})
}

// Answers of two renewals that come in the wrong order do not move validity back.
func TestRenewalAnswersOutOfOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		g := s.newGate()
		s.renew = func(_ context.Context, ls []Lease) []error {
			errs := s.server.Renew(ls)
			if s.count("renew") == 1 {
				g.wait()
			}
			return errs
		}
		l := fakeLocker(t, s, WithTTL(3*time.Second))
		k := hold(t, l, "k")
		time.Sleep(1600 * time.Millisecond)
		require.Equal(t, 2, s.count("renew"))
		until := k.ValidUntil()
		g.open()
		synctest.Wait()
		require.Equal(t, until, k.ValidUntil())
	})
}
