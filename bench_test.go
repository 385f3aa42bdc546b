package holdfast

import (
	"context"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/script"
	"github.com/holdfast-go/holdfast/lua"
)

// BenchmarkBare is the same two commands through bare go-redis: what a cycle is
// compared with.
func BenchmarkBareMem(b *testing.B) {
	m := miniredis.RunT(b)
	benchBare(b, redis.NewClient(&redis.Options{Addr: m.Addr()}))
}
func BenchmarkCycleMem(b *testing.B) {
	m := miniredis.RunT(b)
	benchCycle(b, redis.NewClient(&redis.Options{Addr: m.Addr()}))
}

func benchBare(b *testing.B, c redis.UniversalClient) {
	ctx := context.Background()
	s := script.New(lua.Release)
	s.Load(ctx, c, []string{"k"}, "x")
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
	defer l.Close()
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
