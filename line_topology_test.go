package holdfast

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// callsOf returns how many calls the waiters of l for key have made.
func callsOf(l *Locker, key string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.line.spots {
		if s.k.key == key {
			n += s.calls
		}
	}
	return n
}

// slotMoves: C121: when the slot of a key has moved, those who wait for it keep their
// places and hear of their grants from its new server.
func slotMoves(t *testing.T, set *redistest.ClusterSet) {
	a, b := newTestLocker(t, set.Client()), newTestLocker(t, set.Client())
	slot := keyspace.Slot("k")
	home := set.SlotOwner(slot)
	c := set.Client()
	k := mustAcquire(t, a, "k")
	waiting := acquiringMany(t, c, 10, "k", a, b)
	for i, got := range waiting {
		if i == 4 {
			set.MoveSlot(slot, (home+1)%3)
			require.NoError(t, k.Err())
			require.EqualValues(t, 10-i, c.ZCard(t.Context(), "{k}:queue").Val(), "nobody was dropped")
		}
		require.NoError(t, k.Release())
		k = granted(t, got, 20*time.Second)
		require.Equal(t, k.Owner(), c.Get(t.Context(), "k").Val())
	}
	got := acquiring(t.Context(), b, "k")
	queued(t, c, "k", 1)
	tunedIn(t, set.Nodes[(home+1)%3].Admin(), 1)
	require.NoError(t, k.Release())
	require.NoError(t, granted(t, got, 20*time.Second).Release())
}

// Keys of all slots of a cluster, or of several servers: waiters are told by messages, on
// a cluster by those that stay in their shard, and no longer listened for than anybody
// waits.
func TestLineSharded(t *testing.T) {
	set := redistest.StartCluster(t, 3)
	servers := redistest.StartN(t, 2)
	ring := func() redis.UniversalClient {
		c := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"x": servers[0].Addr(), "y": servers[1].Addr()}})
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	t.Run("cluster", func(t *testing.T) {
		sharded(t, func() redis.UniversalClient { return set.Client() }, set.Nodes, "spublish", "publish")
	})
	t.Run("slot moves", func(t *testing.T) { slotMoves(t, set) })
	t.Run("ring", func(t *testing.T) { sharded(t, ring, servers, "publish", "spublish") })
}

func sharded(t *testing.T, client func() redis.UniversalClient, servers []*redistest.Server, verb, not string) {
	attempts := make(chan int, 30)
	holder, l := newTestLocker(t, client()), newTestLocker(t, client(), WithObserver(Observer{
		Acquired: func(_ string, _ time.Duration, n int) { attempts <- n },
	}))
	c := client()
	var locks []*Lock
	var waiting []<-chan outcome
	for i := range 30 {
		locks = append(locks, mustAcquire(t, holder, fmt.Sprint("k", i)))
		waiting = append(waiting, acquiring(t.Context(), l, locks[i].key))
		queued(t, c, locks[i].key, 1)
	}
	redistest.Eventually(t, 20*time.Second, "a channel for each key", func() bool {
		n := 0
		for _, s := range servers {
			n += len(channels(s.Admin()))
		}
		return n == 30
	})
	for _, s := range servers {
		s.ResetStats()
	}
	asked, told := 0, int64(0)
	for i, got := range waiting {
		before := 1 + callsOf(l, locks[i].key) // the SET that was refused
		require.NoError(t, locks[i].Release())
		next := granted(t, got, 20*time.Second)
		asked += <-attempts - before
		require.NoError(t, next.Release())
	}
	require.Less(t, asked, 15, "by their calls each would have asked once more")
	for _, s := range servers {
		stats := s.CommandStats()
		told += stats[verb]
		require.Positive(t, stats[verb])
		require.Zero(t, stats[not])
	}
	require.EqualValues(t, 30, told)
	for _, s := range servers {
		tunedIn(t, s.Admin(), 0)
		nothingLeft(t, s, 5*time.Second)
	}
	idle(t, l)
}

// A cluster that has no sharded channels, as before Redis 7, tells its waiters by plain
// ones.
func TestLineWithoutShardedChannels(t *testing.T) {
	s := redistest.Start(t, redistest.WithConfig("cluster-enabled", "yes", "cluster-config-file", "nodes.conf",
		"cluster-announce-ip", "127.0.0.1", "rename-command", `SPUBLISH ""`, "rename-command", `SSUBSCRIBE ""`,
		"rename-command", `SUNSUBSCRIBE ""`))
	require.NoError(t, s.Admin().Do(t.Context(), "CLUSTER", "ADDSLOTSRANGE", 0, keyspace.Slots-1).Err())
	redistest.Eventually(t, 20*time.Second, "the cluster serves", func() bool {
		return strings.Contains(s.Admin().ClusterInfo(t.Context()).Val(), "cluster_state:ok")
	})
	client := func() redis.UniversalClient {
		c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{s.Addr()}})
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	a, b := newTestLocker(t, client()), newTestLocker(t, client())
	for round := range 2 {
		k, other := mustAcquire(t, a, "k"), mustAcquire(t, a, "other")
		waiting := acquiringMany(t, s.Admin(), 5, "k", b)
		waiting = append(waiting, acquiringMany(t, s.Admin(), 1, "other", b)...)
		tunedIn(t, s.Admin(), 1)
		s.ResetStats()
		require.NoError(t, k.Release())
		require.NoError(t, other.Release())
		for _, got := range waiting {
			require.NoError(t, granted(t, got, 20*time.Second).Release())
		}
		if round > 0 { // the first calls of all told of the channel that is not to be had
			require.EqualValues(t, 2, s.CommandStats()["publish"])
		}
		tunedIn(t, s.Admin(), 0)
		idle(t, b)
	}
}

