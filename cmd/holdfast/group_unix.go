//go:build unix

package main

import (
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// forwarded are the signals that go on to the command.
var forwarded = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP}

func signalNumber(sig os.Signal) int {
	n, _ := sig.(syscall.Signal)
	return int(n)
}

// group is the process group of a command.
//
// It is a group of its own, so that all the command has started can be ended with it. If we are in
// the foreground of a terminal, then the group is put there in our place, as a shell does it.
type group struct {
	cmd *exec.Cmd
	tty int // its descriptor; -1: we are not in the foreground
}

// newGroup prepares a command.
func newGroup(cmd *exec.Cmd, stdin io.Reader) *group {
	g := &group{cmd, -1}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	dieWithParent(cmd.SysProcAttr)
	f, ok := stdin.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return g
	}
	if front, err := unix.IoctlGetInt(int(f.Fd()), unix.TIOCGPGRP); err == nil && front == unix.Getpgrp() {
		g.tty = int(f.Fd())
		cmd.SysProcAttr.Foreground, cmd.SysProcAttr.Ctty = true, g.tty
		// The command inherits that. A holder that is suspended has not stopped to hold, and
		// nobody here could bring the shell back.
		signal.Ignore(syscall.SIGTSTP)
	}
	return g
}

// started is called when the command has been. What we write to the terminal from the background
// must not suspend us.
func (g *group) started() {
	if g.tty >= 0 {
		signal.Ignore(syscall.SIGTTOU)
	}
}

// signal sends a signal to the group. One that has ended does not mind.
func (g *group) signal(sig os.Signal) {
	if n, ok := sig.(syscall.Signal); ok {
		_ = syscall.Kill(-g.cmd.Process.Pid, n)
	}
}

// terminate asks the group to end, also if it is suspended.
func (g *group) terminate() {
	g.signal(syscall.SIGTERM)
	g.signal(syscall.SIGCONT)
}

func (g *group) kill() { g.signal(syscall.SIGKILL) }

// alive reports whether somebody is left in the group.
func (g *group) alive() bool { return syscall.Kill(-g.cmd.Process.Pid, 0) == nil }

// leave takes the foreground back.
func (g *group) leave() {
	if g.tty >= 0 {
		_ = unix.IoctlSetPointerInt(g.tty, unix.TIOCSPGRP, unix.Getpgrp()) // else the shell does it
	}
}

// statusOf is the exit status as shells have it.
func statusOf(state *os.ProcessState) int {
	if state == nil {
		return exitFailed
	}
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return exitSignal + int(status.Signal())
	}
	return state.ExitCode()
}
