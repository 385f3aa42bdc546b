package once

import (
	"context"
	"time"
)

// State is how an operation stands.
type State string

const (
	// Running is the state of an operation that was claimed and has not ended.
	Running State = "running"
	// Unknown is that of one whose function has failed.
	Unknown State = "unknown"
	// Done is that of one that has a result.
	Done State = "done"
)

// Record is what a store keeps of an operation.
type Record struct {
	State   State
	Run     string    // who has claimed it; "": it was resolved
	Payload []byte    // with Done the result, with Unknown the reason, else empty
	Since   time.Time // when it came to this state, by the store's clock; zero: not known
}

// Store remembers operations. It must be safe for concurrent use, also by other processes,
// and each method must be one atomic step for those who look from outside. Package oncetest
// tests that. A method that is called again with the same arguments must succeed again: an
// answer may be lost, or the client may send twice.
type Store interface {
	// Begin claims id for run if it has no record. It returns the record as it is then:
	// with the same Run if run has the claim.
	Begin(ctx context.Context, id, run string) (Record, error)

	// End puts the record of run into state Done or Unknown, with the payload. If there
	// is no record, it makes one. If the record is not in state Running by this run, it
	// returns an error that matches ErrLost.
	End(ctx context.Context, id, run string, state State, payload []byte) error

	// Abandon deletes the record of id if it is in state Running by this run.
	Abandon(ctx context.Context, id, run string) error

	// Resolve puts the result in place of what is there, if anything; but not of another
	// result, which is an error.
	Resolve(ctx context.Context, id string, result []byte) error

	// Forget deletes the record of id, if there is one.
	Forget(ctx context.Context, id string) error
}
