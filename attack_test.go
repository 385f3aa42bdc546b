package holdfast

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// impatient is a client that soon gives up a reply and sends the command again.
func impatient(o *redis.Options) { o.ReadTimeout = 200 * time.Millisecond }

func mustAcquire(t *testing.T, l *Locker, key string, opts ...Option) *Lock {
	t.Helper()
	k, err := l.Acquire(t.Context(), key, opts...)
	require.NoError(t, err)
	return k
}

// A plain client may talk to a server in cluster mode, or to a proxy over several:
// keys that may not share a script are renewed one by one. C123.
func TestPlainClientOnClusterServer(t *testing.T) {
	set := redistest.StartCluster(t, 1)
	c := redis.NewClient(&redis.Options{Addr: set.Nodes[0].Addr()})
	defer func() { _ = c.Close() }()
	l := newTestLocker(t, c, WithTTL(time.Second))
	locks := []*Lock{mustAcquire(t, l, "a"), mustAcquire(t, l, "b"), mustAcquire(t, l, "c")}
	for _, k := range locks {
		redistest.Eventually(t, 5*time.Second, "two renewals", func() bool { return clockOf(k) > 2*time.Second })
		require.NoError(t, k.Err())
	}
}

// One key of a batch whose rights are gone does not cost the others.
func TestOneBadKeyOfABatch(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, aclUser(t, s, "~a:*", "~{a:*", "~b:*", "~{b:*", "+@all"), WithTTL(time.Second))
	good, bad := mustAcquire(t, l, "a:1"), mustAcquire(t, l, "b:1")
	require.NoError(t, s.Admin().Do(t.Context(), "ACL", "SETUSER", "app", "resetkeys", "~a:*", "~{a:*").Err())
	<-bad.Context().Done()
	redistest.Eventually(t, 5*time.Second, "renewals go on", func() bool { return clockOf(good) > 3*time.Second })
	require.NoError(t, good.Err())
	require.NoError(t, good.Release())
}

// A shard that does not answer costs its own locks only.
func TestHungShard(t *testing.T) {
	servers := redistest.StartN(t, 2)
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"x": servers[0].Addr(), "y": servers[1].Addr()}})
	defer func() { _ = ring.Close() }()
	set := redistest.StartCluster(t, 3)
	for name, on := range map[string]struct {
		client  redis.UniversalClient
		servers []*redistest.Server
	}{"ring": {ring, servers}, "cluster": {set.Client(), set.Nodes}} {
		t.Run(name, func(t *testing.T) {
			l := newTestLocker(t, on.client, WithTTL(2*time.Second))
			var healthy []*Lock
			for i := range 12 {
				k := mustAcquire(t, l, fmt.Sprint("k", i))
				if !slices.Contains(on.servers[0].Admin().Keys(t.Context(), "*").Val(), k.Key()) {
					healthy = append(healthy, k)
				}
			}
			require.NotEmpty(t, healthy)
			require.Less(t, len(healthy), 12)
			on.servers[0].Stop()
			for _, k := range healthy {
				redistest.Eventually(t, 10*time.Second, "renewals go on", func() bool { return clockOf(k) > 5*time.Second })
				require.NoError(t, k.Err())
			}
			on.servers[0].Cont()
		})
	}
}

// Release whose reply is lost, and which the client then sends again by itself, is
// no loss: nobody else can have had the lock.
func TestReleaseRepeatedByClient(t *testing.T) {
	_, p, c := proxied(t)
	var lost int
	l := newTestLocker(t, c, WithObserver(Observer{Lost: func(string, error) { lost++ }}))
	k := mustAcquire(t, l, "k")
	p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.DropReplyAndClose()})
	require.NoError(t, k.Release())
	require.Zero(t, lost)
}

// C026: the first copy of a SET that the client has sent twice runs after Release,
// or the only one of an acquisition that failed, long after its clean-up.
func TestLateCopiesOfSet(t *testing.T) {
	for name, c := range map[string]struct {
		late    time.Duration
		retries int
	}{"granted": {600 * time.Millisecond, 3}, "failed": {2500 * time.Millisecond, -1}} {
		t.Run(name, func(t *testing.T) {
			s, p, client := proxied(t, impatient, func(o *redis.Options) { o.MaxRetries = c.retries })
			l := newTestLocker(t, client, WithTTL(time.Minute))
			warm(t, l)
			s.ResetStats()
			p.Inject(faultproxy.Rule{Match: faultproxy.Command("SET"), Times: 1, Do: faultproxy.DelayRequest(c.late)})
			k, err := l.TryAcquire(t.Context(), "k")
			if err == nil {
				require.NoError(t, k.Release())
			}
			sets := int64(1)
			if c.retries > 0 {
				sets = 2
			}
			redistest.Eventually(t, 5*time.Second, "the late SET ran", func() bool { return s.CommandStats()["set"] == sets })
			absent(t, s, "k", 6*time.Second)
		})
	}
}

