package holdfast

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// proxied returns a real server, a proxy before it, and a client through it.
func proxied(t *testing.T, change ...func(*redis.Options)) (*redistest.Server, *faultproxy.Proxy, *redis.Client) {
	t.Helper()
	s := redistest.Start(t)
	p := faultproxy.New(t, s.Addr())
	o := &redis.Options{Addr: p.Addr()}
	for _, f := range change {
		f(o)
	}
	c := redis.NewClient(o)
	t.Cleanup(func() { _ = c.Close() })
	return s, p, c
}

func retries(n int) func(*redis.Options) {
	return func(o *redis.Options) { o.MaxRetries = n; o.ReadTimeout = 300 * time.Millisecond }
}

// warm lets the Locker find out that scripts run, so that a test's faults hit the
// commands that it means.
func warm(t *testing.T, l *Locker, opts ...Option) {
	t.Helper()
	k, err := l.Acquire(t.Context(), "warm", opts...)
	require.NoError(t, err)
	require.NoError(t, k.Release())
}

func absent(t *testing.T, s *redistest.Server, key string, within time.Duration) {
	t.Helper()
	redistest.Eventually(t, within, key+" is gone", func() bool {
		return s.Admin().Exists(context.Background(), key).Val() == 0
	})
}

// C023, C046: an Acquire whose reply was lost has the lock, or it has an error and
// the key is gone soon. It is never refused by its own first try.
func TestLostAcquireReply(t *testing.T) {
	for _, n := range []int{-1, 3} {
		for name, do := range map[string]faultproxy.Action{
			"held back": faultproxy.HoldReply(), "closed": faultproxy.DropReplyAndClose(),
		} {
			t.Run(fmt.Sprintf("retries %d %s", n, name), func(t *testing.T) {
				s, p, c := proxied(t, retries(n))
				l := newTestLocker(t, c)
				warm(t, l)
				p.Inject(faultproxy.Rule{Match: faultproxy.Command("SET"), Times: 1, Do: do})
				k, err := l.TryAcquire(t.Context(), "k")
				if err != nil {
					require.ErrorIs(t, err, ErrUnavailable)
					require.NotErrorIs(t, err, ErrNotAcquired)
					absent(t, s, "k", time.Second)
					return
				}
				require.Equal(t, k.Owner(), s.Admin().Get(t.Context(), "k").Val())
				require.NoError(t, k.Release())
			})
		}
	}
}

// The same for an Acquire that may try again: it gets the lock, whatever the
// client does.
func TestLostAcquireReplyWaiting(t *testing.T) {
	for _, n := range []int{-1, 3} {
		s, p, c := proxied(t, retries(n))
		l := newTestLocker(t, c)
		warm(t, l)
		p.Inject(faultproxy.Rule{Match: faultproxy.Command("SET"), Times: 1, Do: faultproxy.HoldReply()})
		k, err := l.Acquire(t.Context(), "k")
		require.NoError(t, err)
		require.Equal(t, k.Owner(), s.Admin().Get(t.Context(), "k").Val())
		require.LessOrEqual(t, time.Until(k.ValidUntil()), s.Admin().PTTL(t.Context(), "k").Val())
		require.NoError(t, k.Release())
	}
}

// C026: an acquisition that was given up and runs at the server later is undone.
func TestLateAcquire(t *testing.T) {
	s, p, c := proxied(t, retries(-1))
	l := newTestLocker(t, c)
	warm(t, l)
	held := p.Inject(faultproxy.Rule{Match: faultproxy.Command("SET"), Times: 1, Do: faultproxy.HoldRequest()})
	_, err := l.Acquire(t.Context(), "k", WithWait(100*time.Millisecond))
	require.ErrorIs(t, err, ErrUnavailable)
	require.NotErrorIs(t, err, context.DeadlineExceeded) // C099
	require.NoError(t, held.WaitTimeout(time.Second))
	held.Release()
	redistest.Eventually(t, time.Second, "the late SET ran", func() bool { return s.CommandStats()["set"] >= 2 })
	absent(t, s, "k", 3*time.Second)
	other := newTestLocker(t, s.Client())
	k, err := other.TryAcquire(t.Context(), "k")
	require.NoError(t, err)
	require.NoError(t, k.Release())
}

// C019, C046: cancelling at any moment leaves the lock with the caller, or nobody.
func TestCancelledInFlight(t *testing.T) {
	s, p, c := proxied(t)
	l := newTestLocker(t, c)
	warm(t, l)
	p.Slow(3 * time.Millisecond)
	for i := range 200 {
		key := fmt.Sprint("k", i%20)
		ctx, cancel := context.WithTimeout(t.Context(), rand.N(6*time.Millisecond))
		k, err := l.Acquire(ctx, key)
		if err == nil {
			require.Equal(t, k.Owner(), s.Admin().Get(t.Context(), key).Val())
			_ = k.Release()
		}
		cancel()
	}
	p.Slow(0)
	redistest.Eventually(t, 5*time.Second, "no key is left", func() bool {
		return s.Admin().DBSize(t.Context()).Val() == 0
	})
}

