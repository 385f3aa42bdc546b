package redistest

import (
	"os/exec"
	"runtime"
	"sync"
	"time"
)

// pipeLimit is how long the output of a process that has ended may stay open, which
// a process that it started in turn can hold.
const pipeLimit = time.Second

// process is a child process that has been started and is waited for. It is safe for
// concurrent use.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended, and cmd.ProcessState is there
}

// launcher starts processes on one OS thread. On Linux a child is told to die with
// the thread that started it, not with the process, so that thread must live as
// long as any child: one goroutine holds it, which ends with the last child.
var launcher struct {
	mu       sync.Mutex
	children int
	requests chan func() // that goroutine's, while there are children
}

// startProcess starts cmd. The caller must kill the process in the end.
func startProcess(cmd *exec.Cmd) (*process, error) {
	dieWithParent(cmd)
	cmd.WaitDelay = pipeLimit
	launcher.mu.Lock()
	if launcher.children == 0 {
		launcher.requests = make(chan func())
		go launch(launcher.requests) // ended by childEnded of the last child
	}
	launcher.children++ // before it starts, so that the goroutine stays
	requests := launcher.requests
	launcher.mu.Unlock()

	started := make(chan error)
	requests <- func() { started <- cmd.Start() }
	if err := <-started; err != nil {
		childEnded()
		return nil, err
	}
	p := &process{cmd: cmd, done: make(chan struct{})}
	go p.wait() // ended by the child's end, in the last resort by kill
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

func (p *process) wait() {
	_ = p.cmd.Wait() // how it ended is in cmd.ProcessState
	childEnded()
	close(p.done)
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// stop suspends the process, and returns when it does nothing more: the signal alone
// would let it answer one more request.
func (p *process) stop() error {
	if err := suspend(p.cmd.Process); err != nil {
		return err
	}
	awaitStopped(p.pid())
	return nil
}

func (p *process) cont() error { return resume(p.cmd.Process) }

func (p *process) alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// kill ends the process, also a suspended one, and waits for it.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // an error says that it has ended
	<-p.done
}
