package holdfast

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
)

// lossyStore is the store on Redis behind a network that delays, loses and repeats
// requests, answers and messages, until it is mended.
type lossyStore struct {
	*redisStore
	random func(n int) int
	mended *atomic.Bool
	bad    int // one in so many goes wrong
	start  func(func())
}

// send passes one request on.
func (s *lossyStore) send(fn func() error) error {
	if s.mended.Load() {
		return fn()
	}
	pause := func() {
		time.Sleep(time.Duration(s.random(20)) * time.Millisecond)
		if s.random(s.bad) == 0 {
			time.Sleep(time.Duration(s.random(3000)) * time.Millisecond)
		}
	}
	pause()
	if s.random(s.bad) == 0 {
		return errors.New("connection reset")
	}
	if s.random(2*s.bad) == 0 { // a copy that runs late
		s.start(func() {
			time.Sleep(time.Duration(s.random(1500)) * time.Millisecond)
			_ = fn()
		})
		return errors.New("i/o timeout")
	}
	err := fn()
	pause()
	if s.random(s.bad) == 0 {
		return errors.New("i/o timeout")
	}
	return err
}

func (s *lossyStore) Acquire(ctx context.Context, r Request) (g Grant, err error) {
	ctx = context.WithoutCancel(ctx)
	var mu sync.Mutex
	err = s.send(func() error {
		got, err := s.redisStore.Acquire(ctx, r)
		mu.Lock()
		defer mu.Unlock()
		g = got
		return err
	})
	mu.Lock()
	defer mu.Unlock()
	return g, err
}

func (s *lossyStore) Renew(ctx context.Context, leases []Lease) []error {
	ctx = context.WithoutCancel(ctx)
	answers := make(chan []error, 2)
	if err := s.send(func() error { answers <- s.redisStore.Renew(ctx, leases); return nil }); err != nil {
		return each(leases, err)
	}
	return <-answers
}

func (s *lossyStore) Extend(ctx context.Context, l Lease) error {
	ctx = context.WithoutCancel(ctx)
	return s.send(func() error { return s.redisStore.Extend(ctx, l) })
}

func (s *lossyStore) Release(context.Context, Lease) error { panic("handOn is to be used") }

func (s *lossyStore) handOn(ctx context.Context, l Lease) (*handed, error) {
	ctx = context.WithoutCancel(ctx)
	next := make(chan *handed, 2)
	err := s.send(func() error {
		h, err := s.redisStore.handOn(ctx, l)
		next <- h
		return err
	})
	if err == nil {
		return <-next, nil
	}
	return nil, err
}

func (s *lossyStore) wait(ctx context.Context, calls []lineCall) []lineAnswer {
	ctx = context.WithoutCancel(ctx)
	answers := make(chan []lineAnswer, 2)
	if err := s.send(func() error { answers <- s.redisStore.wait(ctx, calls); return nil }); err != nil {
		failed := make([]lineAnswer, len(calls))
		for i := range failed {
			failed[i].err = err
		}
		return failed
	}
	return <-answers
}

func (s *lossyStore) listen(hear func(string), ready func(string), start func(func())) {
	s.start = start
	s.redisStore.listen(func(text string) {
		if s.mended.Load() {
			hear(text)
			return
		}
		for range []int{0, 1, 1, 1, 2}[s.random(5)] { // lost, once, twice; and in any order
			late := time.Duration(s.random(20)) * time.Millisecond
			if s.random(2) == 0 {
				late = time.Duration(s.random(4000)) * time.Millisecond
			}
			start(func() { time.Sleep(late); hear(text) })
		}
	}, ready, start)
}

// Random schedules with delay, loss, repetition, reordering, late execution and
// clients that give up: no belief outlives the key, tokens grow from grant to grant,
// everybody is served once the network is mended, and nothing is left behind.
func TestLineAtRandom(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for round := range uint64(8) {
		bubble(t, func(t *testing.T, m *miniredis.Miniredis) { lineAtRandom(t, m, rand.New(rand.NewPCG(seed, round))) })
	}
}

func lineAtRandom(t *testing.T, m *miniredis.Miniredis, r *rand.Rand) {
	var (
		mu      sync.Mutex
		beliefs []*Lock
		last    fencing.Token
		mended  atomic.Bool
		served  atomic.Int64
		wg      sync.WaitGroup
	)
	random := func(n int) int { mu.Lock(); defer mu.Unlock(); return r.IntN(n) }
	ttl := []time.Duration{400 * time.Millisecond, 2 * time.Second, 5 * time.Second}[random(3)]
	bad := []int{3, 6, 20}[random(3)]
	check := func() {
		mu.Lock()
		defer mu.Unlock()
		valid := 0
		for _, k := range beliefs {
			if k.Err() != nil {
				continue
			}
			valid++
			if owner, _ := m.Get("k"); k.Err() == nil && owner != k.Owner() {
				t.Errorf("the belief of %s outlives the key, which has %q", k.Owner(), owner)
			}
		}
		assert.LessOrEqual(t, valid, 1)
	}
	granted := func(k *Lock) {
		defer check()
		mu.Lock()
		defer mu.Unlock()
		if k.Err() == nil { // else another may have come in between
			assert.Greater(t, k.Token(), last, "tokens grow")
			last = k.Token()
		}
		beliefs = append(beliefs, k)
	}
	for range 4 {
		inner, err := newRedisStore(memClient(t, m))
		require.NoError(t, err)
		s := &lossyStore{redisStore: inner, random: random, mended: &mended, bad: bad}
		l, err := NewWithStore(s, quiet(), WithTTL(ttl), WithFencing())
		require.NoError(t, err)
		t.Cleanup(func() { _ = l.Close(); time.Sleep(10 * time.Second) })
		for range 2 {
			wg.Go(func() {
				for range 6 {
					var opts []Option
					if random(4) == 0 {
						opts = append(opts, WithoutRenewal())
					}
					ctx, cancel := context.WithCancel(t.Context())
					if random(3) == 0 { // one that gives up
						ctx, cancel = context.WithTimeout(t.Context(), time.Duration(random(3000))*time.Millisecond)
					}
					k, err := l.Acquire(ctx, "k", opts...)
					if err == nil {
						granted(k)
						for range random(4) {
							time.Sleep(time.Duration(random(300)) * time.Millisecond)
							check()
						}
						if random(8) > 0 {
							_ = k.Release()
						} // else it is left to its lease
					}
					cancel()
					time.Sleep(time.Duration(random(100)) * time.Millisecond)
				}
				served.Add(1)
			})
		}
	}
	stop, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(1+random(20)) * time.Millisecond):
				check()
			}
			if n == 4000 {
				mended.Store(true)
			}
		}
	}()
	wg.Wait()
	close(stop)
	<-watched
	mended.Store(true)
	time.Sleep(ttl + 10*time.Second)
	check()
	require.Equal(t, []string{"{k}:fence"}, m.Keys())
	require.EqualValues(t, 8, served.Load())
}
