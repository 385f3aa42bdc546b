package holdfast

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// aclUser gives the server a user with these rights and returns its client.
func aclUser(t *testing.T, s *redistest.Server, rules ...string) *redis.Client {
	t.Helper()
	args := []any{"ACL", "SETUSER", "app", "reset", "on", ">secret"}
	for _, r := range rules {
		args = append(args, r)
	}
	require.NoError(t, s.Admin().Do(t.Context(), args...).Err())
	return s.Client(func(o *redis.Options) { o.Username, o.Password = "app", "secret" })
}

// documentedRights are those that README names for the default path.
var documentedRights = []string{
	"~locks:*", "~{locks:*", "&holdfast:*", "+set", "+get", "+pttl", "+pexpire", "+del", "+eval", "+evalsha", "+time", "+exists",
	"+zadd", "+zcard", "+zpopmin", "+zrange", "+zrank", "+zrem", "+zscore", "+hget", "+hset", "+hdel", "+hgetall", "+publish", "+subscribe",
}

// C126, C129: a user with just the documented rights can do everything; without
// one of them the first call that needs it fails at once, and says so.
func TestRights(t *testing.T) {
	s := redistest.Start(t)
	cycle := func(l *Locker) error {
		k, err := l.Acquire(t.Context(), "k", WithTTL(5*time.Second))
		if err != nil {
			return err
		}
		if _, err := l.TryAcquire(t.Context(), "k"); err == nil {
			return fmt.Errorf("taken twice")
		}
		if err := k.Extend(t.Context(), 6*time.Second); err != nil {
			return err
		}
		return k.Release()
	}
	l := newTestLocker(t, aclUser(t, s, documentedRights...), WithPrefix("locks:"))
	require.NoError(t, cycle(l))
	fenced := append([]string{"+incr"}, documentedRights...)
	l = newTestLocker(t, aclUser(t, s, fenced...), WithPrefix("locks:"), WithFencing())
	require.NoError(t, cycle(l))
	for _, missing := range []string{"-set", "-get", "-pexpire", "-del", "-eval"} {
		c := aclUser(t, s, append(append([]string(nil), documentedRights...), missing)...)
		err := cycle(newTestLocker(t, c, WithPrefix("locks:")))
		require.ErrorIs(t, err, ErrUnavailable, missing)
		require.ErrorContains(t, err, "NOPERM", missing)
		require.NotErrorIs(t, err, ErrLost, missing)
		s.Admin().FlushAll(t.Context())
	}
}

// C130: where scripts are forbidden nothing is taken, and the error says why.
func TestScriptsForbidden(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, aclUser(t, s, "~*", "+@all", "-eval", "-evalsha"))
	_, err := l.Acquire(t.Context(), "k")
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "scripts")
	require.ErrorContains(t, err, "NOPERM")
	require.Zero(t, s.Admin().DBSize(t.Context()).Val())
}

// Wrong or missing passwords, and a replica in the primary's place, end an Acquire
// at once. C083.
func TestServersThatRefuse(t *testing.T) {
	s := redistest.Start(t, redistest.WithConfig("requirepass", "secret"))
	c := redis.NewClient(&redis.Options{Addr: s.Addr()})
	defer func() { _ = c.Close() }()
	_, err := newTestLocker(t, c).Acquire(t.Context(), "k")
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "NOAUTH")

	primary := redistest.Start(t)
	replica := redistest.Start(t, redistest.ReplicaOf(primary))
	acknowledged(t, primary)
	_, err = newTestLocker(t, replica.Client(func(o *redis.Options) { o.MaxRetries = -1 })).Acquire(t.Context(), "k")
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "READONLY")
}

// acknowledged waits until a write is acknowledged by a replica.
func acknowledged(t *testing.T, primary *redistest.Server) {
	t.Helper()
	conn := primary.Admin().Conn()
	defer func() { _ = conn.Close() }()
	redistest.Eventually(t, 10*time.Second, "a replica acknowledges a write", func() bool {
		return conn.Set(t.Context(), "probe", "", time.Millisecond).Err() == nil &&
			conn.Wait(t.Context(), 1, 100*time.Millisecond).Val() == 1
	})
}