// A copy of a short Extend that arrives late must not cut a longer lease that is
// trusted: no two holders.
func TestLateCopyOfExtend(t *testing.T) {
	s, p, c := proxied(t, impatient)
	l := newTestLocker(t, c, WithTTL(10*time.Second), WithoutRenewal())
	k := mustAcquire(t, l, "k")
	p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.DelayRequest(time.Second)})
	require.NoError(t, k.Extend(t.Context(), 2*time.Second))
	require.NoError(t, k.Extend(t.Context(), time.Minute))
	_, err := newTestLocker(t, s.Client()).Acquire(t.Context(), "k", WithWait(8*time.Second))
	require.NoError(t, err, "the late copy has cut the lease")
	require.ErrorIs(t, k.Err(), ErrLost)
}

// What an attempt with too few acknowledgements does about it never hits the lock
// that a later attempt of the same Acquire has been granted.
func TestLateCleanUpOfReplicas(t *testing.T) {
	s := redistest.Start(t)
	replica := redistest.Start(t, redistest.ReplicaOf(s))
	acknowledged(t, s)
	p := faultproxy.New(t, s.Addr())
	c := redis.NewClient(&redis.Options{Addr: p.Addr()})
	defer func() { _ = c.Close() }()
	l := newTestLocker(t, c, WithTTL(20*time.Second), WithReplicas(1, 500*time.Millisecond))
	warm(t, l, WithReplicas(1, 10*time.Second)) // the replica may be slow to begin with
	hung := p.Inject(faultproxy.Rule{Match: faultproxy.Command("WAIT"), Times: 1, Do: faultproxy.HoldRequest()})
	got := make(chan *Lock, 1)
	go func() { // ends with the second attempt
		k, err := l.Acquire(t.Context(), "k")
		if err != nil {
			t.Error(err)
		}
		got <- k
	}()
	k := <-got
	replica.Stop()
	hung.Release() // the first attempt goes on, and has too few acknowledgements
	_, err := newTestLocker(t, s.Client()).Acquire(t.Context(), "k", WithWait(2*time.Second))
	require.ErrorIs(t, err, ErrNotAcquired)
	require.NoError(t, k.Err())
	replica.Cont()
	require.NoError(t, k.Release())
}

// A timeout of WithReplicas longer than the limit of a plain attempt is waited for.
func TestReplicasLongTimeout(t *testing.T) {
	s := redistest.Start(t)
	replica := redistest.Start(t, redistest.ReplicaOf(s))
	acknowledged(t, s)
	l := newTestLocker(t, s.Client(), WithReplicas(1, 8*time.Second))
	warm(t, l)
	replica.Stop()
	timer := time.AfterFunc(5500*time.Millisecond, replica.Cont)
	defer timer.Stop()
	k, err := l.TryAcquire(t.Context(), "k")
	require.NoError(t, err)
	require.NoError(t, k.Release())
}

// A refusal that may pass does not end the clean-up of an unknown outcome.
func TestSettledDespiteRefusal(t *testing.T) {
	s, p, c := proxied(t, func(o *redis.Options) { o.MaxRetries = -1 })
	l := newTestLocker(t, c, WithTTL(time.Minute))
	warm(t, l)
	p.Inject(faultproxy.Rule{Match: faultproxy.Command("SET"), Times: 1, Do: faultproxy.DropReplyAndClose()})
	p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.Refuse("MISCONF no snapshots")})
	_, err := l.TryAcquire(t.Context(), "k")
	require.ErrorIs(t, err, ErrUnavailable)
	absent(t, s, "k", 4*time.Second)
}

// tagged is a client that cannot be compared.
type tagged struct {
	redis.UniversalClient
	_ []string
}

