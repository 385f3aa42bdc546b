package holdfast

import (
	"context"
	"math"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/clock"
)

// withMargin returns the default settings with a margin.
func withMargin(margin time.Duration) *config {
	c := defaults()
	c.margin = margin
	return &c
}

// validityOf is the validity of a lease by default settings but for the margin.
func validityOf(d, margin time.Duration) time.Duration { return withMargin(margin).validity(d) }

// C029: the arithmetic, written out.
func TestValidity(t *testing.T) {
	for _, c := range []struct{ ttl, margin, drift, validity time.Duration }{
		{30 * time.Second, 3 * time.Second, 302 * time.Millisecond, 26698 * time.Millisecond},
		{10 * time.Millisecond, time.Millisecond, 2100 * time.Microsecond, 6900 * time.Microsecond},
		{time.Second, 0, 12 * time.Millisecond, 988 * time.Millisecond},
		{time.Second, 988 * time.Millisecond, 12 * time.Millisecond, 0},
		{time.Second, 2 * time.Second, 12 * time.Millisecond, -1012 * time.Millisecond},
	} {
		require.Equal(t, c.drift, withMargin(0).driftOf(c.ttl))
		require.Equal(t, c.validity, validityOf(c.ttl, c.margin))
	}
}

func TestDrift(t *testing.T) {
	c := resolved(t, WithDrift(0.25, 5*time.Millisecond))
	require.Equal(t, 255*time.Millisecond, c.driftOf(time.Second))
	require.Equal(t, 645*time.Millisecond, c.validity(time.Second))
	require.Equal(t, 3*time.Millisecond, resolved(t, WithDrift(0.25, 0)).driftOf(12*time.Millisecond-3), "rounded up")
	require.Zero(t, resolved(t, WithDrift(0, 0)).driftOf(time.Hour))
	require.Equal(t, 900*time.Millisecond, resolved(t, WithDrift(0, 0)).validity(time.Second))
	require.Positive(t, resolved(t, WithDrift(math.Nextafter(0.5, 0), 0), WithTTL(maxTTL), WithoutRenewal()).validity(maxTTL))
	for _, share := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), -0.01, -math.SmallestNonzeroFloat64, 0.5, 1} {
		refused(t, words("WithDrift(", "share"), WithDrift(share, 0))
	}
	for _, plus := range []time.Duration{-1, math.MinInt64, maxTTL + 1, Unlimited} {
		refused(t, words("WithDrift(0.1, "+plus.String()+")"), WithDrift(0.1, plus))
	}
	refused(t, words("WithMargin(100ms)", "drift of 900ms", "WithTTL(1s)"), WithTTL(time.Second), WithDrift(0.4, 500*time.Millisecond))
	refused(t, words("WithRenewEvery", "validity 50ms"), WithTTL(time.Second), WithDrift(0.35, 500*time.Millisecond))
}

// The drift of a call counts for its grant, its renewals and its Extends.
func TestDriftOfCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s, WithTTL(10*time.Second), WithDrift(0.125, 0))
		require.Equal(t, 7750*time.Millisecond, time.Until(hold(t, l, "a").ValidUntil()))
		k := hold(t, l, "b", WithDrift(0.25, time.Second))
		require.Equal(t, 5500*time.Millisecond, time.Until(k.ValidUntil()))
		time.Sleep(time.Minute)
		renewals := s.got("renew")
		require.Equal(t, 5500*time.Millisecond, k.ValidUntil().Sub(renewals[len(renewals)-1].at))
		require.NoError(t, k.Extend(t.Context(), 4*time.Second))
		require.Equal(t, 1600*time.Millisecond, time.Until(k.ValidUntil()))
		require.ErrorIs(t, k.Extend(t.Context(), time.Second), ErrInvalid, "less than the drift")
	})
}

// C029: validity never reaches to the end of the lease or beyond the cap.
func TestValidityProperty(t *testing.T) {
	for range 10_000 {
		sent := clock.Instant(rand.Int64N(1 << 60))
		ttl := minTTL + time.Duration(rand.Float64()*rand.Float64()*float64(maxTTL-minTTL))
		margin := time.Duration(rand.Int64N(int64(ttl)))
		limit := sent.Add(rand.N(2 * ttl))
		until := withMargin(margin).validUntil(sent, ttl, limit)
		require.LessOrEqual(t, until, limit)
		require.LessOrEqual(t, until, sent.Add(ttl-margin-ttl/100-2*time.Millisecond))
		require.Equal(t, min(limit, sent.Add(ttl-margin-ttl/100-2*time.Millisecond)), until)
	}
}

