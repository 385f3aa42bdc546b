// Package holdfast takes locks on Redis, for Go services: take a lock in a
// handler, defer its Release, work under its context, and find that context
// cancelled the moment ownership can no longer be trusted.
//
//	lock, err := locker.Acquire(ctx, "order:1")
//	if err != nil {
//		return err
//	}
//	defer lock.Release()
//	return work(lock.Context())
//
// A lock is a key with an owner value of its own and a TTL (a lease). A watchdog
// renews it while it is held: one goroutine for all locks of a Locker. Only the
// owner can release or renew it, because both compare before they write, in one
// script.
//
// # What can be trusted
//
// A lease that a command started lives on the server at least from the moment
// before the command was sent. Validity ends earlier: by the drift that clocks
// may have (TTL/100 + 2 ms) and by a margin (TTL/10) in which the holder can stop.
// At the end of validity the context ends with a *LostError as its cause, whatever
// a renewal under way is doing, and Lock.Err is not nil even in a process that was
// stopped and has run no timer yet. Time in which the machine was suspended counts
// where the system tells it (Linux).
//
// # Waiting
//
// Waiters of all processes queue beside the key, first come first served, and
// Release hands the lock to the first of them in the same script that else deletes
// the key. The waiter is told by a published message, and may start on it: the key
// was set after one of its calls had reached the server, so it lives at least the
// lease of a hand-over (2 s, or the TTL if that is shorter) from when that call was
// sent. A message that is read late proves nothing, and is not believed.
//
// # What no lock can promise
//
// A process that is paused between its last check and its write writes late: no
// lock can stop it. Only the resource can, by refusing fencing tokens older than
// the newest it has seen: see WithFencing and package fencing. A single Redis can
// lose a lock: in a failover (see WithReplicas), by eviction, by a flush, or when
// its clock is set. The holder hears of it at its next renewal; until then there
// may be two.
//
// # Errors
//
// ErrNotAcquired means that somebody has the lock, and ErrUnavailable never means
// that. ErrLost means that the lock ended without the caller's doing. All errors
// work with errors.Is and errors.As through any wrapping.
package holdfast
