package holdfast

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"
)

// Extend sets what is left, longer or shorter, and later renewals use it. C031, C039.
func TestExtend(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := memLocker(t, m, WithTTL(3*time.Second), quiet())
		for _, ttl := range []time.Duration{time.Minute, time.Second, 10 * time.Second} {
			k := hold(t, l, "k")
			time.Sleep(500 * time.Millisecond)
			require.NoError(t, k.Extend(t.Context(), ttl))
			require.Equal(t, ttl, m.TTL("k"))
			require.Equal(t, validityOf(ttl, ttl/10), time.Until(k.ValidUntil()))
			for range 30 {
				time.Sleep(ttl / 10)
				require.NoError(t, k.Err())
				require.LessOrEqual(t, m.TTL("k"), ttl)
				require.GreaterOrEqual(t, m.TTL("k"), ttl/2)
			}
			require.NoError(t, k.Release())
		}
	})
}

// C037, C038: impossible values are refused and nothing is sent.
func TestExtendInvalid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s)
		k := hold(t, l, "k", WithMargin(time.Second))
		until := k.ValidUntil()
		for _, d := range []time.Duration{0, -1, -time.Second, math.MinInt64, 1, 999 * time.Microsecond,
			9 * time.Millisecond, time.Second, Unlimited} {
			require.ErrorIs(t, k.Extend(t.Context(), d), ErrInvalid, d)
		}
		//lint:ignore SA1012 it is what is tested
		require.ErrorIs(t, k.Extend(nil, time.Minute), ErrInvalid) //nolint:staticcheck
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, k.Extend(ctx, time.Minute), context.Canceled)
		require.Zero(t, s.count("extend"))
		require.Equal(t, until, k.ValidUntil())
		require.NoError(t, k.Err())
	})
}

// C035: Extend on an absent key creates nothing.
func TestExtendAbsent(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := memLocker(t, m, WithTTL(3*time.Second), quiet())
		k := hold(t, l, "k")
		m.Del("k")
		require.ErrorIs(t, k.Extend(t.Context(), time.Minute), ErrLost)
		require.False(t, m.Exists("k"))
		lostBecause(t, k, LostGone)

		k = hold(t, l, "k")
		require.NoError(t, m.Set("k", "data"))
		require.ErrorIs(t, k.Extend(t.Context(), time.Minute), ErrNotHeld)
		lostBecause(t, k, LostTaken)
		require.Zero(t, m.TTL("k"), "the foreign value stays as it is")
		m.Del("k")

		k = hold(t, l, "k", WithoutRenewal())
		time.Sleep(4 * time.Second)
		require.ErrorIs(t, k.Extend(t.Context(), time.Minute), ErrLost)
		require.False(t, m.Exists("k"))

		k = hold(t, l, "k")
		require.NoError(t, k.Release())
		require.ErrorIs(t, k.Extend(t.Context(), time.Minute), ErrNotHeld)
		require.False(t, m.Exists("k"))

		ctx, cancel := context.WithCancel(t.Context())
		k, err := l.Acquire(ctx, "k")
		require.NoError(t, err)
		cancel()
		err = k.Extend(t.Context(), time.Minute)
		require.ErrorIs(t, err, ErrNotHeld)
		require.NotErrorIs(t, err, ErrLost)
		require.LessOrEqual(t, m.TTL("k"), 3*time.Second)
	})
}

// C031: an Extend slower than the validity returns an error, and the lock is lost.
// Its late success revives nothing and is settled.
func TestExtendTooSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		s.extend = func(_ context.Context, l Lease) error {
			time.Sleep(2900 * time.Millisecond)
			return s.server.Extend(l)
		}
		l := fakeLocker(t, s, WithTTL(3*time.Second), WithoutRenewal())
		k := hold(t, l, "k")
		until := k.ValidUntil()
		require.ErrorIs(t, k.Extend(t.Context(), time.Minute), ErrLost)
		require.Equal(t, until, time.Now())
		lostBecause(t, k, LostExpired)
		time.Sleep(2 * time.Second)
		require.Zero(t, s.server.left("k"))
	})
}

// C043: Extend does not add.
func TestExtendDoesNotAdd(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := memLocker(t, m)
		k := hold(t, l, "k")
		for range 100 {
			require.NoError(t, k.Extend(t.Context(), time.Second))
			require.LessOrEqual(t, m.TTL("k"), time.Second)
		}
	})
}

// An Extend to a shorter lease whose fate is unknown stays a ceiling, because it may
// still be set; but it does not cost the lock while renewals get through.
func TestExtendAbandoned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		g := s.newGate()
		s.extend = func(_ context.Context, l Lease) error {
			if s.count("extend") == 1 {
				g.wait()
			}
			return s.server.Extend(l)
		}
		l := fakeLocker(t, s, WithTTL(30*time.Second))
		k := hold(t, l, "k")
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		sent := time.Now()
		err := k.Extend(ctx, 3*time.Second)
		require.ErrorIs(t, err, ErrUnavailable)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.False(t, k.ValidUntil().After(sent.Add(validityOf(3*time.Second, 300*time.Millisecond))))
		for range 100 { // the ceiling counts for renewals
			time.Sleep(100 * time.Millisecond)
			require.NoError(t, k.Err())
			require.LessOrEqual(t, time.Until(k.ValidUntil()), 3*time.Second)
		}
		// ... and for later Extends, because the first may be executed at any time.
		require.NoError(t, k.Extend(t.Context(), time.Minute))
		require.LessOrEqual(t, time.Until(k.ValidUntil()), 3*time.Second)
		g.open()
		for range 100 {
			time.Sleep(100 * time.Millisecond)
			require.NoError(t, k.Err())
			require.GreaterOrEqual(t, s.server.left("k"), time.Until(k.ValidUntil()))
		}
	})
}

