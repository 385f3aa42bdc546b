package holdfast

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/refusal"
)

// Store is a foundation that a Locker stands on. Waiting, renewal, validity,
// limits and errors are the Locker's; a Store talks to the server. Its methods
// are called from many goroutines at once.
//
// A method should return when ctx ends, but the Locker does not rely on it: it
// goes on without the answer, and settles what the call may have done.
//
// An error whose chain has a method Final() bool that returns true ends an
// acquisition at once, because waiting cannot heal it. All other errors are
// tried again within the wait or the validity; an acquisition that waits after a pause
// of RetryAfter() time.Duration, if the chain has that method and it is above 0 and at
// most 250 ms, up to eight times in a row while nobody wakes it. A method MayHaveRun()
// bool says of an error of Extend or Release whether what was asked may have been done,
// or may yet be; without it that follows from what errors of go-redis say.
//
// A Store may have these methods, too; none of them may wait for the server, but Drain:
//
//   - Configure(StoreSettings) error: NewWithStore calls it, once, before all else.
//   - CheckCall(CallSettings) error: refuses settings that it cannot keep, with an error that
//     wraps ErrInvalid: those of the Locker, of each call with options, and of an Extend.
//   - Watch(key string, wake func()) (stop func()): wake, called at any time from any
//     goroutine, says that key may have become free; not before Watch has returned.
//     A key may be watched anew before the last watch of it is stopped.
//   - Drain(limit time.Duration): Close calls it last. It ends what goes on in the
//     background, and comes back within limit.
//   - SettlesAcquires(): its presence says that the store itself gives back what an
//     Acquire without success may have taken, also one whose ctx has ended.
//   - Shards(ctx context.Context, leases []Lease) [][]int: the indexes of the leases by
//     server, each of which then gets renewals of its own.
type Store interface {
	// Acquire makes one attempt to take r.Key for r.Owner. It must be idempotent
	// for an owner, and must not delete or shorten what an earlier attempt of the
	// same owner may have taken. It returns a *HeldError when somebody else has the
	// lock, and another error when it could not learn the outcome; the Locker then
	// gives back what may have been taken.
	Acquire(ctx context.Context, r Request) (Grant, error)

	// Renew raises what is left of each lease to its TTL, and returns one result
	// for each: nil, a *LostError when the lock is not the owner's, or another
	// error when it could not learn the outcome.
	Renew(ctx context.Context, leases []Lease) []error

	// Extend sets what is left of a lease to its TTL, whether longer or shorter.
	// Results are those of Renew.
	Extend(ctx context.Context, l Lease) error

	// Release deletes the lock if it is the owner's. With l.Keep it leaves it to end by
	// itself after that time, in such a way that it is no longer the owner's for Renew
	// and for a Release without Keep, while one with Keep may be repeated. Results are
	// those of Renew.
	Release(ctx context.Context, l Lease) error
}

// Lease names one acquisition of a lock.
type Lease struct {
	Key   string // as the server sees it
	Owner string // never used for another acquisition
	TTL   time.Duration
	Keep  time.Duration // for Release alone: the lock stays for this long; 0: not at all
}

// Request is one attempt to take a lock.
type Request struct {
	Lease
	Attempt      int           // counts the attempts of an acquisition, from 1
	Contended    bool          // the lock was held a moment ago; a hint
	queues       bool          // the caller joins a queue if it is refused: who has the lock need not be told
	Fencing      bool          // draw a token with the grant
	ClockFloor   bool          // with Fencing: one that cannot go back if counters are lost, see fencing.ClockFloor
	Replicas     int           // acknowledgements to wait for; 0: none
	ReplicaLimit time.Duration // how long to wait for them
}

// Grant is the answer to a Request that took the lock.
type Grant struct {
	Token fencing.Token // 0 without fencing

	// Left, if not 0, says that an earlier try of the same owner had taken the
	// lock, and what was left of its lease when this try was answered.
	Left time.Duration

	// Repeated says that a copy of the request may still run at the server.
	Repeated bool

	// Owner, if not "", is the value that the store has given the lock in place of
	// Request.Owner: Lock.Owner, and what the other methods get. Then each attempt must
	// have a value of its own, and the store must have SettlesAcquires.
	Owner string
}

// safeStore turns a panic in a store, a client or its hooks into an error: it
// would happen on a goroutine where nobody can catch it.
type safeStore struct{ Store }

func caught(err *error) {
	if p := recover(); p != nil {
		*err = refusal.Final(fmt.Errorf("client panicked: %v", p))
	}
}

// contain runs fn, and makes an error of a panic.
func contain(fn func()) (err error) {
	defer caught(&err)
	fn()
	return nil
}

func (s safeStore) Acquire(ctx context.Context, r Request) (g Grant, err error) {
	defer caught(&err)
	return s.Store.Acquire(ctx, r)
}

func (s safeStore) Renew(ctx context.Context, leases []Lease) (errs []error) {
	errs, err := s.renew(ctx, leases)
	if err == nil && len(errs) != len(leases) {
		err = errors.New("store: wrong number of results")
	}
	if err != nil {
		errs = make([]error, len(leases))
		for i := range errs {
			errs[i] = err
		}
	}
	return errs
}

func (s safeStore) renew(ctx context.Context, leases []Lease) (errs []error, err error) {
	defer caught(&err)
	return s.Store.Renew(ctx, leases), nil
}

func (s safeStore) Extend(ctx context.Context, l Lease) (err error) {
	defer caught(&err)
	return s.Store.Extend(ctx, l)
}

func (s safeStore) Release(ctx context.Context, l Lease) (err error) {
	defer caught(&err)
	return s.Store.Release(ctx, l)
}

// safeLine is safeStore for a lineStore.
type safeLine struct{ lineStore }

func (s safeLine) wait(ctx context.Context, calls []lineCall) (answers []lineAnswer) {
	err := contain(func() { answers = s.lineStore.wait(ctx, calls) })
	if err != nil {
		answers = make([]lineAnswer, len(calls))
		for i := range answers {
			answers[i].err = err
		}
	}
	return answers
}

func (s safeLine) handOn(ctx context.Context, l Lease) (next *handed, err error) {
	defer caught(&err)
	return s.lineStore.handOn(ctx, l)
}
