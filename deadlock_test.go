package holdfast

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"
)

const deadlockAfter = 500 * time.Millisecond

// nested is what came of an Acquire by a flow that holds a lock.
type nested struct {
	flow int
	k    *Lock
	err  error
	took time.Duration
}

// ring lets n flows, each on a Locker of its own, hold one lock each, and wait for that of
// the next, one after the other.
func ring(t *testing.T, m *miniredis.Miniredis, n int, pause time.Duration, opts ...Option) (held []*Lock, got chan nested) {
	t.Helper()
	got = make(chan nested, n)
	lockers := make([]*Locker, n)
	for i := range n {
		all := append([]Option{WithHolder(fmt.Sprint("flow-", i)), WithDeadlockAfter(deadlockAfter)}, opts...)
		lockers[i] = memLocker(t, m, all...)
		held = append(held, hold(t, lockers[i], fmt.Sprint("k", i)))
		time.Sleep(pause)
	}
	for i := range n {
		go func() { // ends with its Acquire
			start := time.Now()
			k, err := lockers[i].Acquire(held[i].Context(), fmt.Sprint("k", (i+1)%n))
			got <- nested{i, k, err, time.Since(start)}
		}()
		time.Sleep(pause)
	}
	return held, got
}

// requireNoWaits checks that no wait has left a record.
func requireNoWaits(t *testing.T, m *miniredis.Miniredis) {
	t.Helper()
	for _, key := range m.Keys() {
		require.NotContains(t, key, ":waits")
	}
}

// Of flows that wait for each other the youngest is told, with the whole cycle,
// within twice the limit; when it has released what it holds the others go on, one after the
// other.
func TestDeadlock(t *testing.T) {
	for _, n := range []int{2, 3, 50} {
		bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
			held, got := ring(t, m, n, 7*time.Millisecond)
			victim := <-got
			require.Equal(t, n-1, victim.flow, "the youngest")
			require.Less(t, victim.took, 2*deadlockAfter)
			require.ErrorIs(t, victim.err, ErrDeadlock)
			require.NotErrorIs(t, victim.err, ErrUnavailable)
			var dead *DeadlockError
			require.ErrorAs(t, victim.err, &dead)
			require.Equal(t, "k0", dead.Key)
			require.Len(t, dead.Cycle, n)
			for i, w := range dead.Cycle {
				flow := (i + n - 1) % n
				require.Equal(t, fmt.Sprint("flow-", flow), w.Holder)
				require.Equal(t, fmt.Sprint("k", flow), w.Key)
				require.Equal(t, fmt.Sprint("k", (flow+1)%n), w.WaitsFor)
				require.False(t, w.Since.IsZero() || w.Waits.Before(w.Since))
			}
			require.ErrorContains(t, dead, `"flow-0" holds "k0" and waits for "k1" since `)
			for i := n - 1; i > 0; i-- { // the one before gets the lock, and then the one before that
				require.NoError(t, held[i].Err())
				require.NoError(t, held[i].Release())
				next := <-got
				require.Equal(t, i-1, next.flow)
				require.NoError(t, next.err)
				require.NoError(t, next.k.Release())
			}
			require.NoError(t, held[0].Release())
			time.Sleep(time.Minute)
			requireNoWaits(t, m)
		})
	}
}

// All begin to wait at the same moment: one of them yields, no more.
func TestDeadlockAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		held, got := ring(t, m, 5, 0)
		victim := <-got
		require.ErrorIs(t, victim.err, ErrDeadlock)
		require.LessOrEqual(t, victim.took, 2*deadlockAfter+time.Second/10)
		time.Sleep(10 * deadlockAfter)
		require.Empty(t, got)
		for range 4 {
			require.NoError(t, held[victim.flow].Release())
			victim = <-got
			require.NoError(t, victim.err)
			require.NoError(t, victim.k.Release())
		}
		require.NoError(t, held[victim.flow].Release())
	})
}

