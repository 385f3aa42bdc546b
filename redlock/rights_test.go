package redlock

import (
	"context"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
)

// documentedRights returns the rules of the README's user for a majority.
func documentedRights(t *testing.T) (rules []string) {
	t.Helper()
	text, err := os.ReadFile("../README.md")
	require.NoError(t, err)
	line := regexp.MustCompile("(?m)^ACL SETUSER majority (.*)$").FindStringSubmatch(string(text))
	require.Len(t, line, 2)
	return strings.Fields(line[1])
}

// asUser makes a user with these rights on each server, and clients that log in as it.
func (x *fleet) asUser(rules []string) []redis.UniversalClient {
	x.t.Helper()
	for _, s := range x.servers {
		args := []any{"ACL", "SETUSER", "majority", "reset"}
		for _, r := range rules {
			args = append(args, r)
		}
		require.NoError(x.t, s.Admin().Do(x.t.Context(), args...).Err())
		require.NoError(x.t, s.Admin().Do(x.t.Context(), "ACL", "LOG", "RESET").Err())
	}
	return x.clients(func(o *redis.Options) { o.Username, o.Password = "majority", "password" })
}

// asUser makes a Locker on the clients, closed at the end of the test.
func asUser(t *testing.T, clients []redis.UniversalClient, opts ...holdfast.Option) *holdfast.Locker {
	t.Helper()
	l, err := New(clients, append(opts, quiet, holdfast.WithPrefix("lock:"), holdfast.WithTTL(time.Second))...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// whole does all that Lockers can. Each hears of its own releases in any case, so that
// another one must wait.
func whole(t *testing.T, x *fleet, l, waiter *holdfast.Locker) {
	t.Helper()
	for _, opts := range [][]holdfast.Option{nil, {holdfast.WithFencing()}, {holdfast.WithMinHold(100 * time.Millisecond)}} {
		k := acquire(t, l, "k", opts...)
		require.NoError(t, x.servers[0].Admin().Del(t.Context(), "lock:k").Err())
		renewed(t, 2, k)
		require.NoError(t, k.Extend(t.Context(), time.Second))
		got := awaits(t, waiter, "k")
		x.listening("lock:k", 1, 1, 1)
		require.NoError(t, k.Release())
		next := <-got
		require.NotNil(t, next)
		require.NoError(t, next.Release())
		x.clean(patience)
	}
}

// C129: a user with just the documented rights can do everything, and no server has had to
// refuse anything: waiters hear of releases too.
func TestRights(t *testing.T) {
	const ttl = time.Second
	x := startFleet(t, 3, ttl)
	for _, s := range x.servers { // forgets what was vetted as another user
		require.NoError(t, s.Admin().ScriptFlush(t.Context()).Err())
	}
	clients := x.asUser(documentedRights(t))
	whole(t, x, asUser(t, clients), asUser(t, clients))
	for i, s := range x.servers {
		require.Empty(t, s.Admin().Do(t.Context(), "ACL", "LOG").Val(), i)
	}
}

// Without the right to ask how long a server has been up, that is what the error says, at
// once; a Locker on instances that forget nothing needs no such right.
func TestRightToInfo(t *testing.T) {
	x := startFleet(t, 3, 0)
	var rules []string
	for _, r := range documentedRights(t) {
		if r != "+info" {
			rules = append(rules, r)
		}
	}
	clients := x.asUser(rules)
	var err error
	within(t, patience, "the refusal, which no waiting heals", func() {
		_, err = asUser(t, clients).Acquire(context.Background(), "k")
	})
	require.ErrorIs(t, err, holdfast.ErrUnavailable)
	require.ErrorContains(t, err, "INFO is needed to learn how long the server has been up (or WithDurableInstances)")
	require.ErrorContains(t, err, "NOPERM")

	whole(t, x, asUser(t, clients, WithDurableInstances()), asUser(t, clients, WithDurableInstances()))
}

// C126: a right that is missing on a minority is a vote that is missing; on a majority it
// is an error at once that names each instance and the right.
func TestMissingRights(t *testing.T) {
	x := startFleet(t, 3, 0)
	for _, s := range x.servers[1:] {
		require.NoError(t, s.Admin().Do(t.Context(), "ACL", "SETUSER", "default", "-evalsha").Err())
		l := x.locker(lasting()...)
		var k *holdfast.Lock
		var err error
		within(t, patience, "an answer", func() { k, err = l.Acquire(context.Background(), "k") })
		if s == x.servers[1] {
			require.NoError(t, err)
			renewed(t, 1, k)
			require.NoError(t, k.Release())
			continue
		}
		require.ErrorIs(t, err, holdfast.ErrUnavailable)
		var q *QuorumError
		require.ErrorAs(t, err, &q)
		require.LessOrEqual(t, len(q.Nodes), 3)
		for _, p := range x.proxies[1:] {
			require.ErrorContains(t, err, p.Addr()+": NOPERM")
		}
		require.ErrorContains(t, err, "evalsha")
	}
}
