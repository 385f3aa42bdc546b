package holdfast

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/lua"
)

// digestOf is what a server calls a script.
func digestOf(text string) string {
	sum := sha1.Sum([]byte(text))
	return hex.EncodeToString(sum[:])
}

// isWait matches the calls of those who wait.
func isWait(cmd []string) bool {
	return len(cmd) > 2 && faultproxy.Script()(cmd) && cmd[1] == digestOf(lua.Wait)
}

// nothingLeft waits until no key is left but some.
func nothingLeft(t *testing.T, s *redistest.Server, within time.Duration, but ...string) {
	t.Helper()
	var keys []string
	redistest.Eventually(t, within, fmt.Sprintf("no key is left but %q", but), func() bool {
		keys = s.Admin().Keys(context.Background(), "*").Val()
		return len(keys) == len(but)
	})
	require.ElementsMatch(t, but, keys)
}

// A message is all that a waiter needs: it has the lock although no call of it gets
// through.
func TestLineByMessageAlone(t *testing.T) {
	s, p, c := proxied(t)
	l := newTestLocker(t, c)
	k := mustAcquire(t, newTestLocker(t, s.Client()), "k")
	got := acquiring(t.Context(), l, "k")
	queued(t, s.Admin(), "k", 1)
	tunedIn(t, s.Admin(), 1)
	h := p.Inject(faultproxy.Rule{Match: isWait, Skip: 1, Do: faultproxy.HoldRequest()}) // one that is late would be too late
	require.NoError(t, h.WaitTimeout(10*time.Second))
	require.NoError(t, k.Release())
	next := granted(t, got, 10*time.Second)
	h.Remove()
	h.Release()
	require.NoError(t, next.Release())
	nothingLeft(t, s, 5*time.Second)
}

// C097: a message that the server may not send, because the user of the releasing
// client may not, costs the time to the next call, no more.
func TestLinePublishForbidden(t *testing.T) {
	s := redistest.Start(t)
	k := mustAcquire(t, newTestLocker(t, aclUser(t, s, "~*", "&*", "+@all", "-publish")), "k")
	got := acquiring(t.Context(), newTestLocker(t, s.Client()), "k")
	queued(t, s.Admin(), "k", 1)
	require.NoError(t, k.Release())
	require.NoError(t, granted(t, got, 10*time.Second).Release())
	nothingLeft(t, s, 5*time.Second)
}

// C095, C101: a subscription that is killed again and again costs nobody the lock, and
// is made anew.
func TestLineSubscriberKilled(t *testing.T) {
	s := redistest.Start(t)
	k := mustAcquire(t, newTestLocker(t, s.Client()), "k")
	l := newTestLocker(t, s.Client())
	var waiting []<-chan outcome
	for i := range 10 {
		waiting = append(waiting, acquiring(t.Context(), l, "k"))
		queued(t, s.Admin(), "k", int64(i+1))
	}
	for range 3 {
		tunedIn(t, s.Admin(), 1)
		require.NoError(t, s.Admin().ClientKillByFilter(t.Context(), "TYPE", "pubsub").Err())
	}
	tunedIn(t, s.Admin(), 1)
	for _, got := range waiting {
		require.NoError(t, s.Admin().ClientKillByFilter(t.Context(), "TYPE", "pubsub").Err())
		require.NoError(t, k.Release())
		k = granted(t, got, 10*time.Second)
	}
	require.NoError(t, k.Release())
	nothingLeft(t, s, 5*time.Second)
}

// C095: a subscription from which nothing comes, without an error, costs the time to a
// call, and is given up after a few grants that were found without their messages.
func TestLineFrozenSubscription(t *testing.T) {
	s, p, c := proxied(t)
	l, other := newTestLocker(t, c), newTestLocker(t, s.Client())
	frozen := p.Inject(faultproxy.Rule{Match: faultproxy.Command("SUBSCRIBE"), Times: 1, Do: faultproxy.HoldReply()})
	k := mustAcquire(t, other, "k")
	var waiting []<-chan outcome
	for i := range 5 { // the frozen Locker's between those of the other one, which must tell it
		waiting = append(waiting, acquiring(t.Context(), []*Locker{l, other}[i%2], "k"))
		queued(t, s.Admin(), "k", int64(i+1))
	}
	require.NoError(t, frozen.WaitTimeout(10*time.Second))
	require.Equal(t, 1, p.Count("SUBSCRIBE"))
	for _, got := range waiting {
		require.NoError(t, k.Release())
		k = granted(t, got, 10*time.Second)
	}
	got := acquiring(t.Context(), l, "k")
	redistest.Eventually(t, 10*time.Second, "another subscription", func() bool { return p.Count("SUBSCRIBE") > 1 })
	require.NoError(t, k.Release())
	require.NoError(t, granted(t, got, 10*time.Second).Release())
	frozen.Release()
	nothingLeft(t, s, 5*time.Second)
}

