package redlock

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"

	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// nowhere returns a client that reaches nothing, closed at the end of the test.
func nowhere(t testing.TB) *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1, MaxRetries: -1})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// wrapper is a type that embeds a client.
type wrapper struct {
	*redis.Client
	labels any
}

// opaque is a client of which nothing is known.
type opaque struct{ redis.UniversalClient }

// C018, C073: clients that are missing, the same, or not known to lead to one server are
// refused, and the error names the first of them.
func TestRefusedClients(t *testing.T) {
	a, b := nowhere(t), nowhere(t)
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	sentinel := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "m", SentinelAddrs: []string{"127.0.0.1:1"}})
	t.Cleanup(func() { _ = errors.Join(cluster.Close(), ring.Close(), sentinel.Close()) })
	for text, clients := range map[string][]redis.UniversalClient{
		"no clients":                                   nil,
		"client 1: nil":                                {a, nil, b},
		"client 2: nil":                                {a, b, (*redis.Client)(nil)},
		"client 2: ":                                   {a, b, wrapper{}},
		"client 0: nil":                                {(*redis.ClusterClient)(nil), a, b},
		"client 1: nil:":                               {a, (*wrapper)(nil), b},
		"clients 0 and 2 are the same":                 {a, b, a},
		"clients 1 and 2 are the same":                 {a, wrapper{Client: b}, wrapper{Client: b}},
		"client 1: a Cluster is not one instance":      {a, cluster, b},
		"client 0: a Ring is not one instance":         {ring, a, b},
		"client 2: a Sentinel set is not one instance": {a, b, sentinel},
		"client 1: a Sentinel set is not one instance": {a, wrapper{Client: sentinel}, b},
		"client 1: a redlock.opaque is not known to lead to one server": {a, opaque{cluster}},
	} {
		require.NotPanics(t, func() {
			l, err := New(clients, quiet)
			require.Nil(t, l, text)
			require.ErrorIs(t, err, holdfast.ErrInvalid, text)
			require.ErrorContains(t, err, "redlock: "+text)
		}, text)
	}
}

// Types that embed a client are accepted, whatever else is in them, and asked as they are.
func TestWrappedClients(t *testing.T) {
	servers := redistest.StartN(t, 3)
	c := []*redis.Client{servers[0].Client(), servers[1].Client(), servers[2].Client()}
	for name, clients := range map[string][]redis.UniversalClient{
		"various":        {wrapper{Client: c[0]}, &wrapper{Client: c[1]}, c[2]},
		"not comparable": {wrapper{c[0], []int{1}}, wrapper{c[1], []int{1}}, wrapper{c[2], []int{1}}},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := New(clients, lasting(quiet)...)
			require.NoError(t, err)
			defer l.Close()
			require.NoError(t, acquire(t, l, "k").Release())
		})
	}
	odd := wrapper{c[0], []int{1}}
	require.NotPanics(t, func() { _, _ = New([]redis.UniversalClient{odd, odd, wrapper{Client: c[1]}}, quiet) })
}