// One lost reply to an Extend to a shorter lease does not cost the lock.
func TestExtendLostReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		g := s.newGate()
		s.extend = func(_ context.Context, l Lease) error {
			err := s.server.Extend(l)
			if s.count("extend") == 1 {
				g.wait()
			}
			return err
		}
		l := fakeLocker(t, s, WithTTL(30*time.Second))
		k := hold(t, l, "k")
		err := k.Extend(t.Context(), 3*time.Second)
		require.NotErrorIs(t, err, ErrLost)
		time.Sleep(10 * time.Second)
		require.NoError(t, k.Err())
	})
}

// The end of a validity that an Extend has shortened is told in time, though
// the watchdog had meant to sleep for longer and no answer to the Extend came.
func TestExtendShorterEndsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		g := s.newGate()
		s.extend = func(context.Context, Lease) error { g.wait(); return nil }
		s.renew = func(_ context.Context, ls []Lease) []error { g.wait(); return each(ls, errors.New("down")) }
		l := fakeLocker(t, s, WithTTL(30*time.Second))
		k := hold(t, l, "k")
		time.Sleep(201 * time.Millisecond)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, k.Extend(ctx, 50*time.Millisecond), ErrUnavailable)
		require.Equal(t, k.ValidUntil(), ends(k))
	})
}

// A lock whose lease reached to the cap on the hold is renewed again when Extend
// has made the lease shorter.
func TestExtendShorterBelowCap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s, WithTTL(30*time.Second), WithMaxHold(20*time.Second))
		k := hold(t, l, "k")
		start := time.Now()
		time.Sleep(11 * time.Second)
		require.NoError(t, k.Extend(t.Context(), 2*time.Second))
		require.Equal(t, 20*time.Second, ends(k).Sub(start))
		lostBecause(t, k, LostMaxHold)
	})
}

// Extend against renewals, with requests and answers delayed at random: validity
// never outlives the key.
func TestExtendAgainstRenewals(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for i := range uint64(100) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, i))
			delay := func() time.Duration { return time.Duration(r.IntN(400)) * time.Millisecond }
			s := &fakeStore{}
			var delays []time.Duration
			for range 1000 {
				delays = append(delays, delay())
			}
			pause := func() { // also late execution of what was given up
				s.mu.Lock()
				d := delays[0]
				delays = delays[1:]
				s.mu.Unlock()
				time.Sleep(d)
			}
			s.renew = func(_ context.Context, ls []Lease) []error {
				pause()
				defer pause()
				return s.server.Renew(ls)
			}
			s.extend = func(_ context.Context, l Lease) error {
				pause()
				defer pause()
				return s.server.Extend(l)
			}
			l := fakeLocker(t, s, WithTTL(2*time.Second))
			k := hold(t, l, "k")
			done := make(chan struct{})
			go func() {
				defer close(done)
				for range 5 {
					ctx, cancel := context.WithTimeout(t.Context(), delay())
					_ = k.Extend(ctx, 1500*time.Millisecond+2*delay())
					cancel()
					time.Sleep(delay())
				}
			}()
			for range 500 {
				time.Sleep(10 * time.Millisecond)
				if k.Err() == nil {
					require.GreaterOrEqual(t, s.server.left("k"), time.Until(k.ValidUntil()), "round %d", i)
				}
			}
			<-done
			_ = k.Release()
			time.Sleep(2 * time.Second)
		})
	}
}

// The two orders of one renewal in flight and one Extend, written out.
func TestExtendAndRenewalInFlight(t *testing.T) {
	for name, renewalFirst := range map[string]bool{"renewal executed first": true, "extend executed first": false} {
		for _, ttl := range []time.Duration{time.Second, time.Minute} {
			t.Run(name+" "+ttl.String(), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := &fakeStore{}
					g := s.newGate()
					s.renew = func(_ context.Context, ls []Lease) []error {
						if s.count("renew") > 1 {
							return s.server.Renew(ls)
						}
						if renewalFirst {
							errs := s.server.Renew(ls)
							g.wait()
							return errs
						}
						g.wait()
						return s.server.Renew(ls)
					}
					l := fakeLocker(t, s, WithTTL(3*time.Second))
					k := hold(t, l, "k")
					time.Sleep(1100 * time.Millisecond)
					require.Equal(t, 1, s.count("renew"))
					require.NoError(t, k.Extend(t.Context(), ttl))
					until := k.ValidUntil()
					g.open()
					synctest.Wait()
					require.Equal(t, until, k.ValidUntil())
					require.GreaterOrEqual(t, s.server.left("k"), time.Until(until))
					time.Sleep(10 * time.Second)
					require.NoError(t, k.Err())
				})
			})
		}
	}
}
