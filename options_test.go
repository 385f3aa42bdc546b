package holdfast

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/clock"

	"github.com/holdfast-go/holdfast/internal/keyspace"
)

// untouchable is a Store that must not be asked anything.
type untouchable struct{ t *testing.T }

func (s untouchable) Acquire(context.Context, Request) (Grant, error) {
	s.t.Error("Acquire was sent")
	return Grant{}, errors.New("untouchable")
}

func (s untouchable) Renew(_ context.Context, leases []Lease) []error {
	s.t.Error("Renew was sent")
	return make([]error, len(leases))
}

func (s untouchable) Extend(context.Context, Lease) error {
	s.t.Error("Extend was sent")
	return errors.New("untouchable")
}

func (s untouchable) Release(context.Context, Lease) error {
	s.t.Error("Release was sent")
	return errors.New("untouchable")
}

func untouchedLocker(t *testing.T, opts ...Option) *Locker {
	t.Helper()
	l, err := NewWithStore(untouchable{t}, append([]Option{quiet()}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// refused asserts that opts are ErrInvalid, for New and for a call, that the text
// has all words, and that nothing was sent.
func refused(t *testing.T, words []string, opts ...Option) {
	t.Helper()
	_, atNew := NewWithStore(untouchable{t}, opts...)
	l := untouchedLocker(t)
	k, atAcquire := l.Acquire(t.Context(), "k", opts...)
	require.Nil(t, k)
	k, atTry := l.TryAcquire(t.Context(), "k", opts...)
	require.Nil(t, k)
	atDo := l.Do(t.Context(), "k", func(context.Context) error { t.Error("ran"); return nil }, opts...)
	for _, err := range []error{atNew, atAcquire, atTry, atDo} {
		require.ErrorIs(t, err, ErrInvalid)
		require.NotErrorIs(t, err, ErrUnavailable)
		require.True(t, strings.HasPrefix(err.Error(), "holdfast: "), err.Error())
		for _, word := range words {
			require.ErrorContains(t, err, word)
		}
	}
}

// resolved returns the settings that opts give, to a Locker without options.
func resolved(t *testing.T, opts ...Option) *config {
	t.Helper()
	d := defaults()
	c, err := d.with(opts)
	require.NoError(t, err)
	return c
}

func words(w ...string) []string { return w }

func TestDefaults(t *testing.T) {
	c := resolved(t)
	require.Equal(t, 30*time.Second, c.ttl)
	require.Negative(t, c.wait)
	require.Equal(t, 10*time.Second, c.renewalOf(c.ttl))
	require.Equal(t, 3*time.Second, c.marginOf(c.ttl))
	require.Equal(t, 10*time.Minute, c.maxHoldOf(c.ttl))
	require.Equal(t, time.Hour, c.maxHoldOf(time.Hour), "the TTL, if that is longer")
	require.False(t, c.noRenewal || c.fencing)
	require.Zero(t, c.replicas)
	require.Empty(t, c.prefix)
	require.Same(t, slog.Default(), c.log())
}

// The TTL table: what is below or above the bounds is refused, never corrected.
func TestTTL(t *testing.T) {
	for _, d := range []time.Duration{
		math.MinInt64, -time.Second, -1, 0, 1, 500 * time.Microsecond, 999 * time.Microsecond, time.Millisecond,
		minTTL - 1, maxTTL + 1, 100 * 365 * 24 * time.Hour, Unlimited,
	} {
		t.Run(d.String(), func(t *testing.T) { refused(t, words("TTL", d.String()), WithTTL(d)) })
	}
	for _, d := range []time.Duration{
		minTTL, minTTL + 1, 50 * time.Millisecond, 999 * time.Millisecond, time.Second, 1500 * time.Millisecond,
		time.Hour, 30 * 24 * time.Hour, 10 * 365 * 24 * time.Hour,
	} {
		t.Run(d.String(), func(t *testing.T) {
			c := resolved(t, WithTTL(d))
			require.Equal(t, d, c.ttl)
			require.GreaterOrEqual(t, time.Duration(clock.Millis(d))*time.Millisecond, d)
			require.Positive(t, c.validity(d))
			require.Less(t, c.validity(d), d)
			require.Less(t, c.renewalOf(d), c.validity(d))
		})
	}
}

func TestWait(t *testing.T) {
	refused(t, words("WithWait(-1ns)", "negative"), WithWait(-1))
	refused(t, words("WithWait"), WithWait(math.MinInt64))
	for _, d := range []time.Duration{0, 1, time.Hour, Unlimited} {
		require.Equal(t, d, resolved(t, WithWait(d)).wait)
	}
}

func TestRenewEvery(t *testing.T) {
	for _, d := range []time.Duration{math.MinInt64, -1, 0, 1, time.Millisecond - 1} {
		refused(t, words("WithRenewEvery", d.String()), WithRenewEvery(d))
	}
	// Boundary equality: 1 s has a validity of 1 s - 10 ms - 2 ms - 100 ms.
	left := 888 * time.Millisecond
	refused(t, words("888ms", "1s"), WithTTL(time.Second), WithRenewEvery(left))
	require.Equal(t, left-1, resolved(t, WithTTL(time.Second), WithRenewEvery(left-1)).renewalOf(time.Second))
	require.Equal(t, time.Millisecond, resolved(t, WithRenewEvery(time.Millisecond)).renewalOf(defaultTTL))
	refused(t, words("WithRenewEvery(1m0s)", "WithTTL(30s)"), WithRenewEvery(time.Minute))
}

func TestMargin(t *testing.T) {
	refused(t, words("WithMargin(-1ns)"), WithMargin(-1))
	refused(t, words("WithMargin"), WithMargin(math.MinInt64))
	// 1 s - 10 ms - 2 ms: all of it as margin leaves nothing.
	refused(t, words("WithMargin(988ms)", "WithTTL(1s)"), WithTTL(time.Second), WithMargin(988*time.Millisecond), WithoutRenewal())
	c := resolved(t, WithTTL(time.Second), WithMargin(988*time.Millisecond-1), WithoutRenewal())
	require.Equal(t, time.Duration(1), c.validity(c.ttl))
	require.Zero(t, resolved(t, WithMargin(0)).marginOf(time.Second), "0 is none, not the default")
	refused(t, words("WithMargin"), WithMargin(Unlimited))
}

func TestMaxHoldOption(t *testing.T) {
	for _, d := range []time.Duration{math.MinInt64, -1, 0} {
		refused(t, words("WithMaxHold", "Unlimited"), WithMaxHold(d))
	}
	for _, d := range []time.Duration{1, time.Second, Unlimited} {
		require.Equal(t, d, resolved(t, WithMaxHold(d)).maxHoldOf(defaultTTL))
	}
}

func TestWaitersAndLeastHold(t *testing.T) {
	refused(t, words("WithMaxWaiters(0)", "at least 1"), WithMaxWaiters(0))
	refused(t, words("WithMaxWaiters(-1)"), WithMaxWaiters(-1))
	refused(t, words("WithMinHold(0s)", "positive"), WithMinHold(0))
	refused(t, words("WithMinHold(-1ns)"), WithMinHold(-1))
	refused(t, words("WithMinHold"), WithMinHold(Unlimited))
}

func TestReplicas(t *testing.T) {
	refused(t, words("WithReplicas(-1, 1s)"), WithReplicas(-1, time.Second))
	for _, d := range []time.Duration{-1, 0, time.Millisecond - 1} {
		refused(t, words("WithReplicas(1,", "1ms"), WithReplicas(1, d))
	}
	refused(t, words("WithReplicas", "888ms"), WithTTL(time.Second), WithReplicas(1, 888*time.Millisecond))
	resolved(t, WithTTL(time.Second), WithReplicas(1, 888*time.Millisecond-1))
	c := resolved(t, WithReplicas(2, time.Second), WithReplicas(0, 0))
	require.Zero(t, c.replicas, "0 switches it off")
}

func TestContradictions(t *testing.T) {
	both := words("WithRenewEvery", "WithoutRenewal", "contradict")
	refused(t, both, WithRenewEvery(time.Second), WithoutRenewal())
	refused(t, both, WithoutRenewal(), WithRenewEvery(time.Second))
	refused(t, words("nil option"), nil)
	refused(t, words("nil option"), WithTTL(time.Second), nil)
	refused(t, words("nil logger"), WithLogger(nil))
}

// What a call says overrides what New said; the Locker stays as it was.
func TestCallOverridesNew(t *testing.T) {
	base := resolved(t, WithTTL(time.Minute), WithWait(time.Second), WithRenewEvery(7*time.Second),
		WithPrefix("p:"), WithHolder("a"), WithMaxHold(time.Hour))
	before := *base

	c, err := base.with([]Option{WithTTL(20 * time.Second), WithWait(0), WithHolder("b"), WithPrefix(""), WithFencing()})
	require.NoError(t, err)
	require.Equal(t, 20*time.Second, c.ttl)
	require.Zero(t, c.wait)
	require.Equal(t, "b", c.holder)
	require.Empty(t, c.prefix)
	require.True(t, c.fencing)
	require.Equal(t, 7*time.Second, c.renewalOf(c.ttl), "what a call does not say stays")
	require.Equal(t, time.Hour, c.maxHoldOf(c.ttl))

	c, err = base.with([]Option{WithoutRenewal()})
	require.NoError(t, err, "between New and a call it is no contradiction")
	require.True(t, c.noRenewal)
	c, err = c.with([]Option{WithRenewEvery(time.Second)})
	require.NoError(t, err)
	require.False(t, c.noRenewal)

	_, err = base.with([]Option{WithTTL(7 * time.Second)})
	require.ErrorIs(t, err, ErrInvalid, "too short for the Locker's own WithRenewEvery")
	require.Equal(t, before, *base)

	same, err := base.with(nil)
	require.NoError(t, err)
	require.Same(t, base, same)
}

func TestOverridingReachesTheServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s, WithTTL(time.Minute), WithPrefix("p:"), WithHolder("a"))
		k := hold(t, l, "k", WithTTL(time.Second), WithPrefix("q:"), WithHolder("b"))
		require.Equal(t, "k", k.Key())
		require.True(t, strings.HasPrefix(k.Owner(), "b/"))
		require.Equal(t, time.Second, s.server.left("q:k"))
		k2 := hold(t, l, "k")
		require.True(t, strings.HasPrefix(k2.Owner(), "a/"))
		require.Equal(t, time.Minute, s.server.left("p:k"))
	})
}

