package main

import "syscall"

// dieWithParent ends a command when the thread that has started it ends, as it does when this
// process is killed. Nobody renews the lock then, but there is some time left to stop in.
func dieWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGTERM }
