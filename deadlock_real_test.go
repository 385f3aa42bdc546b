package holdfast

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// childService is one of three services of an outage: it holds one lock and then wants that of
// the next. Told of a deadlock it gives all back and tries again.
func childService() {
	c := redis.NewClient(&redis.Options{Addr: os.Getenv("ADDR")})
	log := slog.New(slog.NewTextHandler(os.Stdout, nil))
	l, err := New(c, WithTTL(30*time.Second), WithHolder(os.Getenv("NAME")), WithLogger(log))
	check(err)
	keys := strings.Split(os.Getenv("KEYS"), " ")
	ready := false
	work := func() error {
		return l.Do(context.Background(), keys[0], func(ctx context.Context) error {
			if !ready {
				ready = true
				fmt.Println("holds", keys[0])
				var line string
				_, err := fmt.Scanln(&line) // until all hold theirs
				check(err)
			}
			return l.Do(ctx, keys[1], func(context.Context) error { return nil })
		})
	}
	for err = work(); errors.Is(err, ErrDeadlock); err = work() {
		fmt.Println("yields")
	}
	check(err)
	check(l.Close())
	fmt.Println("done")
}

// An outage that once took 47 minutes: three services hold one lock each and wait for
// another's, one of them is paused, and replies are lost. It resolves itself in less than 5 s, and
// a line of a log names the whole cycle.
func TestOutageResolvesItself(t *testing.T) {
	s := redistest.Start(t)
	proxy := faultproxy.New(t, s.Addr())
	names, keys := []string{"orders", "stock", "billing"}, []string{"order:7", "sku:9", "invoice:3"}
	services := make([]*redistest.Process, len(names))
	for i, name := range names {
		services[i] = redistest.Child(t, "service", "ADDR="+proxy.Addr(), "NAME="+name, "KEYS="+keys[i]+" "+keys[(i+1)%3])
		require.Equal(t, "holds "+keys[i], services[i].ReadLine(10*time.Second))
	}
	proxy.Inject(faultproxy.Rule{Match: faultproxy.Script(), Times: 2, Do: faultproxy.DropReplyAndClose()})
	start := time.Now()
	for i, p := range services {
		_, err := fmt.Fprintln(p.Stdin, "go")
		require.NoError(t, err)
		if i == 1 {
			p.Stop()
			time.Sleep(300 * time.Millisecond)
			p.Cont()
		}
	}
	yields, told := 0, 0
	for _, p := range services {
		for line := p.ReadLine(10 * time.Second); line != "done"; line = p.ReadLine(10 * time.Second) {
			if strings.Contains(line, "yields") {
				yields++
			}
			if strings.Contains(line, "deadlock") {
				told++
				for i := range names {
					require.Contains(t, line, fmt.Sprintf(`\"%s\" holds \"%s\" and waits for \"%s\"`, names[i], keys[i], keys[(i+1)%3]))
				}
			}
		}
	}
	t.Logf("resolved after %v", time.Since(start))
	require.Less(t, time.Since(start), 5*time.Second)
	require.Positive(t, told)
	require.Positive(t, yields)
	require.Empty(t, s.Admin().Keys(t.Context(), "*:waits").Val())
}

// A member of a cycle that dies frees the others when its lease has ended; nobody yields to it
// in vain for ever.
func TestDeadlockWithTheDead(t *testing.T) {
	s := redistest.Start(t)
	p := redistest.Child(t, "service", "ADDR="+s.Addr(), "NAME=dead", "KEYS=a b")
	require.Equal(t, "holds a", p.ReadLine(10*time.Second))
	l := newTestLocker(t, s.Client(), WithTTL(5*time.Second))
	b := hold(t, l, "b")
	_, err := fmt.Fprintln(p.Stdin, "go")
	require.NoError(t, err)
	redistest.Eventually(t, 10*time.Second, "it waits for b, and says so", func() bool {
		return s.Admin().Exists(t.Context(), "{a}:waits").Val() == 1
	})
	p.Kill()
	require.NoError(t, s.Admin().PExpire(t.Context(), "a", 4*time.Second).Err())
	a, err := l.Acquire(b.Context(), "a", WithWait(30*time.Second))
	if err != nil { // its record was still there: aborting is harmless
		require.ErrorIs(t, err, ErrDeadlock)
		require.NoError(t, b.Release())
		a, err = l.Acquire(t.Context(), "a", WithWait(30*time.Second))
	}
	require.NoError(t, err)
	require.NoError(t, a.Release())
}

// On a Cluster, where the locks of a cycle are on different servers.
func TestDeadlockOnACluster(t *testing.T) {
	set := redistest.StartCluster(t, 3)
	for _, breaks := range []bool{false, true} {
		opts := []Option{WithDeadlockAfter(200 * time.Millisecond)}
		if breaks {
			opts = append(opts, WithDeadlockBreak())
		}
		var held []*Lock
		got := make(chan nested, 3)
		lockers := make([]*Locker, 3)
		for i := range lockers {
			lockers[i] = newTestLocker(t, set.Client(), append(opts, WithHolder(fmt.Sprint("flow-", i)))...)
			held = append(held, hold(t, lockers[i], fmt.Sprintf("%t:k%d", breaks, i)))
		}
		for i, l := range lockers {
			go func() { // ends with its Acquire
				k, err := l.Acquire(held[i].Context(), fmt.Sprintf("%t:k%d", breaks, (i+1)%3))
				got <- nested{flow: i, k: k, err: err}
			}()
		}
		for range held {
			r := <-got
			switch {
			case r.err == nil:
				require.NoError(t, r.k.Release())
			case breaks:
				require.ErrorIs(t, r.err, ErrLost)
				require.ErrorIs(t, context.Cause(held[r.flow].Context()), ErrLost)
				continue
			default:
				require.ErrorIs(t, r.err, ErrDeadlock)
			}
			require.NoError(t, held[r.flow].Release())
		}
	}
}

// C126: a flow without nested locks sends nothing for all this, however long it waits; and where
// the server forbids what is needed, waiting goes on without it.
func TestDeadlockDetectionIsQuiet(t *testing.T) {
	s := redistest.Start(t)
	c := aclUser(t, s, "~locks:*", "~{locks:*", "&holdfast:*", "+@all", "-hgetall", "-hset", "-time")
	l := newTestLocker(t, c, WithPrefix("locks:"), WithDeadlockAfter(20*time.Millisecond))
	plain := newTestLocker(t, s.Client(), WithDeadlockAfter(20*time.Millisecond))
	k := hold(t, plain, "k")
	s.ResetStats()
	_, err := plain.Acquire(t.Context(), "k", WithWait(300*time.Millisecond))
	require.ErrorIs(t, err, ErrNotAcquired)
	stats := s.CommandStats()
	require.Zero(t, stats["hgetall"])
	require.Empty(t, s.Admin().Keys(t.Context(), "*:waits").Val())
	require.NoError(t, k.Release())

	a := hold(t, l, "a", WithoutRenewal())
	b := hold(t, l, "b", WithoutRenewal())
	_, err = l.Acquire(a.Context(), "b", WithWait(300*time.Millisecond))
	require.NotErrorIs(t, err, ErrDeadlock)
	require.Error(t, err)
	_ = errors.Join(a.Release(), b.Release())
}
