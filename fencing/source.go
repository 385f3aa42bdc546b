package fencing

import (
	"context"
	"errors"
)

// Source gives tokens from elsewhere, such as a sequence of a database: an option of
// holdfast.WithFencing. It must be safe for concurrent use.
//
// Its tokens are drawn after the lock was granted. By then the lock may have ended, and
// somebody else may have drawn a lower one; so holdfast asks once more whether the lock is
// still ours before it hands it out.
type Source interface {
	// Next returns a token for key, above 0 and greater than all that were returned for
	// this key before, by any process.
	Next(ctx context.Context, key string) (Token, error)
}

// ClockFloor is an option of holdfast.WithFencing: a token is the counter plus one, or the
// server's clock in microseconds if that is greater. A counter that was lost, in a
// failover, an eviction or a FLUSHALL, then does not bring old numbers back, and its key
// goes by itself a week after the last grant.
//
// It leans on the clocks of servers: a server that takes over must not be behind the one
// before by more time than went by between their last and first grant. And grants must not
// come faster than one per microsecond for long, which they cannot.
//
// It is no source outside that: its Next only returns an error. On a majority (package
// redlock) it changes nothing: tokens there cannot go back anyway.
var ClockFloor Source = clockFloor{}

type clockFloor struct{}

var errClockFloor = errors.New("fencing: ClockFloor is an option of holdfast.WithFencing, and no source by itself")

func (clockFloor) Next(context.Context, string) (Token, error) { return 0, errClockFloor }
