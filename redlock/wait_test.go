package redlock

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/leaktest"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// subscribed returns how many listen for the lock on each server.
func (x *fleet) subscribed(key string) (all []int64) {
	for _, s := range x.servers {
		all = append(all, s.Admin().PubSubNumSub(context.Background(), channelOf(key)).Val()[channelOf(key)])
	}
	return all
}

// listening waits until as many listen on each server.
func (x *fleet) listening(key string, want ...int64) {
	x.t.Helper()
	redistest.Eventually(x.t, patience, fmt.Sprint("listening: ", want), func() bool {
		return fmt.Sprint(x.subscribed(key)) == fmt.Sprint(want)
	})
}

// awaits acquires key with l.
func awaits(t *testing.T, l *holdfast.Locker, key string) (got chan *holdfast.Lock) {
	got = make(chan *holdfast.Lock, 1)
	ctx := context.WithoutCancel(t.Context())
	go func() { // ends with its wait
		k, err := l.Acquire(ctx, key, holdfast.WithWait(patience))
		if err != nil {
			t.Error(err)
		}
		got <- k
	}()
	return got
}

// C076, C082: a waiter of another Locker is woken by a release, long before it would have
// asked again; and also when a minority tells it nothing.
func TestReleaseWakes(t *testing.T) {
	x := startFleet(t, 3, 0)
	holder, waiter := x.direct(lasting()...), x.locker(lasting()...)
	for round := range 6 {
		k := acquire(t, holder, "k")
		x.everywhere(k)
		if round == 3 {
			x.proxies[2].Down()
		}
		got := awaits(t, waiter, "k")
		if round < 3 {
			x.listening("k", 1, 1, 1)
		} else {
			x.listening("k", 1, 1, 0)
		}
		<-time.After(200 * time.Millisecond) // its pauses have grown: it asks rarely now
		for _, p := range x.proxies {
			p.ResetLog()
		}
		require.NoError(t, k.Release())
		next := <-got
		require.NotNil(t, next)
		for i, p := range x.proxies[:2] {
			require.LessOrEqual(t, p.CountMatch(faultproxy.Command("EVALSHA")), 6, "it did not poll: %d", i)
		}
		require.NoError(t, next.Release())
	}
	require.NoError(t, x.proxies[2].Up())
	x.clean(patience)
}

// C082, C091: without messages, because a server refuses to be listened to, or because the
// connection breaks again and again, waiters find the lock free by asking.
func TestWaitingWithoutMessages(t *testing.T) {
	x := startFleet(t, 3, 0)
	holder := x.direct(lasting()...)
	for name, action := range map[string]faultproxy.Action{
		"refused": faultproxy.Error("NOPERM this user has no permissions to run the 'subscribe' command"),
		"cut":     faultproxy.Cut(), "silent": faultproxy.Hang(),
	} {
		t.Run(name, func(t *testing.T) {
			x := x.with(t)
			for _, p := range x.proxies {
				p.Inject(faultproxy.Rule{Match: faultproxy.Command("SUBSCRIBE"), Do: action})
			}
			waiter := x.locker(lasting()...)
			k := acquire(t, holder, "k")
			got := awaits(t, waiter, "k")
			for i, p := range x.proxies {
				redistest.Eventually(t, patience, fmt.Sprint("it tried: ", i), func() bool {
					return p.CountMatch(faultproxy.Command("SUBSCRIBE")) > 0
				})
			}
			require.NoError(t, k.Release())
			next := <-got
			require.NotNil(t, next)
			require.NoError(t, next.Release())
			within(t, patience, "Close", func() { require.NoError(t, waiter.Close()) })
			for _, p := range x.proxies {
				p.Heal()
				p.ResetLog()
			}
			x.clean(patience)
		})
	}
}

