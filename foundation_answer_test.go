package holdfast

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/refusal"
)

// ownStore is a Store that settles its acquisitions itself, and gives each grant a value
// of its own if name is set. It keeps what it is asked.
type ownStore struct {
	*fakeStore
	name   string                       // before the number of the attempt
	answer func(Request) (Grant, error) // to an attempt, in place of take

	// What follows is guarded by fakeStore.mu.
	requests []Request
	owners   []string // of what was released
}

func (s *ownStore) SettlesAcquires() {}

func (s *ownStore) Acquire(_ context.Context, r Request) (Grant, error) {
	s.change(func() { s.requests = append(s.requests, r) })
	if s.answer != nil {
		return s.answer(r)
	}
	return s.take(r)
}

func (s *ownStore) take(r Request) (Grant, error) {
	if s.name == "" {
		return s.server.Acquire(r)
	}
	r.Owner = fmt.Sprint(s.name, r.Attempt)
	g, err := s.server.Acquire(r)
	g.Owner = r.Owner
	return g, err
}

func (s *ownStore) Release(ctx context.Context, l Lease) error {
	s.change(func() { s.owners = append(s.owners, l.Owner) })
	return s.fakeStore.Release(ctx, l)
}

// bareStore hides what a Store has besides the methods of Store.
type bareStore struct{ Store }

// vain are ways in which an attempt of "k" comes to nothing: the store answers fail, or
// its grant, if fail is nil, is of no use to anybody.
func vain(t *testing.T, l *Locker, s *ownStore, fail error) map[string]func() {
	answer := func(first func()) {
		s.answer = func(r Request) (Grant, error) {
			if first(); fail != nil {
				_, _ = s.take(r)
				return Grant{}, fail
			}
			return s.take(r)
		}
	}
	late := func() { time.Sleep(2 * time.Second) }
	return map[string]func(){
		"cancelled": func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			answer(late)
			_, err := l.Acquire(ctx, "k")
			require.ErrorIs(t, err, context.DeadlineExceeded)
		},
		"cancelled as the answer comes": func() {
			ctx, cancel := context.WithCancel(t.Context())
			answer(cancel)
			_, err := l.Acquire(ctx, "k")
			require.ErrorIs(t, err, context.Canceled)
		},
		"given up": func() {
			answer(late)
			_, err := l.TryAcquire(t.Context(), "k", WithTTL(time.Second))
			require.ErrorIs(t, err, ErrUnavailable)
		},
		"closed": func() {
			answer(late)
			time.AfterFunc(time.Second, func() { _ = l.Close() })
			_, err := l.Acquire(t.Context(), "k")
			require.ErrorIs(t, err, ErrClosed)
		},
		"its validity is over": func() {
			s.answer = func(r Request) (Grant, error) {
				g, _ := s.take(r)
				g.Left = time.Millisecond
				return g, fail
			}
			_, err := l.TryAcquire(t.Context(), "k")
			require.ErrorIs(t, err, ErrUnavailable)
		},
	}
}

// inVain runs check on what is left of each of those ways, several times: in some of
// them it is chance what comes first.
func inVain(t *testing.T, name string, bare bool, fail error, check func(*testing.T, *ownStore)) {
	for way := range vain(t, nil, nil, nil) {
		t.Run(fmt.Sprintf("%s, named %q, bare %v", way, name, bare), func(t *testing.T) {
			for range 20 {
				synctest.Test(t, func(t *testing.T) {
					s := &ownStore{fakeStore: &fakeStore{}, name: name}
					store := Store(s)
					if bare {
						store = bareStore{s}
					}
					vain(t, lockerOn(t, store, s.fakeStore), s, fail)[way]()
					time.Sleep(20 * time.Second) // less than the TTL: nothing ends by itself
					s.change(func() { check(t, s) })
				})
			}
		})
	}
}

// Of an attempt that has failed the store knows what it may have taken: the Locker, which
// does not, keeps its hands off. It is the Locker's to settle without that method.
func TestSettlesAcquires(t *testing.T) {
	inVain(t, "", false, errors.New("EOF"), func(t *testing.T, s *ownStore) { require.Empty(t, s.owners) })
	inVain(t, "", true, errors.New("EOF"), func(t *testing.T, s *ownStore) {
		require.Contains(t, s.owners, s.requests[0].Owner)
		require.Zero(t, s.server.left("k"))
	})
}

