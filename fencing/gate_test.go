package fencing_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
)

func newGate(t testing.TB, opts ...fencing.GateOption) *fencing.Gate {
	t.Helper()
	g, err := fencing.NewGate(opts...)
	require.NoError(t, err)
	return g
}

// memMarks is a store of marks in memory, which can fail.
type memMarks struct {
	mu    sync.Mutex
	marks map[string]fencing.Claim
	asked int
	err   error
	pause func()
}

func (m *memMarks) Load(_ context.Context, resource string) (fencing.Claim, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.marks[resource], m.err
}

func (m *memMarks) Raise(_ context.Context, resource string, c fencing.Check) (fencing.Claim, error) {
	if m.pause != nil {
		m.pause()
		defer m.pause()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.asked++
	if m.err != nil {
		return fencing.Claim{}, m.err
	}
	mark, err := c.Admit(resource, m.marks[resource])
	if m.marks == nil {
		m.marks = map[string]fencing.Claim{}
	}
	m.marks[resource] = mark
	return mark, err
}

func TestGateAnswers(t *testing.T) {
	gates := map[string]*fencing.Gate{
		"memory": newGate(t),
		"store":  newGate(t, fencing.WithMarks(&memMarks{})),
		"ask":    newGate(t, fencing.WithMarks(&memMarks{}), fencing.AskEachTime()),
	}
	once, a, b := fencing.Once(), fencing.By("a"), fencing.By("b")
	for _, c := range []struct {
		name  string
		token fencing.Token
		rules []fencing.Rule
		seen  fencing.Token // of the StaleError
		err   error
	}{
		{"first", 5, nil, 0, nil},
		{"the same again", 5, nil, 0, nil},
		{"lower", 4, nil, 5, fencing.ErrStale},
		{"zero", 0, nil, 0, fencing.ErrNoToken},
		{"negative", -1, nil, 0, fencing.ErrNoToken},
		{"used up", 5, []fencing.Rule{once}, 5, fencing.ErrStale},
		{"an owner says who it was", 5, []fencing.Rule{a}, 0, nil},
		{"the number was given twice", 5, []fencing.Rule{b}, 5, fencing.ErrStale},
		{"the owner stays", 5, nil, 0, nil},
		{"still refused", 5, []fencing.Rule{b}, 5, fencing.ErrStale},
		{"higher", 6, []fencing.Rule{b, once}, 0, nil},
		{"once only", 6, []fencing.Rule{b, once}, 6, fencing.ErrStale},
		{"the greatest", 1<<63 - 1, nil, 0, nil},
		{"below the greatest", 1<<63 - 2, nil, 1<<63 - 1, fencing.ErrStale},
	} {
		for name, g := range gates {
			err := g.Enter(t.Context(), "r", c.token, c.rules...)
			if c.err == nil {
				require.NoError(t, err, "%s: %s", name, c.name)
				continue
			}
			require.ErrorIs(t, err, c.err, "%s: %s", name, c.name)
			var stale *fencing.StaleError
			if errors.As(err, &stale) {
				require.Equal(t, fencing.StaleError{Resource: "r", Token: c.token, Seen: c.seen}, *stale, "%s: %s", name, c.name)
			}
		}
	}
}

func TestGateOptions(t *testing.T) {
	for name, opts := range map[string][]fencing.GateOption{
		"nil store":        {fencing.WithMarks(nil)},
		"nil option":       {nil},
		"ask nobody":       {fencing.AskEachTime()},
		"forget for good":  {fencing.WithMostResources(10)},
		"fewer than one":   {fencing.WithMarks(&memMarks{}), fencing.WithMostResources(0)},
		"fewer than none ": {fencing.WithMarks(&memMarks{}), fencing.WithMostResources(-1)},
	} {
		_, err := fencing.NewGate(opts...)
		require.Error(t, err, name)
	}
}

// A restart forgets nothing where there is a store, and a store that fails lets nobody in.
func TestGateRestart(t *testing.T) {
	m := &memMarks{}
	require.NoError(t, newGate(t, fencing.WithMarks(m)).Enter(t.Context(), "r", 7))
	g := newGate(t, fencing.WithMarks(m))
	require.ErrorIs(t, g.Enter(t.Context(), "r", 6), fencing.ErrStale)
	require.NoError(t, g.Enter(t.Context(), "r", 7))
	asked := m.asked
	require.NoError(t, g.Enter(t.Context(), "r", 7))
	require.Equal(t, asked, m.asked, "a known token asks nothing")

	m.err = errors.New("down")
	err := g.Enter(t.Context(), "r", 8)
	require.ErrorIs(t, err, m.err)
	require.NotErrorIs(t, err, fencing.ErrStale)
	require.NoError(t, g.Enter(t.Context(), "r", 7), "the mark was not raised")
	m.err = nil

	// Another process raises it.
	_, err = m.Raise(t.Context(), "r", fencing.Check{Claim: fencing.Claim{Token: 9}})
	require.NoError(t, err)
	require.NoError(t, g.Enter(t.Context(), "r", 7), "which this one does not ask for")
	require.ErrorIs(t, newGate(t, fencing.WithMarks(m), fencing.AskEachTime()).Enter(t.Context(), "r", 8), fencing.ErrStale)

	m.pause = func() { panic("store") }
	require.ErrorContains(t, g.Enter(t.Context(), "r", 10), "panicked: store")
}

// What the store has let through once is let through, though memory has seen the same token
// meanwhile: it is used up, and nobody else would have it.
func TestGateOnceWithStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memMarks{}
		g := newGate(t, fencing.WithMarks(slowOnce{m}))
		once := make(chan error)
		go func() { once <- g.Enter(t.Context(), "r", 5, fencing.Once()) }() // ends with the answer
		synctest.Wait()
		require.NoError(t, g.Enter(t.Context(), "r", 5))
		require.NoError(t, <-once)
		require.ErrorIs(t, g.Enter(t.Context(), "r", 5, fencing.Once()), fencing.ErrStale)
	})
}

