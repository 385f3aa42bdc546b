package holdfast

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/clock"
)

// confirmTries is how often a lock is confirmed whose token has been drawn.
const confirmTries = 3

// WithFencing draws a fencing token with every grant, in the same step. It needs
// a counter key beside the lock, in its cluster slot, which has no TTL.
//
// With fencing.ClockFloor the token is no lower than the server's clock in microseconds,
// so that a counter that was lost does not bring old numbers back, and the counter's key
// goes a week after the last grant. With another fencing.Source the token is drawn from
// that after the grant, for the key with its prefix; the lock is renewed once more before
// Acquire returns it, because a token is only good if the lock was still ours when it was
// drawn. Acquire fails with ErrUnavailable, and gives the lock back, if the source does.
//
// All who share a key must draw from the same place.
func WithFencing(from ...fencing.Source) Option {
	return optionFunc(func(c *config) error {
		if len(from) > 1 {
			return invalid("WithFencing: %d sources of tokens: at most one", len(from))
		}
		c.fencing, c.floored, c.source = true, false, nil
		switch {
		case len(from) == 0:
		case from[0] == nil:
			return invalid("WithFencing: nil source")
		case isFloor(from[0]):
			c.floored = true
		default:
			c.fencing, c.source = false, from[0]
		}
		return nil
	})
}

// isFloor reports whether s is ClockFloor. Users' sources may be of types that cannot be
// compared.
func isFloor(s fencing.Source) bool {
	t := reflect.TypeOf(s)
	return t == reflect.TypeOf(fencing.ClockFloor) && t.Comparable() && s == fencing.ClockFloor
}

// draw gets the token of a lock that has just been granted from the source of the config.
// If it fails the lock is given back.
//
// Invariant: a token is handed out only if a renewal that was sent after it had been drawn
// has found the lock still ours. So all later grants draw later, and get greater tokens. A
// holder that was stopped between grant and draw may get one that is greater than that of
// the next, but not the renewal.
func (w *want) draw() error {
	l, k := w.l, w.k
	limit := attemptLimit
	if w.end != 0 {
		limit = min(limit, w.end.Sub(clock.Now()))
	}
	// Not the lock's own context: the claim is put into that.
	ctx, cancel := context.WithTimeout(k.ctx.Context, limit)
	defer cancel()
	token, err := w.next(ctx)
	if err == nil {
		err = w.confirmDrawn(ctx)
	}
	if err == nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		k.token = token
		k.ctx.drawn = fencing.WithClaim(context.Background(), fencing.Claim{Token: token, Owner: k.owner})
		return nil
	}
	l.mu.Lock()
	l.drop(k, gone)
	k.stage = gone
	l.mu.Unlock()
	k.cancel(err)
	l.settler.add(k, false)
	if l.isClosing() {
		return ErrClosed
	}
	return withContext(w.ctx, unavailable("acquire", k.key, err))
}

// undrawn reports whether k has no token yet, which it is to draw: nobody has been given it.
func (l *Locker) undrawn(k *Lock) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return k.config.source != nil && k.token == 0
}

// next draws a token. Sources are the user's code: they may panic, and not heed ctx.
func (w *want) next(ctx context.Context) (fencing.Token, error) {
	type drawn struct {
		token fencing.Token
		err   error
	}
	source, key := w.k.config.source, w.k.full
	got := make(chan drawn, 1)
	w.l.group.Start(func() { // ends with the source's answer
		var d drawn
		defer func() {
			if p := recover(); p != nil {
				d.err = fmt.Errorf("panicked: %v", p)
			}
			got <- d
		}()
		d.token, d.err = source.Next(ctx, key)
	})
	select {
	case d := <-got:
		if d.err == nil && d.token <= 0 {
			d.err = fmt.Errorf("not a token: %d", d.token)
		}
		if d.err != nil {
			return 0, fmt.Errorf("source of tokens: %w", d.err)
		}
		return d.token, nil
	case <-ctx.Done():
		return 0, fmt.Errorf("source of tokens: %w", context.Cause(ctx))
	}
}

// confirmDrawn renews the lock once, after its token was drawn.
func (w *want) confirmDrawn(ctx context.Context) error {
	l, k := w.l, w.k
	for n := 1; ; n++ {
		l.mu.Lock()
		sent, lease, epoch := clock.Now(), k.lease(), k.epoch
		limit := min(attemptLimit, k.validUntil().Sub(sent)/2)
		l.mu.Unlock()
		c := &call{Context: ctx, l: l, k: k, op: renewOp}
		c.request.Lease = lease
		err := c.run(ctx.Done(), true, max(limit, time.Millisecond))
		if err == nil {
			l.mu.Lock()
			defer l.mu.Unlock()
			switch now := clock.Now(); {
			case k.stage != live || now >= k.validUntil():
				return errTooLate
			case epoch == k.epoch:
				l.confirm(k, sent, lease.TTL)
			}
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		var lost *LostError
		if errors.As(err, &lost) { // nobody has held it yet, so for the caller nothing is lost
			return fmt.Errorf("the lock had ended before its token was drawn: %v", lost)
		}
		if isFinal(err) || n == confirmTries {
			return fmt.Errorf("after the token was drawn: %w", err)
		}
		timer := time.NewTimer(backoff(n, firstPause, mostPause))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}