func TestHolderNames(t *testing.T) {
	for _, name := range []string{
		"", strings.Repeat("a", maxHolder+1), strings.Repeat("я", maxHolder/2) + "a", "a/b", "/", "a\nb", "\x00", "a\x7f", "a\u200bb",
	} {
		refused(t, words("holder name"), WithHolder(name))
	}
	for _, name := range []string{
		"a", strings.Repeat("a", maxHolder), strings.Repeat("я", maxHolder/2), "worker 7", "host-1-ab12", "名前", `"quoted"`, "{a}",
	} {
		require.Equal(t, name, resolved(t, WithHolder(name)).holder)
	}
	name := defaultHolder()
	require.NoError(t, checkHolder(name))
	require.Regexp(t, `^.*-\d+-[0-9a-f]{4}$`, name)
}

func TestOwnersAreUnique(t *testing.T) {
	seen := map[string]bool{}
	for range 1000 {
		owner, err := newOwner(strings.Repeat("h", maxHolder))
		require.NoError(t, err)
		require.Regexp(t, `^h{128}/[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`, owner)
		require.False(t, seen[owner])
		seen[owner] = true
		require.Equal(t, strings.Repeat("h", maxHolder), holderOf(owner))
	}
}

func TestKeys(t *testing.T) {
	c := resolved(t)
	for _, key := range []string{"k", "order:1", "a b", "\x00", "a\x00b", "\xff", "ключ", "{", "}", "{}", "a}b", strings.Repeat("k", maxKey)} {
		full, err := c.fullKey(key)
		require.NoError(t, err)
		require.Equal(t, key, full)
	}
	l := untouchedLocker(t)
	for _, key := range []string{"", strings.Repeat("k", maxKey+1)} {
		_, err := l.Acquire(t.Context(), key)
		require.ErrorIs(t, err, ErrInvalid)
		_, err = l.TryAcquire(t.Context(), key, WithPrefix("p"))
		require.ErrorIs(t, err, ErrInvalid, "a prefix does not make a key")
	}
}

