package holdfast

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
)

// tunedStore is a Store with settings of its own.
type tunedStore struct {
	*fakeStore
	err     error         // of Configure
	longest time.Duration // 0: any

	settings []StoreSettings
	asked    []time.Duration
	calls    []CallSettings
}

func (s *tunedStore) Configure(c StoreSettings) error {
	s.settings = append(s.settings, c)
	return s.err
}

func (s *tunedStore) CheckCall(c CallSettings) error {
	s.asked = append(s.asked, c.TTL)
	s.calls = append(s.calls, c)
	if s.longest > 0 && c.TTL > s.longest {
		return invalid("too long for this store")
	}
	return nil
}

func TestStoreSettings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logger := slog.New(slog.DiscardHandler)
		s := &tunedStore{fakeStore: &fakeStore{}}
		l := lockerOn(t, s, s.fakeStore, StoreOption("a"), WithTTL(20*time.Second), StoreOption(2), WithFencing(),
			WithLogger(logger), WithDrift(0.25, time.Millisecond), StoreOption(nil))
		require.NoError(t, hold(t, l, "k", WithTTL(time.Second)).Release())
		require.Len(t, s.settings, 1, "once")
		got := s.settings[0]
		require.Equal(t, []any{"a", 2, nil}, got.Options)
		require.Equal(t, 20*time.Second, got.TTL)
		require.True(t, got.Fencing)
		require.Same(t, logger, got.Logger)
		require.Equal(t, 251*time.Millisecond, got.Drift(time.Second))

		s = &tunedStore{fakeStore: &fakeStore{}}
		_, err := NewWithStore(s)
		require.NoError(t, err)
		got = s.settings[0]
		require.Empty(t, got.Options)
		require.Equal(t, defaultTTL, got.TTL)
		require.False(t, got.Fencing)
		require.Same(t, slog.Default(), got.Logger)
		require.Equal(t, 12*time.Millisecond, got.Drift(time.Second))
	})
}

// A setting that nobody understands is refused, and so is one that comes too late.
func TestStoreOptionRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused(t, nil, StoreOption(1))
		client := redis.NewClient(&redis.Options{})
		defer client.Close()
		_, err := New(client, StoreOption(1))
		require.ErrorIs(t, err, ErrInvalid)

		s := &tunedStore{fakeStore: &fakeStore{}}
		l := lockerOn(t, s, s.fakeStore, StoreOption(1))
		for _, try := range []func(context.Context, string, ...Option) (*Lock, error){l.Acquire, l.TryAcquire} {
			k, err := try(t.Context(), "k", StoreOption(1))
			require.Nil(t, k)
			require.ErrorIs(t, err, ErrInvalid)
		}
		require.Zero(t, s.count("acquire"))
		require.Len(t, s.settings, 1)
		require.NoError(t, hold(t, l, "k", WithTTL(time.Second)).Release(), "those of the constructor do not count")

		s = &tunedStore{fakeStore: &fakeStore{}, err: errors.New("no such instance")}
		l, err = NewWithStore(s, StoreOption(1))
		require.Nil(t, l)
		require.Equal(t, s.err, err)
		require.Empty(t, s.asked, "Configure comes first")
	})
}

