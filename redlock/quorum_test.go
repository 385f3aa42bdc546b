package redlock

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/refusal"
)

// majorityWithin reports whether a majority of n, as a set of instances, lies within set. A
// majority is more than half; nothing else is known of it here.
func majorityWithin(n int, set uint) bool {
	for m := range uint(1) << n {
		if 2*bits.OnesCount(m) > n && m&^set == 0 {
			return true
		}
	}
	return false
}

// C070: what counts say follows from the sets of those who voted, for all counts of up to
// nine instances.
func TestCounts(t *testing.T) {
	for i, want := range []int{1, 2, 2, 3, 3, 4, 4, 5, 5} {
		n := i + 1
		require.Equal(t, want, needed(n), n)
		for code := range (n + 1) * (n + 1) * (n + 1) {
			agree, refuse, fail := code%(n+1), code/(n+1)%(n+1), code/(n+1)/(n+1)
			if agree+refuse+fail > n {
				continue
			}
			c := count{of: n}
			add := func(v vote, times int) (set uint) { // the next instances
				first := c.yes + c.no + c.faults
				for range times {
					c.add(v)
				}
				return 1<<(first+times) - 1<<first
			}
			yeses, noes, faults := add(yes, agree), add(no, refuse), add(fault, fail)
			c.add(pending) // is none
			all := uint(1)<<n - 1
			require.Equal(t, majorityWithin(n, yeses), c.won(), c)
			require.Equal(t, !majorityWithin(n, all&^noes&^faults), c.impossible(), c)
			require.Equal(t, !majorityWithin(n, all&^noes), c.refused(), c)
			require.Equal(t, yeses|noes|faults == all, c.complete(), c)
		}
	}
}

// Any two majorities share an instance, and one vote less would not do.
func TestMajoritiesIntersect(t *testing.T) {
	for n := 1; n <= 9; n++ {
		least, apart := needed(n), false
		for a := range uint(1) << n {
			for b := range uint(1) << n {
				if fewer := min(bits.OnesCount(a), bits.OnesCount(b)); a&b == 0 {
					require.Less(t, fewer, least, "%b and %b of %d", a, b, n)
					apart = apart || fewer == least-1
				}
			}
		}
		require.True(t, apart, n)
	}
}

// toldLink is a simLink that answers with errors when it is told to.
type toldLink struct {
	simLink
	mu     sync.Mutex
	err    error         // of each request for the lock
	delay  time.Duration // of each answer
	theirs string        // what somebody has put there
	sent   atomic.Int64  // flights
}

// theirs tells a toldLink that somebody has the lock of "k" there, with this value.
type theirs string

func (v theirs) Error() string { return "held: " + string(v) }

// tell sets what is answered, and how late. nil is what the instance itself answers.
func (l *toldLink) tell(err error, delay time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.server.mu.Lock()
	defer l.server.mu.Unlock()
	if l.server.keys["k"].value == l.theirs {
		delete(l.server.keys, "k")
	}
	value, held := err.(theirs)
	if l.err, l.delay, l.theirs = err, delay, string(value); held {
		l.err = nil
		l.server.put("k", l.theirs, time.Hour)
	}
}

func (l *toldLink) send(ctx context.Context, requests []*request) {
	l.mu.Lock()
	err, delay := l.err, l.delay
	l.sent.Add(1)
	l.mu.Unlock()
	time.Sleep(delay) // virtual time
	var rest []*request
	for _, r := range requests {
		if r.kind == take && err != nil {
			r.err = err
		} else {
			rest = append(rest, r)
		}
	}
	if len(rest) > 0 {
		l.simLink.send(ctx, rest)
	}
}