func TestPrefixCountsAsKey(t *testing.T) {
	c := resolved(t, WithPrefix("p:"))
	full, err := c.fullKey(strings.Repeat("k", maxKey-2))
	require.NoError(t, err)
	require.Len(t, full, maxKey)
	_, err = c.fullKey(strings.Repeat("k", maxKey-1))
	require.ErrorIs(t, err, ErrInvalid)

	// Prefix and key together decide about hash tags.
	tagged := resolved(t, WithPrefix("{app}:"), WithFencing())
	full, err = tagged.fullKey("a}b")
	require.NoError(t, err)
	fence, ok := keyspace.Companion(full, "fence")
	require.True(t, ok)
	require.Equal(t, "{app}:a}b:fence", fence)
	require.Equal(t, keyspace.Slot(full), keyspace.Slot(fence))
}

func TestKeysWithCompanion(t *testing.T) {
	l := untouchedLocker(t, WithFencing())
	for _, key := range []string{"}", "a}b", "{}", "{}a", "a{}{b}"} {
		_, err := l.Acquire(t.Context(), key)
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorContains(t, err, fmt.Sprintf("%q", key))
	}
	c := resolved(t, WithFencing())
	for _, key := range []string{"k", "a{b}c", "{a}", "a{b", "\x00"} {
		_, err := c.fullKey(key)
		require.NoError(t, err)
	}
}

