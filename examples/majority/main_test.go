package main

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Every step goes as told.
func TestRun(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, run(ctx))
}
