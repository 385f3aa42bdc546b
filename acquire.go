package holdfast

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/clock"
)

const (
	// attemptLimit bounds one attempt. An answer that comes when the validity
	// has passed is of no use, so the shorter of both counts.
	attemptLimit = 5 * time.Second
)

// Acquire takes the lock of key. If somebody has it, it waits, first come first
// served among all processes, until ctx or WithWait ends. (After a holder has died, a
// call that finds the key free may come before those who wait. A store without queues,
// or a key whose braces leave no room for one, is polled, first come first served
// among the goroutines of this Locker.) ctx bounds the wait and the hold: when it ends,
// the context of the lock has ended with it and nothing is renewed any more; the key
// stays until Release or the end of its TTL, because the work may still be cleaning up.
//
// Exactly one of lock and error is not nil. Errors: ErrNotAcquired,
// ErrUnavailable, ErrDeadlock, ErrInvalid, ErrClosed. One that came because ctx
// ended also matches ctx's error and cause.
func (l *Locker) Acquire(ctx context.Context, key string, opts ...Option) (*Lock, error) {
	return l.acquire(ctx, key, opts, true)
}

// TryAcquire makes one attempt to take the lock of key, without a place in the queue:
// it gets the lock only if that is free. It takes at most 5 seconds (and the timeout of
// WithReplicas) or the validity of the lease, whichever is shorter. Errors are those of
// Acquire.
func (l *Locker) TryAcquire(ctx context.Context, key string, opts ...Option) (*Lock, error) {
	return l.acquire(ctx, key, opts, false)
}

func (l *Locker) acquire(ctx context.Context, key string, opts []Option, wait bool) (*Lock, error) {
	if ctx == nil {
		return nil, invalid("nil context")
	}
	cfg, err := l.config.with(opts)
	if err != nil {
		return nil, err
	}
	return l.acquireWith(ctx, key, cfg, wait)
}

// acquireWith is acquire with all settings.
func (l *Locker) acquireWith(ctx context.Context, key string, cfg *config, wait bool) (*Lock, error) {
	full, err := cfg.fullKey(key)
	if err != nil {
		return nil, err
	}
	if cfg != l.config {
		if err := l.checkCall(cfg); err != nil {
			return nil, err
		}
	}
	wait = wait && cfg.wait != 0
	if ctx.Err() != nil {
		err := withContext(ctx, unavailable("acquire", key, errors.New("not asked")))
		cfg.refused(key, err)
		return nil, err
	}
	if !l.enter() {
		cfg.refused(key, ErrClosed)
		return nil, ErrClosed
	}
	defer l.group.Done()
	owner, err := newOwner(cfg.holder)
	if err != nil {
		err = unavailable("acquire", key, err)
		cfg.refused(key, err)
		return nil, err
	}
	k := &Lock{l: l, config: cfg, key: key, full: full, owner: owner, ttl: cfg.ttl, longest: cfg.ttl}
	if outer := heldBy(ctx, l.resource, full); outer != nil {
		if cfg.reentrant {
			if nested, err := l.nest(ctx, outer, cfg); nested != nil || err != nil {
				return nested, err
			}
		}
		err := deadlock(k, outer, wait)
		cfg.refused(key, err)
		return nil, err
	}
	w := want{l: l, ctx: ctx, k: k, start: clock.Early()}
	if wait && cfg.wait > 0 {
		w.end = capAt(w.start, cfg.wait)
	}
	return w.run(wait)
}

// enter counts a call, so that Close waits for it. It refuses when Close has begun.
func (l *Locker) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return false
	}
	l.group.Add()
	return true
}

func (l *Locker) isClosing() bool {
	select {
	case <-l.closing:
		return true
	default:
		return false
	}
}

