package holdfast

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
)

// sentinel is an error that may be a special case of another one.
type sentinel struct {
	text string
	kind error
}

func (s *sentinel) Error() string { return "holdfast: " + s.text }
func (s *sentinel) Unwrap() error { return s.kind }

// Errors to be used with errors.Is. Details come with errors.As.
var (
	// ErrNotAcquired says that somebody has the lock: at once from TryAcquire, at
	// the end of the wait from Acquire (it then also matches the context's error
	// and cause, if the context ended the wait). Go without, or try later. The
	// detail is *HeldError.
	ErrNotAcquired error = &sentinel{text: "lock not acquired"}

	// ErrUnavailable says that the outcome could not be learned: network, timeout,
	// a server that refuses. It never means that somebody has the lock. The
	// server's or the client's error is in the chain, if one came before the wait ended.
	ErrUnavailable error = &sentinel{text: "lock service unavailable"}

	// ErrNotHeld says that the handle holds nothing (nil, released). ErrLost is a
	// kind of it.
	ErrNotHeld error = &sentinel{text: "lock not held"}

	// ErrLost says that the lock ended without the caller's doing. As the cause of
	// the context: stop, do not write. From Release: the critical section may have
	// overlapped with another; reconcile. The detail is *LostError.
	ErrLost error = &sentinel{text: "lock lost", kind: ErrNotHeld}

	// ErrMaxHold says that the cap on the hold (WithMaxHold) ended it. It is a kind
	// of ErrLost: stop.
	ErrMaxHold error = &sentinel{text: "lock held for longer than allowed", kind: ErrLost}

	// ErrReleased is the cause of a lock's context after Release.
	ErrReleased error = &sentinel{text: "lock released"}

	// ErrDeadlock says that a nested wait could never end: the flow waits for what
	// it holds itself, or flows wait for each other. Release what the flow holds, and try again. The detail is
	// *DeadlockError.
	ErrDeadlock error = &sentinel{text: "deadlock"}

	// ErrInvalid says that the call makes no sense (empty key, impossible TTL,
	// contradicting options). Nothing was sent. Fix the call.
	ErrInvalid error = &sentinel{text: "invalid argument"}

	// ErrClosed comes after Locker.Close, and only then.
	ErrClosed error = &sentinel{text: "locker closed"}
)

// HeldError tells who has the lock. It matches ErrNotAcquired.
type HeldError struct {
	Key    string        // as given to Acquire
	Holder string        // the holder's name; "" if it was gone when asked, or there was no time to ask
	TTL    time.Duration // what was left of its lease; 0 unknown, negative: no expiry
	Full   bool          // there was no place in the queue (WithMaxWaiters)
}

func (e *HeldError) Error() string {
	switch {
	case e.Full:
		return fmt.Sprintf("holdfast: lock %q is held by %q, and as many wait for it as may", e.Key, e.Holder)
	case e.Holder == "":
		return fmt.Sprintf("holdfast: lock %q is held", e.Key)
	case e.TTL == 0:
		return fmt.Sprintf("holdfast: lock %q is held by %q", e.Key, e.Holder)
	case e.TTL < 0:
		return fmt.Sprintf("holdfast: lock %q is held by %q without expiry", e.Key, e.Holder)
	}
	return fmt.Sprintf("holdfast: lock %q is held by %q for another %v", e.Key, e.Holder, e.TTL.Round(time.Millisecond))
}

// Is makes the error match ErrNotAcquired.
func (e *HeldError) Is(target error) bool { return target == ErrNotAcquired }

// ended reports whether the lease that e tells of, learned at at, must have ended
// so long ago that silence since then is no sign of a holder. e may be nil.
func (e *HeldError) ended(at clock.Instant) bool {
	return e != nil && e.TTL > 0 && clock.Now() > at.Add(e.TTL+mostPause)
}

// Reasons of a LostError.
const (
	LostExpired = "validity ended without a confirmed renewal"
	LostGone    = "the key is gone"
	LostTaken   = "the key carries another value"
	LostMaxHold = "the cap on the hold was reached"
	LostBroken  = "it was broken by force"
)

// LostError tells why a lock ended without the caller's doing. It matches
// ErrLost and ErrNotHeld.
type LostError struct {
	Key    string // as given to Acquire
	Reason string // one of the Lost constants
	Err    error  // what stood behind it, such as the last failed renewal; may be nil
}

func (e *LostError) Error() string {
	text := fmt.Sprintf("holdfast: lock %q lost: %s", e.Key, e.Reason)
	if e.Err != nil && !errors.Is(e.Err, ErrMaxHold) {
		text += ": " + e.Err.Error()
	}
	return text
}

