package redlock

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
)

// A whole life on five servers: taken on all, renewed, healed, given up on all.
func TestLifecycle(t *testing.T) {
	const ttl = time.Second
	x := startFleet(t, 5, ttl)
	l := x.locker(holdfast.WithTTL(ttl))
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return len(x.having("k", k.Owner())) == 5 }, ttl/2, ttl/100)
	require.NoError(t, x.servers[1].Admin().FlushDB(t.Context()).Err())
	require.Eventually(t, func() bool { return len(x.having("k", k.Owner())) == 5 }, ttl, ttl/100)
	<-time.After(2 * ttl)
	require.NoError(t, k.Err())
	require.NoError(t, k.Release())
	x.requireNoKeys(time.Second)
}
