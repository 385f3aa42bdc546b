package redlock

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// p50 reports the medians of acquisition and release, in us.
func p50(b *testing.B, acquire, release []time.Duration) {
	slices.Sort(acquire)
	slices.Sort(release)
	us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
	b.ReportMetric(us(acquire[len(acquire)/2]), "acquire-us")
	b.ReportMetric(us(release[len(release)/2]), "release-us")
	b.ReportMetric(us(acquire[len(acquire)/2]+release[len(release)/2]), "cycle-us")
}

func cycles(b *testing.B, l *holdfast.Locker) {
	var acquire, release []time.Duration
	b.ReportAllocs()
	for b.Loop() {
		start := time.Now()
		k, err := l.Acquire(b.Context(), "k")
		if err != nil {
			b.Fatal(err)
		}
		acquire = append(acquire, time.Since(start))
		start = time.Now()
		if err := k.Release(); err != nil {
			b.Fatal(err)
		}
		release = append(release, time.Since(start))
	}
	p50(b, acquire, release)
}

// BenchmarkCycle takes and releases one lock after the other: on each of five servers
// alone, on the majority of them, and with the same commands sent without counting votes.
func BenchmarkCycle(b *testing.B) {
	servers := redistest.StartN(b, 5)
	var clients []redis.UniversalClient
	for _, s := range servers {
		clients = append(clients, s.Client())
	}
	for _, c := range clients {
		b.Run("single", func(b *testing.B) {
			l, err := holdfast.New(c)
			require.NoError(b, err)
			defer l.Close()
			cycles(b, l)
		})
	}
	b.Run("bare", func(b *testing.B) { bareCycles(b, clients) })
	b.Run("majority", func(b *testing.B) {
		l, err := New(clients, WithDurableInstances())
		require.NoError(b, err)
		defer l.Close()
		cycles(b, l)
	})
	for range 2 {
		servers[len(servers)-1].Kill()
		servers = servers[:len(servers)-1]
	}
	b.Run("killed", func(b *testing.B) {
		l, err := New(clients, WithDurableInstances())
		require.NoError(b, err)
		defer l.Close()
		cycles(b, l)
	})
}

// bareCycles sends a SET and a DEL to each server from a goroutine of its own and waits
// for three.
func bareCycles(b *testing.B, clients []redis.UniversalClient) {
	var acquire, release []time.Duration
	all := func(do func(c redis.UniversalClient) error) {
		answers := make(chan error, len(clients))
		for _, c := range clients {
			go func() { answers <- do(c) }() // ends with the server's answer
		}
		for range needed(len(clients)) {
			if err := <-answers; err != nil {
				b.Error(err)
			}
		}
	}
	for b.Loop() {
		start := time.Now()
		all(func(c redis.UniversalClient) error { return c.Set(context.Background(), "k", "v", time.Minute).Err() })
		acquire = append(acquire, time.Since(start))
		start = time.Now()
		all(func(c redis.UniversalClient) error { return c.Del(context.Background(), "k").Err() })
		release = append(release, time.Since(start))
	}
	p50(b, acquire, release)
}
