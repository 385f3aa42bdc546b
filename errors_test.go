package holdfast

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/refusal"
)

var sentinels = map[string]error{
	"ErrNotAcquired": ErrNotAcquired, "ErrUnavailable": ErrUnavailable, "ErrNotHeld": ErrNotHeld,
	"ErrLost": ErrLost, "ErrMaxHold": ErrMaxHold, "ErrReleased": ErrReleased, "ErrDeadlock": ErrDeadlock,
	"ErrInvalid": ErrInvalid, "ErrClosed": ErrClosed,
}

// requireMatches asserts that err, however it is wrapped, matches the named
// sentinels and no others.
func requireMatches(t *testing.T, err error, names ...string) {
	t.Helper()
	want := map[string]bool{}
	for _, n := range names {
		want[n] = true
	}
	for _, wrapped := range []error{
		err, fmt.Errorf("a service: %w", err), errors.Join(errors.New("first"), err),
		fmt.Errorf("%w and %w", errors.New("first"), errors.Join(err)),
	} {
		for name, sentinel := range sentinels {
			require.Equal(t, want[name], errors.Is(wrapped, sentinel), "%q is %s", wrapped, name)
		}
	}
}

// What matches what: ErrLost is a kind of ErrNotHeld, ErrMaxHold one of ErrLost.
func TestSentinels(t *testing.T) {
	kinds := map[string][]string{
		"ErrLost":    {"ErrLost", "ErrNotHeld"},
		"ErrMaxHold": {"ErrMaxHold", "ErrLost", "ErrNotHeld"},
	}
	for name, err := range sentinels {
		want := kinds[name]
		if want == nil {
			want = []string{name}
		}
		requireMatches(t, err, want...)
		require.Regexp(t, `^holdfast: [a-z ]+$`, err.Error())
	}
}

func TestDetailTypes(t *testing.T) {
	held := &HeldError{Key: "k", Holder: "h", TTL: time.Second}
	requireMatches(t, held, "ErrNotAcquired")
	requireMatches(t, &LostError{Key: "k", Reason: LostGone}, "ErrLost", "ErrNotHeld")
	requireMatches(t, &LostError{Key: "k", Reason: LostMaxHold, Err: ErrMaxHold}, "ErrMaxHold", "ErrLost", "ErrNotHeld")
	requireMatches(t, &DeadlockError{Key: "k"}, "ErrDeadlock")
	requireMatches(t, &ReplicaError{}, []string{}...)
	requireMatches(t, invalid("x"), "ErrInvalid")
	requireMatches(t, unavailable("acquire", "k", errors.New("x")), "ErrUnavailable")
	requireMatches(t, unavailable("acquire", "k", &ReplicaError{1, 2}), "ErrUnavailable")

	cause := errors.New("a renewal failed")
	require.ErrorIs(t, &LostError{Err: cause}, cause)

	var (
		h *HeldError
		l *LostError
		d *DeadlockError
		r *ReplicaError
	)
	wrap := func(err error) error { return errors.Join(nil, fmt.Errorf("a service: %w", err)) }
	require.ErrorAs(t, wrap(held), &h)
	require.Same(t, held, h)
	require.ErrorAs(t, wrap(&LostError{Reason: LostTaken}), &l)
	require.Equal(t, LostTaken, l.Reason)
	require.ErrorAs(t, wrap(&DeadlockError{Cycle: []DeadlockWait{{Holder: "h"}}}), &d)
	require.Equal(t, "h", d.Cycle[0].Holder)
	require.ErrorAs(t, wrap(unavailable("acquire", "k", refusal.Final(&ReplicaError{1, 2}))), &r)
	require.Equal(t, &ReplicaError{1, 2}, r)
}

func TestTexts(t *testing.T) {
	for want, err := range map[string]error{
		`holdfast: lock "k" is held`:                                           &HeldError{Key: "k"},
		`holdfast: lock "k" is held by "h" without expiry`:                     &HeldError{Key: "k", Holder: "h", TTL: -1},
		`holdfast: lock "k" is held by "h" for another 1.5s`:                   &HeldError{Key: "k", Holder: "h", TTL: 1500 * time.Millisecond},
		`holdfast: lock "k" lost: the key is gone`:                             &LostError{Key: "k", Reason: LostGone},
		`holdfast: lock "k" lost: the cap on the hold was reached`:             &LostError{Key: "k", Reason: LostMaxHold, Err: ErrMaxHold},
		`holdfast: lock "k" lost: the key is gone: x`:                          &LostError{Key: "k", Reason: LostGone, Err: errors.New("x")},
		`holdfast: deadlock on lock "b": "h" holds "a" and waits for "b"`:      &DeadlockError{Key: "b", Cycle: []DeadlockWait{{Holder: "h", Key: "a", WaitsFor: "b"}}},
		`holdfast: release "k": x`:                                             unavailable("release", "k", errors.New("x")),
		`holdfast: acquire "k": 1 of 2 replicas acknowledged the lock in time`: unavailable("acquire", "k", &ReplicaError{1, 2}),
		`holdfast: extend "k": no answer within 5s`:                            unavailable("extend", "k", &noAnswerError{5 * time.Second}),
		`holdfast: TTL 1ns: must be at least 10ms`:                             checkTTL(1),
	} {
		require.EqualError(t, err, want)
	}
}

