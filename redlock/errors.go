package redlock

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/refusal"
)

// QuorumError says that no majority agreed, and what each of the others answered. It
// comes inside the errors of a Locker, found by errors.As. It matches
// holdfast.ErrNotAcquired if the reason is that others have the lock, or parts of it; the
// *holdfast.HeldError in its chain then tells of the one who has most. Else the error
// matches holdfast.ErrUnavailable.
type QuorumError struct {
	Votes  int         // instances that agreed
	Needed int         // so many would have been a majority
	Nodes  []NodeError // the others, in the order of the clients

	op     string
	held   *holdfast.HeldError // nil: that is not the reason
	holder string              // its value
	final  bool
	ran    bool
	pause  time.Duration
}

// NodeError is what one instance answered, or why it did not. errors.As finds a NodeError, not
// a pointer to one, and only those that do not say that others have the lock.
type NodeError struct {
	Index int    // of its client
	Addr  string // of its client
	Err   error  // such as *holdfast.HeldError, *YoungError, or the client's error
}

func (e NodeError) Error() string {
	var held *holdfast.HeldError
	if !errors.As(e.Err, &held) {
		return e.Addr + ": " + e.Err.Error()
	}
	if held.TTL <= 0 {
		return fmt.Sprintf("%s: held by %q", e.Addr, held.Holder)
	}
	return fmt.Sprintf("%s: held by %q for another %v", e.Addr, held.Holder, held.TTL.Round(time.Millisecond))
}

// Unwrap returns e.Err.
func (e NodeError) Unwrap() error { return e.Err }

func (e *QuorumError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "redlock: %s: %d of the %d votes needed", e.op, e.Votes, e.Needed)
	for i, n := range e.Nodes {
		b.WriteString([]string{": ", "; "}[min(i, 1)])
		b.WriteString(n.Error())
	}
	return b.String()
}

// Unwrap returns the reasons. That others have a minority is none.
func (e *QuorumError) Unwrap() []error {
	var errs []error
	if e.held != nil {
		errs = append(errs, e.held)
	}
	for _, n := range e.Nodes {
		var held *holdfast.HeldError
		if !errors.As(n.Err, &held) {
			errs = append(errs, n)
		}
	}
	return errs
}

// Final reports whether waiting cannot heal it: too many instances refuse for good.
func (e *QuorumError) Final() bool { return e.final }

// MayHaveRun reports whether some instance may have done what was asked.
func (e *QuorumError) MayHaveRun() bool { return e.ran }

// RetryAfter is the pause before the next attempt: random, so that those who have split
// the votes do not split them again; 0 if nobody has.
func (e *QuorumError) RetryAfter() time.Duration { return e.pause }

// YoungError says that an instance has no vote yet, because it has not been up long
// enough: it may have come back without its data, and have forgotten a lease that has
// not ended. See WithLongestTTL and WithDurableInstances.
type YoungError struct {
	Left time.Duration // until it has a vote, if it stays up
}

func (e *YoungError) Error() string {
	return fmt.Sprintf("has not been up for long enough to vote, for another %v", e.Left.Round(time.Millisecond))
}

// SameServerError says that two clients lead to the same server, whose vote would count
// twice. It matches holdfast.ErrInvalid.
type SameServerError struct {
	Addrs [2]string // of the two clients
}

func (e *SameServerError) Error() string {
	return fmt.Sprintf("redlock: the clients of %s and %s reach the same server", e.Addrs[0], e.Addrs[1])
}

// Is makes the error match holdfast.ErrInvalid.
func (e *SameServerError) Is(target error) bool { return target == holdfast.ErrInvalid }

// noAnswerError: a limit of ours ended a request. It is nobody's context error.
type noAnswerError struct{ limit time.Duration }

func (e *noAnswerError) Error() string {
	return fmt.Sprintf("no answer within %v", e.limit.Round(time.Millisecond))
}

// Timeout marks it as one.
func (e *noAnswerError) Timeout() bool { return true }

var (
	errNotAwaited = errors.New("its answer was not waited for")
	errBusy       = errors.New("it is still being asked for the lock")
	errOwn        = errors.New("it still has what an earlier try has taken there")
	errOver       = errors.New("the lock is being given up")
	errGone       = errors.New("it does not have the lock")
	errTaken      = errors.New("somebody else has the lock there")
	errTwin       = errors.New("it had the lock already: another client reaches the same server")
	errLow        = errors.New("it has seen a greater token")
	errAhead      = errors.New("the token is too far ahead of its clock")
	errSetting    = errors.New("an Extend to a shorter lease is on its way to it")
	errCeiling    = refusal.Final(errors.New("an Extend to a shorter lease may still be on its way to it"))
	errUnused     = errors.New("the answer could not be understood")
)

func invalid(format string, args ...any) error {
	return fmt.Errorf("redlock: %s: %w", fmt.Sprintf(format, args...), holdfast.ErrInvalid)
}

// isFinal reports whether waiting cannot heal err.
func isFinal(err error) bool {
	var f interface{ Final() bool }
	return errors.Is(err, holdfast.ErrInvalid) || errors.As(err, &f) && f.Final()
}

// refusedByServer reports whether a server has answered that it did not do it.
func refusedByServer(err error) bool {
	_, ok := refusal.Text(err)
	return ok
}
