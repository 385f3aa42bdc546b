package fencing_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
)

// memObjects is a store with conditional writes in memory.
type memObjects struct {
	mu      sync.Mutex
	objects map[string]fencing.Object
	version int
	pause   func()           // before and after each step
	written func(err *error) // after a write that took place; may change its answer
	tokens  []fencing.Token  // of all writes that took place
}

func (m *memObjects) wait() {
	if m.pause != nil {
		m.pause()
	}
}

func (m *memObjects) Read(_ context.Context, name string) (fencing.Object, error) {
	m.wait()
	defer m.wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.objects[name], nil
}

func (m *memObjects) WriteIf(_ context.Context, name string, o fencing.Object) (err error) {
	m.wait()
	defer m.wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.objects[name].Version != o.Version {
		return fmt.Errorf("precondition: %w", fencing.ErrConflict)
	}
	if m.objects == nil {
		m.objects = map[string]fencing.Object{}
	}
	m.version++
	o.Version = strconv.Itoa(m.version)
	m.objects[name] = o
	m.tokens = append(m.tokens, o.Claim.Token)
	if m.written != nil {
		m.written(&err)
	}
	return err
}

func add(text string) func([]byte) ([]byte, error) {
	return func(data []byte) ([]byte, error) { return append(data[:len(data):len(data)], text...), nil }
}

func TestWrite(t *testing.T) {
	m := &memObjects{}
	ctx := t.Context()
	require.NoError(t, fencing.Write(ctx, m, "o", 3, func(data []byte) ([]byte, error) {
		require.Nil(t, data)
		return []byte("a"), nil
	}))
	require.NoError(t, fencing.Write(ctx, m, "o", 3, add("b")))
	require.ErrorIs(t, fencing.Write(ctx, m, "o", 2, add("c")), fencing.ErrStale)
	require.ErrorIs(t, fencing.Write(ctx, m, "o", 3, add("c"), fencing.Once()), fencing.ErrStale)
	require.ErrorIs(t, fencing.Write(ctx, m, "o", 0, add("c")), fencing.ErrNoToken)
	require.Error(t, fencing.Write(ctx, m, "o", 4, nil))
	require.Error(t, fencing.Write(ctx, nil, "o", 4, add("c")))
	failed := errors.New("no change")
	require.Equal(t, failed, fencing.Write(ctx, m, "o", 4, func([]byte) ([]byte, error) { return nil, failed }))
	require.NoError(t, fencing.Write(ctx, m, "o", 3, add("d")), "4 has written nothing")
	require.NoError(t, fencing.Write(ctx, m, "o", 5, add("e"), fencing.Once(), fencing.By("x")))
	require.ErrorIs(t, fencing.Write(ctx, m, "o", 5, add("f"), fencing.By("y")), fencing.ErrStale)
	require.Equal(t, "abde", string(m.objects["o"].Data))
}

func TestEnter(t *testing.T) {
	m := &memObjects{}
	ctx := t.Context()
	require.NoError(t, fencing.Enter(ctx, m, "o", 3))
	require.NoError(t, fencing.Enter(ctx, m, "o", 3))
	require.Len(t, m.tokens, 1, "entered already")
	require.ErrorIs(t, fencing.Enter(ctx, m, "o", 2), fencing.ErrStale)
	require.NoError(t, fencing.Write(ctx, m, "o", 3, add("x")))
	require.NoError(t, fencing.Enter(ctx, m, "o", 4))
	require.Equal(t, "x", string(m.objects["o"].Data), "data stay")
	require.ErrorIs(t, fencing.Write(ctx, m, "o", 3, add("y")), fencing.ErrStale)
	require.ErrorIs(t, fencing.Enter(ctx, m, "o", 4, fencing.Once()), fencing.ErrStale)
}

