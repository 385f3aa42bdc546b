//go:build !unix

package main

import (
	"io"
	"os"
	"os/exec"
	"syscall"
)

// forwarded are the signals that end a wait for the lock.
var forwarded = []os.Signal{os.Interrupt}

func signalNumber(sig os.Signal) int {
	n, _ := sig.(syscall.Signal)
	return int(n)
}

// group is a command. There are no process groups here, and no signals but the end by force.
type group struct{ cmd *exec.Cmd }

func newGroup(cmd *exec.Cmd, _ io.Reader) *group { return &group{cmd} }

func (g *group) started() {}

// signal does nothing: the console has sent it to the command, too.
func (g *group) signal(os.Signal) {}

func (g *group) terminate() { g.kill() }

func (g *group) kill() { _ = g.cmd.Process.Kill() } // it may have ended

func (g *group) alive() bool { return false }

func (g *group) leave() {}

func statusOf(state *os.ProcessState) int {
	if state == nil {
		return exitFailed
	}
	return state.ExitCode()
}
