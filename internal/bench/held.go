package main

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

const (
	takers    = 32               // goroutines that take many locks
	takeLimit = 10 * time.Second // for taking them all
	giveLimit = 10 * time.Second // for giving them all back
)

// takeMany takes n locks, kept. Their contexts have no end: it would be part of what a
// lock costs.
func takeMany(s subject, n int) ([]kept, error) {
	locks := make([]kept, n)
	var taken atomic.Int64
	done := make(chan error, 1)
	go func() { // ended by the subject; at the latest with this process
		done <- spread(n, func(i int) (err error) {
			locks[i], err = s.keep(context.Background(), fmt.Sprint("bench:", i))
			taken.Add(1)
			return err
		})
	}()
	select {
	case err := <-done:
		return locks, err
	case <-time.After(takeLimit):
		return nil, fmt.Errorf("only %d of %d locks were to be had within %v", taken.Load(), n, takeLimit)
	}
}

// spread calls f for 0 to n-1 on several goroutines, and returns one of the errors.
func spread(n int, f func(i int) error) error {
	var wg sync.WaitGroup
	var first atomic.Pointer[error]
	for g := range takers {
		wg.Go(func() { // ended by f, or by the job's limit
			for i := g; i < n && first.Load() == nil; i += takers {
				if err := f(i); err != nil {
					first.Store(&err)
				}
			}
		})
	}
	wg.Wait()
	if err := first.Load(); err != nil {
		return *err
	}
	return nil
}

// memory returns the bytes of heap and stacks in use.
func memory() (heap, stack int64) {
	runtime.GC()
	runtime.GC() // what had a finalizer or was pooled goes with the second
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc), int64(m.StackInuse)
}

// runHeld is the job that holds many locks.
func runHeld(c *console, j job) (*report, error) {
	s, err := j.open()
	if err != nil {
		return nil, err
	}
	// As many at once as will take the locks, so that no connection counts as theirs.
	late, err := warmAll(s, takers)
	if err != nil {
		return nil, err
	}
	heap, stack := memory()
	goroutines := runtime.NumGoroutine()
	locks, err := takeMany(s, j.Keys)
	if err != nil {
		return nil, fmt.Errorf("take %d locks: %w", j.Keys, err)
	}
	r := &report{Late: late}
	r.Heap, r.Stack = memory()
	r.Heap, r.Stack = r.Heap-heap, r.Stack-stack

	start, err := c.ready()
	if err != nil {
		return nil, err
	}
	sleepUntil(start)
	cpu, sent := cpuTime(), s.wire.sent.Load()
	most := 0
	for end := start + int64(j.Duration); now() < end; time.Sleep(50 * time.Millisecond) {
		most = max(most, runtime.NumGoroutine()-goroutines)
	}
	r.CPU, r.Sent, r.Goroutines = cpuTime()-cpu, s.wire.sent.Load()-sent, most
	for _, k := range locks {
		select {
		case <-k.lost():
			r.Lost++
		default:
		}
	}
	if _, err := c.ready(); err != nil { // the parent looks at the server first
		return nil, err
	}
	giveBack(r, s, locks)
	return r, nil
}

// giveBack releases all locks, within a limit, and closes the subject.
func giveBack(r *report, s *opened, locks []kept) {
	var failures atomic.Int64
	done := make(chan struct{})
	go func() { // ended by the releases; at the latest with this process
		defer close(done)
		_ = spread(len(locks), func(i int) error {
			if locks[i].release() != nil {
				failures.Add(1)
			}
			return nil
		})
	}()
	select {
	case <-done:
	case <-time.After(giveLimit):
		r.Stuck++
	}
	r.Failures = int(failures.Load())
	s.shut()
}

// heldFigures makes the figures of a run of length d with n locks. The server has left
// keys before the release, and used u meanwhile.
func heldFigures(r *report, n int, d time.Duration, keys int64, u usage) figures {
	return figures{
		// Whoever was not told counts too.
		figLost:     max(float64(r.Lost), float64(int64(n)-keys)),
		figSentRate: float64(r.Sent) / d.Seconds(), figScriptedRate: float64(max(0, u.commands-r.Sent)) / d.Seconds(),
		figHeap: float64(r.Heap) / float64(n), figStack: float64(r.Stack) / float64(n),
		figHeldGoroutines: float64(r.Goroutines),
		figCPUShare:       100 * r.CPU.Seconds() / d.Seconds(), figServerCPUShare: 100 * u.cpu.Seconds() / d.Seconds(),
		figStuck: float64(r.Stuck), figFailures: float64(r.Failures),
	}
}
