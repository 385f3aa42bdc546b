package fencing_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestContextCarriesToken(t *testing.T) {
	_, ok := fencing.FromContext(t.Context())
	require.False(t, ok)

	ctx := fencing.NewContext(t.Context(), 7)
	got, ok := fencing.FromContext(ctx)
	require.True(t, ok)
	require.Equal(t, fencing.Token(7), got)

	type key struct{}
	child, cancel := context.WithCancel(context.WithValue(ctx, key{}, 1))
	cancel()
	got, ok = fencing.FromContext(child)
	require.True(t, ok, "children carry it, ended or not")
	require.Equal(t, fencing.Token(7), got)
}

func TestInnermostTokenCounts(t *testing.T) {
	outer := fencing.NewContext(t.Context(), 1)
	inner := fencing.NewContext(outer, 2)
	got, _ := fencing.FromContext(inner)
	require.Equal(t, fencing.Token(2), got)
	got, _ = fencing.FromContext(outer)
	require.Equal(t, fencing.Token(1), got)
}

func TestZeroTokenIsCarried(t *testing.T) {
	got, ok := fencing.FromContext(fencing.NewContext(t.Context(), 0))
	require.True(t, ok)
	require.Zero(t, got)
}