// C009, C093, C098: with a server that does not answer, every call comes back
// within its own bound, although the client waits for 5 s and tries again; and
// nothing is renewed after Release.
func TestHangingServer(t *testing.T) {
	s, p, c := proxied(t, func(o *redis.Options) { o.ReadTimeout = 3 * time.Second })
	l := newTestLocker(t, c, WithTTL(2*time.Second))
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	other, err := l.Acquire(t.Context(), "other")
	require.NoError(t, err)
	p.Hang()

	start := time.Now()
	_, err = l.Acquire(t.Context(), "new", WithWait(200*time.Millisecond))
	require.ErrorIs(t, err, ErrUnavailable)
	require.Less(t, time.Since(start), time.Second)

	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	err = other.Extend(ctx, 2*time.Second)
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Less(t, time.Since(start), 1500*time.Millisecond)

	require.ErrorIs(t, k.Release(), ErrUnavailable)
	require.Less(t, time.Since(start), 3*time.Second)
	require.ErrorIs(t, context.Cause(k.Context()), ErrReleased)
	p.Heal()
	left := s.Admin().PTTL(t.Context(), "k").Val()
	for range 20 {
		now := s.Admin().PTTL(t.Context(), "k").Val()
		require.LessOrEqual(t, now, left, "nothing renews it")
		left = now
	}
	absent(t, s, "k", 3*time.Second)
	start = time.Now()
	require.NotPanics(t, func() { _ = l.Close() })
	require.Less(t, time.Since(start), 6*time.Second)
}

// C010: an Acquire that returned an error has no renewal running.
func TestSlowAcquireIsNotRenewed(t *testing.T) {
	s, p, c := proxied(t, retries(-1))
	l := newTestLocker(t, c, WithTTL(600*time.Millisecond))
	warm(t, l)
	p.Slow(400 * time.Millisecond)
	_, err := l.TryAcquire(t.Context(), "k")
	require.ErrorIs(t, err, ErrUnavailable)
	p.Slow(0)
	absent(t, s, "k", 2*time.Second)
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	require.NoError(t, k.Release())
}

// C027: a grant that comes when its validity has passed is no grant.
func TestGrantedTooLate(t *testing.T) {
	s, p, c := proxied(t)
	l := newTestLocker(t, c)
	warm(t, l)
	p.Slow(350 * time.Millisecond)
	_, err := l.TryAcquire(t.Context(), "k", WithTTL(300*time.Millisecond))
	require.ErrorIs(t, err, ErrUnavailable)
	p.Slow(0)
	absent(t, s, "k", time.Second)
}

// C002, C014: a Release without an answer can be called again, and the retry of an
// old one never deletes a newer lock.
func TestReleaseAgainOnServer(t *testing.T) {
	s, p, c := proxied(t, retries(-1))
	l := newTestLocker(t, c, WithTTL(4*time.Second))
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	p.Down()
	require.ErrorIs(t, k.Release(), ErrUnavailable)
	require.NoError(t, p.Up())
	redistest.Eventually(t, 3*time.Second, "the client is back", func() bool { return c.Ping(t.Context()).Err() == nil })
	err = k.Release()
	if err != nil { // the lease has ended meanwhile
		require.ErrorIs(t, err, ErrLost)
	}
	require.Zero(t, s.Admin().Exists(t.Context(), "k").Val())
	require.ErrorIs(t, k.Release(), ErrNotHeld)

	first, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	lost := p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.HoldReply()})
	require.NoError(t, first.Release(), "absent counts as released when an earlier try may have deleted it")
	require.Equal(t, 1, lost.Fired())
	second, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	require.ErrorIs(t, first.Release(), ErrNotHeld)
	require.Equal(t, second.Owner(), s.Admin().Get(t.Context(), "k").Val())
	require.NoError(t, second.Release())
}

// C006: a server that refuses the release: its text is there, the key too, and a
// later Release works.
func TestReleaseRefused(t *testing.T) {
	s, p, c := proxied(t)
	l := newTestLocker(t, c)
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.Error("MISCONF Redis is configured to save RDB snapshots")})
	err = k.Release()
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "MISCONF")
	require.EqualValues(t, 1, s.Admin().Exists(t.Context(), "k").Val())
	require.NoError(t, k.Release())
}

