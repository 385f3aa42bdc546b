package holdfast

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/refusal"
)

// C001: Release works when the context has ended before.
func TestReleaseAfterCancel(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := memLocker(t, m, WithTTL(time.Minute))
		for range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			k, err := l.Acquire(ctx, "k")
			require.NoError(t, err)
			cancel()
			require.NoError(t, k.Release())
			require.False(t, m.Exists("k"))
			require.ErrorIs(t, k.Release(), ErrNotHeld)
			require.NotErrorIs(t, k.Release(), ErrLost)
		}
	})
}

// C059: of many concurrent Releases one is nil, others say that nothing is held.
func TestReleaseConcurrently(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		s.release = func(_ context.Context, l Lease) error {
			time.Sleep(time.Millisecond)
			return s.server.Release(l)
		}
		l := fakeLocker(t, s, WithTTL(time.Second), WithRenewEvery(time.Millisecond))
		for i := range 200 {
			k := hold(t, l, "k")
			time.Sleep(time.Duration(i) * 100 * time.Microsecond)
			n := s.count("release")
			var ok atomic.Int32
			var wg sync.WaitGroup
			for range 16 {
				wg.Go(func() {
					if err := k.Release(); err == nil {
						ok.Add(1)
					} else {
						require.ErrorIs(t, err, ErrNotHeld)
						require.NotErrorIs(t, err, ErrLost)
					}
				})
			}
			wg.Wait()
			require.EqualValues(t, 1, ok.Load())
			require.Equal(t, n+1, s.count("release"))
		}
	})
}

// C018: nil and zero handles.
func TestNoHandle(t *testing.T) {
	for _, k := range []*Lock{nil, {}} {
		require.ErrorIs(t, k.Release(), ErrNotHeld)
		require.ErrorIs(t, k.Extend(t.Context(), time.Second), ErrNotHeld)
		require.ErrorIs(t, k.Err(), ErrNotHeld)
		require.NotErrorIs(t, k.Err(), ErrLost)
		require.Error(t, k.Context().Err())
		require.ErrorIs(t, context.Cause(k.Context()), ErrNotHeld)
		require.Zero(t, k.ValidUntil())
		require.Zero(t, k.Token())
		require.Empty(t, k.Key())
		require.Empty(t, k.Owner())
	}
	_, err := New(nil)
	require.ErrorIs(t, err, ErrInvalid)
}

// C002: Release without an answer may be called again.
func TestReleaseAfterUnavailable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		down := errors.New("connection refused")
		s.release = func(context.Context, Lease) error { return down }
		l := fakeLocker(t, s)
		k := hold(t, l, "k")
		err := k.Release()
		require.ErrorIs(t, err, ErrUnavailable)
		require.ErrorIs(t, err, down)
		require.NotErrorIs(t, err, ErrNotHeld)
		require.Positive(t, s.server.left("k"))
		s.change(func() { s.release = nil })
		require.NoError(t, k.Release())
		require.Zero(t, s.server.left("k"))
		require.ErrorIs(t, k.Release(), ErrNotHeld)
	})
}

// A lost reply: absent counts as released while validity lasts, and not after it.
func TestReleaseLostReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s, WithTTL(3*time.Second))
		var lost atomic.Int32
		s.release = func(_ context.Context, l Lease) error {
			err := s.server.Release(l)
			if lost.Add(-1) >= 0 {
				return errors.New("broken pipe")
			}
			return err
		}
		k := hold(t, l, "k")
		lost.Store(1)
		require.NoError(t, k.Release())

		k = hold(t, l, "k")
		lost.Store(1000)
		require.ErrorIs(t, k.Release(), ErrUnavailable)
		time.Sleep(3 * time.Second)
		lost.Store(0)
		require.ErrorIs(t, k.Release(), ErrLost, "the key may have been anybody's")

		k = hold(t, l, "k")
		lost.Store(1000)
		require.ErrorIs(t, k.Release(), ErrUnavailable)
		lost.Store(0)
		time.Sleep(3 * time.Second)
		require.NoError(t, k.Release(), "the background has found it absent in time")

		// Without a lost reply absent is a loss. C007
		k = hold(t, l, "k")
		s.server.set("k", "", 0)
		require.ErrorIs(t, k.Release(), ErrLost)
		k = hold(t, l, "k")
		s.server.set("k", "somebody/else", time.Second)
		require.ErrorIs(t, k.Release(), ErrLost) // C003
		require.Positive(t, s.server.left("k"))
	})
}

// C014: a Release that is repeated touches no later acquisition.
func TestReleaseTouchesNoLaterOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s)
		s.release = func(_ context.Context, l Lease) error {
			_ = s.server.Release(l)
			return errors.New("broken pipe")
		}
		k := hold(t, l, "k")
		require.ErrorIs(t, k.Release(), ErrUnavailable)
		s.change(func() { s.release = nil })
		next := hold(t, l, "k")
		require.ErrorIs(t, k.Release(), ErrNotHeld)
		require.NoError(t, next.Err())
		require.Positive(t, s.server.left("k"))
		require.NoError(t, next.Release())
	})
}

