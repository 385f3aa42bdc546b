// Package clock measures elapsed time as leases need it: the time that the
// machine was suspended included. It is for the packages of holdfast.
//
// Go's monotonic clock is CLOCK_MONOTONIC on Linux, which stands still while
// the machine is suspended; a lease on a server does not. So the greater of it
// and CLOCK_BOOTTIME counts. Elsewhere only the monotonic clock is read, and a
// jump of the wall clock is the hint of a suspension.
package clock

import (
	"sync/atomic"
	"time"
)

// Instant is a moment on the elapsed-time clock, in nanoseconds. Only
// differences mean something, within one process. The zero Instant is earlier
// than any that Now returns.
type Instant int64

var (
	base     = time.Now()
	baseBoot = sinceBoot()

	// asleep is at most the time that the machine has been suspended since base.
	asleep atomic.Int64
)

// Now returns the current moment. It is safe for concurrent use.
func Now() Instant {
	boot := sinceBoot() - baseBoot // before the other clock: see below
	now := time.Now()
	if virtual(now) {
		return Instant(now.UnixNano())
	}
	run := now.Sub(base)
	// Were it read afterwards, the time in between would count as suspension.
	if slept := boot - run; slept > time.Duration(asleep.Load())+time.Millisecond { // else it is the noise of two clocks
		asleep.Store(int64(slept)) // of two at once the smaller may stay, until the next call
	}
	return Instant(max(run, boot)) + 1
}

// Early returns a moment that is not later than now, and earlier only by a suspension
// that no call of Now has seen yet, or a millisecond. It costs no system call. It is
// good for the moment before a command is sent, not for the question whether a lease
// has ended.
func Early() Instant {
	now := time.Now()
	if virtual(now) {
		return Instant(now.UnixNano())
	}
	return Instant(now.Sub(base)+time.Duration(asleep.Load())) + 1
}

// virtual reports whether now is of a testing/synctest bubble, where real time must
// not count: it has no monotonic reading.
func virtual(now time.Time) bool { return now == now.Round(0) }

// Add returns the moment d later.
func (i Instant) Add(d time.Duration) Instant { return i + Instant(d) }

// Sub returns the time from j to i.
func (i Instant) Sub(j Instant) time.Duration { return time.Duration(i - j) }

// Wall returns the wall-clock time that belongs to i, for people.
func (i Instant) Wall() time.Time { return time.Now().Add(i.Sub(Now())) }

// Millis returns d in whole milliseconds, rounded up: the one place where a duration becomes
// a number for the server. A lease that lives longer than was asked is safe; one that lives
// shorter is not.
func Millis(d time.Duration) int64 {
	return int64((d + time.Millisecond - 1) / time.Millisecond)
}
