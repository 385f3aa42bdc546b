package main

import (
	"os/exec"
	"runtime"
	"sync"
	"time"
)

// pipeLimit is how long the output of a process that has ended may stay open.
const pipeLimit = time.Second

// family is all processes that this one has started and that run. It is safe for
// concurrent use.
type family struct {
	starts chan func() // what the launcher is to do

	mu      sync.Mutex
	members map[*process]bool
	started []int // process ids of all that there ever were
}

// process is a child that is waited for.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
}

// newFamily starts the launcher. On Linux a child dies with the thread that started it,
// so that one thread, which lives as long as the family, starts them all.
func newFamily() *family {
	f := &family{starts: make(chan func()), members: map[*process]bool{}}
	go func() { // ended by close
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for start := range f.starts {
			start()
		}
	}()
	return f
}

// close ends all processes that still run and waits for them.
func (f *family) close() {
	f.mu.Lock()
	var left []*process
	for p := range f.members {
		left = append(left, p)
	}
	f.mu.Unlock()
	for _, p := range left {
		p.kill()
	}
	close(f.starts)
}

// start starts cmd. The process must be killed in the end, or ends with the family.
func (f *family) start(cmd *exec.Cmd) (*process, error) {
	bind(cmd)
	cmd.WaitDelay = pipeLimit
	result := make(chan error)
	f.starts <- func() { result <- cmd.Start() }
	if err := <-result; err != nil {
		return nil, err
	}
	p := &process{cmd: cmd, done: make(chan struct{})}
	f.mu.Lock()
	f.members[p] = true
	f.started = append(f.started, p.pid())
	f.mu.Unlock()
	go func() { // ended by the process, in the last resort by kill
		_ = cmd.Wait() // who ends it knows why
		f.mu.Lock()
		delete(f.members, p)
		f.mu.Unlock()
		close(p.done)
	}()
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// kill ends the process, also a suspended one, and waits for it. It may be called again.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // an error says that it has ended
	<-p.done
}

func (p *process) alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}