// C074, C075: one of three that fails from the beginning, in whatever way, is not noticed, and
// the clients' own limits of seconds do not count.
func TestMinorityBrokenFromTheStart(t *testing.T) {
	x := startFleet(t, 3, 0)
	silent := faultproxy.NewFake(t, func([]string) []byte { return []byte{} })
	kinds := map[string]func(o *redis.Options){
		"refused":      func(o *redis.Options) { o.Addr = "127.0.0.1:1" },
		"hanging":      func(o *redis.Options) { o.Addr = silent.Addr() },
		"unknown host": func(o *redis.Options) { o.Addr = "unknown..invalid:6379" },
		"password":     func(o *redis.Options) { o.Username, o.Password = "nobody", "wrong" },
		"tls":          func(o *redis.Options) { o.TLSConfig = &tls.Config{InsecureSkipVerify: true} },
	}
	for _, text := range []string{"OOM full", "LOADING Redis is loading", "NOPERM no permissions", "ERR unknown command"} {
		p := faultproxy.New(t, x.servers[0].Addr())
		p.Inject(faultproxy.Rule{Do: faultproxy.Error(text)})
		kinds[text] = func(o *redis.Options) { o.Addr = p.Addr() }
	}
	for kind, change := range kinds {
		for i := range 3 {
			t.Run(fmt.Sprint(kind, i), func(t *testing.T) {
				clients := x.clients()
				clients[i] = x.servers[i].Client(change)
				l, err := New(clients, append(lasting(), quiet)...)
				require.NoError(t, err)
				within(t, 7*time.Second, "a life", func() { // a quarter of the TTL
					k, err := l.Acquire(t.Context(), "k")
					require.NoError(t, err)
					require.NoError(t, k.Extend(t.Context(), 20*time.Second))
					renewed(t, 1, k)
					require.NoError(t, k.Release())
				})
				within(t, 7*time.Second, "Close", func() { require.NoError(t, l.Close()) })
				x.with(t).clean(patience)
			})
		}
	}
}

// The other errors: what they say and what they match.
func TestErrorValues(t *testing.T) {
	node := NodeError{2, "c:6379", errDown}
	require.EqualError(t, node, "c:6379: connection refused")
	require.ErrorIs(t, node, errDown)
	q := &QuorumError{op: "release", Votes: 1, Needed: 2, Nodes: []NodeError{node}}
	require.EqualError(t, q, "redlock: release: 1 of the 2 votes needed: c:6379: connection refused")
	require.ErrorAs(t, fmt.Errorf("outside: %w", q), &node)
	require.EqualError(t, &YoungError{Left: 1499600 * time.Microsecond}, "has not been up for long enough to vote, for another 1.5s")
	same := error(&SameServerError{Addrs: [2]string{"a:1", "b:2"}})
	require.EqualError(t, same, "redlock: the clients of a:1 and b:2 reach the same server")
	require.ErrorIs(t, same, holdfast.ErrInvalid)
	late := error(&noAnswerError{100 * time.Millisecond})
	require.EqualError(t, late, "no answer within 100ms")
	require.NotErrorIs(t, late, context.DeadlineExceeded) // C099
}

// An even number of instances is logged by New, once, and by nothing else.
func TestEvenNumberIsLogged(t *testing.T) {
	for n := 1; n <= 6; n++ {
		var clients []redis.UniversalClient
		for range n {
			clients = append(clients, nowhere(t))
		}
		var log bytes.Buffer // guarded by its handler
		l, err := New(clients, holdfast.WithLogger(slog.New(slog.NewTextHandler(&log, nil))), WithNodeTimeout(10*time.Millisecond))
		require.NoError(t, err)
		for range 2 {
			_, err = l.TryAcquire(t.Context(), "k")
			require.ErrorIs(t, err, holdfast.ErrUnavailable)
		}
		require.NoError(t, l.Close())
		if n%2 == 0 {
			require.Contains(t, log.String(), fmt.Sprintf("one less\" instances=%d needed=%d\n", n, n/2+1))
		}
		require.Equal(t, 1-n%2, strings.Count(log.String(), "\n"))
	}
}

