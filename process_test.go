package holdfast

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/redistest"
)

const childTTL = time.Second

// childHolder holds a lock and, when it reads a line, says what it believes.
func childHolder() {
	c := redis.NewClient(&redis.Options{Addr: os.Getenv("ADDR")})
	l, err := New(c, WithTTL(childTTL), WithLogger(slog.New(slog.DiscardHandler)))
	check(err)
	k, err := l.Acquire(context.Background(), os.Getenv("KEY"))
	check(err)
	fmt.Println("held", k.Owner())
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		first := k.Err() // before anything else can have run
		<-k.Context().Done()
		cause := context.Cause(k.Context())
		fmt.Printf("lost=%t cause=%t release=%t\n", errors.Is(first, ErrLost), errors.Is(cause, ErrLost),
			errors.Is(k.Release(), ErrLost))
	}
}

func check(err error) {
	if err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
}

// C034, C057: a holder that was stopped for longer than its validity knows it at
// its first look, and does not touch the key that others have had since.
func TestStoppedHolderKnows(t *testing.T) {
	for _, retaken := range []bool{true, false} {
		t.Run(fmt.Sprintf("retaken=%t", retaken), func(t *testing.T) {
			s := redistest.Start(t)
			p := redistest.Child(t, "holder", "ADDR="+s.Addr(), "KEY=k")
			require.Contains(t, p.ReadLine(10*time.Second), "held")
			p.Stop()
			l := newTestLocker(t, s.Client(), WithTTL(5*time.Second))
			k, err := l.Acquire(t.Context(), "k") // waits for the child's lease to end
			require.NoError(t, err)
			if !retaken {
				require.NoError(t, k.Release())
			}
			s.ResetStats()
			_, err = fmt.Fprintln(p.Stdin, "look")
			require.NoError(t, err)
			p.Cont()
			require.Equal(t, "lost=true cause=true release=true", p.ReadLine(5*time.Second))
			if retaken {
				require.NoError(t, k.Err())
				require.Equal(t, k.Owner(), s.Admin().Get(t.Context(), "k").Val())
			} else {
				require.Zero(t, s.Admin().Exists(t.Context(), "k").Val(), "nothing is re-created")
			}
		})
	}
}

// childKilled takes and gives back locks until it is killed.
func childKilled() {
	l, err := New(redis.NewClient(&redis.Options{Addr: os.Getenv("ADDR")}), WithLogger(slog.New(slog.DiscardHandler)), WithTTL(300*time.Millisecond))
	check(err)
	fmt.Println("running")
	for {
		k, err := l.Acquire(context.Background(), "k")
		check(err)
		check(k.Release())
	}
}

// C041: value and TTL are one step: a holder killed at any moment leaves no key
// without expiry, and none beyond its TTL.
func TestKilledHolderLeavesNoKeyForEver(t *testing.T) {
	s := redistest.Start(t)
	for range 10 {
		p := redistest.Child(t, "killed", "ADDR="+s.Addr())
		require.Equal(t, "running", p.ReadLine(10*time.Second))
		for range 200 {
			require.NotEqual(t, time.Duration(-1), s.Admin().PTTL(t.Context(), "k").Val())
		}
		p.Kill()
		redistest.Eventually(t, 3*time.Second, "the key is gone", func() bool {
			return s.Admin().Exists(t.Context(), "k").Val() == 0
		})
	}
}

// childFIPS takes and gives back a lock where SHA-1 may not be computed.
func childFIPS() {
	l, err := New(redis.NewClient(&redis.Options{Addr: os.Getenv("ADDR")}), WithLogger(slog.New(slog.DiscardHandler)), WithTTL(time.Second))
	check(err)
	k, err := l.Acquire(context.Background(), "k", WithFencing())
	check(err)
	check(k.Extend(context.Background(), 2*time.Second))
	check(k.Release())
	check(l.Close())
	fmt.Println("fine")
}

// C119: it works under GODEBUG=fips140=only, with the scripts' text.
func TestFIPSOnly(t *testing.T) {
	s := redistest.Start(t)
	p := redistest.Child(t, "fips", "ADDR="+s.Addr(), "GODEBUG=fips140=only")
	require.Equal(t, "fine", p.ReadLine(10*time.Second))
	require.Zero(t, p.Wait())
	require.Zero(t, s.CommandStats()["evalsha"])
}
