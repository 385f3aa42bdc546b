package once

import (
	"errors"
	"fmt"
	"strconv"
	"time"
)

var (
	// ErrInProgress says that another call has claimed the id and has not ended: it is
	// at work, or its process has died. Try again later; if it stays, look at the third
	// party, then call Resolve or Forget.
	ErrInProgress = errors.New("once: in progress")

	// ErrUnknown is in the chain of every [*UnknownError]. Do not try again: look at the
	// third party, then call Resolve or Forget.
	ErrUnknown = errors.New("once: outcome unknown")

	// ErrNotDone says that nothing has happened: the function has said so by NotDone, or
	// it was not called. The same id may be run again.
	ErrNotDone = errors.New("once: not done")

	// ErrNotRemembered comes together with a result: the function has succeeded, and the
	// store may not know it. A repetition gets the result, ErrInProgress or ErrUnknown.
	// Use the result, and call Resolve with it when the store can be reached again.
	ErrNotRemembered = errors.New("once: result not remembered")

	// ErrLost is what a Store answers to a run whose record is somebody else's by now.
	ErrLost = errors.New("once: the claim was lost")
)

// UnknownError says that an operation was begun and that nobody can know how it ended. It
// matches ErrUnknown, and Err.
type UnknownError struct {
	ID     string
	Since  time.Time // by the store's clock; zero: just now, or not known
	Reason string    // the text of the function's error, at most 1 KiB of it
	Err    error     // that error, for the call that got it; nil for later ones
}

// Error tells the id and the reason.
func (e *UnknownError) Error() string {
	return fmt.Sprintf("%v: %q%s: %s", ErrUnknown, e.ID, since(e.Since), e.Reason)
}

// Unwrap returns ErrUnknown, and Err if there is one.
func (e *UnknownError) Unwrap() []error {
	if e.Err == nil {
		return []error{ErrUnknown}
	}
	return []error{ErrUnknown, e.Err}
}

func since(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return ", since " + t.UTC().Format(time.RFC3339)
}

// notDone is what NotDone returns.
type notDone struct{ err error }

func (e *notDone) Error() string   { return ErrNotDone.Error() + ": " + e.err.Error() }
func (e *notDone) Unwrap() []error { return []error{ErrNotDone, e.err} }

// NotDone is for the function that Run calls: it says that nothing has happened, because
// of err, and that the id may be run again. Use it only for what is certain, such as a
// request that was refused or never sent. Return it as it is: wrapped in another error it
// does not count, since it may be that of something inside. NotDone(nil) is an error too.
func NotDone(err error) error {
	if err == nil {
		err = errors.New("no reason given")
	}
	return &notDone{err}
}

// checkID returns an error for an id that not every store can keep.
func checkID(id string) error {
	switch {
	case id == "":
		return errors.New("once: empty id")
	case len(id) > MaxID:
		return errors.New("once: id of " + strconv.Itoa(len(id)) + " bytes, more than " + strconv.Itoa(MaxID))
	case !printable(id):
		return fmt.Errorf("once: id %q: must be UTF-8 without zero bytes", id)
	}
	return nil
}