// Nested locks on a client that cannot be compared are still found.
func TestUncomparableClient(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, tagged{UniversalClient: s.Client()})
	k := mustAcquire(t, l, "k")
	_, err := l.TryAcquire(k.Context(), "k")
	require.ErrorIs(t, err, ErrDeadlock)
	require.NoError(t, k.Release())
}

// Without EVALSHA, whether renamed away or forbidden, scripts go by their text.
func TestNoEvalsha(t *testing.T) {
	renamed := redistest.Start(t, redistest.WithConfig("rename-command", `EVALSHA ""`))
	forbidden := redistest.Start(t)
	for _, c := range []redis.UniversalClient{renamed.Client(), aclUser(t, forbidden, "~*", "+@all", "-evalsha")} {
		l := newTestLocker(t, c)
		k := mustAcquire(t, l, "k")
		require.NoError(t, k.Extend(t.Context(), time.Minute))
		require.NoError(t, k.Release())
	}
}

// A server that has been silent since the holder's lease ended is unavailable: that
// nobody answers is no sign of a holder.
func TestSilenceIsNotHeld(t *testing.T) {
	s := redistest.Start(t)
	mustAcquire(t, newTestLocker(t, s.Client()), "k", WithTTL(500*time.Millisecond), WithoutRenewal())
	l := newTestLocker(t, s.Client())
	timer := time.AfterFunc(200*time.Millisecond, s.Stop)
	defer timer.Stop()
	_, err := l.Acquire(t.Context(), "k", WithWait(3*time.Second))
	s.Cont()
	require.ErrorIs(t, err, ErrUnavailable)
	require.NotErrorIs(t, err, ErrNotAcquired)
}

// An Extend that was refused has not run: it limits nothing.
func TestRefusedExtendLimitsNothing(t *testing.T) {
	_, p, c := proxied(t, func(o *redis.Options) { o.MaxRetries = -1 })
	l := newTestLocker(t, c, WithTTL(5*time.Second), WithoutRenewal())
	k := mustAcquire(t, l, "k")
	p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.Refuse("MISCONF no snapshots")})
	require.ErrorIs(t, k.Extend(t.Context(), 6*time.Second), ErrUnavailable)
	require.NoError(t, k.Extend(t.Context(), time.Minute))
	require.Greater(t, time.Until(k.ValidUntil()), 40*time.Second)
}

// C058: an Extend that the holder's own Release overtakes is no loss.
func TestExtendOvertakenByRelease(t *testing.T) {
	_, p, c := proxied(t)
	l := newTestLocker(t, c, WithTTL(10*time.Second))
	k := mustAcquire(t, l, "k")
	h := p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.HoldRequest()})
	got := make(chan error, 1)
	go func() { got <- k.Extend(t.Context(), 10*time.Second) }() // ends with its answer
	require.NoError(t, h.WaitTimeout(time.Second))
	require.NoError(t, k.Release())
	h.Release()
	err := <-got
	require.ErrorIs(t, err, ErrNotHeld)
	require.NotErrorIs(t, err, ErrLost)
}

// C009: a renewal that the client would send again is called back when its lock is
// released, whatever comes of the release.
func TestRenewalIsCalledBack(t *testing.T) {
	s, p, c := proxied(t, func(o *redis.Options) { o.ReadTimeout = 500 * time.Millisecond })
	l := newTestLocker(t, c, WithTTL(6*time.Second))
	k := mustAcquire(t, l, "k")
	h := p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.Hang()})
	require.NoError(t, h.WaitTimeout(4*time.Second))
	p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.Refuse("MISCONF no snapshots")})
	require.ErrorIs(t, k.Release(), ErrUnavailable)
	left := s.Admin().PTTL(t.Context(), "k").Val()
	redistest.Eventually(t, 10*time.Second, "the key ends with its TTL", func() bool {
		now := s.Admin().PTTL(t.Context(), "k").Val()
		require.LessOrEqual(t, now, left)
		left = now
		return now < 0
	})
}

// askingContext is a context that asks a lock when it is asked.
type askingContext struct {
	context.Context
	k *Lock
}

func (c askingContext) Err() error {
	if err := c.k.Err(); err != nil {
		return err
	}
	return c.Context.Err()
}

