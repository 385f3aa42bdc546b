package holdfast

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
)

// Extend sets what is left of the lease to ttl, and makes it the TTL of later
// renewals, so that it may be longer or shorter than before. It waits for the
// answer until ctx or the validity ends. When it returns nil the new lease is
// confirmed. The cap on the hold stays.
//
// ErrLost or ErrNotHeld: the lock is not held (any more). ErrUnavailable: no
// answer came; the shorter of both leases counts from then on. ErrInvalid: ttl
// is impossible, and nothing was sent. After one without an answer no lease longer
// than its ttl is trusted any more, because it may still be set.
func (k *Lock) Extend(ctx context.Context, ttl time.Duration) error {
	if k == nil || k.l == nil {
		return ErrNotHeld
	}
	if ctx == nil {
		return invalid("nil context")
	}
	if k.root != nil {
		if k.ctx.Err() != nil {
			return k.Err()
		}
		return k.root.Extend(ctx, ttl)
	}
	if err := checkTTL(ttl); err != nil {
		return err
	}
	if err := k.config.check(ttl); err != nil {
		return err
	}
	if err := k.l.checkStore(k.config, ttl); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return withContext(ctx, unavailable("extend", k.key, errInterrupted))
	}
	done, err := k.l.startExtend(ctx, k)
	if err != nil {
		return withContext(ctx, unavailable("extend", k.key, err))
	}
	defer done()
	for n := 1; ; n++ {
		if err := k.heldError(); err != nil {
			return err
		}
		err := k.l.extend(ctx, k, ttl)
		if err == nil || errors.Is(err, ErrNotHeld) {
			return err
		}
		if isFinal(err) || ctx.Err() != nil {
			if held := k.heldError(); held != nil {
				return held
			}
			return withContext(ctx, unavailable("extend", k.key, err))
		}
		// Not beyond the end of validity, which the next look will find.
		timer := time.NewTimer(min(backoff(n, firstPause, mostPause), k.validUntil().Sub(clock.Now())))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return withContext(ctx, unavailable("extend", k.key, err))
		}
	}
}

// heldError is nil while the lock is held, else what Extend returns.
func (k *Lock) heldError() error {
	err := k.Err()
	if err == nil || errors.Is(err, ErrNotHeld) {
		return err
	}
	return &chain{texts: fmt.Sprintf("holdfast: extend %q: %v", k.key, err), errs: []error{ErrNotHeld, err}}
}

// startExtend waits for the Extend of the same lock that is under way. The caller
// calls done when it is through.
func (l *Locker) startExtend(ctx context.Context, k *Lock) (done func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for k.setting != nil {
		busy := k.setting
		l.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			err = errInterrupted
		}
		if l.mu.Lock(); err != nil {
			return nil, err
		}
	}
	busy := make(chan struct{})
	k.setting = busy
	return func() {
		l.mu.Lock()
		k.setting = nil
		l.mu.Unlock()
		close(busy)
	}, nil
}

// extend makes one try.
//
// Invariant: validity never exceeds what the server keeps, in whatever order the
// commands under way arrive. A shorter lease counts from before it is sent, and
// one whose fate is unknown stays a ceiling, because it may still be set. Renewals
// that were sent before say nothing any more (epoch), and the script of a renewal
// never shortens. Only one Extend of a lock is under way at a time.
func (l *Locker) extend(ctx context.Context, k *Lock, ttl time.Duration) error {
	l.mu.Lock()
	if k.stage != live {
		l.mu.Unlock()
		return errInterrupted
	}
	sent := clock.Now()
	before := k.ttl
	k.epoch++
	k.longest = max(k.longest, ttl)
	if ttl < k.ttl {
		l.setLease(k, ttl)
		until := k.config.validUntil(sent, ttl, k.limit)
		l.setValidity(k, min(k.validUntil(), until))
		l.renewBy(k, sent.Add(k.renewal.every))
		l.rouse()
	}
	// Half of what is left: one lost reply must not cost the lock.
	limit := min(attemptLimit, k.validUntil().Sub(sent)/2)
	l.mu.Unlock()

	c := &call{Context: ctx, l: l, k: k, op: extendOp}
	c.request.Lease = Lease{Key: k.full, Owner: k.owner, TTL: ttl}
	err := c.run(ctx.Done(), false, max(limit, time.Millisecond))
	lost, err := l.extended(k, before, ttl, sent, err)
	if lost != nil {
		l.lose(k, lost)
	}
	return err
}

// setLease changes the length of later leases; l.mu is held.
func (l *Locker) setLease(k *Lock, ttl time.Duration) {
	if k.ceiling > 0 {
		ttl = min(ttl, k.ceiling)
	}
	k.ttl = ttl
	k.renewal.every = k.config.renewalOf(ttl)
}

// extended takes in the answer to one try. It returns why the lock is lost, if it
// is, having dropped it.
func (l *Locker) extended(k *Lock, before, ttl time.Duration, sent clock.Instant, err error) (*LostError, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var lost *LostError
	if errors.As(err, &lost) {
		if !l.drop(k, gone) {
			return nil, errInterrupted // it has ended meanwhile, and its context says why
		}
		lost = &LostError{Key: k.key, Reason: lost.Reason, Err: lost.Err}
		return lost, lost
	}
	if err != nil && !mayHaveRun(err) {
		if k.stage == live {
			l.setLease(k, before)
		}
		return nil, err
	}
	if err != nil {
		if k.ceiling == 0 || ttl < k.ceiling { // it may still run
			k.ceiling = ttl
		}
		return nil, err
	}
	if k.stage != live || clock.Now() >= k.validUntil() {
		if k.stage != over && !k.giving.done {
			l.settler.add(k, false) // a late answer does not revive it
		}
		return nil, errTooLate
	}
	l.setLease(k, ttl)
	l.confirm(k, sent, k.ttl)
	l.rouse()
	return nil, nil
}
