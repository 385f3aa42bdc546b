package filefence

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/leaktest"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

func TestMain(m *testing.M) {
	redistest.RunChild(map[string]func(){"count": count})
	leaktest.Main(m)
}

// count adds one to an object until it is killed, and prints each number once it is there.
func count() {
	d, err := New(os.Getenv("DIR"))
	for err == nil {
		n := 0
		err = fencing.Write(context.Background(), d, "n", 1, func(data []byte) ([]byte, error) {
			n, _ = strconv.Atoi(strings.TrimSpace(string(data)))
			n++
			return fmt.Appendf(nil, "%200000d", n), nil
		})
		if err == nil {
			_, err = fmt.Println(n)
		}
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func newDir(t *testing.T) *Dir {
	t.Helper()
	d, err := New(t.TempDir())
	require.NoError(t, err)
	return d
}

func text(s string) func([]byte) ([]byte, error) {
	return func([]byte) ([]byte, error) { return []byte(s), nil }
}

func TestObjects(t *testing.T) {
	d, ctx := newDir(t), t.Context()
	o, err := d.Read(ctx, "o")
	require.NoError(t, err)
	require.Zero(t, o)
	require.NoError(t, fencing.Enter(ctx, d, "o", 2, fencing.By("me")))
	require.NoError(t, fencing.Write(ctx, d, "o", 2, text("a\nb\x00")))
	require.ErrorIs(t, fencing.Write(ctx, d, "o", 1, text("late")), fencing.ErrStale)
	require.ErrorIs(t, fencing.Write(ctx, d, "o", 2, text("twin"), fencing.By("you")), fencing.ErrStale)

	again, err := New(d.path)
	require.NoError(t, err)
	o, err = again.Read(ctx, "o")
	require.NoError(t, err)
	require.Equal(t, "a\nb\x00", string(o.Data))
	require.Equal(t, fencing.Claim{Token: 2, Owner: "me"}, o.Claim)

	require.ErrorIs(t, d.WriteIf(ctx, "o", fencing.Object{}), fencing.ErrConflict, "there is one")
	require.NoError(t, d.WriteIf(ctx, "o", o))
	require.ErrorIs(t, d.WriteIf(ctx, "o", o), fencing.ErrConflict, "the same data are another version")
	require.NoError(t, fencing.Write(ctx, d, "o", 1<<63-1, text("")))
	o, err = d.Read(ctx, "o")
	require.NoError(t, err)
	require.Empty(t, o.Data)
	require.Equal(t, fencing.Token(1<<63-1), o.Claim.Token)
}

func TestNames(t *testing.T) {
	d, ctx := newDir(t), t.Context()
	names := []string{"a", "A b", "../x", "/etc/passwd", "a/b", ".", "..", "ä🔒", "a\x00b", "a%2Fb", "lock-01", "x.next", "\xff"}
	for _, name := range names {
		require.NoError(t, fencing.Write(ctx, d, name, 1, text(name)), "%q", name)
	}
	for _, name := range names {
		o, err := d.Read(ctx, name)
		require.NoError(t, err)
		require.Equal(t, name, string(o.Data))
	}
	for _, name := range []string{"", strings.Repeat("x", 201), strings.Repeat("/", 67)} {
		_, err := d.Read(ctx, name)
		require.Error(t, err)
		require.Error(t, d.WriteIf(ctx, name, fencing.Object{}))
	}
	entries, err := filepath.Glob(filepath.Join(filepath.Dir(d.path), "*"))
	require.NoError(t, err)
	require.Equal(t, []string{d.path}, entries, "nothing outside")
}

// A damaged file is told, and not taken for an object that does not exist.
func TestDamage(t *testing.T) {
	d, ctx := newDir(t), t.Context()
	require.NoError(t, fencing.Write(ctx, d, "o", 5, text("data")))
	file := filepath.Join(d.path, "o.object")
	good, err := os.ReadFile(file)
	require.NoError(t, err)
	for _, bad := range []string{"", "x", "holdfast object 1\n", "holdfast object 1\n{}\n", string(good[:len(good)-1]), string(good) + "x"} {
		require.NoError(t, os.WriteFile(file, []byte(bad), 0o600))
		_, err := d.Read(ctx, "o")
		require.ErrorIs(t, err, fencing.ErrFormat)
		err = fencing.Write(ctx, d, "o", 4, text("late"))
		require.ErrorIs(t, err, fencing.ErrFormat)
		require.NotErrorIs(t, err, fencing.ErrStale)
	}
	_, err = New("")
	require.Error(t, err)
	_, err = New(file)
	require.Error(t, err)
}

// A writer that waits for another's lock heeds its context.
func TestLockHeedsContext(t *testing.T) {
	d := newDir(t)
	unlock, err := d.lock(t.Context(), "o")
	require.NoError(t, err)
	ctx, cancel := context.WithCancelCause(t.Context())
	failed := make(chan error)
	go func() { failed <- fencing.Write(ctx, d, "o", 1, text("x")) }() // ends with ctx
	reason := errors.New("enough")
	cancel(reason)
	require.ErrorIs(t, <-failed, reason)
	require.NoError(t, unlock())
	require.NoError(t, fencing.Write(t.Context(), d, "o", 1, text("x")))
}

// Goroutines with a Dir each, as processes have: nothing is lost, and no token goes down.
func TestConcurrentWriters(t *testing.T) {
	path, ctx := t.TempDir(), t.Context()
	var wg sync.WaitGroup
	var mu sync.Mutex
	done := 0
	for i := range 8 {
		wg.Go(func() { // ends after its writes
			d, err := New(path)
			for n := 0; n < 10 && err == nil; n++ {
				word := fmt.Sprintf("%d ", i+1)
				err = fencing.Write(ctx, d, "o", fencing.Token(i+1), func(data []byte) ([]byte, error) {
					return append(data, word...), nil
				})
				if err == nil {
					mu.Lock()
					done++
					mu.Unlock()
				}
			}
			if err != nil && !errors.Is(err, fencing.ErrStale) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	d, err := New(path)
	require.NoError(t, err)
	o, err := d.Read(ctx, "o")
	require.NoError(t, err)
	words := strings.Fields(string(o.Data))
	require.Len(t, words, done)
	last := 0
	for _, w := range words {
		n, err := strconv.Atoi(w)
		require.NoError(t, err)
		require.GreaterOrEqual(t, n, last)
		last = n
	}
	require.Equal(t, 8, last)
}

// Whoever is killed at any moment leaves a whole object, with all that was told as written,
// and no lock.
func TestKilledWriters(t *testing.T) {
	d := newDir(t)
	for range 15 {
		child := redistest.Child(t, "count", "DIR="+d.path)
		n, err := strconv.Atoi(child.ReadLine(20 * time.Second))
		require.NoError(t, err)
		child.Kill()
		o, err := d.Read(t.Context(), "n")
		require.NoError(t, err)
		got, err := strconv.Atoi(strings.TrimSpace(string(o.Data)))
		require.NoError(t, err)
		require.GreaterOrEqual(t, got, n)
	}
	require.NoError(t, fencing.Write(t.Context(), d, "n", 2, text("0")))
	left, err := filepath.Glob(filepath.Join(d.path, "*.next"))
	require.NoError(t, err)
	require.Empty(t, left)
}
