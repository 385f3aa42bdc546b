package main

import (
	"context"
	"os"
	"os/exec"
	"runtime"
	"time"

	"github.com/holdfast-go/holdfast"
)

// sweepEvery is how often it is looked whether a process group has ended.
const sweepEvery = 10 * time.Millisecond

// supervisor runs a command while a lock is held.
type supervisor struct {
	i       *invocation
	lock    *holdfast.Lock
	signals <-chan os.Signal
	grace   time.Duration

	group *group
	done  chan error       // one element, when the command has ended
	kill  <-chan time.Time // when the grace is over; nil: it may go on
	over  bool             // the grace is over
	lost  bool
}

// run starts the command and returns when it has ended, with its exit status as an error.
func (s *supervisor) run(ctx context.Context, path string) error {
	cmd := exec.Command(path)
	cmd.Args = s.i.argv
	cmd.Env = environment(s.lock, s.i.fence)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = s.i.stdin, s.i.stdout, s.i.stderr
	cmd.WaitDelay = s.grace + time.Second // of matter only if these are no files
	if err := s.start(cmd); err != nil {
		return cannotRun(err)
	}
	defer s.group.leave()
	lost, ended := s.lock.Context().Done(), ctx.Done()
	for {
		select {
		case sig := <-s.signals:
			s.group.signal(sig)
		case <-lost:
			lost, s.lost = nil, true
			s.i.complain("%s; SIGTERM to the command, SIGKILL after %v", message(s.lock.Err()), s.grace)
			s.terminate()
		case <-ended:
			ended = nil
			s.terminate()
		case <-s.kill:
			s.over = true
			s.group.kill()
		case <-s.done:
			if s.lost {
				s.sweep()
				return &exitError{code: exitLost}
			}
			if code := statusOf(cmd.ProcessState); code != exitOK {
				return &exitError{code: code}
			}
			return nil
		}
	}
}

// start starts the command.
func (s *supervisor) start(cmd *exec.Cmd) error {
	s.group = newGroup(cmd, s.i.stdin)
	s.done = make(chan error, 1)
	started := make(chan error, 1)
	go func() { // ends with the command
		// The kernel ends the command with the thread that has started it, see newGroup. So that
		// one must stay.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			s.done <- cmd.Wait()
		}
	}()
	err := <-started
	if err == nil {
		s.group.started()
	}
	return err
}

// terminate asks the command to end, and sets the time for the end by force.
func (s *supervisor) terminate() {
	s.group.terminate()
	if s.kill == nil {
		s.kill = time.After(s.grace)
	}
}

// sweep waits, when the command itself has ended, for what it has started, and ends that by force
// when the grace is over.
func (s *supervisor) sweep() {
	ticker := time.NewTicker(sweepEvery)
	defer ticker.Stop()
	for s.group.alive() {
		if s.over {
			s.group.kill()
			return
		}
		select {
		case <-s.kill:
			s.over = true
		case sig := <-s.signals:
			s.group.signal(sig)
		case <-ticker.C:
		}
	}
}