// Is makes the error match ErrLost and ErrNotHeld.
func (e *LostError) Is(target error) bool { return target == ErrLost || target == ErrNotHeld }

// Unwrap returns e.Err.
func (e *LostError) Unwrap() error { return e.Err }

// DeadlockError describes a nested wait that could never end: the flow asks for a lock that
// it holds itself, or each of several flows waits for one that the next of them holds. Of those
// the youngest gets the error, the one whose first lock was taken last: let it release what it holds, by its deferred
// calls, and try again; the others go on. It matches ErrDeadlock.
type DeadlockError struct {
	Key   string         // the lock that was asked for
	Cycle []DeadlockWait // who waits for what; the last waits for the first
}

// DeadlockWait is one edge of a cycle: a flow that holds a lock waits for another.
type DeadlockWait struct {
	Holder   string    // name of the flow's holder
	Key      string    // the lock that it holds
	WaitsFor string    // the lock that it waits for
	Since    time.Time // since when it holds Key, by the holder's clock
	Waits    time.Time // since when it waits, by the server's clock; zero: it has not begun
}

func (e *DeadlockError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "holdfast: deadlock on lock %q", e.Key)
	for i, w := range e.Cycle {
		b.WriteString([]string{": ", "; "}[min(i, 1)])
		fmt.Fprintf(&b, "%q holds %q and waits for %q", w.Holder, w.Key, w.WaitsFor)
		if !w.Waits.IsZero() {
			fmt.Fprintf(&b, " since %s", w.Waits.UTC().Format("15:04:05.000"))
		}
	}
	return b.String()
}

// Is makes the error match ErrDeadlock.
func (e *DeadlockError) Is(target error) bool { return target == ErrDeadlock }

// ReplicaError says that fewer replicas than WithReplicas asks for had
// acknowledged the lock in time. The lock was given back. It comes inside an
// error that matches ErrUnavailable.
type ReplicaError struct {
	Acked, Wanted int
}

func (e *ReplicaError) Error() string {
	return fmt.Sprintf("%d of %d replicas acknowledged the lock in time", e.Acked, e.Wanted)
}

// errTooLate: a grant came when its validity had already ended.
var errTooLate = errors.New("granted too late: its validity has already ended")

// errInterrupted: the caller stopped waiting for an answer.
var errInterrupted = errors.New("interrupted before an answer came")

// errSilent: the last that was heard of a lock is a lease that has ended since.
var errSilent = errors.New("no answer since the holder's lease has ended")

// noAnswerError: a limit of ours ended a call. It is nobody's context error.
type noAnswerError struct{ limit time.Duration }

func (e *noAnswerError) Error() string {
	return fmt.Sprintf("no answer within %v", e.limit.Round(time.Millisecond))
}
func (e *noAnswerError) Timeout() bool { return true }

func invalid(format string, args ...any) error {
	return &chain{texts: "holdfast: " + fmt.Sprintf(format, args...), errs: []error{ErrInvalid}}
}

// unavailable makes the error of an operation whose outcome is not known.
func unavailable(op, key string, err error) error {
	return &chain{
		texts: fmt.Sprintf("holdfast: %s %q: %v", op, key, err),
		errs:  []error{ErrUnavailable, opaqueContext{err}},
	}
}

// chain is one text over several errors that all match.
type chain struct {
	texts string
	errs  []error
}

func (c *chain) Error() string   { return c.texts }
func (c *chain) Unwrap() []error { return c.errs }

// withContext adds the error and the cause of a context that ended the call.
func withContext(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	cause := context.Cause(ctx)
	return &chain{texts: fmt.Sprintf("%v: %v", err, cause), errs: []error{err, ctx.Err(), cause}}
}

// opaqueContext hides context errors in err, whose limits were ours or the
// client's: a caller whose own context is fine must not be told that it ended.
// All else in err stays reachable.
type opaqueContext struct{ error }

func (o opaqueContext) Is(target error) bool {
	if target == context.Canceled || target == context.DeadlineExceeded {
		return false
	}
	return errors.Is(o.error, target)
}

func (o opaqueContext) As(target any) bool { return errors.As(o.error, target) }

// isFinal reports whether waiting cannot heal err. Errors of a Store say so by a
// method Final.
func isFinal(err error) bool {
	var f interface{ Final() bool }
	return errors.Is(err, ErrInvalid) || errors.As(err, &f) && f.Final()
}
