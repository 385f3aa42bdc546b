package holdfast

import (
	"math/rand/v2"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
)

// drift is what clocks may disagree over a lease of length d: one per cent for
// their rates, and 2 ms for rounding. Source: the Redlock description, redis.io,
// "Distributed Locks with Redis", section "Safety arguments".
func drift(d time.Duration) time.Duration { return d/100 + 2*time.Millisecond }

// validity is how long a lease of length d may be trusted, counted from before
// the command that started it was sent. The server starts the lease no earlier
// than that, so it cannot end sooner in true time than sent + d - drift. The
// margin is the time the holder has to stop.
func validity(d, margin time.Duration) time.Duration { return d - drift(d) - margin }

// validUntil is the end of trust in a lease of length d, started or restarted by
// a command sent at sent, and never beyond the cap on the hold.
func validUntil(sent clock.Instant, d, margin time.Duration, limit clock.Instant) clock.Instant {
	return min(sent.Add(validity(d, margin)), limit)
}

// backoff returns the pause before try n (from 1): half to all of first·2^(n-1),
// at most most.
func backoff(n int, first, most time.Duration) time.Duration {
	return jitter(n, first, most, rand.Float64())
}

// jitter is backoff with a share of the random half, from 0 to 1.
func jitter(n int, first, most time.Duration, share float64) time.Duration {
	d := most
	if shift := max(n, 1) - 1; shift < 32 && first < most>>shift {
		d = first << shift
	}
	return d/2 + time.Duration(share*float64(d/2))
}
