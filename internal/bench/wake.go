package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

// In a wake run two processes meet on each key in slots of time: one holds the lock,
// the other has waited for it when the first gives it back. How long is drawn each time
// from a range that is longer than the fixed pauses of those that poll: all their tries
// would else fall at the same distance from the release.
const (
	idleWait   = 300 * time.Millisecond
	idleSpread = 100 * time.Millisecond
	headStart  = 20 * time.Millisecond // of the holder
	slotLength = 800 * time.Millisecond
	slotSpare  = 20 * time.Millisecond // at the end of a slot, in which nobody waits
)

// runWake is the job of one of the two processes. Times holds, for each key and slot,
// when the holder began to release or the waiter had the lock.
func runWake(c *console, j job) (*report, error) {
	s, err := j.open()
	if err != nil {
		return nil, err
	}
	late, err := warmAll(s, j.Keys)
	if err != nil {
		return nil, err
	}
	start, err := c.ready()
	if err != nil {
		return nil, err
	}
	r := &report{Times: make([]int64, j.Keys*j.Slots), Late: late}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for k := range j.Keys {
		wg.Go(func() { // ended by the end of the last slot, or by the job's limit
			// The keys take turns, so that not all are released at once.
			first := start + int64(k)*int64(slotLength)/int64(j.Keys)
			for i := range j.Slots {
				at, err := meet(s, j.Waiter, fmt.Sprint("bench:", k), first+int64(i)*int64(slotLength))
				mu.Lock()
				if err != nil {
					r.Failures++
					r.Failure = err.Error()
				}
				r.Times[k*j.Slots+i] = at
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	r.Goroutines = s.shut()
	return r, nil
}

// meet plays one part in the slot that begins at start. It returns 0 if the lock was
// not to be had before the end of the slot.
func meet(s subject, waiter bool, key string, start int64) (at int64, err error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	// Not a deadline: some subjects would make the lease shorter for one.
	end := time.AfterFunc(time.Duration(start+int64(slotLength-slotSpare)-now()), cancel)
	defer end.Stop()
	if waiter {
		sleepUntil(start + int64(headStart))
	} else {
		sleepUntil(start)
	}
	h, err := s.acquire(ctx, key)
	if err != nil {
		if ctx.Err() != nil {
			err = nil // the slot is over
		}
		return 0, err
	}
	at = now()
	if !waiter {
		sleepUntil(start + int64(headStart+idleWait+rand.N(idleSpread)))
		at = now()
	}
	return at, h.release()
}

// wakeFigures makes the figures of the reports of holder and waiter.
func wakeFigures(holder, waiter *report) figures {
	var gaps []float64
	missed := 0
	for i, gone := range holder.Times {
		got := waiter.Times[i]
		switch {
		case gone == 0: // the waiter of the slot before was not through
		case got == 0:
			missed++
			gaps = append(gaps, millis(int64(slotLength-slotSpare-headStart-idleWait-idleSpread))) // at least
		default:
			gaps = append(gaps, millis(got-gone))
		}
	}
	return figures{
		figGapP50: percentile(gaps, 50), figGapP99: percentile(gaps, 99), figCut: float64(missed),
		figFailures: float64(holder.Failures + waiter.Failures),
	}
}
