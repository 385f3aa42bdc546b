package holdfast

import (
	"math"
	"math/rand/v2"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
)

// driftPlus is the part of the drift that does not grow with the lease.
const driftPlus = 2 * time.Millisecond

// driftOf is what clocks may disagree over a lease of length d: by default one per
// cent for their rates, and 2 ms for rounding. Source: the Redlock description,
// redis.io, "Distributed Locks with Redis", section "Safety arguments".
func (c *config) driftOf(d time.Duration) time.Duration {
	if c.driftShare < 0 {
		return d/100 + c.driftPlus
	}
	return time.Duration(math.Ceil(c.driftShare*float64(d))) + c.driftPlus
}

// validity is how long a lease of length d may be trusted, counted from before
// the command that started it was sent. The server starts the lease no earlier
// than that, so it cannot end sooner in true time than sent + d - drift. The
// margin is the time the holder has to stop.
func (c *config) validity(d time.Duration) time.Duration { return d - c.driftOf(d) - c.marginOf(d) }

// validUntil is the end of trust in a lease of length d, started or restarted by
// a command sent at sent, and never beyond the cap on the hold.
func (c *config) validUntil(sent clock.Instant, d time.Duration, limit clock.Instant) clock.Instant {
	return min(sent.Add(c.validity(d)), limit)
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