// A write whose answer was lost, and which the client of the store then sent again, meets a
// conflict with itself: it took place, once, and nothing is changed twice.
func TestWriteLostAnswer(t *testing.T) {
	m := &memObjects{}
	m.written = func(err *error) { *err = fencing.ErrConflict }
	require.NoError(t, fencing.Write(t.Context(), m, "o", 1, add("x"), fencing.Once()))
	require.Equal(t, "x", string(m.objects["o"].Data))

	down := errors.New("no answer")
	m.written = func(err *error) { *err = down }
	err := fencing.Write(t.Context(), m, "o", 2, add("y"))
	require.ErrorIs(t, err, down)
	require.NotErrorIs(t, err, fencing.ErrStale)
	require.Len(t, m.tokens, 2, "it is not made again when it is open whether it was made")
}

// Conflicts without end end with ctx.
func TestWriteEndsWithContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memObjects{objects: map[string]fencing.Object{"o": {Version: "1"}}}
		reads := 0
		store := conflicting{m, &reads}
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, errors.New("my reason"))
		defer cancel()
		err := fencing.Write(ctx, store, "o", 1, add("x"))
		require.ErrorIs(t, err, fencing.ErrConflict)
		require.ErrorContains(t, err, "my reason")
		require.Less(t, reads, 1000, "with pauses")
		require.Greater(t, reads, 100)
	})
}

type conflicting struct {
	*memObjects
	reads *int
}

func (c conflicting) Read(ctx context.Context, name string) (fencing.Object, error) {
	*c.reads++
	return c.memObjects.Read(ctx, name)
}

func (c conflicting) WriteIf(context.Context, string, fencing.Object) error {
	return fencing.ErrConflict
}

// Whoever does not enter before it reads loses an update: the old holder's late write comes
// between the new one's read and its write, and is undone without a trace. With Enter it is
// refused, and knows it.
func TestLostUpdateWithoutEnter(t *testing.T) {
	for _, enters := range []bool{false, true} {
		m, ctx := &memObjects{}, t.Context()
		require.NoError(t, fencing.Write(ctx, m, "stock", 1, func([]byte) ([]byte, error) { return []byte("10"), nil }))
		if enters {
			require.NoError(t, fencing.Enter(ctx, m, "stock", 2))
		}
		read, err := m.Read(ctx, "stock")
		require.NoError(t, err)
		late := fencing.Write(ctx, m, "stock", 1, func([]byte) ([]byte, error) { return []byte("9"), nil })
		n, err := strconv.Atoi(string(read.Data))
		require.NoError(t, err)
		require.NoError(t, fencing.Write(ctx, m, "stock", 2, func([]byte) ([]byte, error) { return []byte(strconv.Itoa(n - 1)), nil }))
		got := string(m.objects["stock"].Data)
		require.Equal(t, "9", got)
		if enters {
			require.ErrorIs(t, late, fencing.ErrStale, "one was sold")
		} else {
			require.NoError(t, late, "two were sold, and one is missing: this is what Enter is for")
		}
	}
}

// Over any interleaving of holders that pause: tokens of writes never go down, and every
// write that was told as done is there once.
func TestWriteRandom(t *testing.T) {
	for range 100 {
		synctest.Test(t, func(t *testing.T) {
			m := &memObjects{pause: func() { time.Sleep(time.Duration(rand.IntN(10)) * time.Millisecond) }}
			m.written = func(err *error) {
				if rand.IntN(4) == 0 {
					*err = fencing.ErrConflict // as after a lost answer that was sent again
				}
			}
			var wg sync.WaitGroup
			var mu sync.Mutex
			done := map[string]bool{}
			for i := range 8 {
				wg.Go(func() { // ends after its writes
					time.Sleep(time.Duration(rand.IntN(100)) * time.Millisecond)
					for n := range 3 {
						word := fmt.Sprintf("<%d.%d>", i, n)
						err := fencing.Write(t.Context(), m, "o", fencing.Token(i+1), add(word))
						if err != nil && !errors.Is(err, fencing.ErrStale) {
							t.Error(err)
						}
						mu.Lock()
						done[word] = err == nil
						mu.Unlock()
					}
				})
			}
			wg.Wait()
			for i := 1; i < len(m.tokens); i++ {
				require.LessOrEqual(t, m.tokens[i-1], m.tokens[i])
			}
			text := string(m.objects["o"].Data)
			for word, ok := range done {
				if ok {
					require.Equal(t, 1, strings.Count(text, word), "%s in %s", word, text)
				}
			}
		})
	}
}