// deadlock is the error for a flow that asks for what it holds. One that would
// not have waited is also told that the lock is held.
func deadlock(k, outer *Lock, wait bool) error {
	err := error(&DeadlockError{Key: k.key, Cycle: []DeadlockWait{{
		Holder: outer.config.holder, Key: k.key, WaitsFor: k.key, Since: outer.since.Wall(),
	}}})
	if !wait {
		held := &HeldError{Key: k.key, Holder: outer.config.holder, TTL: outer.validUntil().Sub(clock.Now())}
		return &chain{texts: err.Error(), errs: []error{err, held}}
	}
	return err
}

// want is one acquisition under way. It belongs to its goroutine.
type want struct {
	l        *Locker
	ctx      context.Context
	k        *Lock
	start    clock.Instant
	end      clock.Instant // of WithWait; 0: none
	attempts int

	queues bool         // a refused one joins the queue at the server
	stuck  <-chan error // tells that the wait can never end; nil: nobody looks

	held    *HeldError // the latest refusal
	heldBy  error      // which may tell more than that; nil: it does not
	heldAt  clock.Instant
	failure error // the latest failure to learn the outcome
	unsure  bool  // failure is newer than held
	unknown bool  // a try may have taken the lock without our knowing
	queued  bool  // it may have a place in the queue at the server
}

// errWaitOver ends a wait by WithWait.
var errWaitOver = errors.New("wait over")

// run tries, waits if it may, and settles what was left open.
func (w *want) run(wait bool) (*Lock, error) {
	var err error
	if wait {
		err = w.wait()
	} else {
		err = w.try(false)
	}
	if err == nil && w.k.config.source != nil {
		if err = w.draw(); err != nil {
			w.k.config.refused(w.k.key, err)
			return nil, err
		}
	}
	if err == nil {
		if w.k.config.inspect {
			w.l.describe(w.k)
		}
		if w.k.config.observer.Acquired != nil { // else the time is not needed, which costs
			w.k.config.acquired(w.k.key, clock.Now().Sub(w.start), w.attempts)
		}
		return w.k, nil
	}
	w.l.mu.Lock()
	w.k.stage = gone
	unknown := w.unknown || w.k.suspect
	w.l.mu.Unlock()
	switch {
	case unknown:
		w.l.settler.add(w.k, false)
	case w.queued:
		w.l.settler.addLeft(w.k)
	}
	err = w.report(err)
	w.k.config.refused(w.k.key, err)
	return nil, err
}

// report makes the caller's error of the last one.
func (w *want) report(err error) error {
	if errors.Is(err, ErrClosed) || w.l.isClosing() && !isFinal(err) {
		return ErrClosed
	}
	if errors.Is(err, ErrInvalid) || errors.Is(err, ErrDeadlock) {
		return err
	}
	switch {
	case w.held != nil && !w.unsure:
		err = w.refusal()
	case w.failure != nil:
		err = unavailable("acquire", w.k.key, w.failure)
	default: // the wait ended before anything was learned
		err = unavailable("acquire", w.k.key, err)
	}
	return withContext(w.ctx, err)
}

// refusal is the error for a lock that somebody has.
func (w *want) refusal() error {
	texts, errs := w.held.Error(), []error{w.held}
	if w.heldBy != nil {
		texts, errs = fmt.Sprintf("%s: %v", texts, w.heldBy), append(errs, opaqueContext{w.heldBy})
	}
	if w.failure != nil {
		texts, errs = fmt.Sprintf("%s (before: %v)", texts, w.failure), append(errs, opaqueContext{w.failure})
	}
	if len(errs) == 1 {
		return w.held
	}
	return &chain{texts, errs}
}

