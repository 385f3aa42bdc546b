//go:build !linux

package redistest

import "os/exec"

// dieWithParent does nothing here: a test that is killed leaves its servers behind.
func dieWithParent(*exec.Cmd) {}

// awaitStopped does not wait here: a suspended process may do a little more.
func awaitStopped(int) {}
