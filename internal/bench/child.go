package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"
)

// jobVariable holds a child's job, as JSON. A process without it is the parent.
const jobVariable = "HOLDFAST_BENCH_JOB"

// job is what a child is to do.
type job struct {
	Kind     string // names one of jobs
	Subject  string
	Majority bool // Subject is one of majoritySubjects
	Addrs    []string
	TTL      time.Duration
	Limit    time.Duration // after which the child ends itself, whatever it is doing

	Workers  int
	First    int           // number of the first worker, over all processes
	Shared   bool          // all workers want one key
	Hold     time.Duration // length of the critical section
	PauseMin time.Duration
	PauseMax time.Duration // 0: no pause
	Duration time.Duration

	Waiter bool // of a wake job: waits, instead of holding first
	Keys   int
	Slots  int
}

// report is what a child hands back, as JSON on its stdout.
type report struct {
	Error string // the job could not be done

	Workers    []workerReport
	Times      []int64 // what they are depends on the job; 0 is none
	Sent       int64   // commands
	CPU        time.Duration
	Mallocs    uint64
	Goroutines int // left at the end, or started by locks
	Heap       int64
	Stack      int64
	Lost       int
	Stuck      int // calls that did not come back within the limit
	Late       int // acquisitions of the warm-up that had to be begun again
	Failures   int // calls that failed
	Failure    string
}

// jobs are the kinds of work that a child can do.
var jobs = map[string]func(*console, job) (*report, error){
	"cycles": runCycles, "wake": runWake, "held": runHeld, "silent": runSilent, "majority": runMajority,
}

// console is a child's side of the pipes to its parent.
type console struct {
	in  *bufio.Reader
	out io.Writer
}

// ready tells the parent that all is prepared and returns the time at which it says
// that the work begins.
func (c *console) ready() (start int64, err error) {
	if _, err := fmt.Fprintln(c.out, "ready"); err != nil {
		return 0, err
	}
	line, err := c.in.ReadString('\n')
	if err != nil {
		return 0, fmt.Errorf("the parent is gone: %w", err)
	}
	_, err = fmt.Sscanf(line, "go %d\n", &start)
	return start, err
}

// runChild does the job of this process, if it is a child, and ends it.
func runChild() {
	text := os.Getenv(jobVariable)
	if text == "" {
		return
	}
	var j job
	r, err := &report{}, json.Unmarshal([]byte(text), &j)
	if err == nil {
		time.AfterFunc(j.Limit, func() {
			fmt.Fprintf(os.Stderr, "not done within %v\n", j.Limit)
			os.Exit(3)
		})
		r, err = jobs[j.Kind](&console{bufio.NewReader(os.Stdin), os.Stdout}, j)
	}
	if err != nil {
		r = &report{Error: err.Error()}
	}
	if err := json.NewEncoder(os.Stdout).Encode(r); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// opened is a subject that is open, with what its process was like before.
type opened struct {
	subject

	wire       *wire
	goroutines int
}

// open opens the job's subject.
func (j job) open() (*opened, error) {
	list := subjects
	if j.Majority {
		list = majoritySubjects
	}
	d, err := find(list, j.Subject)
	if err != nil {
		return nil, err
	}
	o := &opened{wire: &wire{}, goroutines: runtime.NumGoroutine()}
	o.subject, err = d.open(settings{addrs: j.Addrs, ttl: j.TTL, wire: o.wire})
	return o, err
}

const (
	closeLimit  = 2 * time.Second        // of closing a subject
	settleLimit = 500 * time.Millisecond // in which goroutines may end afterwards
)

// shut closes the subject and returns how many goroutines are left then.
func (o *opened) shut() int {
	done := make(chan struct{})
	go func() { // ended by the subject; at the latest with this process
		o.close()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(closeLimit):
	}
	left := runtime.NumGoroutine() - o.goroutines
	for deadline := time.Now().Add(settleLimit); left > 0 && time.Now().Before(deadline); {
		time.Sleep(5 * time.Millisecond)
		left = runtime.NumGoroutine() - o.goroutines
	}
	return max(0, left)
}

// mallocs returns how many objects this process has allocated so far.
func mallocs() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.Mallocs
}
