package holdfast

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/refusal"
)

// ask makes n calls of one try each for the locks, at the same time.
func ask(l *Locker, op operation, locks []*Lock, limit time.Duration) []error {
	errs := make([]error, len(locks))
	together(len(locks), func(i int) {
		c := &call{Context: context.Background(), l: l, op: op}
		c.request.Lease = locks[i].lease()
		errs[i] = c.run(nil, false, limit)
	})
	return errs
}

// held takes n locks.
func held(t *testing.T, l *Locker, n int) []*Lock {
	t.Helper()
	locks := make([]*Lock, n)
	for i := range locks {
		locks[i] = hold(t, l, fmt.Sprint("k", i))
	}
	return locks
}

// A release follows its acquisition, and each command runs once.
func TestPipelineOrder(t *testing.T) {
	_, p, c := proxied(t)
	l := newTestLocker(t, c)
	warm(t, l)
	p.ResetLog()
	cycles(t, l, 64, 20)
	taken := map[string]bool{} // by owner
	for _, cmd := range p.Commands() {
		switch cmd.Name() {
		case "SET":
			require.NotContains(t, taken, cmd.Args[2])
			taken[cmd.Args[2]] = true
		case "EVALSHA":
			require.True(t, taken[cmd.Args[7]], "released before, or twice")
			taken[cmd.Args[7]] = false
		}
	}
	require.Len(t, taken, 64*20)
}

// A connection that breaks in the middle of a batch fails what was not answered, and
// go-redis repeats none of it, though it may repeat 3 times.
func TestPipelineBroken(t *testing.T) {
	s, p, c := proxied(t, retries(3))
	l := newTestLocker(t, c)
	locks := held(t, l, 40)
	p.ResetLog()
	// As many flights as go by themselves are held back, so that the others gather.
	stuck := p.Inject(faultproxy.Rule{Match: faultproxy.Command("EVALSHA"), Times: fewFlights, Do: faultproxy.HoldReply()})
	p.Inject(faultproxy.Rule{Match: faultproxy.Command("EVALSHA"), Skip: 10, Times: 1, Do: faultproxy.DropReplyAndClose()})
	errs := ask(l, releaseOp, locks, 2*time.Second)
	stuck.Release()
	failed := 0
	for i, err := range errs {
		times := p.CountMatch(func(cmd []string) bool {
			return faultproxy.Command("EVALSHA")(cmd) && cmd[4] == locks[i].Owner()
		})
		require.LessOrEqual(t, times, 1)
		if err != nil {
			failed++
			_, refused := refusal.Text(err)
			require.False(t, refused)
			continue
		}
		require.Zero(t, s.Admin().Exists(t.Context(), locks[i].Key()).Val())
	}
	require.Greater(t, failed, fewFlights)
	require.Less(t, failed, 40)
	for i, k := range locks {
		if errs[i] != nil {
			_ = k.Release()
		}
		require.Zero(t, s.Admin().Exists(t.Context(), k.Key()).Val())
	}

	// Release tries again by itself, and knows that an earlier try may have run.
	locks = held(t, l, 40)
	p.Inject(faultproxy.Rule{Match: faultproxy.Command("EVALSHA"), Skip: 10, Times: 2, Do: faultproxy.DropReplyAndClose()})
	together(len(locks), func(i int) {
		if err := locks[i].Release(); err != nil {
			t.Error(err)
		}
	})
	require.Zero(t, s.Admin().DBSize(t.Context()).Val())
}

// Acquisitions in a batch that breaks are repeated by go-redis, and none is refused
// by its own first try.
func TestPipelineBrokenAcquire(t *testing.T) {
	for _, n := range []int{-1, 3} {
		s, p, c := proxied(t, retries(n))
		l := newTestLocker(t, c)
		warm(t, l)
		p.Inject(faultproxy.Rule{Match: faultproxy.Command("SET"), Skip: 12, Times: 2, Do: faultproxy.DropReplyAndClose()})
		together(60, func(i int) {
			k, err := l.Acquire(t.Context(), fmt.Sprint("k", i), WithWait(3*time.Second))
			if err != nil {
				t.Error(err)
				return
			}
			if got := s.Admin().Get(context.Background(), k.Key()).Val(); got != k.Owner() {
				t.Errorf("%q has %q", k.Key(), got)
			}
			if err := k.Release(); err != nil {
				t.Error(err)
			}
		})
		require.NoError(t, l.Close())
		require.Zero(t, s.Admin().DBSize(t.Context()).Val())
	}
}

