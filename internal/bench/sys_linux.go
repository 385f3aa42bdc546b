package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// supported is nil where this program runs.
var supported error

// kernelClock reads the clock that all processes of one machine share, in nanoseconds.
func kernelClock() int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // cannot fail: clock and pointer are valid
	return ts.Nano()
}

// bind lets a child be killed when the thread that starts it ends, and keeps the
// Ctrl-C of a terminal from it: the parent ends its children in order.
func bind(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}

// cpuTime returns the processor time that this process has used.
func cpuTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u) // cannot fail: both arguments are valid
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// loadAverage returns that of the last minute: what else kept the processors busy.
func loadAverage() string {
	text, _ := os.ReadFile("/proc/loadavg") // an error: none
	load, _, _ := strings.Cut(string(text), " ")
	return load
}

// suspend stops a process, and returns when none of its threads runs any more: the
// signal alone would let it answer one more request.
func suspend(pid int) error {
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		return err
	}
	for range 1000 {
		if stopped(pid) {
			return nil
		}
		time.Sleep(time.Millisecond)
	}
	return fmt.Errorf("process %d does not stop", pid)
}

// resume lets a suspended process go on.
func resume(pid int) error { return syscall.Kill(pid, syscall.SIGCONT) }

func stopped(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid)) // the pattern is valid
	for _, name := range threads {
		stat, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended
		}
		// The state follows the name, which is in parentheses and may contain some.
		_, state, ok := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" "))
		if !ok || len(state) == 0 || state[0] != 'T' && state[0] != 't' {
			return false
		}
	}
	return true
}