// Code of users never runs while the Locker's own mutex is held.
func TestContextThatAsksALock(t *testing.T) {
	_, p, c := proxied(t)
	l := newTestLocker(t, c)
	outer := mustAcquire(t, l, "outer", WithTTL(300*time.Millisecond), WithoutRenewal())
	p.Inject(faultproxy.Rule{Match: faultproxy.Command("SET"), Times: 1, Do: faultproxy.Delay(400 * time.Millisecond)})
	_, err := l.Acquire(askingContext{t.Context(), outer}, "inner")
	require.ErrorIs(t, err, ErrLost, "the cause of the context that ended the call")
	k := mustAcquire(t, l, "unrelated")
	require.NoError(t, k.Release())
}

// A Release that got no answer is made up for in the background, and a second one
// learns of it.
func TestReleaseIsMadeUpFor(t *testing.T) {
	s, p, c := proxied(t, retries(-1))
	l := newTestLocker(t, c, WithTTL(10*time.Second))
	k := mustAcquire(t, l, "k")
	p.Hang()
	require.ErrorIs(t, k.Release(), ErrUnavailable)
	p.Heal()
	absent(t, s, "k", 4*time.Second)
	redistest.Eventually(t, time.Second, "the background knows", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return k.giving.behind
	})
	require.NoError(t, k.Release())
	require.ErrorIs(t, k.Release(), ErrNotHeld)
}

// A Release that met a refusal, or a redirect, and then finds the key gone, tells of
// the loss: what was refused has not run, so it cannot have been our own deletion.
func TestRefusedReleaseHidesNoLoss(t *testing.T) {
	for _, text := range []string{"LOADING Redis is loading", "READONLY You can't write against a read only replica."} {
		s, p, c := proxied(t)
		l := newTestLocker(t, c)
		k := mustAcquire(t, l, "k")
		require.NoError(t, s.Admin().Del(t.Context(), "k").Err())
		p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.Refuse(text)})
		require.ErrorIs(t, k.Release(), ErrLost)
	}
	set := redistest.StartCluster(t, 2)
	l := newTestLocker(t, set.Client())
	k := mustAcquire(t, l, "k")
	slot := keyspace.Slot("k")
	home := set.SlotOwner(slot)
	require.NoError(t, set.Nodes[home].Admin().Del(t.Context(), "k").Err())
	set.MoveSlot(slot, 1-home)
	require.ErrorIs(t, k.Release(), ErrLost)
}

// An Extend that got no answer, and whose repetition was refused, may yet run.
func TestLateExtendAfterRefusal(t *testing.T) {
	s, p, c := proxied(t, impatient)
	l := newTestLocker(t, c, WithTTL(10*time.Second), WithoutRenewal())
	k := mustAcquire(t, l, "k")
	p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.DelayRequest(time.Second)})
	p.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 1, Do: faultproxy.Refuse("MISCONF no snapshots")})
	require.ErrorIs(t, k.Extend(t.Context(), 2*time.Second), ErrUnavailable)
	require.NoError(t, k.Extend(t.Context(), time.Minute))
	_, err := newTestLocker(t, s.Client()).Acquire(t.Context(), "k", WithWait(8*time.Second))
	require.NoError(t, err, "the late copy has cut the lease")
	require.ErrorIs(t, k.Err(), ErrLost)
}

// Many locks on a shard that hangs, taken at different moments, do not use up the
// renewals of the others.
func TestHungShardWithManyLocks(t *testing.T) {
	servers := redistest.StartN(t, 2)
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"x": servers[0].Addr(), "y": servers[1].Addr()}})
	defer func() { _ = ring.Close() }()
	l := newTestLocker(t, ring)
	var healthy []*Lock
	for i := range 60 { // a phase of its own for each
		node, err := ring.GetShardClientForKey(fmt.Sprint("k", i))
		require.NoError(t, err)
		if node.Options().Addr == servers[1].Addr() {
			healthy = append(healthy, mustAcquire(t, l, fmt.Sprint("k", i), WithTTL(2*time.Second)))
			continue
		}
		mustAcquire(t, l, fmt.Sprint("k", i), WithRenewEvery(time.Duration(500+20*i)*time.Millisecond))
	}
	require.NotEmpty(t, healthy)
	servers[0].Stop()
	for _, k := range healthy {
		redistest.Eventually(t, 20*time.Second, "renewals go on", func() bool { return clockOf(k) > 10*time.Second })
		require.NoError(t, k.Err())
	}
	servers[0].Cont()
}
