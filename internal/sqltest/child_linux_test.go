package sqltest

import "syscall"

// dieWithParent lets a child be killed when the thread that started it ends, as it
// does when this process is killed.
func dieWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
