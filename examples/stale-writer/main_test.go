//go:build unix

package main

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/leaktest"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(workerVariable); role != "" {
		work(role)
		return
	}
	leaktest.Main(m)
}

// Every step goes as told: the refusal with tokens, and the oversold stock without.
func TestRun(t *testing.T) {
	t.Setenv("REDIS_URL", "")
	t.Setenv("DATABASE_URL", "")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, run(ctx))
}