// A connection for messages is there while anybody waits, is made again when it breaks, and
// is given up soon after: an idle Locker holds none. Close leaves nothing of it.
func TestListeningEnds(t *testing.T) {
	leaktest.Check(t)
	x := startFleet(t, 3, 0)
	holder, waiter := x.direct(lasting()...), x.locker(lasting()...)
	for range 2 {
		k := acquire(t, holder, "k")
		got := awaits(t, waiter, "k")
		x.listening("k", 1, 1, 1)
		for _, s := range x.servers {
			require.NoError(t, s.Admin().Do(t.Context(), "CLIENT", "KILL", "TYPE", "pubsub").Err())
		}
		x.listening("k", 1, 1, 1)
		require.NoError(t, k.Release())
		next := <-got
		require.NotNil(t, next)
		require.NoError(t, next.Release())
		x.listening("k", 0, 0, 0)
		for i, s := range x.servers {
			redistest.Eventually(t, patience, fmt.Sprint("no connection for messages is left: ", i), func() bool {
				list := s.Admin().Do(t.Context(), "CLIENT", "LIST", "TYPE", "pubsub").Val()
				return fmt.Sprint(list) == ""
			})
		}
	}
	k := acquire(t, holder, "k")
	got := make(chan error, 1)
	go func() { // ends with Close
		_, err := waiter.Acquire(context.Background(), "k")
		got <- err
	}()
	x.listening("k", 1, 1, 1)
	within(t, patience, "Close", func() { require.NoError(t, waiter.Close()) })
	require.ErrorIs(t, <-got, holdfast.ErrClosed)
	x.listening("k", 0, 0, 0)
	require.NoError(t, k.Release())
}

// What an attempt that failed gives back is told to nobody: it was no lock, and waiters who
// heard of it would ask, fail and tell each other without end. A release is told once by
// each instance.
func TestFailedAttemptIsSilent(t *testing.T) {
	x := startFleet(t, 3, 0)
	l := x.locker(lasting()...)
	ear := x.servers[2].Client().Subscribe(t.Context(), channelOf("k"))
	t.Cleanup(func() { _ = ear.Close() })
	_, err := ear.Receive(t.Context())
	require.NoError(t, err)
	for _, s := range x.servers[:2] {
		require.NoError(t, s.Admin().Set(t.Context(), "k", "x/1", time.Minute).Err())
	}
	for range 5 {
		_, err := l.TryAcquire(t.Context(), "k")
		require.ErrorIs(t, err, holdfast.ErrNotAcquired)
		require.NoError(t, x.gone(2))
	}
	for _, s := range x.servers[:2] {
		require.NoError(t, s.Admin().Del(t.Context(), "k").Err())
	}
	k := acquire(t, l, "k")
	x.everywhere(k)
	require.NoError(t, k.Release())
	x.clean(patience)
	require.NoError(t, x.servers[2].Admin().Publish(t.Context(), channelOf("k"), "last").Err())
	var heard []string
	for m := range ear.Channel() {
		if heard = append(heard, m.Payload); m.Payload == "last" {
			break
		}
	}
	require.Len(t, heard, 2, "%q", heard)
}

// gone waits until a server does not have the lock.
func (x *fleet) gone(i int) error {
	a := x.servers[i].Admin()
	redistest.Eventually(x.t, patience, "it was given back", func() bool { return a.Exists(context.Background(), "k").Val() == 0 })
	return nil
}

// C106: messages that nobody should have sent grant nothing, and make nobody ask in a loop.
func TestStrayMessages(t *testing.T) {
	x := startFleet(t, 3, 0)
	holder, waiter := x.direct(lasting()...), x.locker(lasting()...)
	k := acquire(t, holder, "k")
	got := awaits(t, waiter, "k")
	x.listening("k", 1, 1, 1)
	for _, p := range x.proxies {
		p.ResetLog()
	}
	const strays = 300
	for range strays {
		for _, s := range x.servers {
			require.NoError(t, s.Admin().Publish(t.Context(), channelOf("k"), "free").Err())
		}
	}
	require.NoError(t, k.Err())
	require.Empty(t, got)
	require.NoError(t, k.Release())
	next := <-got
	require.NotNil(t, next)
	require.NoError(t, next.Release())
	for i, p := range x.proxies { // an attempt is two commands at the most, and strays come in threes
		require.LessOrEqual(t, p.CountMatch(faultproxy.Command("EVALSHA")), 2*strays, i)
	}
	x.clean(patience)
}
