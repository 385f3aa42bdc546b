package main

import (
	"cmp"
	"slices"
	"time"
)

// owned is an event with the number of its worker.
type owned struct {
	event

	worker int
}

// history is all that the workers of one run did.
type history struct {
	events []owned // by the time at which they had the lock
	cuts   []int64
	counts []int // of events, by worker
}

func newHistory(reports []*report) (*history, error) {
	h := &history{}
	for _, r := range reports {
		for _, w := range r.Workers {
			events, err := unpack(w.Events)
			if err != nil {
				return nil, err
			}
			for _, e := range events {
				h.events = append(h.events, owned{e, len(h.counts)})
			}
			h.counts = append(h.counts, len(events))
			if w.Cut > 0 {
				h.cuts = append(h.cuts, w.Cut)
			}
		}
	}
	slices.SortFunc(h.events, func(a, b owned) int { return cmp.Compare(a.Got, b.Got) })
	return h, nil
}

// waits returns the waits for the lock in milliseconds, and among them those that the
// end of the run cut off, which would have been longer: who starves would else be left
// out of the figures.
func (h *history) waits() []float64 {
	var waits []float64
	for _, e := range h.events {
		waits = append(waits, millis(e.Got-e.Begin))
	}
	for _, cut := range h.cuts {
		waits = append(waits, millis(cut))
	}
	return waits
}

// gaps returns, in milliseconds, how long it took from the moment at which a holder
// began to release to that at which the next one had the lock. All events must be of
// one key.
func (h *history) gaps() []float64 {
	var gaps []float64
	for i := 1; i < len(h.events); i++ {
		gaps = append(gaps, millis(h.events[i].Got-h.events[i-1].Gone))
	}
	return gaps
}

// overlaps returns how often a holder had the lock before another began to give it
// back: never, or the lock is none.
func (h *history) overlaps() (n int) {
	latest := int64(0) // any before may have held longest
	for _, e := range h.events {
		if e.Got < latest {
			n++
		}
		latest = max(latest, e.Gone)
	}
	return n
}

// moved returns the percentage of acquisitions that went to another worker than the
// one before.
func (h *history) moved() float64 {
	n := 0
	for i := 1; i < len(h.events); i++ {
		if h.events[i].worker != h.events[i-1].worker {
			n++
		}
	}
	return 100 * float64(n) / float64(max(1, len(h.events)-1))
}

// cycles returns the lengths of the cycles, without the critical section, in
// microseconds.
func (h *history) cycles() []float64 {
	var cycles []float64
	for _, e := range h.events {
		cycles = append(cycles, float64(e.Got-e.Begin+e.Back-e.Gone)/1e3)
	}
	return cycles
}

// cycleFigures makes the figures of a run of length d. The usage is the server's.
func cycleFigures(reports []*report, shared bool, d time.Duration, u usage) (figures, error) {
	h, err := newHistory(reports)
	if err != nil {
		return nil, err
	}
	var sum report
	for _, r := range reports {
		sum.Sent += r.Sent
		sum.CPU += r.CPU
		sum.Mallocs += r.Mallocs
		sum.Goroutines += r.Goroutines
		sum.Stuck += r.Stuck
		sum.Failures += r.Failures
	}
	waits := h.waits()
	n := float64(len(h.events))
	f := figures{
		figRate:  n / d.Seconds(),
		figCut:   float64(len(h.cuts)),
		figStuck: float64(sum.Stuck), figFailures: float64(sum.Failures),
		figGoroutines: float64(sum.Goroutines),
		figWaitP50:    percentile(waits, 50), figWaitP99: percentile(waits, 99), figWaitMax: percentile(waits, 100),
	}
	if n > 0 {
		cycles := h.cycles()
		f[figCycleP50], f[figCycleP99] = percentile(cycles, 50), percentile(cycles, 99)
		f[figSent] = float64(sum.Sent) / n
		// Opening a connection sends what the server refuses and does not count.
		f[figScripted] = float64(max(0, u.commands-sum.Sent)) / n
		f[figMallocs] = float64(sum.Mallocs) / n
		f[figCPU] = float64(sum.CPU.Microseconds()) / n
		f[figServerCPU] = float64(u.cpu.Microseconds()) / n
	}
	f[figLeast], f[figMost] = float64(slices.Min(h.counts)), float64(slices.Max(h.counts))
	if shared {
		gaps := h.gaps()
		f[figGapP50], f[figGapP99] = percentile(gaps, 50), percentile(gaps, 99)
		f[figMoved], f[figOverlaps] = h.moved(), float64(h.overlaps())
	}
	return f, nil
}
