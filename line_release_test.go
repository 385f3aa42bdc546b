package holdfast

import (
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/lua"
)

// A release whose reply is lost has handed the lock on, to one of the same Locker, whom
// nobody told: he asks.
func TestLineReleaseReplyLost(t *testing.T) {
	s, p, c := proxied(t, retries(-1))
	l := newTestLocker(t, c)
	for _, do := range []faultproxy.Action{faultproxy.HoldReply(), faultproxy.DropReplyAndClose()} {
		k := mustAcquire(t, l, "k")
		got := acquiring(t.Context(), l, "k")
		queued(t, s.Admin(), "k", 1)
		p.Inject(faultproxy.Rule{Match: isRelease, Times: 1, Do: do})
		require.NoError(t, k.Release(), "it was ours")
		require.NoError(t, granted(t, got, 10*time.Second).Release())
	}
	nothingLeft(t, s, 6*time.Second)
}

// isRelease matches releases.
func isRelease(cmd []string) bool {
	return len(cmd) > 2 && faultproxy.Script()(cmd) && cmd[1] == digestOf(lua.Release)
}

// C103: with no connection left for a subscription, and with a refusal that passes,
// waiters get the lock by their calls; and a subscription is made when it can be had.
func TestLineSubscribeRefused(t *testing.T) {
	for _, text := range []string{"ERR max number of clients reached", "CLUSTERDOWN The cluster is down", "LOADING Redis is loading"} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			s, p, c := proxied(t)
			l, other := newTestLocker(t, c), newTestLocker(t, s.Client())
			refused := p.Inject(faultproxy.Rule{Match: faultproxy.Command("SUBSCRIBE"), Times: 1, Do: faultproxy.Refuse(text)})
			k := mustAcquire(t, other, "k")
			waiting := acquiringMany(t, s.Admin(), 2, "k", l)
			require.NoError(t, refused.WaitTimeout(10*time.Second))
			require.NoError(t, k.Release())
			require.NoError(t, granted(t, waiting[0], 10*time.Second).Release())
			k = granted(t, waiting[1], 10*time.Second)
			got := acquiring(t.Context(), l, "k")
			tunedIn(t, s.Admin(), 1)
			require.NoError(t, k.Release())
			require.NoError(t, granted(t, got, 10*time.Second).Release())
		})
	}
}

// What is left of the least time may be shorter than the time between two calls.
func TestLineMinHoldShort(t *testing.T) {
	for _, left := range []time.Duration{time.Millisecond, 20 * time.Millisecond, 200 * time.Millisecond, 600 * time.Millisecond} {
		bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
			l, other := memLocker(t, m, WithMinHold(5*time.Second)), memLocker(t, m)
			k := hold(t, l, "k")
			got := acquiring(t.Context(), other, "k")
			time.Sleep(5*time.Second - left)
			require.NoError(t, k.Release())
			start := time.Now()
			require.NoError(t, granted(t, got, time.Minute).Release())
			require.LessOrEqual(t, time.Since(start), left+2*leastCall, "%v were left", left)
		})
	}
}

// C121: in a slot that is moving, and stays so, locks are taken and given back all the
// same.
func TestLineReleaseInMovingSlot(t *testing.T) {
	set := redistest.StartCluster(t, 2)
	l := newTestLocker(t, set.Client(), WithTTL(20*time.Second))
	slot := keyspace.Slot("k")
	home := set.SlotOwner(slot)
	before := mustAcquire(t, l, "{k}before")
	set.BeginMove(slot, 1-home)
	require.NoError(t, before.Release())
	require.NoError(t, mustAcquire(t, l, "{k}during").Release())
}

// C129: without one of the rights for waiting, who waits gets the lock all the same, or
// is told at once what is missing; and the server is not kept busy.
func TestLineMissingRights(t *testing.T) {
	for _, missing := range []string{"-time", "-zadd", "-zcard", "-zrange", "-zrank", "-zrem", "-zpopmin", "-zscore", "-hget", "-hset", "-hdel"} {
		t.Run(missing, func(t *testing.T) {
			s := redistest.Start(t)
			dead := newTestLocker(t, s.Client(), WithPrefix("locks:"))
			k := mustAcquire(t, dead, "k", WithTTL(2*time.Second))
			deadWaiters(t, dead, "locks:k", 2, time.Millisecond, time.Second)
			require.NoError(t, s.Admin().PExpire(t.Context(), "locks:k", 500*time.Millisecond).Err())
			c := aclUser(t, s, append(append([]string(nil), documentedRights...), missing)...)
			l := newTestLocker(t, c, WithPrefix("locks:"), WithTTL(2*time.Second))
			o := <-acquiring(t.Context(), l, "k", WithWait(10*time.Second), WithMaxWaiters(10))
			if o.err != nil {
				require.ErrorIs(t, o.err, ErrUnavailable)
				require.ErrorContains(t, o.err, "NOPERM")
			} else if err := o.k.Release(); err != nil {
				require.ErrorContains(t, err, "NOPERM")
			}
			_ = k.Release()
			absent(t, s, "locks:k", 10*time.Second)
		})
	}
}
