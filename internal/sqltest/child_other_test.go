//go:build unix && !linux

package sqltest

import "syscall"

// dieWithParent does nothing here: a test that is killed leaves its servers behind.
func dieWithParent(*syscall.SysProcAttr) {}