// A TTL that the store refuses is never sent.
func TestCheckCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &tunedStore{fakeStore: &fakeStore{}, longest: 10 * time.Second}
		_, err := NewWithStore(s)
		require.ErrorIs(t, err, ErrInvalid)
		l := lockerOn(t, s, s.fakeStore, WithTTL(5*time.Second))
		_, err = l.Acquire(t.Context(), "k", WithTTL(11*time.Second))
		require.ErrorIs(t, err, ErrInvalid)
		_, err = l.TryAcquire(t.Context(), "k", WithTTL(12*time.Second))
		require.ErrorIs(t, err, ErrInvalid)
		require.Zero(t, s.count("acquire"))
		k := hold(t, l, "k", WithTTL(6*time.Second))
		until := k.ValidUntil()
		require.ErrorIs(t, k.Extend(t.Context(), 13*time.Second), ErrInvalid)
		require.Zero(t, s.count("extend"))
		require.Equal(t, until, k.ValidUntil())
		require.NoError(t, k.Err())
		require.NoError(t, k.Extend(t.Context(), 7*time.Second))
		sec := time.Second
		require.Equal(t, []time.Duration{defaultTTL, 5 * sec, 11 * sec, 12 * sec, 6 * sec, 13 * sec, 7 * sec}, s.asked)

		all := []Option{WithMinHold(sec), WithReplicas(2, sec), WithFencing(fencing.ClockFloor), WithTTL(9 * sec)}
		k, err = l.TryAcquire(t.Context(), "other", all...)
		require.NoError(t, err)
		want := CallSettings{TTL: 9 * sec, MinHold: sec, Replicas: 2, Fencing: true, ClockFloor: true}
		require.Equal(t, want, s.calls[len(s.calls)-1])
		require.NoError(t, k.Extend(t.Context(), 8*sec))
		want.TTL = 8 * sec
		require.Equal(t, want, s.calls[len(s.calls)-1])
	})
}

// watchedStore is a Store that can tell when a key has become free.
type watchedStore struct {
	*fakeStore
	inWatch func(wake func())
	inStop  func()

	// What follows is guarded by fakeStore.mu.
	begun []string
	ended int
	wake  func() // of the latest watch
}

func (s *watchedStore) Watch(key string, wake func()) (stop func()) {
	s.change(func() { s.begun, s.wake = append(s.begun, key), wake })
	if s.inWatch != nil {
		s.inWatch(wake)
	}
	return func() {
		s.change(func() { s.ended++ })
		if s.inStop != nil {
			s.inStop()
		}
	}
}

// watches asserts how many watches have begun and ended when nothing moves any more.
func (s *watchedStore) watches(t *testing.T, begun, ended int) {
	t.Helper()
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	require.Len(t, s.begun, begun)
	require.Equal(t, ended, s.ended)
}

// waits starts an Acquire of "k" that is over when cancel is called, or it has the lock.
func waits(t *testing.T, l *Locker) (got chan *Lock, cancel func()) {
	ctx, stop := context.WithCancel(t.Context())
	got = make(chan *Lock, 1)
	go func() {
		k, _ := l.Acquire(ctx, "k")
		got <- k
	}()
	synctest.Wait()
	return got, func() { stop(); <-got }
}

// One watch for all who wait for a key, for as long as somebody does.
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &watchedStore{fakeStore: &fakeStore{}}
		l := lockerOn(t, s, s.fakeStore, WithPrefix("p:"))
		require.NoError(t, hold(t, l, "k").Release())
		s.server.set("p:k", "somebody/else", time.Hour)
		_, err := l.TryAcquire(t.Context(), "k")
		require.ErrorIs(t, err, ErrNotAcquired)
		_, err = l.Acquire(t.Context(), "k", WithWait(0))
		require.ErrorIs(t, err, ErrNotAcquired)
		s.watches(t, 0, 0)

		_, first := waits(t, l)
		_, second := waits(t, l)
		got, _ := waits(t, l)
		s.watches(t, 1, 0)
		require.Equal(t, "p:k", s.begun[0], "as the server sees it")
		second()
		first()
		s.watches(t, 1, 0)

		time.Sleep(10 * time.Second) // pauses have grown
		n, start := s.count("acquire"), time.Now()
		s.wake()
		synctest.Wait()
		require.Equal(t, n+1, s.count("acquire"), "it asks at once")
		s.server.set("p:k", "", 0)
		s.wake()
		k := <-got
		require.Zero(t, time.Since(start))
		s.watches(t, 1, 1)
		s.wake() // comes too late, and nobody minds
		require.NoError(t, k.Release())

		s.server.set("p:k", "somebody/else", time.Hour)
		_, last := waits(t, l)
		s.watches(t, 2, 1)
		last()
		s.watches(t, 2, 2)
		_, closed := waits(t, l)
		require.NoError(t, l.Close())
		closed()
		s.watches(t, 3, 3)
	})
}

