// Package clock measures elapsed time as leases need it: the time that the
// machine was suspended included. It is for the packages of holdfast.
//
// Go's monotonic clock is CLOCK_MONOTONIC on Linux, which stands still while
// the machine is suspended; a lease on a server does not. So the greater of it
// and CLOCK_BOOTTIME counts. Elsewhere only the monotonic clock is read, and a
// jump of the wall clock is the hint of a suspension.
package clock

import "time"

// Instant is a moment on the elapsed-time clock, in nanoseconds. Only
// differences mean something, within one process. The zero Instant is earlier
// than any that Now returns.
type Instant int64

var (
	base     = time.Now()
	baseBoot = sinceBoot()
)

// Now returns the current moment. It is safe for concurrent use.
func Now() Instant {
	now := time.Now()
	if now == now.Round(0) {
		// No monotonic reading: the virtual time of a testing/synctest bubble,
		// where real time must not count.
		return Instant(now.UnixNano())
	}
	return Instant(max(now.Sub(base), sinceBoot()-baseBoot)) + 1
}

// Add returns the moment d later.
func (i Instant) Add(d time.Duration) Instant { return i + Instant(d) }

// Sub returns the time from j to i.
func (i Instant) Sub(j Instant) time.Duration { return time.Duration(i - j) }

// Wall returns the wall-clock time that belongs to i, for people.
func (i Instant) Wall() time.Time { return time.Now().Add(i.Sub(Now())) }
