package redistest

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"
)

// childVariable names the function that a child process runs.
const childVariable = "HOLDFAST_CHILD"

// RunChild runs the function that Child has named, if this process is a child, and
// exits. Call it first in TestMain.
func RunChild(functions map[string]func()) {
	if f := functions[os.Getenv(childVariable)]; f != nil {
		f()
		os.Exit(0)
	}
}

// Process is a child process of a test. It ends with the test. Its methods are for
// the test's goroutine.
type Process struct {
	Stdin io.Writer // what the child reads

	t     testing.TB
	proc  *process
	lines chan string
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

// Child starts the test binary once more, to run the function of that name that
// TestMain gave to RunChild. env is added to the environment.
func Child(t testing.TB, name string, env ...string) *Process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "-test.run=^$")
	cmd.Env = append(append(os.Environ(), env...), childVariable+"="+name)
	stderr := &lockedBuffer{}
	cmd.Stderr = stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout = in
	proc, err := startProcess(cmd)
	_ = in.Close() // the child has its own
	if err != nil {
		t.Fatal(err)
	}
	p := &Process{Stdin: stdin, t: t, proc: proc, lines: make(chan string, 1000)}
	go p.read(out) // ends with the child's output
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("stderr of child %s:\n%s", name, stderr)
		}
	})
	return p
}

func (p *Process) read(out *os.File) {
	defer close(p.lines)
	defer func() { _ = out.Close() }()
	for s := bufio.NewScanner(out); s.Scan(); {
		select {
		case p.lines <- s.Text():
		case <-p.proc.done: // nobody reads any more
			return
		}
	}
}

// ReadLine returns the next line that the child prints, and fails the test if there
// is none within the time.
func (p *Process) ReadLine(within time.Duration) string {
	p.t.Helper()
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case line, ok := <-p.lines:
		if !ok {
			p.t.Fatal("redistest: the child has ended its output")
		}
		return line
	case <-timer.C:
		p.t.Fatalf("redistest: the child printed nothing within %v", within)
	}
	return ""
}

// Stop suspends the child (SIGSTOP).
func (p *Process) Stop() { p.signal(syscall.SIGSTOP) }

// Cont lets it go on (SIGCONT).
func (p *Process) Cont() { p.signal(syscall.SIGCONT) }

func (p *Process) signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.proc.signal(sig); err != nil {
		p.t.Fatal(err)
	}
}

// Kill ends it (SIGKILL) and waits. It may be called again.
func (p *Process) Kill() { p.proc.kill() }

// Wait waits until the child ends by itself and returns its exit code.
func (p *Process) Wait() int {
	<-p.proc.done
	return p.proc.cmd.ProcessState.ExitCode()
}

// PID returns the process id.
func (p *Process) PID() int { return p.proc.pid() }
