package holdfast

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/script"
	"github.com/holdfast-go/holdfast/lua"
)

// BenchmarkCycle takes and gives back a lock that nobody else wants, next to the
// same two commands through bare go-redis; on the in-process fake, for the
// allocations, and on a real server, for time and commands.
func BenchmarkCycle(b *testing.B) {
	b.Run("memory/bare", func(b *testing.B) { benchBare(b, memoryClient(b)) })
	b.Run("memory/holdfast", func(b *testing.B) { benchCycle(b, memoryClient(b)) })
	if testing.Short() {
		return
	}
	s := redistest.Start(b)
	b.Run("redis/bare", func(b *testing.B) { benchBare(b, s.Client()) })
	b.Run("redis/holdfast", func(b *testing.B) {
		s.ResetStats()
		benchCycle(b, s.Client())
		stats := s.CommandStats()
		b.ReportMetric(float64(stats["set"])/float64(b.N), "SETs/op")
		b.ReportMetric(float64(stats["evalsha"])/float64(b.N), "EVALSHAs/op")
	})
}

func memoryClient(b *testing.B) redis.UniversalClient {
	c := redis.NewClient(&redis.Options{Addr: miniredis.RunT(b).Addr()})
	b.Cleanup(func() { _ = c.Close() })
	return c
}

func benchBare(b *testing.B, c redis.UniversalClient) {
	ctx := context.Background()
	s := script.New(lua.Release)
	s.ByText(ctx, c, []string{"k"}, "x")
	b.ReportAllocs()
	for b.Loop() {
		if ok, err := c.SetNX(ctx, "k", "owner", 30001*time.Millisecond).Result(); !ok || err != nil {
			b.Fatal(ok, err)
		}
		if n, err := s.Run(ctx, c, []string{"k"}, "owner").Int(); n != 1 || err != nil {
			b.Fatal(n, err)
		}
	}
}

