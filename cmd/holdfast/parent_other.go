//go:build unix && !linux

package main

import "syscall"

// dieWithParent does nothing: this system cannot do it.
func dieWithParent(*syscall.SysProcAttr) {}