// toldLocker returns a Locker on n instances that can be told what to answer.
func toldLocker(t *testing.T, n int, opts ...holdfast.Option) (*holdfast.Locker, []*toldLink) {
	var links []*toldLink
	s := &store{connect: func(s *store) (all []link) {
		for _, server := range simServers(n) {
			l := &toldLink{simLink: simLink{server, &simNet{}, s}}
			links, all = append(links, l), append(all, l)
		}
		return all
	}}
	l, err := holdfast.NewWithStore(s, append([]holdfast.Option{quiet}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l, links
}

// graded is a server's refusal as links report it.
func graded(text string) error { return refusal.Grade(refusal.Reply(text), false, false) }

// An error matches ErrNotAcquired if others have the lock on an instance that made a majority
// impossible, and else ErrUnavailable; never both. For all answers of up to five instances, in
// all orders: what was not waited for does not count. Each that did not agree is named.
func TestWhyNotAcquired(t *testing.T) {
	for n := 1; n <= 5; n++ {
		for code := range []int{1, 3, 9, 27, 81, 243}[n] {
			synctest.Test(t, func(t *testing.T) {
				l, links := toldLocker(t, n)
				won, others, noes, yeses, digits := false, false, 0, 0, code
				for i, link := range links {
					err := []error{nil, theirs("x/1"), errDown}[digits%3]
					digits /= 3
					link.tell(err, time.Duration(i+1)*time.Millisecond)
					switch {
					case won || noes > n-needed(n): // decided
					case err == nil:
						yeses++
						won = yeses == needed(n)
					default:
						noes++
						others = others || err != errDown
					}
				}
				k, err := l.TryAcquire(t.Context(), "k")
				if won {
					require.NoError(t, err)
					require.NoError(t, k.Release())
					return
				}
				require.Equal(t, others, errors.Is(err, holdfast.ErrNotAcquired), "%d: %v", code, err)
				require.Equal(t, !others, errors.Is(err, holdfast.ErrUnavailable), "%d: %v", code, err)
				var q *QuorumError
				require.ErrorAs(t, err, &q)
				require.Equal(t, []int{yeses, needed(n)}, []int{q.Votes, q.Needed})
				require.Len(t, q.Nodes, n-yeses)
				for i, node := range q.Nodes {
					require.True(t, i == 0 || node.Index > q.Nodes[i-1].Index)
					require.Equal(t, links[node.Index].name(), node.Addr)
					require.Error(t, node.Err)
				}
			})
		}
	}
}

// C082, C085: the texts name each instance with what it answered, and the errors match
// through the chain: those of instances, and the one who has most, if others have it at all.
func TestQuorumErrors(t *testing.T) {
	held := func(holder, id string, left time.Duration) answer {
		return answer{vote: no, err: &holdfast.HeldError{Key: "k", Holder: holder, TTL: left}, value: holder + id}
	}
	fails := func(err error) answer { return answer{vote: fault, err: err} }
	const second = time.Second
	none := holdfast.HeldError{}
	for _, c := range []struct {
		answers []answer
		text    string
		held    holdfast.HeldError
		ran     bool
	}{
		{[]answer{fails(errDown), fails(graded("OOM command not allowed")), {vote: yes}},
			"1 of the 2 votes needed: node-i: connection refused; node-ii: OOM command not allowed", none, true},
		{[]answer{held("x", "/1", second*3/2000), fails(errDown), fails(&YoungError{Left: 2 * second})},
			`0 of the 2 votes needed: node-i: held by "x" for another 2ms; node-ii: connection refused; ` +
				"node-iii: has not been up for long enough to vote, for another 2s", none, false},
		{[]answer{held("x", "/1", -1), held("", "", 0), {err: errNotAwaited}},
			`0 of the 2 votes needed: node-i: held by "x"; node-ii: held by ""; node-iii: its answer was not waited for`,
			holdfast.HeldError{Key: "k", Holder: "x", TTL: -1}, true},
		{[]answer{held("x", "/1", second), held("y", "/1", 2*second), held("y", "/1", 3*second)},
			"", holdfast.HeldError{Key: "k", Holder: "y", TTL: 3 * second}, false},
		{[]answer{held("x", "/1", second), held("y", "/1", 3*second), held("y", "/1", 2*second)},
			"", holdfast.HeldError{Key: "k", Holder: "y", TTL: 3 * second}, false},
		{[]answer{held("x", "/1", second), held("x", "/2", second), held("y", "/1", second), held("y", "/1", second), {vote: yes}},
			"", holdfast.HeldError{Key: "k", Holder: "y", TTL: second}, true},
	} {
		_, s := simLocker(t, simServers(len(c.answers)), &simNet{}, quiet)
		count := count{of: len(c.answers)}
		for _, a := range c.answers {
			count.add(a.vote)
		}
		err := fmt.Errorf("outside: %w", s.failure("acquire", count, c.answers))
		q := (*QuorumError)(nil)
		require.ErrorAs(t, err, &q)
		require.Contains(t, q.Error(), "redlock: acquire: "+c.text)
		require.Equal(t, c.ran, q.MayHaveRun())
		most := &holdfast.HeldError{}
		require.Equal(t, c.held != none, errors.As(err, &most), q)
		require.Equal(t, c.held != none, errors.Is(err, holdfast.ErrNotAcquired), q)
		require.Equal(t, c.held, *most, q)
		for i, a := range c.answers {
			if a.vote == fault {
				require.ErrorIs(t, err, a.err)
				require.Contains(t, err.Error(), NodeError{i, s.nodes[i].link.name(), a.err}.Error())
			}
		}
	}
}

// Split votes are asked for again after a random pause; a lock that one has after the pauses
// of everybody who waits.
func TestPauseAfterSplitVotes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, links := toldLocker(t, 5)
		for _, split := range []bool{true, false} {
			pauses := map[time.Duration]bool{}
			for range 20 {
				for i, link := range links[:3] {
					value := theirs("x/1")
					if split && i == 0 {
						value = "y/1"
					}
					link.tell(value, time.Millisecond)
				}
				_, err := l.TryAcquire(t.Context(), "k")
				var q *QuorumError
				require.ErrorAs(t, err, &q)
				require.Equal(t, split, q.RetryAfter() > 0)
				require.LessOrEqual(t, q.RetryAfter(), 20*time.Millisecond)
				pauses[q.RetryAfter()] = true
				time.Sleep(time.Second) // virtual time: what was taken is given back
			}
			require.Equal(t, split, len(pauses) > 10, pauses)
		}
	})
}