// C098, C009: Release is bounded by 5 s and by the validity, but tries once.
func TestReleaseBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		g := s.newGate()
		s.release = func(context.Context, Lease) error { g.wait(); return errors.New("x") }
		s.renew = func(_ context.Context, ls []Lease) []error { return each(ls, errors.New("x")) }
		l := fakeLocker(t, s)
		k := hold(t, l, "a", WithTTL(time.Minute))
		start := time.Now()
		err := k.Release()
		require.ErrorIs(t, err, ErrUnavailable)
		require.NotErrorIs(t, err, context.DeadlineExceeded) // C099
		require.NotErrorIs(t, err, context.Canceled)
		require.LessOrEqual(t, time.Since(start), 5*time.Second)
		require.Greater(t, time.Since(start), 4*time.Second)
		require.Greater(t, s.count("release"), 1, "a lost reply does not cost the whole time")

		k = hold(t, l, "b", WithTTL(2*time.Second))
		until := k.ValidUntil()
		require.ErrorIs(t, k.Release(), ErrUnavailable)
		require.False(t, time.Now().After(until))

		k = hold(t, l, "c", WithTTL(2*time.Second))
		ends(k)
		n := s.count("release")
		start = time.Now()
		require.ErrorIs(t, k.Release(), ErrUnavailable)
		require.LessOrEqual(t, time.Since(start), releaseLeast)
		require.Equal(t, n+1, s.count("release"))
	})
}

// C006, C122, C005: what passes is tried again; what does not is not; a definite
// answer ends it at once.
func TestReleaseErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s)
		for _, text := range []string{"BUSY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN"} {
			k := hold(t, l, "k")
			var bad atomic.Int32
			bad.Store(3)
			s.change(func() {
				s.release = func(_ context.Context, l Lease) error {
					if bad.Add(-1) >= 0 {
						return errors.New(text)
					}
					return s.server.Release(l)
				}
			})
			require.NoError(t, k.Release())
			require.Zero(t, s.server.left("k"))
		}
		for _, err := range []error{refusal.Final(errors.New("MISCONF")), &LostError{Reason: LostGone}, &LostError{Reason: LostTaken}} {
			s.change(func() { s.release = func(context.Context, Lease) error { return err } })
			k := hold(t, l, err.Error())
			n, start := s.count("release"), time.Now()
			got := k.Release()
			require.ErrorContains(t, got, err.Error()[len(err.Error())-7:])
			require.Zero(t, time.Since(start))
			require.Equal(t, n+1, s.count("release"))
		}
	})
}

// Do releases in every case, and joins the errors. C015
func TestDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s, WithTTL(3*time.Second))
		mine := errors.New("mine")
		require.NoError(t, l.Do(t.Context(), "k", func(ctx context.Context) error {
			time.Sleep(time.Minute)
			return ctx.Err()
		}))
		require.Zero(t, s.server.left("k"))
		require.PanicsWithValue(t, "boo", func() {
			_ = l.Do(t.Context(), "k", func(context.Context) error { panic("boo") })
		})
		require.Zero(t, s.server.left("k"))
		ctx, cancel := context.WithCancelCause(t.Context())
		err := l.Do(ctx, "k", func(ctx context.Context) error {
			cancel(mine)
			return context.Cause(ctx)
		})
		require.ErrorIs(t, err, mine)
		require.Zero(t, s.server.left("k"))
		s.release = func(context.Context, Lease) error { return errors.New("down") }
		err = l.Do(t.Context(), "k", func(context.Context) error { return mine })
		require.ErrorIs(t, err, mine)
		require.ErrorIs(t, err, ErrUnavailable)
		require.ErrorIs(t, l.Do(t.Context(), "x", nil), ErrInvalid)
	})
}

// C045: what a renewal that came too late had left of a lost lock is deleted in the
// background. Release does not take that for its own doing, whatever the store says:
// others may have had the lock since.
func TestReleaseAfterCleanUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		s.renew = func(_ context.Context, leases []Lease) []error {
			errs := s.server.Renew(leases)
			time.Sleep(2500 * time.Millisecond) // it does not heed its context
			return errs
		}
		s.release = func(_ context.Context, l Lease) error {
			_ = s.server.Release(l)
			return nil // deleted, now or before
		}
		l := fakeLocker(t, s, WithTTL(3*time.Second), WithMaxHold(3200*time.Millisecond))
		k := hold(t, l, "k")
		other := hold(t, fakeLocker(t, s, WithoutRenewal()), "k", WithWait(time.Minute))
		require.ErrorIs(t, k.Err(), ErrLost)
		time.Sleep(time.Second)
		require.NotZero(t, s.count("release"))
		require.ErrorIs(t, k.Release(), ErrLost)
		require.ErrorIs(t, k.Release(), ErrNotHeld)
		require.NoError(t, other.Err())
	})
}