// C133: too few acknowledgements give the lock back, and say how many came.
func TestReplicasAcknowledge(t *testing.T) {
	primary := redistest.Start(t)
	replica := redistest.Start(t, redistest.ReplicaOf(primary))
	acknowledged(t, primary)
	for _, fenced := range []bool{false, true} {
		opts := []Option{WithReplicas(1, 200*time.Millisecond)}
		if fenced {
			opts = append(opts, WithFencing())
		}
		l := newTestLocker(t, primary.Client(), opts...)
		k, err := l.Acquire(t.Context(), "k")
		require.NoError(t, err)
		require.Equal(t, k.Owner(), replica.Admin().Get(t.Context(), "k").Val())
		require.NoError(t, k.Release())

		replica.Stop()
		_, err = l.Acquire(t.Context(), "k")
		var few *ReplicaError
		require.ErrorAs(t, err, &few)
		require.Equal(t, ReplicaError{Acked: 0, Wanted: 1}, *few)
		require.ErrorIs(t, err, ErrUnavailable)
		redistest.Eventually(t, time.Second, "the lock is given back", func() bool {
			return primary.Admin().Exists(t.Context(), "k").Val() == 0
		})
		replica.Cont()
		redistest.Eventually(t, 5*time.Second, "a lock with the replica back", func() bool {
			k, err = l.TryAcquire(t.Context(), "k")
			return err == nil
		})
		require.NoError(t, k.Release())
	}
	_, err := newTestLocker(t, primary.Client()).Acquire(t.Context(), "k", WithReplicas(2, 50*time.Millisecond))
	require.ErrorContains(t, err, "1 of 2 replicas")
}

// C134: a failover that has the lock is not noticed by its holder; one that lost
// it is told at the next renewal, and the key is not re-created.
func TestFailover(t *testing.T) {
	for _, replicated := range []bool{true, false} {
		t.Run(fmt.Sprintf("replicated=%t", replicated), func(t *testing.T) {
			set := redistest.StartSentinel(t)
			l := newTestLocker(t, set.Client(), WithTTL(30*time.Second), WithRenewEvery(200*time.Millisecond))
			var opts []Option
			if replicated {
				opts = append(opts, WithReplicas(1, time.Second))
			} else {
				// Cut off and stopped, the replica gets nothing that is written now.
				set.Replica.Stop()
				require.NoError(t, set.Primary.Admin().ClientKillByFilter(t.Context(), "TYPE", "replica").Err())
			}
			k, err := l.Acquire(t.Context(), "k", opts...)
			require.NoError(t, err)
			set.Primary.Kill()
			if !replicated {
				set.Replica.Cont()
			}
			set.WaitFailover(30 * time.Second)
			if replicated {
				before := k.ValidUntil()
				redistest.Eventually(t, 20*time.Second, "a renewal by the new primary", func() bool {
					return k.ValidUntil().Sub(before) > time.Second
				})
				require.NoError(t, k.Err())
				require.NoError(t, k.Release())
				return
			}
			select {
			case <-k.Context().Done():
			case <-time.After(20 * time.Second):
				t.Fatal("the holder was not told")
			}
			require.ErrorIs(t, context.Cause(k.Context()), ErrLost)
			require.ErrorIs(t, k.Release(), ErrLost)
			other, err := l.Acquire(t.Context(), "k")
			require.NoError(t, err)
			require.NoError(t, other.Release())
		})
	}
}

// A failover that loses the counter brings old tokens back, which is the documented
// limit of the plain counter; with the clock as a floor the first token after it is higher
// than the last before.
func TestTokensAfterFailover(t *testing.T) {
	set := redistest.StartSentinel(t)
	l := newTestLocker(t, set.Client(), WithTTL(5*time.Second), WithWait(40*time.Second))
	token := func(key string, opts ...Option) fencing.Token {
		var token fencing.Token
		require.NoError(t, l.Do(t.Context(), key, func(ctx context.Context) error {
			token, _ = fencing.FromContext(ctx)
			return nil
		}, opts...), key)
		require.Positive(t, token)
		return token
	}
	floored, plain := WithFencing(fencing.ClockFloor), WithFencing()
	// Cut off and stopped, the replica gets nothing that is written now.
	set.Replica.Stop()
	require.NoError(t, set.Primary.Admin().ClientKillByFilter(t.Context(), "TYPE", "replica").Err())
	var lastPlain, lastFloored fencing.Token
	for range 5 {
		lastPlain, lastFloored = token("plain", plain), token("floored", floored)
	}
	set.Primary.Kill()
	set.Replica.Cont()
	set.WaitFailover(30 * time.Second)
	require.Greater(t, token("floored", floored), lastFloored)
	require.LessOrEqual(t, token("plain", plain), lastPlain, "nothing was lost: this test shows nothing")
}