// With WithDeadlockBreak the lock that was taken first is taken away, its holder hears of it
// at once, and the others go on.
func TestDeadlockBreak(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		held, got := ring(t, m, 3, 10*time.Millisecond, WithDeadlockBreak(), WithFencing())
		start := time.Now()
		<-held[0].Context().Done()
		require.Less(t, time.Since(start), 2*deadlockAfter)
		var lost *LostError
		require.ErrorAs(t, held[0].Err(), &lost)
		require.Equal(t, LostBroken, lost.Reason)
		require.ErrorIs(t, held[0].Release(), ErrLost)
		results := map[int]nested{}
		for range 2 {
			r := <-got
			results[r.flow] = r
		}
		require.ErrorIs(t, results[0].err, ErrLost, "its context has ended")
		require.NoError(t, results[2].err)
		require.Greater(t, results[2].k.Token(), held[0].Token())
		require.NoError(t, held[1].Err())
		require.NoError(t, results[2].k.Release())
		require.NoError(t, held[2].Release())
		r := <-got
		require.NoError(t, r.err)
		require.NoError(t, r.k.Release())
		require.NoError(t, held[1].Release())
		time.Sleep(time.Minute)
		requireNoWaits(t, m)
	})
}

// A chain without a cycle is none, however long it lasts, and what is waited for by one who
// holds nothing writes nothing.
func TestNoDeadlock(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		const n = 6
		end := hold(t, memLocker(t, m), fmt.Sprint("k", n))
		got := make(chan error, n)
		var lockers []*Locker
		var held []*Lock
		for i := range n {
			lockers = append(lockers, memLocker(t, m, WithDeadlockAfter(deadlockAfter)))
			held = append(held, hold(t, lockers[i], fmt.Sprint("k", i)))
		}
		for i, k := range held {
			l := lockers[i]
			go func() { // ends with its locks
				next, err := l.Acquire(k.Context(), fmt.Sprint("k", i+1))
				if err == nil {
					err = next.Release()
				}
				got <- errors.Join(err, k.Release())
			}()
		}
		time.Sleep(20 * deadlockAfter)
		require.Empty(t, got)
		require.True(t, m.Exists("{k0}:waits"))
		require.False(t, m.Exists("{k6}:waits"), "its holder does not wait")
		require.NoError(t, end.Release())
		for range n {
			require.NoError(t, <-got)
		}
		time.Sleep(time.Minute)
		require.Empty(t, m.Keys())
	})
}

// Two cycles share a lock: one flow of each yields, or one for both.
func TestDeadlocksThatShareALock(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		var flows sync.WaitGroup
		var dead, done atomic.Int32
		lockers, held := map[string]*Locker{}, map[string]*Lock{}
		for _, key := range []string{"shared", "b", "c"} {
			lockers[key] = memLocker(t, m, WithDeadlockAfter(deadlockAfter))
			held[key] = hold(t, lockers[key], key)
		}
		for _, keys := range [][2]string{{"shared", "b"}, {"b", "shared"}, {"c", "shared"}} {
			l, k := lockers[keys[0]], held[keys[0]]
			flows.Go(func() { // ends with its locks
				defer func() { _ = k.Release() }()
				if keys[0] == "shared" { // it waits for both of the others
					var both sync.WaitGroup
					for _, key := range []string{"b", "c"} {
						both.Go(func() { // ends with its lock
							next, err := l.Acquire(k.Context(), key)
							count(err, &dead, &done)
							_ = next.Release()
						})
					}
					both.Wait()
					return
				}
				next, err := l.Acquire(k.Context(), keys[1])
				count(err, &dead, &done)
				_ = next.Release()
			})
			time.Sleep(10 * time.Millisecond)
		}
		flows.Wait()
		require.Positive(t, dead.Load())
		require.LessOrEqual(t, dead.Load(), int32(2))
		require.EqualValues(t, 4, dead.Load()+done.Load())
		time.Sleep(time.Minute)
		require.Empty(t, m.Keys())
	})
}

