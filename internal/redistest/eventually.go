package redistest

import (
	"testing"
	"time"
)

// Eventually waits until cond is true, which it calls on its own goroutine each few
// milliseconds, and fails t after within, naming what was waited for. cond must not
// block for long: it is not interrupted.
func Eventually(t testing.TB, within time.Duration, what string, cond func() bool) {
	t.Helper()
	if !poll(within, cond) {
		t.Fatalf("redistest: not within %v: %s", within, what)
	}
}

// poll reports whether cond became true in time. The last look is after the time is
// over, so that a slow machine does not miss what did happen.
func poll(within time.Duration, cond func() bool) bool {
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for deadline := time.Now().Add(within); ; <-ticker.C {
		over := time.Now().After(deadline)
		if cond() {
			return true
		}
		if over {
			return false
		}
	}
}