// try makes one attempt. It returns nil when the lock is held, live and in the
// watchdog's care.
func (w *want) try(contended bool) error {
	l, k := w.l, w.k
	sent := clock.Early()
	limit := attemptLimit
	if k.config.replicas > 0 {
		limit += k.config.replicaLimit
	}
	limit = min(limit, k.config.validity(k.ttl))
	if w.end != 0 {
		limit = min(limit, w.end.Sub(sent))
	}
	if limit <= 0 {
		return errWaitOver
	}
	w.attempts++
	c := &call{Context: w.ctx, l: l, k: k, op: acquireOp, request: Request{
		Lease: k.lease(), Attempt: w.attempts, Contended: contended, queues: w.queues, Fencing: k.config.fencing,
		ClockFloor: k.config.floored,
		Replicas:   k.config.replicas, ReplicaLimit: k.config.replicaLimit,
	}}
	err := c.run(w.ctx.Done(), true, limit)
	if err == nil {
		err = l.grant(w.ctx, k, c.grant, sent, w.unknown || c.grant.Repeated)
		switch {
		case err == nil:
		case c.grant.Owner != "": // the next attempt will have another
			l.settler.addOwner(c.request.Lease, c.grant.Owner)
		default: // the store believes it wanted
			w.unknown = true
		}
	}
	if err != nil {
		return w.refused(err)
	}
	return nil
}

// refused notes why an attempt failed.
func (w *want) refused(err error) error {
	var held *HeldError
	if errors.As(err, &held) {
		held.Key = w.k.key
		w.held, w.heldAt, w.unsure = held, clock.Now(), false
		if w.heldBy = nil; err != error(held) {
			w.heldBy = err
		}
		return err
	}
	if errors.Is(err, ErrInvalid) {
		return err // nothing was sent
	}
	w.unknown = w.unknown || !w.l.settlesAcquires()
	// An attempt that the end of the wait cut short does not outweigh a refusal.
	cut := w.ctx.Err() != nil || w.end != 0 && clock.Now() >= w.end
	if !cut || w.held == nil && w.failure == nil || w.held.ended(w.heldAt) {
		w.failure, w.unsure = err, true
	}
	return err
}

// grant makes k live: from here on the watchdog cares for it.
//
// Invariant: a lock is live only if its validity has not ended, its parent
// context has not ended, and the Locker is not closed; otherwise what was taken
// is given back.
func (l *Locker) grant(ctx context.Context, k *Lock, g Grant, sent clock.Instant, suspect bool) error {
	lease, renewAt := k.ttl, sent.Add(k.config.renewalOf(k.ttl))
	if g.Left > 0 {
		// An earlier try started the lease, or a hand-over, so only what is left counts.
		// It is renewed to its full length soon, but not at once: many critical sections
		// are shorter than that, and need no renewal.
		lease = min(lease, g.Left)
		renewAt = min(renewAt, clock.Now().Add(min(tick, lease/10)))
	}
	parent := ctx
	if k.token = g.Token; k.config.fencing {
		parent = fencing.WithClaim(ctx, fencing.Claim{Token: g.Token, Owner: cmp.Or(g.Owner, k.owner)})
	}
	k.ctx.k = k
	k.ctx.Context, k.cancel = context.WithCancelCause(parent)
	err := ctx.Err() // whose code may be the user's, so not under l.mu
	l.mu.Lock()
	now := clock.Now()
	k.since = now
	k.limit = capAt(now, k.config.maxHoldOf(k.ttl))
	until := k.config.validUntil(sent, lease, k.limit)
	k.until.Store(int64(until))
	switch {
	case l.ended:
		err = ErrClosed
	case err != nil:
	case now >= until:
		err = errTooLate
	default:
		if g.Owner != "" { // else the next attempt asks as this one has
			k.owner = g.Owner
		}
		k.stage, k.suspect = live, k.suspect || suspect
		l.arm(k, renewAt)
	}
	l.mu.Unlock()
	if err != nil {
		k.cancel(err)
	}
	return err
}

// capAt returns the moment d after now, without overflow.
func capAt(now clock.Instant, d time.Duration) clock.Instant {
	if d > maxTTL*10 {
		d = maxTTL * 10
	}
	return now.Add(d)
}
