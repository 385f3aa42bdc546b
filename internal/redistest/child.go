package redistest

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"
)

const (
	childVariable = "HOLDFAST_CHILD" // names the function that a child process runs
	childLimit    = time.Minute      // within which Wait must see it end
	longestLine   = 1 << 20
)

// RunChild runs the function that Child named, if this process is a child, and exits
// with 0 after it. Call it first in TestMain.
func RunChild(functions map[string]func()) {
	name := os.Getenv(childVariable)
	if name == "" {
		return
	}
	f := functions[name]
	if f == nil {
		fmt.Fprintf(os.Stderr, "redistest: there is no child function %q\n", name)
		os.Exit(2)
	}
	f()
	os.Exit(0)
}

// Process is a child process of a test, killed at the end of the test. Its methods
// are for the test's goroutine.
type Process struct {
	// Stdin is what the child reads. It is an io.Closer too.
	Stdin io.Writer

	t     testing.TB
	name  string
	proc  *process
	out   *os.File
	lines chan string
	quit  chan struct{} // closed when nobody will read lines any more
}

// lockedBuffer is a buffer that a process writes while a test may read.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// Child runs the test binary once more as a child process, there the function of that
// name which TestMain gave to RunChild. env, of the form NAME=value, is added to the
// environment. What the child writes to stderr is logged when the test fails.
func Child(t testing.TB, name string, env ...string) *Process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// The argument is for a TestMain that does not call RunChild: no test may run.
	cmd := exec.Command(self, "-test.run=^$")
	cmd.Env = append(append(os.Environ(), env...), childVariable+"="+name)
	stderr := &lockedBuffer{}
	cmd.Stderr = stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	// Not StdoutPipe: the end of the process would close that, with lines still in it.
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout = in
	proc, err := startProcess(cmd)
	_ = in.Close() // the child has its own
	if err != nil {
		_ = out.Close()
		t.Fatal(err)
	}
	p := &Process{
		Stdin: stdin, t: t, name: name, proc: proc, out: out, lines: make(chan string), quit: make(chan struct{}),
	}
	t.Cleanup(func() { p.cleanup(stderr) })
	go p.read() // ended by the end of the child's output, at the latest by cleanup
	return p
}

func (p *Process) cleanup(stderr *lockedBuffer) {
	p.Kill()
	close(p.quit)
	_ = p.out.Close() // which a process that the child started may have open
	if p.t.Failed() {
		p.t.Logf("stderr of child %q:\n%s", p.name, stderr)
	}
}

func (p *Process) read() {
	defer close(p.lines)
	s := bufio.NewScanner(p.out)
	s.Buffer(nil, longestLine)
	for s.Scan() {
		select {
		case p.lines <- s.Text():
		case <-p.quit:
			return
		}
	}
}

// ReadLine returns the next line of the child's stdout, also after its end. It fails
// the test if there is none within the time, or no more.
func (p *Process) ReadLine(timeout time.Duration) string {
	p.t.Helper()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case line, ok := <-p.lines:
		if !ok {
			p.t.Fatalf("redistest: child %q has ended its output", p.name)
		}
		return line
	case <-timer.C:
		p.t.Fatalf("redistest: child %q printed nothing within %v", p.name, timeout)
	}
	return ""
}

// Stop suspends the child (SIGSTOP) and returns when it does nothing more.
func (p *Process) Stop() {
	p.t.Helper()
	p.must(p.proc.stop())
}

// Cont lets a suspended child go on (SIGCONT).
func (p *Process) Cont() {
	p.t.Helper()
	p.must(p.proc.cont())
}

func (p *Process) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatalf("redistest: child %q: %v", p.name, err)
	}
}

// Kill ends the child at once (SIGKILL) and waits until it has ended. It may be called
// again.
func (p *Process) Kill() { p.proc.kill() }

// Wait waits until the child ends by itself and returns its exit code, -1 if a signal
// ended it. It fails the test if the child is still there after a minute.
func (p *Process) Wait() int {
	p.t.Helper()
	timer := time.NewTimer(childLimit)
	defer timer.Stop()
	select {
	case <-p.proc.done:
	case <-timer.C:
		p.t.Fatalf("redistest: child %q does not end", p.name)
	}
	return p.proc.cmd.ProcessState.ExitCode()
}

// PID returns the process id, also after the end.
func (p *Process) PID() int { return p.proc.pid() }
