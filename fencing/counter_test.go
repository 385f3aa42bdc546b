package fencing_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

func newCounter(t *testing.T, client redis.UniversalClient) *fencing.Counter {
	t.Helper()
	c, err := fencing.NewCounter(client)
	require.NoError(t, err)
	return c
}

// Many draw at once, also as holders of a lock on the same key: no number comes twice, and
// each of them sees its own numbers grow.
func TestCounter(t *testing.T) {
	server := redistest.Start(t)
	client := server.Client()
	counter := newCounter(t, client)
	first, err := counter.Next(t.Context(), "order:1")
	require.NoError(t, err)
	require.EqualValues(t, 1, first)
	locker, err := holdfast.New(client, holdfast.WithFencing(), holdfast.WithPrefix("order:"))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, locker.Close()) })

	const goroutines, each = 8, 50
	drawn := make([][]fencing.Token, goroutines)
	var wg sync.WaitGroup
	for i := range drawn {
		wg.Go(func() { // ends with its draws
			for range each {
				token, err := counter.Next(t.Context(), "order:1")
				if i == 0 {
					err = locker.Do(t.Context(), "1", func(ctx context.Context) error {
						token, _ = fencing.FromContext(ctx)
						return nil
					})
				}
				if err != nil {
					t.Error(err)
					return
				}
				drawn[i] = append(drawn[i], token)
			}
		})
	}
	wg.Wait()
	var all []fencing.Token
	for _, own := range drawn {
		require.True(t, slices.IsSorted(own))
		all = append(all, own...)
	}
	slices.Sort(all)
	require.Len(t, slices.Compact(all), goroutines*each, "no number twice")
	require.EqualValues(t, -1, client.PTTL(t.Context(), "{order:1}:fence").Val(), "it stays")
	other, err := counter.Next(t.Context(), "order:2")
	require.NoError(t, err)
	require.EqualValues(t, 1, other)
}

// The warning of the documentation: a counter that was lost gives old numbers again, and the
// resource refuses them.
func TestCounterLost(t *testing.T) {
	server := miniredis.RunT(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	counter := newCounter(t, client)
	gate, err := fencing.NewGate()
	require.NoError(t, err)
	for range 2 {
		token, err := counter.Next(t.Context(), "x")
		require.NoError(t, err)
		require.NoError(t, gate.Enter(t.Context(), "x", token))
	}
	server.FlushAll()
	token, err := counter.Next(t.Context(), "x")
	require.NoError(t, err)
	require.EqualValues(t, 1, token)
	require.ErrorIs(t, gate.Enter(t.Context(), "x", token), fencing.ErrStale)
}

func TestCounterErrors(t *testing.T) {
	_, err := fencing.NewCounter(nil)
	require.Error(t, err)
	_, err = fencing.NewCounter((*redis.Client)(nil))
	require.Error(t, err)

	server := miniredis.RunT(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr(), MaxRetries: -1})
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	counter := newCounter(t, client)
	next := func(ctx context.Context, key string) error {
		token, err := counter.Next(ctx, key)
		require.Error(t, err)
		require.Zero(t, token)
		return err
	}
	_ = next(t.Context(), "")
	_ = next(t.Context(), "a}b")
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("the reason"))
	err = next(ended, "x")
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "the reason")
	require.False(t, server.Exists("{x}:fence"), "nothing was sent")

	require.NoError(t, server.Set("{x}:fence", "-1"))
	require.ErrorContains(t, next(t.Context(), "x"), "given 0")
	require.NoError(t, server.Set("{x}:fence", "no number"))
	_ = next(t.Context(), "x")
	require.NoError(t, server.Set("{x}:fence", "9223372036854775807"))
	_ = next(t.Context(), "x")
	server.SetError("LOADING it loads")
	require.ErrorContains(t, next(t.Context(), "x"), "LOADING")
}