// C073: clients that reach the same server, by whatever ways, are an error that names both
// addresses, at the first use and at each later one, and nothing is taken anywhere; also when
// that server would look like a majority, because no other one is up.
func TestSameServer(t *testing.T) {
	servers := redistest.StartN(t, 3)
	s, other, third := servers[0], servers[1], servers[2]
	proxy := faultproxy.New(t, s.Addr())
	named := func(addr string) *redis.Client { return s.Client(func(o *redis.Options) { o.Addr = addr }) }
	local := fmt.Sprint("localhost:", s.Port())
	one := s.Client()
	for name, c := range map[string]struct {
		first, second redis.UniversalClient
		addr          string // of the second
	}{
		"the same address": {s.Client(), s.Client(), s.Addr()},
		"other name":       {s.Client(), named(local), local},
		"other way":        {s.Client(), named(proxy.Addr()), proxy.Addr()},
		"other database":   {s.Client(), s.Client(func(o *redis.Options) { o.DB = 1 }), s.Addr()},
		"the same pool":    {one, one.WithTimeout(time.Second), s.Addr()},
		"the same inside":  {one, &wrapper{Client: one}, s.Addr()},
	} {
		for _, rest := range [][]redis.UniversalClient{
			{other.Client()}, {nowhere(t)}, {s.Client()}, {other.Client(), third.Client(), s.Client()}, {nowhere(t), nowhere(t), nowhere(t)}, nil,
		} {
			t.Run(fmt.Sprint(name, len(rest)), func(t *testing.T) {
				clients := append([]redis.UniversalClient{c.first, c.second}, rest...)
				l, err := New(clients, append(lasting(WithNodeTimeout(5*time.Second)), quiet)...)
				require.NoError(t, err)
				defer l.Close()
				for _, server := range servers {
					server.ResetStats()
				}
				for i := range 3 {
					k, err := l.Acquire(t.Context(), "k", holdfast.WithWait(time.Duration(i)*time.Second))
					require.Nil(t, k)
					require.ErrorIs(t, err, holdfast.ErrInvalid)
					require.NotErrorIs(t, err, holdfast.ErrUnavailable)
					var same *SameServerError
					require.ErrorAs(t, err, &same)
					if len(rest) == 0 {
						require.Equal(t, [2]string{s.Addr(), c.addr}, same.Addrs)
					}
				}
				for _, server := range servers {
					stats := server.CommandStats()
					require.Zero(t, stats["set"]+stats["evalsha"]+stats["eval"]+stats["script|load"], "nothing is sent but INFO")
				}
			})
		}
	}
}