// The server's error and the network's stay reachable; context errors that are
// not the caller's do not.
func TestUnavailableShowsWhatIsBehind(t *testing.T) {
	dial := &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	err := unavailable("acquire", "k", fmt.Errorf("hook: %w", dial))
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	var op *net.OpError
	require.ErrorAs(t, err, &op)
	require.Same(t, dial, op)
	var network net.Error
	require.ErrorAs(t, err, &network)

	err = unavailable("acquire", "k", refusal.Final(refusal.Reply("NOPERM no")))
	var reply redis.Error
	require.ErrorAs(t, err, &reply)
	require.Equal(t, "NOPERM no", reply.Error())

	err = unavailable("acquire", "k", &noAnswerError{time.Second})
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	var timeout interface{ Timeout() bool }
	require.ErrorAs(t, err, &timeout)
	require.True(t, timeout.Timeout())
}

func TestContextErrorsAreOpaque(t *testing.T) {
	for _, limit := range []error{context.Canceled, context.DeadlineExceeded} {
		inner := errors.Join(limit, syscall.ECONNRESET)
		err := unavailable("acquire", "k", fmt.Errorf("client: %w", inner))
		requireMatches(t, err, "ErrUnavailable")
		require.NotErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, syscall.ECONNRESET)
		require.ErrorContains(t, err, limit.Error())
	}
}

func TestCallersContextIsNamed(t *testing.T) {
	reason := errors.New("shutting down")
	ctx, cancel := context.WithCancelCause(t.Context())
	err := unavailable("acquire", "k", context.DeadlineExceeded)
	require.Equal(t, err, withContext(ctx, err), "it has not ended")
	cancel(reason)
	err = withContext(ctx, err)
	requireMatches(t, err, "ErrUnavailable")
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, reason)
	require.NotErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "shutting down")
}

// serverHas makes another holder of key.
func serverHas(s *fakeStore, key string) { s.server.set(key, "other/1", time.Hour) }

