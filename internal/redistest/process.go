package redistest

import (
	"os/exec"
	"runtime"
	"sync"
	"syscall"
)

// process is a child process that has been started and will be waited for.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
}

// launcher starts processes on one OS thread. On Linux a child is told to die with
// the thread that started it, not with the process, so that thread must live as
// long as any child: it is held by one goroutine, which ends with the last child.
var launcher struct {
	mu       sync.Mutex
	children int
	requests chan func()
}

// startProcess starts cmd.
func startProcess(cmd *exec.Cmd) (*process, error) {
	dieWithParent(cmd)
	launcher.mu.Lock()
	if launcher.children == 0 {
		launcher.requests = make(chan func())
		go launch(launcher.requests) // ended by the last child's end
	}
	launcher.children++
	requests := launcher.requests
	launcher.mu.Unlock()
	started := make(chan error)
	requests <- func() { started <- cmd.Start() }
	if err := <-started; err != nil {
		childEnded()
		return nil, err
	}
	p := &process{cmd: cmd, done: make(chan struct{})}
	go func() { // ends with the child, which kill ends
		_ = cmd.Wait() // the state is in cmd
		childEnded()
		close(p.done)
	}()
	return p, nil
}

func launch(requests <-chan func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for f := range requests {
		f()
	}
}

func childEnded() {
	launcher.mu.Lock()
	defer launcher.mu.Unlock()
	launcher.children--
	if launcher.children == 0 {
		close(launcher.requests)
	}
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) signal(sig syscall.Signal) error { return p.cmd.Process.Signal(sig) }

func (p *process) alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// kill ends the process and waits for it.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.done
}
