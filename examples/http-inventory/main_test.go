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
	if os.Getenv(workerVariable) != "" {
		main()
		return
	}
	leaktest.Main(m)
}

// Every step goes as told: the refusal behind the middleware, and the oversold stock without.
func TestRun(t *testing.T) {
	t.Setenv("REDIS_URL", "")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, run(ctx))
}
