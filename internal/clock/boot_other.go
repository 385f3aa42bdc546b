//go:build !linux

package clock

import "time"

// sinceBoot is not known here; the watchdog compares with the wall clock.
func sinceBoot() time.Duration { return 0 }
