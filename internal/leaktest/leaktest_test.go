package leaktest

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// leakVariable makes TestLeakForMain leak, in the child that TestMainExitCode runs.
const leakVariable = "HOLDFAST_LEAKTEST_LEAK"

func TestMain(m *testing.M) { Main(m) }

// recorder is a test whose end is the call of finish.
type recorder struct {
	testing.TB
	cleanups []func()
	errors   []string
}

func (r *recorder) Helper()          {}
func (r *recorder) Cleanup(f func()) { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Error(args ...any) {
	r.errors = append(r.errors, fmt.Sprint(args...))
}

func (r *recorder) finish() {
	for i := len(r.cleanups) - 1; i >= 0; i-- {
		r.cleanups[i]()
	}
}

func leakUntil(end <-chan struct{}) {
	go func() { <-end }() // ended by the test, which closes end
}

func TestCheckFindsLeak(t *testing.T) {
	end := make(chan struct{})
	defer close(end)
	r := &recorder{TB: t}
	check(r, 50*time.Millisecond)
	leakUntil(end)
	r.finish()
	if len(r.errors) != 1 || !strings.Contains(r.errors[0], "leaktest.leakUntil") {
		t.Fatalf("want the stack of leakUntil: %q", r.errors)
	}
}

func TestCheckWaitsAndForgives(t *testing.T) {
	before, during := make(chan struct{}), make(chan struct{})
	defer close(before)
	leakUntil(before)
	r := &recorder{TB: t}
	Check(r)
	leakUntil(during)
	time.AfterFunc(50*time.Millisecond, func() { close(during) })
	r.finish()
	if len(r.errors) != 0 {
		t.Fatal(r.errors)
	}
}

func TestCheckInParallelSubtests(t *testing.T) {
	Check(t)
	for range 3 {
		t.Run("sub", func(t *testing.T) { t.Parallel() })
	}
}

// TestLeakForMain leaks in the child of TestMainExitCode only.
func TestLeakForMain(*testing.T) {
	if os.Getenv(leakVariable) != "" {
		leakUntil(nil)
	}
}

func TestMainExitCode(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, "-test.run=^TestLeakForMain$")
	cmd.Env = append(os.Environ(), leakVariable+"=1")
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), "leaktest.leakUntil") {
		t.Fatalf("want exit code 1 and the stack of leakUntil: %v\n%s", err, out)
	}
}
