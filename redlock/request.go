package redlock

import (
	"context"
	"time"
)

// kind is what a request asks of an instance.
type kind uint8

const (
	take  kind = iota // the lock, if it is free
	heal              // the lock, which is held, back to an instance that does not have it
	renew             // raise what is left of many leases
	set               // what is left of one lease
	drop              // the lock
)

// granting reports whether an instance needs vetting for it.
func (k kind) granting() bool { return k <= heal }

// Answers to requests.
const (
	codeYes   = 1
	codeHad   = 2 // it had the lock for this value already
	codeGone  = 0
	codeTaken = -1 // somebody else has it
	codeLow   = -2 // the token is not above the counter
	codeAhead = -3 // the token is too far ahead of the instance's clock
)

// names are the keys of a lock as arguments of commands, made once for all instances.
type names struct{ key, fence, channel any }

// lease is one of those that a renewal raises.
type lease struct {
	key, value string
	ttl        time.Duration
}

// request is one question to one instance, and then its answer.
//
// Invariant: it is sent to a server at most once. So an answer tells what was done, and
// only a request with sent and without an answer leaves that open.
type request struct {
	kind kind
	lease
	names  *names // nil in simulations
	token  int64  // 0: without fencing
	fenced bool   // for drop: the counter is raised above token
	silent bool   // for drop: nobody is told
	keep   time.Duration
	leases []lease // of a renewal

	cmd command // while it is being sent

	// The answer. A server's error is one.
	sent    bool  // it may have been done
	err     error // no answer, or a refusal
	code    int
	codes   []any         // of a renewal: int64, or a string that is an error
	holder  string        // the value that stands in the way
	left    time.Duration // what is left of its lease; negative: no expiry
	counter int64         // or the instance's clock, with codeAhead
}

// mayHaveRun reports whether what was asked may have been done, or may yet be.
func (r *request) mayHaveRun() bool { return r.sent && !refusedByServer(r.err) }

// refused reports whether the instance has answered a request for the lock with no: it took
// nothing, and will not.
func (r *request) refused() bool {
	return r.err == nil && (r.code == codeTaken || r.code == codeLow || r.code == codeAhead)
}

// link leads to one instance.
type link interface {
	// name is what people call the instance.
	name() string
	// meet makes sure that it is an instance of its own. It does nothing once that is
	// known.
	meet(ctx context.Context) error
	// young returns a *YoungError if it is known to have no vote yet, without asking.
	young() error
	// send sends requests in one go and puts the answers into them.
	send(ctx context.Context, requests []*request)
	// listen calls hear, from any goroutine, when the lock of key is given up there, until
	// stop is called. Neither waits for the instance.
	listen(key string, hear func()) (stop func())
	// close ends listening.
	close()
}
