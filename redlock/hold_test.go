package redlock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// patience is for what must happen, however busy the machine is.
const patience = 20 * time.Second

// lasting are options for locks whose keys do not end by themselves within a test, and
// that are renewed often: what is gone was deleted, and what is held is not lost to a busy
// machine. Instances vote at once, which is right where one Locker is alone or none restarts.
func lasting(more ...holdfast.Option) []holdfast.Option {
	return append([]holdfast.Option{
		WithDurableInstances(), holdfast.WithTTL(30 * time.Second), WithNodeTimeout(100 * time.Millisecond),
		holdfast.WithRenewEvery(50 * time.Millisecond),
	}, more...)
}

// fleeting are options for locks that end soon unless they are renewed.
func fleeting(more ...holdfast.Option) []holdfast.Option {
	return append([]holdfast.Option{WithDurableInstances(), holdfast.WithTTL(900 * time.Millisecond)}, more...)
}

// with returns the fleet for a subtest.
func (x *fleet) with(t testing.TB) *fleet {
	y := *x
	y.t = t
	return &y
}

// direct returns a Locker that no fault of the proxies is for.
func (x *fleet) direct(opts ...holdfast.Option) *holdfast.Locker {
	x.t.Helper()
	var clients []redis.UniversalClient
	for _, s := range x.servers {
		clients = append(clients, s.Client())
	}
	l, err := New(clients, append([]holdfast.Option{quiet}, opts...)...)
	require.NoError(x.t, err)
	x.t.Cleanup(func() { _ = l.Close() })
	return l
}

// lefts returns what is left of a key on each server, negative where it is not.
func (x *fleet) lefts(key string) (all []time.Duration) {
	for _, s := range x.servers {
		all = append(all, s.Admin().PTTL(context.Background(), key).Val())
	}
	return all
}

// everywhere waits until all servers have the lock.
func (x *fleet) everywhere(k *holdfast.Lock) {
	x.t.Helper()
	redistest.Eventually(x.t, patience, "all have "+k.Key(), func() bool {
		return len(x.having(k.Key(), k.Owner())) == len(x.servers)
	})
}

// clean waits until no server has a key but those that fencing leaves. All must run.
func (x *fleet) clean(within time.Duration) {
	x.t.Helper()
	var left []string
	defer func() {
		if x.t.Failed() {
			x.t.Log("left behind:", left)
		}
	}()
	redistest.Eventually(x.t, within, "no key is left", func() bool {
		left = nil
		for i, s := range x.servers {
			keys, err := s.Admin().Keys(context.Background(), "*").Result()
			if err != nil {
				left = append(left, err.Error())
			}
			for _, key := range keys {
				if key != floorKey && !strings.HasSuffix(key, ":fence") {
					left = append(left, fmt.Sprintf("%d:%s", i, key))
				}
			}
		}
		return len(left) == 0
	})
}

// acquire takes a lock that nobody has.
func acquire(t testing.TB, l *holdfast.Locker, key string, opts ...holdfast.Option) *holdfast.Lock {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	k, err := l.Acquire(ctx, key, append([]holdfast.Option{holdfast.WithWait(patience)}, opts...)...)
	require.NoError(t, err)
	return k
}

// renewed waits for n more renewals, seen by the end of validity.
func renewed(t testing.TB, n int, locks ...*holdfast.Lock) {
	t.Helper()
	for _, k := range locks {
		for range n {
			before := k.ValidUntil()
			redistest.Eventually(t, patience, "a renewal of "+k.Key(), func() bool { return k.ValidUntil().After(before.Add(5 * time.Millisecond)) })
		}
		require.NoError(t, k.Err(), k.Key())
	}
}

// C039, C042, C043: what is left of the lease is what was asked, on all instances, after
// Acquire, a renewal and Extend; Extend sets and does not add.
func TestLeaseOnInstances(t *testing.T) {
	x := startFleet(t, 5, 0)
	const month = 30 * 24 * time.Hour
	l := x.locker(lasting(WithLongestTTL(3*month), holdfast.WithMaxHold(holdfast.Unlimited))...)
	for _, ttl := range []time.Duration{1100 * time.Millisecond, 1500*time.Millisecond + time.Microsecond, time.Hour, month} {
		k := acquire(t, l, "k", holdfast.WithTTL(ttl))
		x.everywhere(k)
		near := func(want time.Duration) {
			t.Helper()
			for _, left := range x.lefts("k") {
				require.LessOrEqual(t, left, want+time.Millisecond)
				require.Greater(t, left, want-time.Second)
			}
		}
		near(ttl)
		for _, s := range x.servers {
			require.NoError(t, s.Admin().PExpire(t.Context(), "k", ttl/2).Err())
		}
		redistest.Eventually(t, patience, "a renewal on all", func() bool {
			for _, left := range x.lefts("k") {
				if left < ttl*3/4 {
					return false
				}
			}
			return true
		})
		near(ttl)
		for range 10 {
			require.NoError(t, k.Extend(t.Context(), 2*ttl))
			for _, left := range x.lefts("k") {
				require.LessOrEqual(t, left, 2*ttl+time.Millisecond)
			}
		}
		require.LessOrEqual(t, time.Until(k.ValidUntil()), 2*ttl)
		require.Greater(t, time.Until(k.ValidUntil()), ttl)
		require.NoError(t, k.Release())
	}
	x.clean(patience)
}