func TestBackoff(t *testing.T) {
	for range 100 {
		for n := 1; n < 200; n++ {
			d, want := backoff(n, firstPause, mostPause), mostPause
			if n < 6 {
				want = min(mostPause, firstPause<<(n-1))
			}
			require.GreaterOrEqual(t, d, want/2)
			require.LessOrEqual(t, d, want)
		}
	}
}

// validUntil counts from before the command was sent, with drift and margin. C030.
func TestValidUntilOfLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{acquire: func(context.Context, Request) (Grant, error) {
			time.Sleep(500 * time.Millisecond)
			return Grant{}, nil
		}}
		l := fakeLocker(t, s, WithTTL(10*time.Second))
		for _, c := range []struct {
			opts  []Option
			valid time.Duration
		}{
			{nil, 8898 * time.Millisecond},
			{[]Option{WithMargin(0)}, 9898 * time.Millisecond},
			{[]Option{WithMargin(5 * time.Second)}, 4898 * time.Millisecond},
			{[]Option{WithTTL(20 * time.Second)}, 17798 * time.Millisecond},
			{[]Option{WithMaxHold(2 * time.Second)}, 2500 * time.Millisecond},
		} {
			sent := time.Now()
			k := hold(t, l, "k", c.opts...)
			require.Equal(t, c.valid, k.ValidUntil().Sub(sent))
			require.NoError(t, k.Err())
			l.end(k, ErrReleased)
		}
	})
}

// What an earlier try of the same owner had taken has less than a TTL left.
func TestValidUntilOfRepeatedTry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{acquire: func(context.Context, Request) (Grant, error) { return Grant{Left: time.Second}, nil }}
		l := fakeLocker(t, s, WithTTL(10*time.Second), WithoutRenewal(), WithMargin(0))
		k := hold(t, l, "k")
		require.Equal(t, 988*time.Millisecond, time.Until(k.ValidUntil()))
	})
}

// C037, C038, C066: impossible settings are refused and nothing is sent.
func TestImpossibleSettings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s)
		sec := WithTTL(time.Second)
		left := validityOf(time.Second, 100*time.Millisecond)
		for i, opts := range [][]Option{
			{WithTTL(0)}, {WithTTL(-1)}, {WithTTL(math.MinInt64)}, {WithTTL(1)}, {WithTTL(999 * time.Microsecond)},
			{WithTTL(minTTL - 1)}, {WithTTL(maxTTL + 1)}, {WithTTL(Unlimited)},
			{sec, WithMargin(-1)}, {sec, WithMargin(988 * time.Millisecond)}, {WithMargin(Unlimited)},
			{sec, WithRenewEvery(left)}, {sec, WithRenewEvery(0)}, {sec, WithRenewEvery(-1)},
			{WithRenewEvery(time.Second), WithoutRenewal()}, {WithMaxHold(0)}, {WithMaxHold(-1)},
			{WithWait(-1)}, {nil}, {WithHolder("")}, {WithHolder("a/b")},
		} {
			_, err := l.Acquire(t.Context(), "k", opts...)
			require.ErrorIs(t, err, ErrInvalid, i)
			_, err = NewWithStore(s, opts...)
			require.ErrorIs(t, err, ErrInvalid, i)
		}
		_, err := l.Acquire(t.Context(), "")
		require.ErrorIs(t, err, ErrInvalid)
		_, err = NewWithStore(nil)
		require.ErrorIs(t, err, ErrInvalid)
		require.Zero(t, s.count("acquire"))
		for _, opts := range [][]Option{
			{sec, WithMargin(988*time.Millisecond - 1), WithoutRenewal()}, {sec, WithRenewEvery(left - 1)},
			{WithTTL(minTTL)}, {WithTTL(maxTTL)}, {WithTTL(1500 * time.Microsecond * 10)},
			{WithRenewEvery(time.Second), WithTTL(time.Minute)},
		} {
			require.NoError(t, hold(t, l, "k", opts...).Release())
		}
	})
}