// C114: whatever error the server gives at whatever step, there is nothing left of the
// waiter soon after, and the lock is not kept from others.
func TestLineErrorAtEachStep(t *testing.T) {
	s, p, c := proxied(t, func(o *redis.Options) { o.MaxRetries = -1 })
	l := newTestLocker(t, c)
	warm(t, l)
	for skip := range 2 {
		for _, instead := range []bool{true, false} { // of running, or of the answer alone
			k := mustAcquire(t, newTestLocker(t, s.Client()), "k")
			do := faultproxy.Refuse("MISCONF no snapshots")
			if !instead {
				do = faultproxy.ReplyError("MISCONF no snapshots")
			}
			h := p.Inject(faultproxy.Rule{Match: isWait, Times: 1, Skip: skip, Do: do})
			_, err := l.Acquire(t.Context(), "k")
			require.ErrorIs(t, err, ErrUnavailable)
			require.ErrorContains(t, err, "MISCONF")
			require.Equal(t, 1, h.Fired())
			nothingLeft(t, s, 3*time.Second, "k")
			require.NoError(t, k.Release())
			require.NoError(t, mustAcquire(t, newTestLocker(t, s.Client()), "k").Release())
		}
	}
}

// C023, C110: replies and requests of a waiter's calls that are lost, late or twice
// neither give the lock away nor leave a place behind.
func TestLineCallsThatFail(t *testing.T) {
	for name, do := range map[string]faultproxy.Action{
		"reply lost":     faultproxy.HoldReply(),
		"closed":         faultproxy.DropReplyAndClose(),
		"cut":            faultproxy.Cut(),
		"twice":          faultproxy.Duplicate(),
		"late":           faultproxy.DelayRequest(700 * time.Millisecond),
		"passing answer": faultproxy.Error("LOADING Redis is loading"),
	} {
		for _, n := range []int{-1, 3} {
			if n > 0 && name != "reply lost" && name != "closed" {
				continue // the client's own retries play no part
			}
			t.Run(fmt.Sprint(name, " retries ", n), func(t *testing.T) {
				t.Parallel()
				s, p, c := proxied(t, retries(n))
				l := newTestLocker(t, c)
				warm(t, l)
				for skip := range 2 {
					k := mustAcquire(t, newTestLocker(t, s.Client()), "k")
					h := p.Inject(faultproxy.Rule{Match: isWait, Times: 1, Skip: skip, Do: do})
					quits := acquiring(t.Context(), l, "k", WithWait(400*time.Millisecond))
					stays := acquiring(t.Context(), l, "k")
					require.NoError(t, h.WaitTimeout(10*time.Second))
					require.Error(t, (<-quits).err)
					require.NoError(t, k.Release())
					next := granted(t, stays, 20*time.Second)
					require.Equal(t, next.Owner(), s.Admin().Get(t.Context(), "k").Val())
					require.NoError(t, next.Release())
					nothingLeft(t, s, 6*time.Second)
				}
			})
		}
	}
}

// C046, C093: a server that hangs holds nobody in the queue beyond his own limit, and
// what he leaves behind is cleaned up when it is back.
func TestLineHangingServer(t *testing.T) {
	s, p, c := proxied(t, retries(3))
	k := mustAcquire(t, newTestLocker(t, s.Client()), "k")
	l := newTestLocker(t, c)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var waiting []<-chan outcome
	for i := range 8 {
		waiting = append(waiting, acquiring(ctx, l, "k"))
		queued(t, s.Admin(), "k", int64(i+1))
	}
	p.Hang()
	late := acquiring(ctx, l, "k", WithWait(200*time.Millisecond))
	select {
	case o := <-late:
		require.ErrorIs(t, o.err, ErrUnavailable)
		require.NotErrorIs(t, o.err, context.DeadlineExceeded)
	case <-time.After(10 * time.Second):
		t.Fatal("WithWait does not end it")
	}
	cancel()
	for _, got := range waiting {
		select {
		case o := <-got:
			require.ErrorIs(t, o.err, context.Canceled)
		case <-time.After(10 * time.Second):
			t.Fatal("the end of its context does not end it")
		}
	}
	p.Heal()
	p.CutAll()
	nothingLeft(t, s, 10*time.Second, "k")
	require.NoError(t, k.Release())
}

