package holdfast

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// sourceFunc is a fencing.Source. It cannot be compared.
type sourceFunc func(ctx context.Context, key string) (fencing.Token, error)

func (f sourceFunc) Next(ctx context.Context, key string) (fencing.Token, error) { return f(ctx, key) }

// counting is a source as a sequence of a database is one.
type counting struct {
	n    atomic.Int64
	keys chan string
}

func (s *counting) Next(_ context.Context, key string) (fencing.Token, error) {
	if s.keys != nil {
		s.keys <- key
	}
	return fencing.Token(s.n.Add(1)), nil
}

func TestFencingOption(t *testing.T) {
	for name, o := range map[string]Option{
		"nil": WithFencing(nil), "two": WithFencing(fencing.ClockFloor, fencing.ClockFloor),
	} {
		_, err := NewWithStore(&fakeStore{}, o)
		require.ErrorIs(t, err, ErrInvalid, name)
	}
	c := defaults()
	n, err := c.with([]Option{WithFencing(&counting{}), WithFencing(fencing.ClockFloor)})
	require.NoError(t, err)
	require.True(t, n.fencing && n.floored && n.source == nil)
	n, err = n.with([]Option{WithFencing()})
	require.NoError(t, err)
	require.True(t, n.fencing && !n.floored)
	n, err = n.with([]Option{WithFencing(sourceFunc(nil))})
	require.NoError(t, err)
	require.True(t, !n.fencing && n.source != nil)
}

// A token with a floor is the server's clock, as long as that is ahead of the counter; it
// is part of the one step that takes the lock, and lost counters do not bring it back.
func TestClockFloor(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client(), WithFencing(fencing.ClockFloor))
	last := fencing.Token(time.Now().Add(-time.Minute).UnixMicro())
	cycle := func(opts ...Option) {
		t.Helper()
		k, err := l.Acquire(t.Context(), "k", opts...)
		require.NoError(t, err)
		require.Greater(t, k.Token(), last)
		last = k.Token()
		require.Equal(t, strconv.Itoa(int(last)), s.Admin().Get(t.Context(), "{k}:fence").Val())
		require.NoError(t, k.Extend(t.Context(), time.Minute))
		claim, ok := fencing.ClaimFrom(k.Context())
		require.True(t, ok)
		require.Equal(t, fencing.Claim{Token: last, Owner: k.Owner()}, claim)
		require.NoError(t, k.Release())
	}
	cycle()
	s.ResetStats()
	for range 10 {
		cycle()
		ttl := s.Admin().PTTL(t.Context(), "{k}:fence").Val()
		require.LessOrEqual(t, ttl, 7*24*time.Hour)
		require.Greater(t, ttl, 7*24*time.Hour-time.Minute)
	}
	require.EqualValues(t, 30, s.CommandStats()["evalsha"])
	require.Less(t, last, fencing.Token(time.Now().Add(time.Minute).UnixMicro()))
	require.NoError(t, s.Admin().FlushAll(t.Context()).Err())
	cycle()
	last += 1e15 // a clock that was ahead
	require.NoError(t, s.Admin().Set(t.Context(), "{k}:fence", int(last), 0).Err())
	cycle()
	cycle(WithFencing()) // whose counter stays for ever
	require.Equal(t, time.Duration(-1), s.Admin().PTTL(t.Context(), "{k}:fence").Val())
}

// Those who are handed the lock get a token with a floor, too.
func TestClockFloorInLine(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client(), WithFencing(fencing.ClockFloor))
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	tokens := []fencing.Token{k.Token()}
	next := make(chan *Lock)
	for range 5 {
		go func() { // ends with its lock
			k, err := l.Acquire(context.WithoutCancel(t.Context()), "k")
			if err != nil {
				panic(err)
			}
			next <- k
		}()
	}
	redistest.Eventually(t, 20*time.Second, "five wait", func() bool {
		return s.Admin().ZCard(t.Context(), "{k}:queue").Val() == 5
	})
	for range 5 {
		require.NoError(t, s.Admin().Del(t.Context(), "{k}:fence").Err())
		require.NoError(t, k.Release())
		k = <-next
		tokens = append(tokens, k.Token())
	}
	require.NoError(t, k.Release())
	require.True(t, slices.IsSorted(tokens))
	require.Len(t, slices.Compact(tokens), 6)
	require.Greater(t, tokens[0], fencing.Token(1e15))
}