func TestInvalidCallsSendNothing(t *testing.T) {
	l := untouchedLocker(t)
	var none context.Context
	_, err := l.Acquire(none, "k")
	require.ErrorIs(t, err, ErrInvalid)
	_, err = l.TryAcquire(none, "k")
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorIs(t, l.Do(t.Context(), "k", nil), ErrInvalid)

	_, err = NewWithStore(nil)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = New(nil)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = New((*redis.Client)(nil))
	require.ErrorIs(t, err, ErrInvalid)
	_, err = New((*redis.ClusterClient)(nil))
	require.ErrorIs(t, err, ErrInvalid)
	_, err = New((*redis.Ring)(nil))
	require.ErrorIs(t, err, ErrInvalid)
}

func TestInvalidExtendSendsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s, WithTTL(time.Minute), WithRenewEvery(10*time.Second))
		k := hold(t, l, "k")
		for _, d := range []time.Duration{math.MinInt64, -time.Second, 0, 1, minTTL - 1, maxTTL + 1, 11 * time.Second} {
			require.ErrorIs(t, k.Extend(t.Context(), d), ErrInvalid, "%v", d)
		}
		var none context.Context
		require.ErrorIs(t, k.Extend(none, time.Minute), ErrInvalid)
		require.Zero(t, s.count("extend"))
		require.NoError(t, k.Err())
		require.NoError(t, k.Extend(t.Context(), 12*time.Second))
	})
}

func TestMillis(t *testing.T) {
	for d, want := range map[time.Duration]int64{
		0: 0, 1: 1, time.Millisecond - 1: 1, time.Millisecond: 1, time.Millisecond + 1: 2,
		1500*time.Millisecond + 1: 1501, time.Second: 1000, maxTTL: 315360000000,
	} {
		require.Equal(t, want, clock.Millis(d), "%v", d)
	}
}

func FuzzMillis(f *testing.F) {
	for _, d := range []int64{0, 1, 999_999, 1_000_000, 1_000_001, int64(minTTL), int64(maxTTL), math.MaxInt64} {
		f.Add(d)
	}
	f.Fuzz(func(t *testing.T, n int64) {
		d := time.Duration(n)
		if checkTTL(d) != nil {
			if d >= minTTL && d <= maxTTL {
				t.Fatalf("%v is refused", d)
			}
			return
		}
		ms := time.Duration(clock.Millis(d)) * time.Millisecond
		if ms < d || ms-d >= time.Millisecond || ms <= 0 {
			t.Fatalf("%v became %v on the server", d, ms)
		}
		if v := validityOf(d, d/10); v <= 0 || v >= d {
			t.Fatalf("%v has a validity of %v", d, v)
		}
	})
}
