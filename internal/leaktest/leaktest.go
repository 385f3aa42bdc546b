// Package leaktest fails tests that leave goroutines behind.
package leaktest

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

const (
	patience = 5 * time.Second // how long goroutines may take to end
	interval = 5 * time.Millisecond
)

// harmless begin the frames by which goroutines of the testing package, the runtime
// and os/signal are known. They end no sooner than the process.
var harmless = []string{
	"testing.(*M).", "testing.(*T).Run(", "testing.(*B).run", "testing.(*B).launch(", "testing.tRunner(",
	"testing.runTests(", "testing.runFuzzing(", "testing.runFuzzTests(",
	"runtime.goexit0(", "runtime.ensureSigM", "runtime.runFinalizers(", "runtime.runCleanups(",
	"runtime.ReadTrace(", "runtime/pprof.profileWriter(", "runtime/trace.", "os/signal.signal_recv(", "os/signal.loop(",
}

// Main runs the tests of a package, then waits for the goroutines that they left,
// and exits: with 1 and the stacks on stderr when some do not end, with the exit
// code of the tests otherwise. Call it last in TestMain; it does not return.
func Main(m *testing.M) {
	code := m.Run()
	if left := wait(nil, patience); len(left) > 0 {
		fmt.Fprintln(os.Stderr, report(left))
		code = 1
	}
	os.Exit(code)
}

// Check fails t when goroutines that were started after the call are still there at
// the end of t, which waits some time for them. What t cleans up by Cleanup after the
// call to Check counts as ended; so call it first. It cannot tell the goroutines of
// tests that run in parallel from those of t.
func Check(t testing.TB) {
	t.Helper()
	check(t, patience)
}

func check(t testing.TB, limit time.Duration) {
	t.Helper()
	before := map[string]bool{}
	for _, s := range stacks() {
		before[id(s)] = true
	}
	t.Cleanup(func() {
		t.Helper()
		if left := wait(before, limit); len(left) > 0 {
			t.Error(report(left))
		}
	})
}

func report(left []string) string {
	return fmt.Sprintf("leaktest: %d goroutines left:\n\n%s", len(left), strings.Join(left, "\n\n"))
}

// wait returns the stacks of goroutines that are neither harmless nor in known, once
// there are none or limit is over.
func wait(known map[string]bool, limit time.Duration) []string {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for deadline := time.Now().Add(limit); ; <-ticker.C {
		var left []string
		for _, s := range stacks() {
			if !known[id(s)] && !isHarmless(s) {
				left = append(left, s)
			}
		}
		if len(left) == 0 || time.Now().After(deadline) {
			return left
		}
	}
}

// id returns "goroutine 7". The runtime does not use a number twice.
func id(stack string) string {
	head, _, _ := strings.Cut(stack, " [")
	return head
}

// isHarmless looks at the beginnings of lines only: a goroutine that a test started
// has the test's name in its last lines, and "testing" possibly in its arguments.
func isHarmless(stack string) bool {
	for line := range strings.Lines(stack) {
		for _, h := range harmless {
			if strings.HasPrefix(line, h) {
				return true
			}
		}
	}
	return false
}

// stacks returns the stack of each goroutine but the calling one's.
func stacks() []string {
	for buf := make([]byte, 1<<20); ; buf = make([]byte, 2*len(buf)) {
		if n := runtime.Stack(buf, true); n < len(buf) {
			return strings.Split(strings.TrimSpace(string(buf[:n])), "\n\n")[1:]
		}
	}
}