// C121: while the slot of a key moves back and forth, its holder keeps it, others
// are excluded, and nobody hangs.
func TestSlotMoves(t *testing.T) {
	set := redistest.StartCluster(t, 3)
	l := newTestLocker(t, set.Client(), WithTTL(5*time.Second), WithRenewEvery(50*time.Millisecond))
	k, err := l.Acquire(t.Context(), "{k}held")
	require.NoError(t, err)
	spread := make([]*Lock, 30)
	for i := range spread {
		spread[i], err = l.Acquire(t.Context(), fmt.Sprint("spread", i))
		require.NoError(t, err)
	}
	pair, err := l.Acquire(t.Context(), "{k}pair")
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	var inside, most, cycles atomic.Int32
	var wg sync.WaitGroup
	for range 4 {
		other := newTestLocker(t, set.Client(), WithTTL(5*time.Second))
		wg.Go(func() {
			for ctx.Err() == nil {
				err := other.Do(t.Context(), "{k}fought", func(context.Context) error {
					most.Store(max(most.Load(), inside.Add(1)))
					time.Sleep(time.Millisecond) // leaves the processor to the servers
					inside.Add(-1)
					cycles.Add(1)
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	slot := keyspace.Slot("k")
	home := set.SlotOwner(slot)
	// Between two moves the requests under way come to their end. A server that
	// imports a slot answers for any key when the client says ASKING, so one that was
	// sent there in an earlier move and comes in a later one finds no key yet: no
	// client of a cluster can tell, and no move in earnest is that fast.
	calm := func() {
		before, done := k.ValidUntil(), cycles.Load()
		redistest.Eventually(t, 10*time.Second, "renewals and cycles after a move", func() bool {
			return k.ValidUntil().Sub(before) > 200*time.Millisecond && cycles.Load() > done+20
		})
	}
	for range 3 {
		set.MoveSlot(slot, (home+1)%3)
		calm()
		set.BeginMove(slot, home)
		before := cycles.Load()
		redistest.Eventually(t, 10*time.Second, "cycles in a slot that is moving", func() bool {
			return cycles.Load() > before+10
		})
		set.MoveKeys(slot, home)
		set.FinishMove(slot, home)
		calm()
	}
	stop()
	wg.Wait()
	require.EqualValues(t, 1, most.Load())
	before := k.ValidUntil()
	redistest.Eventually(t, 5*time.Second, "renewals go on", func() bool { return k.ValidUntil().After(before) })
	for _, k := range append(spread, k, pair) {
		require.NoError(t, k.Err())
		require.NoError(t, k.Release())
	}
}

// A script of many keys goes to each server of a cluster or a ring by itself; the
// same with acknowledgements of replicas, of which there are none here.
func TestShardedClients(t *testing.T) {
	set := redistest.StartCluster(t, 3)
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{
		"a": redistest.Start(t).Addr(), "b": redistest.Start(t).Addr(),
	}})
	defer func() { _ = ring.Close() }()
	for name, c := range map[string]redis.UniversalClient{"cluster": set.Client(), "ring": ring} {
		t.Run(name, func(t *testing.T) {
			l := newTestLocker(t, c, WithTTL(5*time.Second), WithRenewEvery(50*time.Millisecond), WithFencing())
			var locks []*Lock
			for i := range 50 {
				k, err := l.Acquire(t.Context(), fmt.Sprint("k", i))
				require.NoError(t, err)
				require.EqualValues(t, 1, k.Token())
				locks = append(locks, k)
			}
			for _, k := range locks {
				redistest.Eventually(t, 5*time.Second, "a renewal", func() bool { return clockOf(k) > 5*time.Second })
				require.NoError(t, k.Extend(t.Context(), 6*time.Second))
				require.NoError(t, k.Release())
			}
			_, err := l.Acquire(t.Context(), "r", WithReplicas(1, 20*time.Millisecond))
			var few *ReplicaError
			require.ErrorAs(t, err, &few)
		})
	}
}