func benchCycle(b *testing.B, c redis.UniversalClient) {
	ctx := context.Background()
	l, err := New(c)
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	b.ReportAllocs()
	for b.Loop() {
		k, err := l.Acquire(ctx, "k")
		if err != nil {
			b.Fatal(err)
		}
		if err := k.Release(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkCycleParallel has goroutines that take and give back keys of their own, next
// to the same two commands through bare go-redis, for a few milliseconds in turn: what
// else the machine does then hits both. One iteration is one turn of each.
func BenchmarkCycleParallel(b *testing.B) {
	s := redistest.Start(b)
	for _, n := range []int{1, 8, 64, 512} {
		b.Run(fmt.Sprint(n), func(b *testing.B) { benchParallel(b, s, n) })
	}
}

func benchParallel(b *testing.B, s *redistest.Server, n int) {
	ctx := context.Background()
	c := s.Client()
	release := script.New(lua.Release)
	release.ByText(ctx, c, []string{"k"}, "x")
	l, err := New(s.Client())
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	bare := &turns{cycle: func(key string) error {
		if ok, err := c.SetNX(ctx, key, "owner", 30001*time.Millisecond).Result(); !ok || err != nil {
			return fmt.Errorf("SET: %v %w", ok, err)
		}
		return release.Run(ctx, c, []string{key}, "owner").Err()
	}}
	holdfast := &turns{cycle: func(key string) error {
		k, err := l.Acquire(ctx, key)
		if err != nil {
			return err
		}
		return k.Release()
	}}
	bare.run(b, n)
	holdfast.run(b, n)
	*bare, *holdfast = turns{cycle: bare.cycle}, turns{cycle: holdfast.cycle} // they were warm-up
	var ratios []float64
	for b.Loop() {
		ratios = append(ratios, holdfast.run(b, n)/bare.run(b, n))
	}
	slices.Sort(ratios)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ratios[len(ratios)/2], "rate-ratio")
	for name, t := range map[string]*turns{"bare": bare, "holdfast": holdfast} {
		slices.Sort(t.times)
		b.ReportMetric(float64(len(t.times))/t.took.Seconds(), name+"-cycles/s")
		b.ReportMetric(float64(t.times[len(t.times)/2].Microseconds()), name+"-µs-p50")
		b.ReportMetric(float64(t.times[len(t.times)*99/100].Microseconds()), name+"-µs-p99")
	}
}

// turns is one side of the comparison.
type turns struct {
	cycle func(key string) error
	times []time.Duration // of each cycle
	took  time.Duration
}

// run has n goroutines run cycles for a while, and returns how many there were in a
// second.
func (t *turns) run(b *testing.B, n int) float64 {
	const turn = 30 * time.Millisecond
	times := make([][]time.Duration, n)
	start := time.Now()
	var wg sync.WaitGroup
	for i := range times {
		wg.Go(func() {
			key := fmt.Sprint("k", i)
			for before := time.Now(); before.Sub(start) < turn; {
				if err := t.cycle(key); err != nil {
					b.Error(err)
					return
				}
				now := time.Now()
				times[i] = append(times[i], now.Sub(before))
				before = now
			}
		})
	}
	wg.Wait()
	took := time.Since(start)
	all := slices.Concat(times...)
	t.times, t.took = append(t.times, all...), t.took+took
	return float64(len(all)) / took.Seconds()
}

const (
	heldLocks = 10_000
	heldTTL   = 3 * time.Second
)

// holdMany takes many locks.
func holdMany(b *testing.B, l *Locker) []*Lock {
	locks := make([]*Lock, heldLocks)
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Go(func() {
			for i := g; i < len(locks); i += 16 {
				k, err := l.Acquire(context.Background(), fmt.Sprint("k", i))
				if err != nil {
					b.Error(err)
					return
				}
				locks[i] = k
			}
		})
	}
	wg.Wait()
	if b.Failed() {
		b.FailNow()
	}
	return locks
}

// BenchmarkHeld holds 10,000 locks with a TTL of 3 s for 15 s, and says how many
// were lost and what they cost.
func BenchmarkHeld(b *testing.B) {
	s := redistest.Start(b)
	l, err := New(s.Client(), WithTTL(heldTTL), quiet())
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	var before, after runtime.MemStats
	for b.Loop() {
		goroutines := runtime.NumGoroutine()
		runtime.GC()
		runtime.ReadMemStats(&before)
		locks := holdMany(b, l)
		runtime.GC()
		runtime.ReadMemStats(&after)
		s.ResetStats()
		const duration = 15 * time.Second
		most := 0
		for start := time.Now(); time.Since(start) < duration; time.Sleep(50 * time.Millisecond) {
			most = max(most, runtime.NumGoroutine()-goroutines)
		}
		stats := s.CommandStats()
		lost := 0
		for _, k := range locks {
			if k.Err() != nil {
				lost++
			}
			_ = k.Release()
		}
		b.ReportMetric(float64(lost), "lost")
		b.ReportMetric(float64(stats["eval"]+stats["evalsha"])/duration.Seconds(), "scripts/s")
		b.ReportMetric(float64(most), "goroutines")
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/heldLocks, "B/lock")
	}
}

// BenchmarkToldOfLoss holds 10,000 locks with a TTL of 3 s on a server that is then
// stopped, and says how late their contexts ended, against ValidUntil and against
// the earliest moment at which the key could be taken by another.
func BenchmarkToldOfLoss(b *testing.B) {
	s := redistest.Start(b)
	l, err := New(s.Client(), WithTTL(heldTTL), quiet())
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	for b.Loop() {
		locks := holdMany(b, l)
		var (
			mu    sync.Mutex
			late  time.Duration
			early = heldTTL
			wg    sync.WaitGroup
		)
		for _, k := range locks {
			wg.Add(1)
			context.AfterFunc(k.Context(), func() {
				defer wg.Done()
				by := clock.Now().Sub(k.validUntil())
				mu.Lock()
				defer mu.Unlock()
				late = max(late, by)
				// The key can expire a drift and a margin after the end of validity.
				early = min(early, heldTTL-validityOf(heldTTL, heldTTL/10)-by)
			})
		}
		s.Stop()
		wg.Wait()
		s.Cont()
		b.ReportMetric(float64(late.Microseconds())/1000, "ms-late")
		b.ReportMetric(float64(early.Microseconds())/1000, "ms-before-takeover")
	}
}
