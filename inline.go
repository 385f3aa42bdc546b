package holdfast

import (
	"errors"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
)

// waitInLine is wait with a place in the key's queue at the server.
func (w *want) waitInLine() error {
	l, k := w.l, w.k
	l.mu.Lock()
	crowded := l.line.crowded(k.full)
	l.mu.Unlock()
	if !crowded {
		w.queues = true
		err := w.try(false)
		if err == nil || !w.again(err) || w.end != 0 && clock.Now() >= w.end {
			return err
		}
		w.queues = false
	}
	var over <-chan time.Time
	if w.end != 0 {
		timer := time.NewTimer(w.end.Sub(clock.Now()))
		defer timer.Stop()
		over = timer.C
	}
	l.line.store.await(k.full)
	defer l.line.store.enough(k.full)
	s := &spot{k: k, holds: holdsOf(heldIn(w.ctx, l.resource)), got: make(chan verdict, 1)}
	w.queued = true
	defer w.settleLine(s)
	for {
		l.enterLine(s)
		select {
		case v := <-s.got:
			if done, err := w.accept(s, v); done {
				return err
			}
		case err := <-w.stuck:
			return w.leaveLine(s, err)
		case <-over:
			return w.leaveLine(s, errWaitOver)
		case <-w.ctx.Done():
			return w.leaveLine(s, w.ctx.Err())
		case <-l.closing:
			return w.leaveLine(s, ErrClosed)
		}
	}
}

// accept makes the lock live that s was given, if it can be trusted. done is false if
// it cannot, and the wait goes on: its next call finds what is true.
func (w *want) accept(s *spot, v verdict) (done bool, err error) {
	switch {
	case v.err != nil:
		w.queued = !v.full
		return true, w.refused(v.err)
	case v.weak:
		err = w.confirm(v)
	default:
		err = w.l.grant(w.ctx, w.k, v.grant, v.sent, w.unknown)
		if err != nil {
			w.failure, w.unsure = err, true
		}
	}
	return err == nil || !w.again(err), err
}

// confirm renews a lease that is ours, but too short, to its full length before the work
// may start; with replicas it waits for their acknowledgement. It does not extend: one
// that runs late must not undo an Extend that was longer.
func (w *want) confirm(v verdict) error {
	if w.k.config.replicas > 0 {
		return w.try(true)
	}
	k, sent := w.k, clock.Now()
	limit := min(attemptLimit, k.config.validity(k.ttl))
	if w.end != 0 {
		limit = min(limit, w.end.Sub(sent))
	}
	if limit <= 0 {
		return errWaitOver
	}
	c := &call{Context: w.ctx, l: w.l, k: k, op: renewOp}
	c.request.Lease = k.lease()
	err := c.run(w.ctx.Done(), true, limit)
	var lost *LostError
	if errors.As(err, &lost) {
		return &HeldError{Key: k.key} // it has ended before: back to the queue
	}
	if err != nil {
		return w.refused(err)
	}
	if left := v.grant.Left; left > 0 && clock.Now() >= v.sent.Add(k.config.validity(left)) {
		// The lease that was to be confirmed may have ended in between, and this may be
		// a later one with another token.
		return &HeldError{Key: k.key}
	}
	return w.l.grant(w.ctx, k, Grant{Token: v.grant.Token}, sent, w.unknown)
}

// leaveLine gives up, and takes over what was learned, for the error.
func (w *want) leaveLine(s *spot, err error) error {
	w.l.mu.Lock()
	defer w.l.mu.Unlock()
	w.l.closeSpot(s)
	w.take(s.news, s.flights > 0 && clock.Now() > s.latest().Add(mostPause))
	return err
}

// settleLine notes what the stay in the queue leaves open.
func (w *want) settleLine(s *spot) {
	w.l.mu.Lock()
	defer w.l.mu.Unlock()
	w.attempts += s.calls
	if s.unknown {
		w.unknown = true
		w.k.suspect = true
	}
}
