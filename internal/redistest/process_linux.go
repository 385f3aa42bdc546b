package redistest

import (
	"os/exec"
	"syscall"
)

// dieWithParent lets a child be killed when this process is.
func dieWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