// The table of errors, by calls: which call gives which error.
func TestErrorsOfCalls(t *testing.T) {
	failing := func(err error) *fakeStore {
		return &fakeStore{acquire: func(context.Context, Request) (Grant, error) { return Grant{}, err }}
	}
	deadline := func(t *testing.T) context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		t.Cleanup(cancel)
		return ctx
	}
	for name, run := range map[string]func(t *testing.T) (err error, want []string){
		"TryAcquire of a held lock": func(t *testing.T) (error, []string) {
			s := &fakeStore{}
			serverHas(s, "k")
			_, err := fakeLocker(t, s).TryAcquire(t.Context(), "k")
			var held *HeldError
			require.ErrorAs(t, err, &held)
			require.Equal(t, &HeldError{Key: "k", Holder: "other", TTL: time.Hour}, held)
			return err, words("ErrNotAcquired")
		},
		"the wait ends by WithWait": func(t *testing.T) (error, []string) {
			s := &fakeStore{}
			serverHas(s, "k")
			_, err := fakeLocker(t, s).Acquire(t.Context(), "k", WithWait(time.Second))
			require.NotErrorIs(t, err, context.DeadlineExceeded)
			return err, words("ErrNotAcquired")
		},
		"the wait ends with the context": func(t *testing.T) (error, []string) {
			s := &fakeStore{}
			serverHas(s, "k")
			_, err := fakeLocker(t, s).Acquire(deadline(t), "k")
			require.ErrorIs(t, err, context.DeadlineExceeded)
			return err, words("ErrNotAcquired")
		},
		"the server refuses for good": func(t *testing.T) (error, []string) {
			start := time.Now()
			_, err := fakeLocker(t, failing(refusal.Final(refusal.Reply("NOPERM no")))).Acquire(t.Context(), "k")
			require.Zero(t, time.Since(start))
			var reply redis.Error
			require.ErrorAs(t, err, &reply)
			return err, words("ErrUnavailable")
		},
		"the server refuses for now": func(t *testing.T) (error, []string) {
			_, err := fakeLocker(t, failing(refusal.Reply("LOADING x"))).Acquire(deadline(t), "k")
			var reply redis.Error
			require.ErrorAs(t, err, &reply)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			return err, words("ErrUnavailable")
		},
		"the client's own time limit": func(t *testing.T) (error, []string) {
			_, err := fakeLocker(t, failing(context.DeadlineExceeded)).TryAcquire(t.Context(), "k")
			require.NotErrorIs(t, err, context.DeadlineExceeded)
			return err, words("ErrUnavailable")
		},
		"the context had ended": func(t *testing.T) (error, []string) {
			ctx, cancel := context.WithCancelCause(t.Context())
			reason := errors.New("why")
			cancel(reason)
			_, err := fakeLocker(t, &fakeStore{}).Acquire(ctx, "k")
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorIs(t, err, reason)
			return err, words("ErrUnavailable")
		},
		"the lock is gone at Release": func(t *testing.T) (error, []string) {
			s := &fakeStore{}
			k := hold(t, fakeLocker(t, s), "k")
			s.server.set("k", "", 0)
			return k.Release(), words("ErrLost", "ErrNotHeld")
		},
		"the lock is another's at Extend": func(t *testing.T) (error, []string) {
			s := &fakeStore{}
			k := hold(t, fakeLocker(t, s), "k")
			serverHas(s, "k")
			err := k.Extend(t.Context(), time.Minute)
			lostBecause(t, k, LostTaken)
			return err, words("ErrLost", "ErrNotHeld")
		},
		"the cap on the hold": func(t *testing.T) (error, []string) {
			k := hold(t, fakeLocker(t, &fakeStore{}), "k", WithMaxHold(time.Minute))
			<-k.Context().Done()
			lostBecause(t, k, LostMaxHold)
			return k.Err(), words("ErrMaxHold", "ErrLost", "ErrNotHeld")
		},
		"validity ends": func(t *testing.T) (error, []string) {
			s := &fakeStore{renew: func(_ context.Context, l []Lease) []error { return each(l, syscall.ECONNREFUSED) }}
			k := hold(t, fakeLocker(t, s), "k")
			<-k.Context().Done()
			lostBecause(t, k, LostExpired)
			require.ErrorIs(t, k.Err(), syscall.ECONNREFUSED, "the last renewal's error")
			return context.Cause(k.Context()), words("ErrLost", "ErrNotHeld")
		},
		"no answer to Release": func(t *testing.T) (error, []string) {
			s := &fakeStore{release: func(context.Context, Lease) error { return syscall.ECONNREFUSED }}
			k := hold(t, fakeLocker(t, s), "k")
			err := k.Release()
			require.ErrorIs(t, err, syscall.ECONNREFUSED)
			return err, words("ErrUnavailable")
		},
		"after Release": func(t *testing.T) (error, []string) {
			k := hold(t, fakeLocker(t, &fakeStore{}), "k")
			require.NoError(t, k.Release())
			requireMatches(t, k.Release(), "ErrNotHeld")
			requireMatches(t, context.Cause(k.Context()), "ErrReleased")
			require.ErrorIs(t, k.Extend(t.Context(), time.Minute), ErrNotHeld)
			return k.Err(), words("ErrReleased")
		},
		"a flow asks for what it holds": func(t *testing.T) (error, []string) {
			l := fakeLocker(t, &fakeStore{})
			_, err := l.Acquire(hold(t, l, "k").Context(), "k")
			return err, words("ErrDeadlock")
		},
		"a flow tries what it holds": func(t *testing.T) (error, []string) {
			l := fakeLocker(t, &fakeStore{})
			_, err := l.TryAcquire(hold(t, l, "k").Context(), "k")
			return err, words("ErrDeadlock", "ErrNotAcquired")
		},
		"after Close": func(t *testing.T) (error, []string) {
			l := fakeLocker(t, &fakeStore{})
			k := hold(t, l, "k")
			require.NoError(t, l.Close())
			requireMatches(t, context.Cause(k.Context()), "ErrClosed")
			_, err := l.Acquire(t.Context(), "k")
			return err, words("ErrClosed")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				err, want := run(t)
				require.Error(t, err)
				requireMatches(t, err, want...)
			})
		})
	}
}

// The methods of a Lock that never was say that nothing is held.
func TestNilLock(t *testing.T) {
	for name, k := range map[string]*Lock{"nil": nil, "zero": {}} {
		t.Run(name, func(t *testing.T) {
			requireMatches(t, k.Release(), "ErrNotHeld")
			requireMatches(t, k.Extend(t.Context(), time.Minute), "ErrNotHeld")
			requireMatches(t, k.Err(), "ErrNotHeld")
			requireMatches(t, context.Cause(k.Context()), "ErrNotHeld")
			require.Error(t, k.Context().Err())
			require.Zero(t, k.ValidUntil())
			require.Zero(t, k.Token())
			require.Empty(t, k.Key())
			require.Empty(t, k.Owner())
		})
	}
}

func TestErrorsOfDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s)
		failure := errors.New("the work failed")
		err := l.Do(t.Context(), "k", func(context.Context) error { return failure })
		require.ErrorIs(t, err, failure)
		requireMatches(t, err)

		err = l.Do(t.Context(), "k", func(context.Context) error {
			s.server.set("k", "", 0)
			return failure
		})
		require.ErrorIs(t, err, failure)
		requireMatches(t, err, "ErrLost", "ErrNotHeld")

		serverHas(s, "k")
		err = l.Do(t.Context(), "k", func(context.Context) error { t.Error("ran"); return nil }, WithWait(0))
		requireMatches(t, err, "ErrNotAcquired")

		s.server.set("k", "", 0)
		require.PanicsWithValue(t, "x", func() {
			_ = l.Do(t.Context(), "k", func(context.Context) error { panic("x") })
		})
		require.Zero(t, s.server.left("k"), "released for all that")
	})
}