// C094: waiters without a limit outlast a restart of the server that forgets everything,
// and all are served.
func TestLineServerRestarts(t *testing.T) {
	s := redistest.Start(t)
	holder := newTestLocker(t, s.Client(), WithTTL(time.Second))
	k := mustAcquire(t, holder, "k")
	var waiting []<-chan outcome
	for i := range 3 {
		l := newTestLocker(t, s.Client(), WithTTL(2*time.Second))
		for range 5 {
			waiting = append(waiting, acquiring(t.Context(), l, "k"))
		}
		queued(t, s.Admin(), "k", int64(5*i+5))
	}
	s.Kill()
	s.Restart()
	all := make(chan outcome, len(waiting))
	for _, got := range waiting {
		go func() { all <- <-got }() // ends with the test's Acquires
	}
	for range waiting {
		next := granted(t, all, 20*time.Second)
		require.Equal(t, next.Owner(), s.Admin().Get(t.Context(), "k").Val())
		require.NoError(t, next.Release())
	}
	redistest.Eventually(t, 5*time.Second, "the holder is told", func() bool { return errors.Is(k.Err(), ErrLost) })
	nothingLeft(t, s, 10*time.Second)
}

// C113, C115: a server that is flushed while many wait: the holder is told before
// anybody else believes that he has the lock for long, and all waiters are served.
func TestLineFlushed(t *testing.T) {
	s := redistest.Start(t)
	k := mustAcquire(t, newTestLocker(t, s.Client(), WithTTL(900*time.Millisecond)), "k")
	l := newTestLocker(t, s.Client())
	all := make(chan outcome, 30)
	for i := range 30 {
		got := acquiring(t.Context(), l, "k")
		go func() { all <- <-got }() // ends with the test's Acquires
		if i%10 == 9 {
			queued(t, s.Admin(), "k", int64(i+1))
		}
	}
	require.NoError(t, s.Admin().FlushAll(t.Context()).Err())
	<-k.Context().Done()
	require.ErrorIs(t, k.Err(), ErrLost)
	for range 30 {
		require.NoError(t, granted(t, all, 20*time.Second).Release())
	}
	nothingLeft(t, s, 5*time.Second)
}

// C113, C115: each of what stands beside a lock may be missing, or be something else, in
// the middle of a wait: the waiter has a lock of its own or a clear error.
func TestLineCompanionsGone(t *testing.T) {
	s := redistest.Start(t)
	a, l := s.Admin(), newTestLocker(t, s.Client(), WithFencing())
	var waiting []<-chan outcome
	var locks []*Lock
	companions := []string{"{gone%d}:queue", "{gone%d}:waiters", "{gone%d}:fence", "{other%d}:queue", "{other%d}:waiters", "{other%d}:fence"}
	for i, companion := range companions {
		name, _, _ := strings.Cut(companion[1:], "%")
		key := fmt.Sprint(name, i)
		locks = append(locks, mustAcquire(t, newTestLocker(t, s.Client(), WithFencing()), key))
		waiting = append(waiting, acquiring(t.Context(), l, key))
		queued(t, a, key, 1)
	}
	for i, companion := range companions {
		require.NoError(t, a.Del(t.Context(), fmt.Sprintf(companion, i)).Err())
		if strings.HasPrefix(companion, "{other") {
			require.NoError(t, a.LPush(t.Context(), fmt.Sprintf(companion, i), "something else").Err())
		}
		require.NoError(t, locks[i].Release(), companion)
	}
	for i, got := range waiting {
		select {
		case o := <-got:
			if o.err != nil {
				require.Contains(t, locks[i].Key(), "other")
				require.ErrorIs(t, o.err, ErrUnavailable)
				break
			}
			require.Equal(t, o.k.Owner(), a.Get(t.Context(), locks[i].Key()).Val())
			require.Positive(t, o.k.Token())
			require.NoError(t, o.k.Release())
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: still waiting", companions[i])
		}
		absent(t, s, locks[i].Key(), 5*time.Second)
	}
}