// Releases at the same time do not keep go-redis from repeating acquisitions.
func TestPipelineBrokenAmongReleases(t *testing.T) {
	_, p, c := proxied(t, retries(3))
	l := newTestLocker(t, c)
	locks := held(t, l, 40)
	p.Inject(faultproxy.Rule{Match: faultproxy.Command("SET"), Skip: 8, Times: 1, Do: faultproxy.DropReplyAndClose()})
	together(2*len(locks), func(i int) {
		k := locks[i/2]
		if i%2 == 0 {
			var err error
			if k, err = l.TryAcquire(context.Background(), fmt.Sprint("other", i)); err != nil {
				t.Error(err)
				return
			}
		}
		if err := k.Release(); err != nil {
			t.Error(err)
		}
	})
}

// A server that has lost its scripts gets their texts, for each command.
func TestPipelineNoScript(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client())
	for range 5 {
		locks := held(t, l, 40)
		require.NoError(t, s.Admin().ScriptFlush(t.Context()).Err())
		together(len(locks), func(i int) {
			if err := locks[i].Release(); err != nil {
				t.Error(err)
			}
		})
		require.Zero(t, s.Admin().DBSize(t.Context()).Val())
	}
}

// Each command keeps its own answer.
func TestPipelineOwnErrors(t *testing.T) {
	s := redistest.Start(t)
	l := newTestLocker(t, s.Client())
	locks := held(t, l, 60)
	for i, k := range locks {
		switch i % 3 {
		case 1:
			require.NoError(t, s.Admin().Del(t.Context(), k.Key()).Err())
		case 2:
			require.NoError(t, s.Admin().Set(t.Context(), k.Key(), "other/1", 0).Err())
		}
	}
	for i, err := range ask(l, releaseOp, locks, time.Second) {
		var lost *LostError
		switch i % 3 {
		case 0:
			require.NoError(t, err)
		case 1:
			require.ErrorAs(t, err, &lost)
			require.Equal(t, LostGone, lost.Reason)
		case 2:
			require.ErrorAs(t, err, &lost)
			require.Equal(t, LostTaken, lost.Reason)
		}
	}
}

// A connection that hangs delays the commands on it, and the others by a moment.
func TestPipelineOneHangs(t *testing.T) {
	_, p, c := proxied(t)
	l := newTestLocker(t, c)
	warm(t, l)
	for n := range fewFlights + 2 { // also when all flights of the lane hang
		stuck := p.Inject(faultproxy.Rule{Match: faultproxy.Command("SET"), Times: n, Do: faultproxy.HoldReply()})
		if n == 0 {
			stuck.Remove()
		}
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				k, err := l.Acquire(context.Background(), fmt.Sprint("stuck", i))
				if err != nil {
					t.Error(err)
				} else if err := k.Release(); err != nil {
					t.Error(err)
				}
			})
			redistest.Eventually(t, time.Second, "it hangs", func() bool { return stuck.Fired() > i })
		}
		start := time.Now()
		cycles(t, l, 30, 3)
		require.Less(t, time.Since(start), 2500*time.Millisecond, "%d: the hung ones end after 3 s", n)
		stuck.Release()
		wg.Wait()
	}
}

// The end of one caller ends nothing for the others in its batch.
func TestPipelineOneEnds(t *testing.T) {
	s, p, c := proxied(t)
	l := newTestLocker(t, c)
	warm(t, l)
	p.Slow(20 * time.Millisecond)
	together(60, func(i int) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		if i%2 == 0 {
			time.AfterFunc(time.Duration(i)*time.Millisecond, cancel)
		}
		k, err := l.Acquire(ctx, fmt.Sprint("k", i))
		if i%2 == 0 {
			if err == nil {
				_ = k.Release()
			}
			return
		}
		if err != nil {
			t.Error(err)
		} else if err := k.Release(); err != nil {
			t.Error(err)
		}
	})
	p.Slow(0)
	redistest.Eventually(t, 3*time.Second, "no key is left", func() bool {
		return s.Admin().DBSize(context.Background()).Val() == 0
	})
}

// A pool of one connection is enough for any number of goroutines.
func TestPipelineSmallPool(t *testing.T) {
	for _, piped := range []int{-1, 0, 1} {
		s := redistest.Start(t)
		l := newTestLocker(t, s.Client(func(o *redis.Options) { o.PoolSize, o.PipelinePoolSize = 1, piped }))
		cycles(t, l, 64, 20)
		require.NoError(t, l.Close())
	}
}