// C122: answers that pass by themselves are tried again by acquire, renewal and
// release; C121 for those of a cluster.
func TestPassingAnswers(t *testing.T) {
	for _, text := range []string{"BUSY Redis is busy", "LOADING Redis is loading", "CLUSTERDOWN The cluster is down",
		"TRYAGAIN Multiple keys request during rehashing", "MASTERDOWN Link with MASTER is down"} {
		s, p, c := proxied(t, func(o *redis.Options) { o.MaxRetries = -1 })
		l := newTestLocker(t, c, WithTTL(10*time.Second), WithRenewEvery(100*time.Millisecond))
		warm(t, l)
		p.Inject(faultproxy.Rule{Match: faultproxy.Command("SET"), Times: 1, Do: faultproxy.Error(text)})
		k, err := l.Acquire(t.Context(), "k")
		require.NoError(t, err, text)
		h := p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.Error(text)})
		require.NoError(t, h.WaitTimeout(5*time.Second))
		before := k.ValidUntil()
		redistest.Eventually(t, 5*time.Second, "a renewal", func() bool { return k.ValidUntil().After(before) })
		require.NoError(t, k.Err())
		_, err = l.Acquire(t.Context(), "k", WithWait(0))
		require.ErrorIs(t, err, ErrNotAcquired)
		p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.Error(text)})
		require.NoError(t, k.Release(), text)
		require.Zero(t, s.Admin().Exists(t.Context(), "k").Val())
	}
}

// C127: refusals that do not pass end an Acquire at once, after one command, with
// the server's text.
func TestRefusalsAtOnce(t *testing.T) {
	for _, text := range []string{"READONLY You can't write against a read only replica.", "OOM command not allowed",
		"NOAUTH Authentication required.", "NOPERM this user has no permissions", "MISCONF no snapshots",
		"ERR syntax error", "WRONGTYPE Operation against a key"} {
		_, p, c := proxied(t, func(o *redis.Options) { o.MaxRetries = -1 })
		l := newTestLocker(t, c)
		warm(t, l)
		p.ResetLog()
		p.Inject(faultproxy.Rule{Match: faultproxy.Command("SET"), Do: faultproxy.Error(text)})
		_, err := l.Acquire(t.Context(), "k")
		require.ErrorIs(t, err, ErrUnavailable, text)
		require.ErrorContains(t, err, text)
		require.NotErrorIs(t, err, ErrNotAcquired)
		require.Equal(t, 1, p.Count("SET"), "no retries")
	}
}

// C063: garbage in place of replies is an error, never a crash.
func TestGarbage(t *testing.T) {
	_, p, c := proxied(t, retries(-1))
	l := newTestLocker(t, c, WithTTL(500*time.Millisecond), WithRenewEvery(20*time.Millisecond))
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	for _, raw := range []string{":7\r\n", "*0\r\n", "$3\r\nabc\r\n", "*1\r\n$1\r\nx\r\n", "?what\r\n", "$-1\r\n"} {
		h := p.Inject(faultproxy.Rule{Match: faultproxy.Any(), Times: 1, Do: faultproxy.RawInstead([]byte(raw))})
		_, err := l.TryAcquire(t.Context(), "k")
		require.Error(t, err)
		require.NoError(t, h.WaitTimeout(time.Second))
	}
	p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Do: faultproxy.RawInstead([]byte("*0\r\n"))})
	<-k.Context().Done()
	require.ErrorIs(t, k.Err(), ErrLost)
	require.Error(t, k.Release())
}

// C055: a holder that is cut off is told before anybody else gets in.
func TestCutOffHolderIsToldFirst(t *testing.T) {
	s, p, c := proxied(t, retries(-1))
	waiter := newTestLocker(t, s.Client(), WithTTL(500*time.Millisecond))
	for range 5 {
		l := newTestLocker(t, c, WithTTL(500*time.Millisecond))
		k, err := l.Acquire(t.Context(), "k")
		require.NoError(t, err)
		told := make(chan time.Time, 1)
		context.AfterFunc(k.Context(), func() { told <- time.Now() })
		p.DropReplies()
		p.Hang()
		got, err := waiter.Acquire(t.Context(), "k")
		require.NoError(t, err)
		acquired := time.Now()
		require.Error(t, k.Err())
		require.False(t, (<-told).After(acquired))
		require.ErrorIs(t, context.Cause(k.Context()), ErrLost)
		require.NoError(t, got.Release())
		p.Heal()
		p.CutAll()
		redistest.Eventually(t, 5*time.Second, "the client is back", func() bool { return c.Ping(t.Context()).Err() == nil })
	}
}

// C089: a hundred waiters of one process put no more load on the server than one.
func TestWaitersDoNotLoadTheServer(t *testing.T) {
	_, p, c := proxied(t)
	l := newTestLocker(t, c)
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	p.ResetLog()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	errs := make(chan error)
	for range 100 {
		go func() { // ends with ctx
			_, err := l.Acquire(ctx, "k")
			errs <- err
		}()
	}
	for range 100 {
		err := <-errs
		require.ErrorIs(t, err, ErrNotAcquired)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		var held *HeldError
		require.ErrorAs(t, err, &held)
		require.NotEmpty(t, held.Holder)
	}
	asked := p.Count("SET") + p.CountMatch(faultproxy.Script())
	require.Less(t, asked, 350, "at most one attempt each, and the polls of the first")
	require.NoError(t, k.Release())
}