// Whatever a watch does, waiting goes on.
func TestWatchMisbehaves(t *testing.T) {
	boo := func() { panic("boo") }
	for name, c := range map[string]struct {
		inWatch func(func())
		inStop  func()
		ended   int
	}{
		"wakes inside":         {inWatch: func(wake func()) { wake(); wake() }, ended: 1},
		"panics":               {inWatch: func(func()) { boo() }},
		"panics at the end":    {inStop: boo, ended: 1},
		"wakes and then fails": {inWatch: func(wake func()) { wake(); boo() }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &watchedStore{fakeStore: &fakeStore{}, inWatch: c.inWatch, inStop: c.inStop}
				l := lockerOn(t, s, s.fakeStore)
				s.server.set("k", "somebody/else", time.Second)
				k := hold(t, l, "k")
				s.watches(t, 1, c.ended)
				require.Empty(t, l.queues)
				require.NoError(t, k.Release())
				require.NoError(t, hold(t, l, "k").Release())
			})
		})
	}
}

// A Watch that takes its time delays only who has called it, and is ended all the same.
func TestWatchStillRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &watchedStore{fakeStore: &fakeStore{}}
		g := s.newGate()
		s.inWatch = func(func()) { g.wait() }
		l := lockerOn(t, s, s.fakeStore)
		s.server.set("k", "somebody/else", time.Hour)
		_, first := waits(t, l)
		_, second := waits(t, l)
		start := time.Now()
		second()
		require.Zero(t, time.Since(start))
		time.AfterFunc(time.Second, g.open)
		first()
		require.Equal(t, time.Second, time.Since(start))
		s.watches(t, 1, 1)
		require.Empty(t, l.queues)
	})
}

// drainedStore is a Store with work of its own in the background.
type drainedStore struct {
	*fakeStore
	drain func(limit time.Duration)
}

func (s *drainedStore) Drain(limit time.Duration) { s.drain(limit) }

// Drain is the last that Close does, and gets the time that is left.
func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, calls := &drainedStore{fakeStore: &fakeStore{}}, 0
		l := lockerOn(t, s, s.fakeStore)
		s.release = func(_ context.Context, l Lease) error { time.Sleep(time.Second); return s.server.Release(l) }
		hold(t, l, "held")
		s.acquire = func(_ context.Context, r Request) (Grant, error) {
			_, _ = s.server.Acquire(r)
			return Grant{}, errors.New("EOF")
		}
		_, err := l.TryAcquire(t.Context(), "unsettled")
		require.ErrorIs(t, err, ErrUnavailable)
		start := time.Now()
		s.drain = func(limit time.Duration) {
			calls++
			require.Zero(t, s.server.left("held")+s.server.left("unsettled"))
			require.Zero(t, l.group.Running(), "goroutines of the Locker")
			require.Equal(t, 5*time.Second-time.Since(start), limit)
			time.Sleep(500 * time.Millisecond)
			panic("boo")
		}
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				require.NoError(t, l.Close())
				require.Equal(t, 1, calls, "all of them wait for it")
			})
		}
		wg.Wait()
		require.NoError(t, l.Close())
		require.Equal(t, 1, calls)
	})
}

// When the server has used up all the time the store still gets some.
func TestDrainWhileStoreHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &drainedStore{fakeStore: &fakeStore{}}
		g := s.newGate()
		s.release = func(context.Context, Lease) error { g.wait(); return errors.New("down") }
		l := lockerOn(t, s, s.fakeStore)
		hold(t, l, "k")
		var limits []time.Duration
		s.drain = func(limit time.Duration) { limits = append(limits, limit) }
		start := time.Now()
		require.ErrorIs(t, l.Close(), ErrUnavailable)
		require.LessOrEqual(t, time.Since(start), 5*time.Second)
		require.Len(t, limits, 1)
		require.Positive(t, limits[0])
		require.LessOrEqual(t, limits[0], 5*time.Second)
	})
}