// A grant that nobody wants is given back, under the value that it was given.
func TestGrantInVain(t *testing.T) {
	inVain(t, "mine/", false, nil, func(t *testing.T, s *ownStore) {
		require.Equal(t, []string{"mine/1"}, s.owners)
		require.Zero(t, s.server.left("k"))
	})
	inVain(t, "", false, nil, func(t *testing.T, s *ownStore) {
		require.Contains(t, s.owners, s.requests[0].Owner)
		require.Zero(t, s.server.left("k"))
	})
}

// The lock has the value of the attempt that took it, and what earlier ones have taken is
// given back under theirs, also while it is held.
func TestOwnerOfGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &ownStore{fakeStore: &fakeStore{}, name: "mine/"}
		l := lockerOn(t, s, s.fakeStore)
		start := time.Now()
		s.answer = func(r Request) (Grant, error) {
			switch r.Attempt {
			case 1: // comes after the lock is held
				time.Sleep(6 * time.Second)
				return Grant{Owner: "mine/1"}, nil
			case 2:
				return Grant{Owner: "mine/2", Left: time.Millisecond}, nil
			case 3:
				return Grant{}, &HeldError{}
			}
			return s.take(r)
		}
		k := hold(t, l, "k")
		require.Equal(t, "mine/4", k.Owner())
		require.Less(t, time.Since(start), 6*time.Second)
		time.Sleep(6*time.Second - time.Since(start))
		require.NoError(t, k.Extend(t.Context(), time.Minute)) // while the late answer comes
		s.change(func() {
			require.Len(t, s.requests, 4)
			for i, r := range s.requests {
				require.Equal(t, i+1, r.Attempt)
				require.Equal(t, s.requests[0].Owner, r.Owner, "whatever came of the one before")
			}
		})
		time.Sleep(5 * time.Minute)
		require.NoError(t, k.Err())
		require.Positive(t, s.count("renew"))
		require.Positive(t, s.server.left("k"))
		require.NoError(t, k.Release())
		require.Zero(t, s.server.left("k"))
		time.Sleep(time.Minute)
		s.change(func() { require.Equal(t, []string{"mine/2", "mine/1", "mine/4"}, s.owners) })
	})
}

// votesError says more than the HeldError in it. Its context errors are the store's own.
type votesError struct{ held *HeldError }

func (e *votesError) Error() string   { return "2 of 5 have granted it" }
func (e *votesError) Unwrap() []error { return []error{context.DeadlineExceeded, e.held} }

func TestHeldErrorInside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, asked := &fakeStore{}, map[string]bool{}
		l := fakeLocker(t, s, WithPrefix("p:"))
		votes := func(_ context.Context, r Request) (Grant, error) {
			s.change(func() { asked[holderOf(r.Owner)] = true })
			return Grant{}, fmt.Errorf("hook: %w", &votesError{&HeldError{Key: r.Key, Holder: "h"}})
		}
		s.acquire = votes
		says := func(err error) {
			t.Helper()
			var held *HeldError
			var more *votesError
			require.ErrorIs(t, err, ErrNotAcquired)
			require.ErrorAs(t, err, &held)
			require.Equal(t, HeldError{Key: "k", Holder: "h"}, *held)
			require.ErrorAs(t, err, &more)
			require.ErrorContains(t, err, held.Error())
			require.ErrorContains(t, err, more.Error())
			require.NotErrorIs(t, err, ErrUnavailable)
			require.NotErrorIs(t, err, context.DeadlineExceeded)
		}
		_, err := l.TryAcquire(t.Context(), "k")
		says(err)
		_, err = l.Acquire(t.Context(), "k", WithWait(time.Second))
		says(err)
		_, cancel := waits(t, l)
		defer cancel()
		_, err = l.Acquire(t.Context(), "k", WithWait(time.Second), WithHolder("second"))
		says(err)
		require.False(t, asked["second"])

		first := errors.New("EOF")
		other := func(ctx context.Context, r Request) (Grant, error) {
			if r.Attempt == 1 {
				return Grant{}, first
			}
			return votes(ctx, r)
		}
		s.change(func() { s.acquire = other })
		_, err = l.Acquire(t.Context(), "other", WithWait(time.Second))
		require.ErrorIs(t, err, first)
		require.True(t, strings.HasSuffix(err.Error(), "2 of 5 have granted it (before: EOF)"), err.Error())
	})
}