// A token from elsewhere: grant, mint, confirm, and only then the lock.
func TestSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, src := &fakeStore{}, &counting{keys: make(chan string, 9)}
		l := fakeLocker(t, s, WithFencing(src), WithPrefix("p:"))
		for n := fencing.Token(1); n < 4; n++ {
			k := hold(t, l, "k")
			require.Equal(t, "p:k", <-src.keys)
			require.Equal(t, n, k.Token())
			require.Equal(t, int(n), s.count("renew"))
			child, cancel := context.WithCancel(k.Context())
			claim, ok := fencing.ClaimFrom(child)
			require.True(t, ok)
			require.Equal(t, fencing.Claim{Token: n, Owner: k.Owner()}, claim)
			require.NoError(t, k.Err())
			require.NoError(t, k.Release())
			<-child.Done()
			cancel()
		}
	})
}

// Without a token, or a confirmation, there is no lock, and nothing is left of it.
func TestSourceFails(t *testing.T) {
	stuck := make(chan struct{})
	t.Cleanup(func() { close(stuck) })
	for name, next := range map[string]sourceFunc{
		"error":   func(context.Context, string) (fencing.Token, error) { return 7, errors.New("no database") },
		"zero":    func(context.Context, string) (fencing.Token, error) { return 0, nil },
		"panic":   func(context.Context, string) (fencing.Token, error) { panic("no database") },
		"hangs":   func(ctx context.Context, _ string) (fencing.Token, error) { <-ctx.Done(); return 7, ctx.Err() },
		"is late": func(context.Context, string) (fencing.Token, error) { time.Sleep(time.Minute); return 7, nil },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &fakeStore{}
				var seen []error
				l := fakeLocker(t, s, WithFencing(next), WithObserver(Observer{
					Acquired: func(string, time.Duration, int) { seen = append(seen, nil) },
					Refused:  func(_ string, err error) { seen = append(seen, err) },
				}))
				start := time.Now()
				k, err := l.Acquire(t.Context(), "k")
				require.Nil(t, k)
				require.ErrorIs(t, err, ErrUnavailable)
				require.LessOrEqual(t, time.Since(start), attemptLimit)
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if name == "hangs" {
					_, err := l.Acquire(ctx, "k2")
					require.ErrorIs(t, err, context.DeadlineExceeded)
					_, err = l.Acquire(t.Context(), "k2", WithWait(time.Second))
					require.ErrorIs(t, err, ErrUnavailable)
					require.NotErrorIs(t, err, context.DeadlineExceeded)
				}
				time.Sleep(time.Second)
				require.Zero(t, s.server.left("k"))
				require.Zero(t, s.server.left("k2"))
				require.NotContains(t, seen, error(nil))
				require.NotEmpty(t, seen)
			})
		})
	}
}

// A lost reply to the confirmation does not cost the lock; that the lock is gone does.
func TestSourceConfirmation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, tries := &fakeStore{}, 0
		s.renew = func(_ context.Context, leases []Lease) []error {
			if tries++; tries < confirmTries {
				return []error{errors.New("no answer")}
			}
			return s.server.Renew(leases)
		}
		l := fakeLocker(t, s, WithFencing(&counting{}))
		k := hold(t, l, "k")
		require.EqualValues(t, 1, k.Token())
		require.Equal(t, confirmTries, tries)
		require.NoError(t, k.Release())

		taken := sourceFunc(func(context.Context, string) (fencing.Token, error) {
			s.server.set("k", "somebody", time.Hour)
			return 2, nil
		})
		_, err := l.Acquire(t.Context(), "k", WithFencing(taken))
		require.ErrorIs(t, err, ErrUnavailable)
		require.NotErrorIs(t, err, ErrLost)
		require.NotZero(t, s.server.left("k"))
	})
}