// slowOnce is a store whose answers to Once take a while.
type slowOnce struct{ *memMarks }

func (s slowOnce) Raise(ctx context.Context, resource string, c fencing.Check) (fencing.Claim, error) {
	mark, err := s.memMarks.Raise(ctx, resource, c)
	if c.Once {
		time.Sleep(time.Second) // virtual time
	}
	return mark, err
}

// Memory is bounded beside a store, and what was forgotten is asked for again.
func TestGateForgets(t *testing.T) {
	m := &memMarks{}
	g := newGate(t, fencing.WithMarks(m), fencing.WithMostResources(512))
	for i := range 20_000 {
		require.NoError(t, g.Enter(t.Context(), fmt.Sprint(i), 2))
	}
	require.LessOrEqual(t, g.Len(), 512)
	require.Greater(t, g.Len(), 256)
	for i := range 20_000 {
		require.ErrorIs(t, g.Enter(t.Context(), fmt.Sprint(i), 1), fencing.ErrStale)
	}
	require.LessOrEqual(t, g.Len(), 512)
}

// Newer work stops the older and waits for it; what comes after is refused.
func TestGateDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(t)
		var log []string
		var old error
		done := make(chan struct{})
		go func() { // ends with the older work
			defer close(done)
			old = g.Do(t.Context(), "r", 1, func(ctx context.Context) error {
				<-ctx.Done()
				time.Sleep(time.Minute) // it takes its time to stop
				log = append(log, "old")
				return context.Cause(ctx)
			})
		}()
		synctest.Wait()
		require.NoError(t, g.Do(t.Context(), "r", 1, func(context.Context) error { return nil }), "the same token, side by side")
		require.NoError(t, g.Do(t.Context(), "r", 2, func(context.Context) error {
			log = append(log, "new")
			return nil
		}))
		<-done
		require.Equal(t, []string{"old", "new"}, log)
		var stale *fencing.StaleError
		require.ErrorAs(t, old, &stale)
		require.Equal(t, fencing.StaleError{Resource: "r", Token: 1, Seen: 2}, *stale)
		require.ErrorIs(t, g.Do(t.Context(), "r", 1, nil), fencing.ErrStale)
	})
}