// C037, C066: leases that make no sense are refused and nothing is sent. Without renewal
// any length is fine.
func TestImpossibleLeases(t *testing.T) {
	x := startFleet(t, 3, 0)
	l := x.locker(fleeting(WithLongestTTL(time.Hour), holdfast.WithTTL(time.Hour), holdfast.WithRenewEvery(time.Minute))...)
	k := acquire(t, l, "k")
	x.everywhere(k)
	sent := func() (n int) {
		for _, p := range x.proxies {
			n += p.CountMatch(faultproxy.Any())
		}
		return n
	}
	before, until := sent(), k.ValidUntil()
	for _, ttl := range []time.Duration{0, -time.Second, 1, time.Millisecond, time.Hour + 1, -1 << 63} {
		require.ErrorIs(t, k.Extend(t.Context(), ttl), holdfast.ErrInvalid, ttl)
		_, err := l.Acquire(t.Context(), "other", holdfast.WithTTL(ttl))
		require.ErrorIs(t, err, holdfast.ErrInvalid, ttl)
	}
	require.Equal(t, before, sent())
	require.WithinDuration(t, until, k.ValidUntil(), time.Millisecond)
	require.NoError(t, k.Release())
	for _, ttl := range []time.Duration{10 * time.Millisecond, time.Second, time.Hour} {
		k, err := l.Acquire(t.Context(), "fixed", holdfast.WithoutRenewal(), holdfast.WithTTL(ttl))
		if ttl >= time.Second {
			require.NoError(t, err)
		}
		_ = k.Release()
		require.NotErrorIs(t, err, holdfast.ErrInvalid)
	}
}

// C030, C054: whether the lock is held is answered by the local clock, at once, whatever
// the instances do: nil before the end of validity and never after it. C067: the context
// of a fixed lease has that end as its deadline; then the key goes and another gets it.
func TestValidityEndsByItself(t *testing.T) {
	x := startFleet(t, 5, 0)
	l, other := x.locker(fleeting()...), x.direct(fleeting()...)
	for name, fault := range map[string]func(){
		"one slow": func() { x.proxies[4].Slow(10 * time.Second) },
		"all hang": func() {
			for _, p := range x.proxies {
				p.Hang()
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			k := acquire(t, l, "k", holdfast.WithoutRenewal())
			end := k.ValidUntil()
			deadline, ok := k.Context().Deadline()
			require.True(t, ok)
			require.WithinDuration(t, end, deadline, time.Millisecond)
			fault()
			for {
				asked := time.Now()
				err := k.Err()
				require.Less(t, time.Since(asked), time.Second, "it waits for nobody")
				if err != nil {
					require.ErrorIs(t, err, holdfast.ErrLost)
					require.False(t, time.Now().Add(time.Millisecond).Before(end))
					break
				}
				require.True(t, asked.Before(end.Add(time.Millisecond)))
			}
			<-k.Context().Done()
			require.ErrorIs(t, context.Cause(k.Context()), holdfast.ErrLost)
			got := acquire(t, other, "k")
			require.NoError(t, got.Release())
			for _, p := range x.proxies {
				p.Slow(0)
				p.Heal()
			}
			require.ErrorIs(t, k.Release(), holdfast.ErrLost)
		})
	}
}

