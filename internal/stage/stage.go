//go:build unix

// Package stage runs the examples in which a process is paused: it starts the program again
// as workers, prints what they say, and stops and continues them. It is not safe for
// concurrent use.
package stage

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// Stage prints a time line.
type Stage struct {
	ctx      context.Context // kills the workers
	out      io.Writer
	variable string
	start    time.Time
}

// New returns a Stage that prints to out. The environment variable tells a program that it
// is a worker, and what to do. When ctx ends the workers are killed.
func New(ctx context.Context, out io.Writer, variable string) *Stage {
	return &Stage{ctx, out, variable, time.Now()}
}

// Say prints a step with the time since the start.
func (s *Stage) Say(format string, args ...any) {
	fmt.Fprintf(s.out, "%6.2fs  %s\n", time.Since(s.start).Seconds(), fmt.Sprintf(format, args...))
}

// Worker is a child process. Whoever starts one must call End.
type Worker struct {
	stage *Stage
	name  string
	cmd   *exec.Cmd
	in    io.Closer
	lines *bufio.Scanner
}

// Start starts a worker with the role in the variable, and more of the environment. What it
// writes to its standard error goes to that of this process.
func (s *Stage) Start(name, role string, env ...string) (*Worker, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(s.ctx, self)
	cmd.Env = append(append(cmd.Environ(), env...), s.variable+"="+role)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &Worker{s, name, cmd, in, bufio.NewScanner(out)}, nil
}

// Until prints what the worker says, until it says word.
func (w *Worker) Until(word string) error {
	for w.lines.Scan() {
		if w.lines.Text() == word {
			return nil
		}
		w.stage.Say("%-7s %s", w.name+":", w.lines.Text())
	}
	return errors.Join(fmt.Errorf("the %s worker ended before it was %s", w.name, word), w.lines.Err())
}

// Pause stops the worker, wherever it is.
func (w *Worker) Pause() error { return w.cmd.Process.Signal(syscall.SIGSTOP) }

// Continue lets a worker that was paused run again.
func (w *Worker) Continue() error { return w.cmd.Process.Signal(syscall.SIGCONT) }

// Finish closes the worker's standard input, for which it waits, and waits until it is "done".
func (w *Worker) Finish() error {
	if err := w.in.Close(); err != nil {
		return err
	}
	if err := w.Until("done"); err != nil {
		return err
	}
	return w.cmd.Wait()
}

// End kills a worker that is still there, also a paused one.
func (w *Worker) End() {
	if w.cmd.ProcessState == nil {
		_ = w.cmd.Process.Kill() // an error says that it has ended
		_ = w.cmd.Wait()
	}
}