// What the latest refusal does not say is not told.
func TestHeldErrorInsideIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := fakeLocker(t, &fakeStore{acquire: func(_ context.Context, r Request) (Grant, error) {
			held := &HeldError{Holder: fmt.Sprint(r.Attempt)}
			if r.Attempt == 1 {
				return Grant{}, &votesError{held}
			}
			return Grant{}, held
		}})
		_, err := l.Acquire(t.Context(), "k", WithWait(time.Second))
		var more *votesError
		require.ErrorIs(t, err, ErrNotAcquired)
		require.False(t, errors.As(err, &more))
	})
}

// saidError says more of itself than its text.
type saidError struct {
	error
	ran, final bool
	retryAfter time.Duration
}

func (e *saidError) Unwrap() error             { return e.error }
func (e *saidError) MayHaveRun() bool          { return e.ran }
func (e *saidError) Final() bool               { return e.final }
func (e *saidError) RetryAfter() time.Duration { return e.retryAfter }

func TestRetryAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s)
		for d, exact := range map[time.Duration]bool{
			time.Millisecond: true, 7 * time.Millisecond: true, mostPause: true,
			0: false, -1: false, mostPause + 1: false, time.Hour: false,
		} {
			for _, behind := range []error{errors.New("EOF"), &HeldError{Holder: "h"}} {
				err := fmt.Errorf("hook: %w", &saidError{error: behind, retryAfter: d})
				s.change(func() { s.acquire = func(context.Context, Request) (Grant, error) { return Grant{}, err } })
				n := s.count("acquire")
				_, _ = l.Acquire(t.Context(), "k", WithWait(2*time.Second))
				calls := s.got("acquire")[n:]
				require.Greater(t, len(calls), 3)
				for i := 1; i < 4; i++ {
					pause, most := calls[i].at.Sub(calls[i-1].at), firstPause<<(i-1)
					if exact {
						require.Equal(t, d, pause)
						continue
					}
					require.GreaterOrEqual(t, pause, most/2, "%v", d)
					require.LessOrEqual(t, pause, most, "%v", d)
				}
			}
		}
	})
}

// What an Extend that did not run has asked for counts for nothing; one that may have
// run caps all later leases.
func TestMayHaveRunOfExtend(t *testing.T) {
	for ran, lease := range map[bool]time.Duration{false: time.Minute, true: 5 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			s := &fakeStore{}
			l := fakeLocker(t, s)
			k := hold(t, l, "k")
			// Of a reply alone it would follow that nothing has run, and of EOF that it may have.
			behind := map[bool]error{false: errors.New("EOF"), true: refusal.Reply("OOM")}[ran]
			s.extend = func(context.Context, Lease) error { return &saidError{error: behind, ran: ran, final: true} }
			require.ErrorIs(t, k.Extend(t.Context(), 5*time.Second), ErrUnavailable)
			time.Sleep(20 * time.Second)
			require.Equal(t, min(lease, defaultTTL), s.got("renew")[s.count("renew")-1].ttl)
			s.change(func() { s.extend = nil })
			require.NoError(t, k.Extend(t.Context(), time.Minute))
			time.Sleep(time.Minute)
			require.Equal(t, lease, s.got("renew")[s.count("renew")-1].ttl)
			require.NoError(t, k.Err())
		})
	}
}

// "Gone" after a release that may have run is what that has done; else it is a loss.
func TestMayHaveRunOfRelease(t *testing.T) {
	for _, ran := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s, n := &fakeStore{}, 0
			behind := map[bool]error{false: errors.New("EOF"), true: refusal.Reply("BUSY")}[ran]
			s.release = func(context.Context, Lease) error {
				if n++; n == 1 {
					return &saidError{error: behind, ran: ran}
				}
				return &LostError{Reason: LostGone}
			}
			k := hold(t, fakeLocker(t, s), "k")
			err := k.Release()
			require.Equal(t, 2, n)
			if ran {
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, ErrLost)
		})
	}
}