// C031: an Extend that takes longer than what is left of the validity is an error, and the
// lock is lost. C035: it does not bring a lock back that has ended, nor does a renewal.
func TestExtendTooLate(t *testing.T) {
	x := startFleet(t, 5, 0)
	l := x.locker(fleeting(holdfast.WithoutRenewal())...)
	k := acquire(t, l, "k")
	for _, p := range x.proxies[:3] {
		p.Slow(time.Second)
	}
	require.ErrorIs(t, k.Extend(context.WithoutCancel(t.Context()), 900*time.Millisecond), holdfast.ErrLost)
	<-k.Context().Done()
	require.ErrorIs(t, context.Cause(k.Context()), holdfast.ErrLost)
	for _, p := range x.proxies {
		p.Slow(0)
	}
	x.clean(patience)
	for _, s := range x.servers {
		s.ResetStats()
	}
	require.ErrorIs(t, k.Extend(t.Context(), 900*time.Millisecond), holdfast.ErrNotHeld)
	require.ErrorIs(t, k.Release(), holdfast.ErrNotHeld)
	for i, s := range x.servers {
		require.Zero(t, s.CommandStats()["set"], i)
	}
}

// C045: the cap on the hold ends it, with a cause of its own, and another gets the lock.
func TestCapOnTheHold(t *testing.T) {
	x := startFleet(t, 3, 0)
	l := x.locker(fleeting(holdfast.WithTTL(600*time.Millisecond), holdfast.WithMaxHold(1200*time.Millisecond))...)
	k := acquire(t, l, "k")
	renewed(t, 1, k)
	got := acquire(t, x.locker(fleeting()...), "k") // waits for it
	require.ErrorIs(t, k.Err(), holdfast.ErrMaxHold)
	require.NoError(t, got.Err())
	require.ErrorIs(t, k.Release(), holdfast.ErrLost)
	require.NoError(t, got.Err())
	require.NoError(t, got.Release())
	x.clean(patience)
}

// decorate is a hook that wraps every error.
type decorate struct{}

func (decorate) DialHook(next redis.DialHook) redis.DialHook { return next }
func (decorate) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { return wrapped(next(ctx, cmd)) }
}

func (decorate) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error { return wrapped(next(ctx, cmds)) }
}

func wrapped(err error) error {
	if err != nil {
		return fmt.Errorf("decorated: %w", err)
	}
	return nil
}

// C118: scripts that the instances have forgotten are not noticed, at any moment, also
// through hooks that wrap errors.
func TestForgottenScripts(t *testing.T) {
	x := startFleet(t, 3, 0)
	clients := x.clients(func(o *redis.Options) { o.ContextTimeoutEnabled = true }) // else there are no hooks
	for _, c := range clients {
		c.AddHook(decorate{})
	}
	l, err := New(clients, append(lasting(holdfast.WithFencing()), quiet)...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	flush := func() {
		for _, s := range x.servers {
			require.NoError(t, s.Admin().ScriptFlush(t.Context()).Err())
		}
	}
	var last *holdfast.Lock
	for range 5 {
		flush()
		k := acquire(t, l, "k")
		flush()
		_, err := l.TryAcquire(t.Context(), "k")
		require.ErrorIs(t, err, holdfast.ErrNotAcquired)
		flush()
		renewed(t, 1, k)
		flush()
		require.NoError(t, k.Extend(t.Context(), 20*time.Second))
		flush()
		require.NoError(t, k.Release())
		if last != nil {
			require.Greater(t, k.Token(), last.Token())
			require.NotEqual(t, k.Owner(), last.Owner()) // C137
		}
		last = k
	}
	x.clean(patience)
}

// C051: length and renewal belong to one acquisition: many users of one key in one Locker,
// each with settings of its own, do not disturb each other.
func TestSettingsOfOneAcquisition(t *testing.T) {
	x := startFleet(t, 3, 0)
	l := x.locker(fleeting(holdfast.WithTTL(time.Second), WithLongestTTL(time.Minute))...)
	var wg sync.WaitGroup
	var held atomic.Int32
	for i := range 6 {
		ttl := time.Duration(1+i) * time.Second
		opts := []holdfast.Option{holdfast.WithTTL(ttl), holdfast.WithWait(patience)}
		if i%2 == 0 {
			opts = append(opts, holdfast.WithoutRenewal())
		} else {
			opts = append(opts, holdfast.WithRenewEvery(20*time.Millisecond))
		}
		wg.Go(func() { // ends after its rounds
			for range 5 {
				err := l.Do(t.Context(), "k", func(ctx context.Context) error {
					if held.Add(1) != 1 {
						return errors.New("two holders")
					}
					defer held.Add(-1)
					<-time.After(60 * time.Millisecond)
					right := 0 // a minority may have the vote of another user
					lefts := x.lefts("k")
					for _, left := range lefts {
						if left > 0 && left <= ttl+time.Millisecond && (i%2 == 0 || left >= ttl/4) {
							right++
						}
					}
					if right < needed(len(lefts)) {
						return fmt.Errorf("%v left of %v", lefts, ttl)
					}
					return ctx.Err()
				}, opts...)
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	x.clean(patience)
}
