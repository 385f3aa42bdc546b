//go:build !linux

package main

import (
	"errors"
	"os/exec"
	"time"
)

// supported says why this program does not run here: it needs a clock that several
// processes share, and children that do not outlive it.
var supported = errors.New("this benchmark runs on Linux only")

func kernelClock() int64     { return 0 }
func bind(*exec.Cmd)         {}
func cpuTime() time.Duration { return 0 }
func loadAverage() string    { return "" }
func suspend(int) error      { return supported }
func resume(int) error       { return supported }