func count(err error, dead, done *atomic.Int32) {
	switch {
	case errors.Is(err, ErrDeadlock):
		dead.Add(1)
	case err == nil:
		done.Add(1)
	}
}

// A member of a cycle whose wait ends by itself dissolves it, also at the moment at which it is
// looked at: who yields then was stuck until that moment, and nobody else yields.
func TestDeadlockThatDissolves(t *testing.T) {
	for ms := 400; ms < 700; ms += 25 {
		bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
			wait := time.Duration(ms) * time.Millisecond
			a := memLocker(t, m, WithDeadlockAfter(deadlockAfter))
			b := memLocker(t, m, WithDeadlockAfter(deadlockAfter), WithWait(wait))
			ka, kb := hold(t, a, "a"), hold(t, b, "b")
			got := make(chan error, 1)
			go func() { // ends with its Acquire
				k, err := a.Acquire(ka.Context(), "b")
				got <- errors.Join(err, k.Release())
			}()
			k, err := b.Acquire(kb.Context(), "a")
			require.Error(t, err)
			require.Nil(t, k)
			require.NoError(t, kb.Release())
			switch err := <-got; {
			case errors.Is(err, ErrDeadlock):
				require.GreaterOrEqual(t, wait, deadlockAfter)
			default:
				require.ErrorIs(t, err, ErrNotHeld, "the nil Lock's Release") // or nil
			case err == nil:
			}
			require.NoError(t, ka.Release())
		})
	}
}

// Without limits, or with one below the least, it says so or does nothing.
func TestDeadlockOptions(t *testing.T) {
	for _, d := range []time.Duration{0, -1, leastDeadlockAfter - 1, maxTTL + 1} {
		_, err := NewWithStore(&fakeStore{}, WithDeadlockAfter(d))
		require.ErrorIs(t, err, ErrInvalid, d)
	}
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		held, got := ring(t, m, 2, time.Millisecond, WithDeadlockAfter(Unlimited), WithWait(time.Minute))
		time.Sleep(50 * time.Second)
		requireNoWaits(t, m)
		for range held {
			require.ErrorIs(t, (<-got).err, ErrNotAcquired)
		}
	})
}

// model is a graph of waits in memory, in which waits begin and end at any moment. It keeps
// the history of what was true.
type model struct {
	mu     sync.Mutex
	owners map[string]string
	waits  map[string][]waitRecord // by key that is held
}

func (g *model) now(context.Context) (time.Time, error) { return time.Now(), nil }

func (g *model) note(_ context.Context, id string, records []waitRecord, _ time.Duration) error {
	_ = g.unnote(context.Background(), id, records)
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, r := range records {
		g.waits[r.Key] = append(slices.Clip(g.waits[r.Key]), r)
	}
	return nil
}

func (g *model) unnote(_ context.Context, id string, records []waitRecord) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, r := range records {
		g.waits[r.Key] = slices.DeleteFunc(slices.Clone(g.waits[r.Key]), func(x waitRecord) bool { return x.ID == id })
	}
	return nil
}

func (g *model) tellBroken(context.Context, waitRecord) error { return nil }

func (g *model) look(_ context.Context, key string) (string, []waitRecord, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.owners[key], slices.Clone(g.waits[key]), nil
}

// changing changes the graph before each look.
type changing struct {
	*model
	change func()
}

func (g changing) look(ctx context.Context, key string) (string, []waitRecord, error) {
	g.change()
	return g.model.look(ctx, key)
}