// Close does not wait for a source longer than for a server, and its caller hears of it.
func TestSourceAndClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		l := fakeLocker(t, s, WithFencing(sourceFunc(func(ctx context.Context, _ string) (fencing.Token, error) {
			<-ctx.Done()
			return 0, ctx.Err()
		})))
		failed := make(chan error, 1)
		go func() { // ends with Close
			_, err := l.Acquire(context.WithoutCancel(t.Context()), "k")
			failed <- err
		}()
		synctest.Wait()
		require.NoError(t, l.Close())
		require.ErrorIs(t, <-failed, ErrClosed)
		require.Zero(t, s.server.left("k"))
	})
}

// An Acquire whose source fails at Close gives its lock back at the same moment as Close: that
// one of the two finds the key gone is no loss.
func TestSourceAndCloseMeet(t *testing.T) {
	for i := range 40 {
		synctest.Test(t, func(t *testing.T) {
			s := &fakeStore{}
			var releases atomic.Int64
			s.release = func(ctx context.Context, lease Lease) error {
				if releases.Add(1)-1 == int64(i%2) { // whichever that is
					time.Sleep(10 * time.Millisecond)
				}
				return s.server.Release(lease)
			}
			l := fakeLocker(t, s, WithFencing(sourceFunc(func(ctx context.Context, _ string) (fencing.Token, error) {
				<-ctx.Done()
				return 0, ctx.Err()
			})))
			failed := make(chan error, 1)
			go func() { // ends with Close
				_, err := l.Acquire(context.WithoutCancel(t.Context()), "k")
				failed <- err
			}()
			synctest.Wait()
			require.NoError(t, l.Close())
			require.ErrorIs(t, <-failed, ErrClosed)
			require.Zero(t, s.server.left("k"))
		})
	}
}

// In whatever order grants and draws come, with holders that stop between the two: of the
// tokens that are handed out, later grants have greater ones.
func TestSourceOrder(t *testing.T) {
	for range 200 {
		synctest.Test(t, func(t *testing.T) {
			s, src := &fakeStore{}, &counting{}
			var mu sync.Mutex
			var grants []string
			s.acquire = func(_ context.Context, r Request) (Grant, error) {
				mu.Lock()
				defer mu.Unlock()
				if rand.IntN(2) == 0 {
					r.TTL /= 4 // as if the holder stopped for a while, and its clock with it
				}
				g, err := s.server.Acquire(r)
				if err == nil {
					grants = append(grants, r.Owner)
				}
				return g, err
			}
			pausing := sourceFunc(func(ctx context.Context, key string) (fencing.Token, error) {
				time.Sleep(time.Duration(rand.IntN(400)) * time.Millisecond)
				token, err := src.Next(ctx, key)
				time.Sleep(time.Duration(rand.IntN(400)) * time.Millisecond)
				return token, err
			})
			tokens := map[string]fencing.Token{}
			var all sync.WaitGroup
			for range 6 {
				l := fakeLocker(t, s, WithFencing(pausing), WithTTL(300*time.Millisecond), WithoutRenewal())
				all.Go(func() {
					for range 3 {
						k, err := l.Acquire(context.WithoutCancel(t.Context()), "k")
						if err != nil {
							continue
						}
						mu.Lock()
						tokens[k.Owner()] = k.Token()
						mu.Unlock()
						time.Sleep(time.Duration(rand.IntN(400)) * time.Millisecond)
						_ = k.Release()
					}
				})
			}
			all.Wait()
			last := fencing.Token(0)
			for _, owner := range grants {
				if token := tokens[owner]; token != 0 {
					require.Greater(t, token, last)
					last = token
				}
			}
		})
	}
}