// A holder that gives up waiting for older work has still entered.
func TestGateWaitEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(t)
		free := make(chan struct{})
		go func() { // ends with free
			_ = g.Do(t.Context(), "r", 1, func(context.Context) error { <-free; return nil })
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := g.Enter(ctx, "r", 2)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, fencing.ErrStale)
		require.ErrorIs(t, g.Enter(t.Context(), "r", 1), fencing.ErrStale)
		close(free)
		require.NoError(t, g.Enter(t.Context(), "r", 2))
	})
}

// An fn that panics leaves nothing under way.
func TestGateDoPanics(t *testing.T) {
	g := newGate(t)
	require.Panics(t, func() {
		_ = g.Do(t.Context(), "r", 1, func(context.Context) error { panic("work") })
	})
	require.NoError(t, g.Enter(t.Context(), "r", 2))
}

// For any interleaving of grants, pauses, retries and restarts: what is let through has
// tokens that never go down. With a store, without, and with a memory so small that it
// forgets all the time; owners break the ties of a counter that was lost.
func TestGateNeverGoesDown(t *testing.T) {
	for name, opts := range map[string]func(m *memMarks) []fencing.GateOption{
		"memory": func(*memMarks) []fencing.GateOption { return nil },
		"store":  func(m *memMarks) []fencing.GateOption { return []fencing.GateOption{fencing.WithMarks(m)} },
		"small": func(m *memMarks) []fencing.GateOption {
			return []fencing.GateOption{fencing.WithMarks(m), fencing.WithMostResources(1)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			for range 100 {
				synctest.Test(t, func(t *testing.T) { neverGoesDown(t, opts, name != "memory") })
			}
		})
	}
}

func neverGoesDown(t *testing.T, opts func(m *memMarks) []fencing.GateOption, restarts bool) {
	pause := func() { time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond) }
	m := &memMarks{pause: pause}
	var gate atomic.Pointer[fencing.Gate]
	gate.Store(newGate(t, opts(m)...))
	var (
		counter atomic.Int64
		mu      sync.Mutex
		last    = map[string]fencing.Token{}
		wg      sync.WaitGroup
	)
	for i := range 12 {
		wg.Go(func() { // ends after its tries
			resource := fmt.Sprint("r", i%3)
			for range 3 {
				token := fencing.Token(counter.Add(1))
				pause()
				for range 4 {
					g := gate.Load()
					err := g.Do(t.Context(), resource, token, func(context.Context) error {
						pause()
						mu.Lock()
						defer mu.Unlock()
						if gate.Load() != g {
							return nil // the restart has ended this work
						}
						if token < last[resource] {
							t.Errorf("%s: %d after %d", resource, token, last[resource])
						}
						last[resource] = token
						return nil
					}, fencing.By(fmt.Sprint(i)))
					if err != nil && !errors.Is(err, fencing.ErrStale) {
						t.Error(err)
					}
					pause()
				}
			}
		})
	}
	if restarts {
		wg.Go(func() { // ends after two restarts
			for range 2 {
				time.Sleep(15 * time.Millisecond)
				mu.Lock()
				gate.Store(newGate(t, opts(m)...))
				mu.Unlock()
			}
		})
	}
	wg.Wait()
}

// 64 goroutines, each with a resource of its own, and a token that is known.
func BenchmarkGate(b *testing.B) {
	for name, opts := range map[string][]fencing.GateOption{
		"memory": nil,
		"store":  {fencing.WithMarks(&memMarks{})},
	} {
		b.Run(name, func(b *testing.B) {
			g := newGate(b, opts...)
			var n atomic.Int64
			b.SetParallelism(32) // times GOMAXPROCS, which is 2 on two cores
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				resource, ctx := fmt.Sprint("resource-", n.Add(1)), context.Background()
				for pb.Next() {
					if err := g.Enter(ctx, resource, 7); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}
