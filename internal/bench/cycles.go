package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

const (
	warmCycles = 5 // of each worker, on a key of its own
	warmTries  = 10
	warmLimit  = time.Second     // of one of these
	stuckLimit = 5 * time.Second // for a call to come back after the end of the run
	breather   = time.Millisecond
)

// event is one cycle: asked for the lock, had it, began to give it back, was through.
type event struct {
	Begin, Got, Gone, Back int64
}

// workerReport is what one worker did.
type workerReport struct {
	Events []byte // packed
	Cut    int64  // length of the wait that the end of the run cut off, in ns; 0: none
}

func pack(events []event) []byte {
	b, _ := binary.Append(nil, binary.LittleEndian, events) // only fixed sizes: cannot fail
	return b
}

func unpack(b []byte) ([]event, error) {
	events := make([]event, len(b)/binary.Size(event{}))
	if _, err := binary.Decode(b, binary.LittleEndian, events); err != nil {
		return nil, fmt.Errorf("events: %w", err)
	}
	return events, nil
}

// worker takes and gives back one lock over and over.
type worker struct {
	s   subject
	j   job
	key string

	events   []event
	cut      int64
	failures int
	failure  error
}

// run goes on until end. ctx ends at that time, too, and with it the last wait.
func (w *worker) run(ctx context.Context, end int64) {
	for {
		e := event{Begin: now()}
		if e.Begin >= end {
			return
		}
		h, err := w.s.acquire(ctx, w.key)
		e.Got = now()
		if err != nil && ctx.Err() != nil {
			w.cut = e.Got - e.Begin
			return
		}
		if err != nil {
			w.fail(err)
			continue
		}
		if w.j.Hold > 0 {
			time.Sleep(w.j.Hold)
		}
		e.Gone = now()
		if err := h.release(); err != nil && ctx.Err() == nil {
			w.fail(err)
		}
		e.Back = now()
		if e.Gone <= end {
			w.events = append(w.events, e)
		}
		if spread := w.j.PauseMax - w.j.PauseMin; spread > 0 {
			time.Sleep(w.j.PauseMin + rand.N(spread))
		}
	}
}

func (w *worker) fail(err error) {
	w.failures++
	w.failure = err
	time.Sleep(breather) // a subject that refuses at once is not asked without pause
}

// warm opens connections and loads scripts, so that they are not measured. It adds to
// late how many acquisitions it had to begin again: nobody else wants the key, and yet
// a subject may wait in vain when a busy machine lets its first try time out.
func (w *worker) warm(late *atomic.Int64) error {
	key := fmt.Sprintf("warm:%d:%p", os.Getpid(), w)
	for cycles, tries := 0, 0; cycles < warmCycles; {
		h, err := w.acquireWithin(warmLimit, key)
		if tries++; err != nil {
			if late.Add(1); tries == warmTries {
				return fmt.Errorf("warm up: %w", err)
			}
			continue
		}
		if err := h.release(); err != nil {
			return fmt.Errorf("warm up: %w", err)
		}
		cycles++
	}
	return nil
}

func (w *worker) acquireWithin(limit time.Duration, key string) (hold, error) {
	ctx, cancel := context.WithCancel(context.Background())
	timer := time.AfterFunc(limit, cancel)
	h, err := w.s.acquire(ctx, key)
	if !timer.Stop() && err == nil { // too late, and some end the hold with ctx
		_ = h.release() // which may have ended
		err = context.DeadlineExceeded
	}
	if err != nil {
		cancel()
	}
	return h, err
}

// warmAll warms n workers at once.
func warmAll(s subject, n int) (late int, err error) {
	var sum atomic.Int64
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = (&worker{s: s}).warm(&sum) }) // ended by warmLimit
	}
	wg.Wait()
	return int(sum.Load()), errors.Join(errs...)
}

// runCycles is the job of one process with any number of workers.
func runCycles(c *console, j job) (*report, error) {
	s, err := j.open()
	if err != nil {
		return nil, err
	}
	workers := make([]*worker, j.Workers)
	for i := range workers {
		key := "bench"
		if !j.Shared {
			key = fmt.Sprint("bench:", j.First+i)
		}
		workers[i] = &worker{s: s, j: j, key: key, events: make([]event, 0, 1<<12)}
	}
	late, err := warmAll(s, j.Workers)
	if err != nil {
		return nil, err
	}
	runtime.GC()
	start, err := c.ready()
	if err != nil {
		return nil, err
	}
	r := measureCycles(s, j, workers, start)
	r.Late = late
	return r, nil
}

func measureCycles(s *opened, j job, workers []*worker, start int64) *report {
	// Without a deadline: some subjects would make the lease shorter for one.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	end := start + int64(j.Duration)
	sleepUntil(start)
	sent, cpu, objects := s.wire.sent.Load(), cpuTime(), mallocs()
	done := make(chan *worker, len(workers))
	for _, w := range workers {
		go func() { // ended by ctx; at the latest with this process
			w.run(ctx, end)
			done <- w
		}()
	}
	sleepUntil(end)
	cancel()
	r := &report{}
	stuck := time.NewTimer(stuckLimit)
	defer stuck.Stop()
collect:
	for range workers {
		select {
		case w := <-done:
			r.Workers = append(r.Workers, workerReport{pack(w.events), w.cut})
			r.Failures += w.failures
			if w.failure != nil {
				r.Failure = w.failure.Error()
			}
		case <-stuck.C:
			r.Stuck = len(workers) - len(r.Workers)
			break collect
		}
	}
	r.CPU, r.Mallocs = cpuTime()-cpu, mallocs()-objects
	r.Goroutines = max(0, s.shut()-r.Stuck) // the stuck ones are ours
	r.Sent = s.wire.sent.Load() - sent
	return r
}