// C134: those who wait stay in the queue over a failover, and hear of their grants from
// the new primary.
func TestLineFailover(t *testing.T) {
	set := redistest.StartSentinel(t)
	holder := newTestLocker(t, set.Client(), WithTTL(30*time.Second), WithRenewEvery(200*time.Millisecond))
	l := newTestLocker(t, set.Client(), WithTTL(30*time.Second), WithFencing())
	k := mustAcquire(t, holder, "k", WithReplicas(1, time.Second))
	waiting := acquiringMany(t, set.Primary.Admin(), 5, "k", l)
	set.Primary.Kill()
	set.WaitFailover(30 * time.Second)
	redistest.Eventually(t, 30*time.Second, "all are back in the queue", func() bool {
		return set.Replica.Admin().ZCard(t.Context(), "{k}:queue").Val() == 5
	})
	tunedIn(t, set.Replica.Admin(), 1)
	require.NoError(t, k.Err())
	require.NoError(t, k.Release())
	all, tokens := make(chan outcome, 5), map[int64]bool{}
	for _, got := range waiting {
		go func() { all <- <-got }() // ends when it was served
	}
	for range waiting { // order is kept only if the replica had all of it
		next := granted(t, all, 20*time.Second)
		tokens[int64(next.Token())] = true
		require.NoError(t, next.Release())
	}
	require.Len(t, tokens, 5)
	nothingLeft(t, set.Replica, 5*time.Second, "{k}:fence")
}

// C129: a user with just the documented rights waits, and is told by messages; without
// those for messages he gets the lock by his calls.
func TestLineRights(t *testing.T) {
	s := redistest.Start(t)
	for name, without := range map[string][]string{
		"all": nil, "no subscribe": {"-subscribe"}, "no publish": {"-publish"}, "no channels": {"resetchannels"},
	} {
		t.Run(name, func(t *testing.T) {
			c := aclUser(t, s, append(append([]string(nil), documentedRights...), without...)...)
			a, b := newTestLocker(t, c, WithPrefix("locks:")), newTestLocker(t, c, WithPrefix("locks:"))
			k := mustAcquire(t, a, "k")
			var waiting []<-chan outcome
			for i := range 3 {
				waiting = append(waiting, acquiring(t.Context(), b, "k"))
				queued(t, s.Admin(), "locks:k", int64(i+1))
			}
			if without == nil {
				tunedIn(t, s.Admin(), 1)
			}
			s.ResetStats()
			for _, got := range waiting {
				require.NoError(t, k.Release())
				k = granted(t, got, 20*time.Second)
				require.NoError(t, k.Err())
			}
			require.Less(t, s.CommandStats()["subscribe"], int64(3), "a refused one is not tried again and again")
			require.NoError(t, k.Release())
			nothingLeft(t, s, 5*time.Second)
		})
	}
}

// C133: a hand-over to one that wants acknowledgements is acknowledged, or goes on to the
// next.
func TestLineReplicas(t *testing.T) {
	primary := redistest.Start(t)
	replica := redistest.Start(t, redistest.ReplicaOf(primary))
	acknowledged(t, primary)
	a, b := newTestLocker(t, primary.Client()), newTestLocker(t, primary.Client())
	for _, fenced := range []bool{false, true} {
		opts := []Option{WithReplicas(1, 200*time.Millisecond)}
		if fenced {
			opts = append(opts, WithFencing())
		}
		k := mustAcquire(t, a, "k")
		got := acquiring(t.Context(), b, "k", opts...)
		queued(t, primary.Admin(), "k", 1)
		require.NoError(t, k.Release())
		k = granted(t, got, 20*time.Second)
		require.Equal(t, k.Owner(), replica.Admin().Get(t.Context(), "k").Val())
		require.Greater(t, primary.Admin().PTTL(t.Context(), "k").Val(), 10*time.Second)

		got = acquiring(t.Context(), a, "k", opts...)
		queued(t, primary.Admin(), "k", 1)
		next := acquiring(t.Context(), b, "k")
		queued(t, primary.Admin(), "k", 2)
		replica.Stop()
		require.NoError(t, k.Release())
		var few *ReplicaError
		require.ErrorAs(t, (<-got).err, &few)
		k = granted(t, next, 20*time.Second)
		replica.Cont()
		acknowledged(t, primary)
		require.NoError(t, k.Release())
	}
}
