package redlock

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// fleet is some independent servers, each behind a proxy.
type fleet struct {
	t       testing.TB
	servers []*redistest.Server
	proxies []*faultproxy.Proxy
}

// startFleet starts n servers and waits until each has a vote for leases of ttl at the most.
func startFleet(t testing.TB, n int, ttl time.Duration) *fleet {
	x := &fleet{t: t, servers: redistest.StartN(t, n)}
	for _, s := range x.servers {
		x.proxies = append(x.proxies, faultproxy.New(t, s.Addr()))
	}
	if ttl > 0 {
		x.mature(ttl)
	}
	return x
}

// mature waits until all servers that answer have been up for long enough.
func (x *fleet) mature(ttl time.Duration) {
	x.t.Helper()
	for _, s := range x.servers {
		l, err := New([]redis.UniversalClient{s.Admin()}, holdfast.WithTTL(ttl), quiet)
		require.NoError(x.t, err)
		ctx, cancel := context.WithTimeout(context.Background(), 2*ttl+10*time.Second)
		k, err := l.Acquire(ctx, "mature")
		cancel()
		require.NoError(x.t, err)
		require.NoError(x.t, k.Release())
		require.NoError(x.t, l.Close())
	}
}

// clients returns new clients of the servers, through the proxies.
func (x *fleet) clients(opts ...func(*redis.Options)) (all []redis.UniversalClient) {
	for i, s := range x.servers {
		addr := x.proxies[i].Addr()
		all = append(all, s.Client(append([]func(*redis.Options){func(o *redis.Options) { o.Addr = addr }}, opts...)...))
	}
	return all
}

// locker returns a Locker on new clients, closed at the end of the test.
func (x *fleet) locker(opts ...holdfast.Option) *holdfast.Locker {
	x.t.Helper()
	l, err := New(x.clients(), append([]holdfast.Option{quiet}, opts...)...)
	require.NoError(x.t, err)
	x.t.Cleanup(func() { _ = l.Close() })
	return l
}

// having returns the servers that have key with the value, by their indexes.
func (x *fleet) having(key, value string) (indexes []int) {
	for i, s := range x.servers {
		if s.Alive() && s.Admin().Get(context.Background(), key).Val() == value {
			indexes = append(indexes, i)
		}
	}
	return indexes
}

// requireNoKeys waits until no server that runs has a key but those of fencing.
func (x *fleet) requireNoKeys(within time.Duration) {
	x.t.Helper()
	redistest.Eventually(x.t, within, "no key is left", func() bool {
		for _, s := range x.servers {
			if !s.Alive() {
				continue
			}
			for _, key := range s.Admin().Keys(context.Background(), "*").Val() {
				if key != floorKey && key != fenceOf("k") {
					return false
				}
			}
		}
		return true
	})
}
