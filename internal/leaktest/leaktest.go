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

// patience is how long goroutines may take to end.
const patience = 5 * time.Second

// harmless are parts of stacks that belong to the testing package and the runtime.
var harmless = []string{
	"testing.(*M).", "testing.(*T).Run(", "testing.tRunner(", "testing.runTests(", "testing.runFuzzing(",
	"runtime.goexit0", "os/signal.signal_recv", "os/signal.loop", "runtime.ensureSigM", "leaktest.stacks(",
}

// Main runs the tests of a package, and fails when goroutines are left after them.
// Call it from TestMain; it does not return.
func Main(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if left := wait(nil); len(left) > 0 {
			fmt.Fprintf(os.Stderr, "leaktest: %d goroutines left:\n\n%s\n", len(left), strings.Join(left, "\n\n"))
			code = 1
		}
	}
	os.Exit(code)
}

// Check fails t when it ends with more goroutines than there are now.
func Check(t testing.TB) {
	t.Helper()
	before := map[string]bool{}
	for _, s := range stacks() {
		before[id(s)] = true
	}
	t.Cleanup(func() {
		if left := wait(before); len(left) > 0 {
			t.Errorf("%d goroutines left:\n\n%s", len(left), strings.Join(left, "\n\n"))
		}
	})
}

// wait returns the stacks of goroutines that are neither harmless nor in known,
// once there are none or patience is over.
func wait(known map[string]bool) (left []string) {
	for deadline := time.Now().Add(patience); ; {
		left = left[:0]
		for _, s := range stacks() {
			if !known[id(s)] && !isHarmless(s) {
				left = append(left, s)
			}
		}
		if len(left) == 0 || time.Now().After(deadline) {
			return left
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// id returns "goroutine 7".
func id(stack string) string {
	head, _, _ := strings.Cut(stack, " [")
	return head
}

func isHarmless(stack string) bool {
	for _, h := range harmless {
		if strings.Contains(stack, h) {
			return true
		}
	}
	return false
}

// stacks returns the stack of each goroutine but the calling one's.
func stacks() []string {
	buf := make([]byte, 1<<20)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			return strings.Split(strings.TrimSpace(string(buf[:n])), "\n\n")[1:]
		}
		buf = make([]byte, 2*len(buf))
	}
}