// C129: too many instances that refuse for good end a waiting Acquire at once; a minority of
// them, or any number of others, do not: it goes on, and gets the lock when it can.
func TestFinalRefusals(t *testing.T) {
	held, final, denied, passing := theirs("x/1"), graded("NOPERM no permissions"), graded("NOAUTH Authentication required."), graded("LOADING")
	for _, c := range []struct {
		errs []error
		ends bool
	}{
		{[]error{final, denied, final, nil, nil}, true},
		{[]error{final, denied, final, denied, final}, true},
		{[]error{final, denied, errDown, nil, nil}, false},
		{[]error{final, denied, passing, passing, nil}, false},
		{[]error{errDown, passing, errDown, nil, nil}, false},
		{[]error{final, denied, held, held, held}, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			l, links := toldLocker(t, 5)
			for i, err := range c.errs {
				links[i].tell(err, time.Duration(i+1)*time.Millisecond)
			}
			start := time.Now()
			time.AfterFunc(time.Second, func() { // it heals
				for _, link := range links[2:] {
					link.tell(nil, 0)
				}
			})
			k, err := l.Acquire(t.Context(), "k", holdfast.WithWait(time.Minute))
			if c.ends {
				require.ErrorIs(t, err, holdfast.ErrUnavailable)
				require.ErrorIs(t, err, final)
				require.ErrorIs(t, err, denied)
				require.Equal(t, 3*time.Millisecond, time.Since(start), "the third is one too many")
				return
			}
			require.NoError(t, err)
			require.GreaterOrEqual(t, time.Since(start), time.Second)
			require.NoError(t, k.Release())
		})
	}
}

// C089: who waits asks at most twenty times a second whatever instances answer, also when a
// minority fails and others have the lock, and when a majority fails and the rest agrees.
func TestWaitingIsCheapWithFaults(t *testing.T) {
	held, fails := theirs("x/1"), graded("LOADING")
	for _, errs := range [][]error{{held, held, held}, {held, held, nil}, {fails, held, held}, {fails, fails, nil}, {fails, fails, fails}} {
		t.Run(fmt.Sprint(errs), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, links := toldLocker(t, len(errs))
				for i, link := range links {
					link.tell(errs[i], time.Duration(i+1)*time.Millisecond)
				}
				const seconds = 5
				_, err := l.Acquire(t.Context(), "k", holdfast.WithWait(seconds*time.Second))
				require.Error(t, err)
				for _, link := range links { // an attempt is two, if it has to give something back
					require.LessOrEqual(t, link.sent.Load(), int64(2*20*seconds))
				}
			})
		})
	}
}

// C070, C071: with each set of instances that can be reached, of up to seven, the lock is taken
// exactly if they are a majority of all; nothing is left of a try, and when the others are
// back it is taken.
func TestReachableMajority(t *testing.T) {
	for n := 1; n <= 7; n++ {
		for set := range uint(1) << n {
			synctest.Test(t, func(t *testing.T) {
				servers, net := simServers(n), &simNet{}
				for i, s := range servers {
					net.set(s.addr, set&(1<<i) == 0)
				}
				l, _ := simLocker(t, servers, net, quiet)
				k, err := l.TryAcquire(t.Context(), "k")
				if bits.OnesCount(set) >= needed(n) {
					require.NoError(t, err, "%b of %d", set, n)
					require.NoError(t, k.Extend(t.Context(), time.Minute/2))
					require.NoError(t, k.Release())
				} else {
					require.ErrorIs(t, err, holdfast.ErrUnavailable, "%b of %d", set, n)
				}
				time.Sleep(time.Second) // virtual time
				for _, s := range servers {
					require.Empty(t, s.all())
					net.set(s.addr, false)
				}
				require.NoError(t, l.Do(t.Context(), "k", func(ctx context.Context) error { return ctx.Err() }))
			})
		}
	}
}

// C071: who sees only a minority, from the start or since, never gets the lock, held or free,
// while another one who sees all of them always does; and no lock of it is taken by that.
func TestPartitionedClient(t *testing.T) {
	for n := 2; n <= 7; n++ {
		synctest.Test(t, func(t *testing.T) {
			servers, part := simServers(n), &simNet{}
			for _, s := range servers[:needed(n)] {
				part.set(s.addr, true)
			}
			cut, _ := simLocker(t, servers, part, quiet)
			whole, _ := simLocker(t, servers, &simNet{}, quiet)
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() { // ended by cancel
				if _, err := cut.Acquire(ctx, "k"); !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			})
			for range 200 {
				k, err := whole.Acquire(t.Context(), "k", holdfast.WithWait(time.Minute))
				require.NoError(t, err)
				_, err = cut.TryAcquire(t.Context(), "k")
				require.Error(t, err)
				time.Sleep(rand.N(20 * time.Millisecond)) // virtual time
				require.NoError(t, k.Err())
				require.NoError(t, k.Release())
				_, err = cut.TryAcquire(t.Context(), "k")
				require.Error(t, err)
			}
			cancel()
			wg.Wait()
		})
	}
}