// C073: a second way to a server that opens only after first contact never gives it a second
// vote, whoever asks for the lock and however long.
func TestSameServerMetLater(t *testing.T) {
	x := startFleet(t, 3, 0)
	again := faultproxy.New(t, x.servers[0].Addr())
	again.Down()
	x.proxies[1].Down()
	x.proxies[2].Down()
	clients := append(x.clients()[:2], x.servers[0].Client(func(o *redis.Options) { o.Addr = again.Addr() }))
	l, err := New(clients, append(lasting(), quiet)...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	_, err = l.TryAcquire(t.Context(), "k")
	require.ErrorIs(t, err, holdfast.ErrUnavailable)
	require.NotErrorIs(t, err, holdfast.ErrInvalid)
	require.NoError(t, again.Up())
	redistest.Eventually(t, patience, "it is met", func() bool {
		k, err := l.Acquire(t.Context(), "k", holdfast.WithWait(300*time.Millisecond))
		require.Nil(t, k, "one server is no majority")
		require.Error(t, err)
		return errors.As(err, new(*SameServerError))
	})
	x.clean(patience)
	require.NoError(t, x.proxies[1].Up())
	redistest.Eventually(t, patience, "two servers have one vote each", func() bool {
		k, err := l.TryAcquire(t.Context(), "k")
		return err == nil && k.Release() == nil
	})
	x.clean(patience)
}

// Options that make no sense are refused where they are given, and those of a majority in
// other places, as those of others here.
func TestRefusedOptions(t *testing.T) {
	clients := []redis.UniversalClient{nowhere(t), nowhere(t), nowhere(t)}
	ttl := holdfast.WithTTL(time.Second)
	for _, opts := range [][]holdfast.Option{
		{WithNodeTimeout(0)}, {WithNodeTimeout(-1)}, {WithNodeTimeout(-1 << 63)}, {ttl, WithNodeTimeout(time.Second)},
		{WithNodeTimeout(time.Second), ttl}, {ttl, WithNodeTimeout(time.Minute)}, {WithNodeTimeout(holdfast.Unlimited)},
		{ttl, WithLongestTTL(time.Second - 1)}, {WithLongestTTL(0)}, {WithLongestTTL(-time.Hour)},
		{WithLongestTTL(time.Minute), holdfast.WithTTL(time.Minute + 1)}, {holdfast.WithTTL(0)}, {nil},
		{ttl, WithNodeTimeout(time.Second / 2), WithNodeTimeout(time.Second)}, {holdfast.StoreOption("another's")}, {holdfast.StoreOption(nil)},
	} {
		l, err := New(clients, append([]holdfast.Option{quiet}, opts...)...)
		require.Nil(t, l)
		require.ErrorIs(t, err, holdfast.ErrInvalid)
	}
	for _, opts := range [][]holdfast.Option{
		{ttl, WithNodeTimeout(time.Second - 1)}, {ttl, WithNodeTimeout(1)}, {ttl, WithLongestTTL(time.Second)},
		{ttl, WithNodeTimeout(time.Minute), WithNodeTimeout(time.Second / 2)}, {holdfast.WithReplicas(0, 0)},
	} {
		l, err := New(clients, append([]holdfast.Option{quiet}, opts...)...)
		require.NoError(t, err)
		require.NoError(t, l.Close())
	}
	for _, own := range []holdfast.Option{WithNodeTimeout(time.Second), WithLongestTTL(time.Hour), WithDurableInstances()} {
		_, err := holdfast.New(nowhere(t), own)
		require.ErrorIs(t, err, holdfast.ErrInvalid)
		one, err := holdfast.New(nowhere(t), quiet)
		require.NoError(t, err)
		many, err := New(clients, own, quiet)
		require.NoError(t, err)
		for _, l := range []*holdfast.Locker{one, many} {
			_, err = l.TryAcquire(t.Context(), "k", own)
			require.ErrorIs(t, err, holdfast.ErrInvalid, "constructors only")
			require.NoError(t, l.Close())
		}
	}
}

// WithReplicas is refused wherever it is given, and a TTL above the longest in Acquire and
// Extend; so is a MinHold, which restarts would forget. Nothing is sent, and what is held is
// held on.
func TestRefusedCalls(t *testing.T) {
	x := startFleet(t, 3, 0)
	replicas, longest := holdfast.WithReplicas(1, 50*time.Millisecond), 40*time.Second
	l, forgets := x.locker(lasting(WithLongestTTL(longest))...), x.locker(WithLongestTTL(longest))
	x.locker(lasting(holdfast.WithMinHold(longest + 1))...) // its servers forget nothing
	for _, o := range []holdfast.Option{replicas, holdfast.WithMinHold(longest + 1)} {
		_, err := New(x.clients(), WithLongestTTL(longest), o, quiet)
		require.ErrorIs(t, err, holdfast.ErrInvalid)
	}
	k := acquire(t, l, "k", holdfast.WithoutRenewal(), holdfast.WithTTL(longest))
	x.everywhere(k)
	for _, p := range x.proxies {
		p.ResetLog()
	}
	for _, call := range []func() error{
		func() error { _, err := l.TryAcquire(t.Context(), "other", replicas); return err },
		func() error { _, err := l.Acquire(t.Context(), "k", replicas); return err },
		func() error {
			_, err := forgets.Acquire(t.Context(), "other", holdfast.WithMinHold(longest+1))
			return err
		},
		func() error { _, err := l.Acquire(t.Context(), "other", holdfast.WithTTL(longest+1)); return err },
		func() error { return k.Extend(t.Context(), longest+1) },
		func() error { return k.Extend(t.Context(), 5) },
	} {
		err := call()
		require.ErrorIs(t, err, holdfast.ErrInvalid)
		require.NotErrorIs(t, err, holdfast.ErrUnavailable)
	}
	for i, p := range x.proxies {
		require.Zero(t, p.CountMatch(faultproxy.Any()), i)
	}
	require.NoError(t, k.Extend(t.Context(), longest))
	require.NoError(t, k.Release())
	x.clean(patience)
}

// WithMaxWaiters counts the waiters of one Locker, not those of others: who is one too many is
// refused at once, and those who wait get the lock.
func TestMaxWaiters(t *testing.T) {
	x := startFleet(t, 3, 0)
	l, other := x.locker(lasting(holdfast.WithMaxWaiters(2))...), x.locker(lasting(holdfast.WithMaxWaiters(1))...)
	k := acquire(t, l, "k")
	var wg sync.WaitGroup
	for _, who := range []*holdfast.Locker{l, l, other} {
		wg.Go(func() { // ends when it has had the lock
			err := who.Do(context.Background(), "k", func(ctx context.Context) error { return ctx.Err() }, holdfast.WithMaxWaiters(9))
			if err != nil {
				t.Error(err)
			}
		})
	}
	for _, who := range []*holdfast.Locker{l, other} {
		redistest.Eventually(t, patience, "as many wait as may", func() bool {
			_, err := who.Acquire(t.Context(), "k", holdfast.WithWait(50*time.Millisecond))
			var held *holdfast.HeldError
			if errors.Is(err, holdfast.ErrUnavailable) {
				return false // a busy machine: no answer in time
			}
			require.ErrorAs(t, err, &held)
			require.ErrorIs(t, err, holdfast.ErrNotAcquired)
			return held.Full
		})
	}
	_, err := l.Acquire(t.Context(), "k") // without a limit of its own
	require.ErrorIs(t, err, holdfast.ErrNotAcquired)
	require.NoError(t, k.Release())
	wg.Wait()
	x.clean(patience)
}

// C146: any key is fine that is not empty or too long, whatever is in it, also with a prefix;
// but with fencing its braces must leave room for a companion.
func TestOddKeys(t *testing.T) {
	x := startFleet(t, 3, 0)
	keys := []string{
		":", "::", "{", "{}", "}", "a}b", "{a}", "a{b}c", "{}a{b}", "%s", " ", "\n", "\r\n", "\x00", "\xff\xfe", "\U0001f512",
		"*", "a/b/1", "k:fence", "{k}:fence", strings.Repeat("x", 64<<10-5), strings.Repeat("\x00{", 1000),
	}
	for _, prefix := range []string{"", "p:{\x00"} {
		plain := x.locker(lasting(holdfast.WithPrefix(prefix))...)
		fenced := x.locker(lasting(holdfast.WithPrefix(prefix), holdfast.WithFencing())...)
		for i, key := range keys {
			for _, l := range []*holdfast.Locker{plain, fenced} {
				_, room := keyspace.Companion(prefix+key, "fence")
				if l == fenced && !room {
					_, err := l.Acquire(t.Context(), key)
					require.ErrorIs(t, err, holdfast.ErrInvalid, "%d: %.10q", i, key)
					continue
				}
				roundTrip(t, x, l, key, prefix+key)
			}
		}
		for _, key := range []string{"", strings.Repeat("x", 64<<10+1-len(prefix))} {
			_, err := plain.TryAcquire(t.Context(), key)
			require.ErrorIs(t, err, holdfast.ErrInvalid)
		}
	}
	x.clean(patience)
}

// roundTrip takes a key's lock through its whole life.
func roundTrip(t *testing.T, x *fleet, l *holdfast.Locker, key, full string) {
	k := acquire(t, l, key)
	require.Equal(t, key, k.Key())
	redistest.Eventually(t, patience, "all have it", func() bool { return len(x.having(full, k.Owner())) == 3 })
	_, err := l.TryAcquire(t.Context(), key)
	var held *holdfast.HeldError
	require.ErrorAs(t, err, &held)
	require.Equal(t, key, held.Key)
	require.NoError(t, k.Extend(t.Context(), 20*time.Second))
	next := make(chan error, 1)
	go func() { // ends when it has had the lock
		next <- l.Do(context.Background(), key, func(ctx context.Context) error { return ctx.Err() })
	}()
	require.NoError(t, k.Release())
	require.NoError(t, <-next)
}