// Random waits without a cycle, which begin and end while they are looked at: never a false
// alarm. Flows take keys in growing order only, so no cycle can be. Records of waits that have
// ended may stay for a while, and those of former holders too.
func TestNoFalseAlarm(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	runs := 100_000
	const keys, flows = 8, 6
	for range runs {
		g := &model{owners: map[string]string{}, waits: map[string][]waitRecord{}}
		n := 0
		name := func(i int) string { return string(rune('a' + i)) }
		highest := make([]int, flows) // key of each flow, -1: none
		for i := range highest {
			highest[i] = -1
		}
		change := func() {
			n++
			i := random.IntN(flows)
			if highest[i] >= 0 && random.IntN(3) == 0 { // it releases all, and its records stay at times
				for key, owner := range g.owners {
					if owner == fmt.Sprint("f/", i) || len(owner) > 3 && owner[2:3] == fmt.Sprint(i) {
						delete(g.owners, key)
						if random.IntN(2) == 0 {
							delete(g.waits, key)
						}
					}
				}
				highest[i] = -1
				return
			}
			next := highest[i] + 1 + random.IntN(3)
			if next >= keys {
				return
			}
			if g.owners[name(next)] == "" {
				g.owners[name(next)] = fmt.Sprintf("f/%d-%d", i, n) // never used again
				highest[i] = next
				return
			}
			for key, owner := range g.owners { // it waits, with all that it holds
				if owner[2:3] == fmt.Sprint(i) {
					g.waits[key] = append(g.waits[key], waitRecord{ID: fmt.Sprint(n), Owner: owner, Key: key, For: name(next)})
				}
			}
		}
		for range random.IntN(20) {
			change()
		}
		// The flow that looks holds a key that no other can come after.
		me := &Lock{full: name(0), owner: "f/me", l: &Locker{}}
		me.ctx.k, me.ctx.Context = me, context.Background()
		g.owners[name(0)] = "f/me"
		p := &prober{
			w: &want{k: &Lock{full: name(1 + random.IntN(keys-1))}}, held: []*Lock{me},
			graph: changing{g, func() {
				if random.IntN(2) == 0 {
					change()
				}
				g.owners[name(0)] = "f/me"
			}},
		}
		first, err := p.walk(t.Context())
		require.NoError(t, err)
		second, err := p.walk(t.Context())
		require.NoError(t, err)
		if first != nil && slices.EqualFunc(first, second, sameEdge) {
			t.Fatalf("a false alarm: %v", first)
		}
	}
}

// Many flows take locks in any order: whenever one is told of a deadlock the cycle is one that
// stands, all are served in the end, and nothing is left.
func TestDeadlockRandom(t *testing.T) {
	for range 50 {
		seed := rand.Uint64()
		bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
			random := rand.New(rand.NewPCG(seed, 2))
			var wg sync.WaitGroup
			var dead, done atomic.Int32
			for i := range 6 {
				l := memLocker(t, m, WithHolder(fmt.Sprint("flow-", i)), WithDeadlockAfter(50*time.Millisecond))
				order := random.Perm(5)
				pauses := random.Perm(40)
				wg.Go(func() { // ends when it has had all its locks
					for {
						err := take(l, t.Context(), order[:3], pauses)
						count(err, &dead, &done)
						if err == nil {
							return
						}
						if !errors.Is(err, ErrDeadlock) {
							t.Error(seed, err)
							return
						}
						checkCycle(t, m, err)
					}
				})
			}
			wg.Wait()
			require.EqualValues(t, 6, done.Load())
			time.Sleep(time.Minute)
			require.Empty(t, m.Keys())
		})
	}
}

// take takes locks one inside the other.
func take(l *Locker, ctx context.Context, keys, pauses []int) error {
	if len(keys) == 0 {
		return nil
	}
	return l.Do(ctx, fmt.Sprint("k", keys[0]), func(ctx context.Context) error {
		time.Sleep(time.Duration(pauses[0]) * time.Millisecond)
		return take(l, ctx, keys[1:], pauses[1:])
	})
}

// checkCycle checks that a cycle is closed.
func checkCycle(t *testing.T, m *miniredis.Miniredis, err error) {
	var found *DeadlockError
	if !errors.As(err, &found) || len(found.Cycle) < 2 {
		t.Error(err)
		return
	}
	for i, w := range found.Cycle {
		if next := found.Cycle[(i+1)%len(found.Cycle)]; w.WaitsFor != next.Key {
			t.Error(found)
		}
	}
}
