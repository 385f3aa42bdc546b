package holdfast

import (
	"context"
	"errors"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
)

// detacher is what a Store offers whose locks can change hands.
type detacher interface {
	// detach leaves the lock for its TTL to who attaches to it. Results are those of Extend.
	detach(ctx context.Context, l Lease) error
	// attach takes over what owner has left, for r. It is idempotent, and returns a *HeldError
	// for what was not left, with no holder for what is gone.
	attach(ctx context.Context, r Request, owner string) (Grant, error)
}

// Detach gives up the duty to renew and release, and leaves the lock to whoever attaches to it,
// with the value of Owner, by Locker.Attach: another goroutine, or another process. Meanwhile
// nobody holds it, and nobody else gets it; it ends by itself after its TTL. So there are never two
// who believe to have it: the context has ended, with ErrReleased, before anything is sent.
//
// It comes back within 5 seconds or what is left of the validity. ErrLost: the lock was not ours
// any more. ErrUnavailable: no answer came, and whether it can be attached to is not known; Detach
// may be called again, and Release too, which then may say ErrLost. ErrInvalid, and the lock is held on: other Locks stand on
// the same grant (Reentrant), or the store is not one Redis. After success the handle
// holds nothing: ErrNotHeld.
func (k *Lock) Detach() error {
	if k == nil || k.l == nil {
		return ErrNotHeld
	}
	l := k.l
	s, ok := l.store.Store.(detacher)
	if !ok {
		return invalid("Detach: on this store locks cannot change hands")
	}
	l.mu.Lock()
	switch {
	case k.root != nil || k.nested > 0:
		l.mu.Unlock()
		return invalid("Detach: other Locks stand on the grant of %q", k.key)
	case k.giving.busy || k.giving.done:
		l.mu.Unlock()
		return ErrNotHeld
	}
	k.giving.busy = true
	now := clock.Now()
	end := now.Add(min(releaseLimit, max(releaseLeast, k.validUntil().Sub(now))))
	stopped := l.drop(k, over)
	lease := k.lease()
	l.mu.Unlock()
	if stopped {
		k.cancel(ErrReleased)
	}
	err := l.detach(s, k, lease, end)
	l.mu.Lock()
	defer l.mu.Unlock()
	k.giving.busy = false
	if k.giving.after != nil {
		close(k.giving.after)
		k.giving.after = nil
	}
	if err == nil || errors.Is(err, ErrLost) {
		k.giving.done, k.stage = true, gone
	}
	return err
}

// detach asks until there is a definite answer, or the time is over.
func (l *Locker) detach(s detacher, k *Lock, lease Lease, end clock.Instant) error {
	if lost := k.knownLost(); lost != nil {
		return lost
	}
	for n := 1; ; n++ {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(k.ctx.Context), max(end.Sub(clock.Now()), time.Millisecond))
		var err error
		if panicked := contain(func() { err = s.detach(ctx, lease) }); panicked != nil {
			err = panicked
		}
		cancel()
		var lost *LostError
		if errors.As(err, &lost) {
			return &LostError{Key: k.key, Reason: lost.Reason}
		}
		if err == nil {
			return nil
		}
		pause := backoff(n, firstPause, mostPause)
		if isFinal(err) || clock.Now().Add(pause) >= end {
			return unavailable("detach", k.key, err)
		}
		time.Sleep(pause)
	}
}

// Attach takes over the lock of key that a Lock with this Owner has left by Detach, with the duty to
// renew and release it. The new Lock has an owner value of its own, and the same token (give
// WithFencing, if the other had it). Of several who attach one gets it. The context and the other
// options are those of Acquire; a fencing.Source and WithReplicas are refused.
//
// Errors: ErrNotAcquired if the lock was not left, or somebody has been faster, or it has ended;
// else those of TryAcquire.
func (l *Locker) Attach(ctx context.Context, key, owner string, opts ...Option) (*Lock, error) {
	s, ok := l.store.Store.(detacher)
	switch {
	case !ok:
		return nil, invalid("Attach: on this store locks cannot change hands")
	case ctx == nil:
		return nil, invalid("nil context")
	case owner == "":
		return nil, invalid("Attach: empty owner")
	}
	cfg, err := l.config.with(opts)
	if err != nil {
		return nil, err
	}
	full, err := cfg.fullKey(key)
	if err != nil {
		return nil, err
	}
	if cfg.source != nil || cfg.replicas > 0 {
		return nil, invalid("Attach: neither a source of tokens nor WithReplicas has a meaning here")
	}
	if err := l.checkCall(cfg); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, withContext(ctx, unavailable("attach", key, errors.New("not asked")))
	}
	if !l.enter() {
		return nil, ErrClosed
	}
	defer l.group.Done()
	value, err := newOwner(cfg.holder)
	if err != nil {
		return nil, unavailable("attach", key, err)
	}
	k := &Lock{l: l, config: cfg, key: key, full: full, owner: value, ttl: cfg.ttl, longest: cfg.ttl}
	return l.attach(ctx, s, k, owner)
}

// attach makes one attempt.
func (l *Locker) attach(ctx context.Context, s detacher, k *Lock, owner string) (*Lock, error) {
	sent := clock.Now()
	limited, cancel := context.WithTimeout(ctx, min(attemptLimit, k.config.validity(k.ttl)))
	defer cancel()
	var g Grant
	var err error
	r := Request{Lease: k.lease(), Attempt: 1, Fencing: k.config.fencing}
	if panicked := contain(func() { g, err = s.attach(limited, r, owner) }); panicked != nil {
		err = panicked
	}
	if err == nil {
		if err = l.grant(ctx, k, g, sent, g.Repeated); err == nil {
			if k.config.inspect {
				l.describe(k)
			}
			k.config.acquired(k.key, clock.Now().Sub(sent), 1)
			return k, nil
		}
	}
	l.mu.Lock()
	k.stage = gone
	l.mu.Unlock()
	var held *HeldError
	if errors.As(err, &held) {
		held.Key = k.key
		k.config.refused(k.key, held)
		return nil, held
	}
	l.settler.add(k, false) // it may be ours by now
	if !errors.Is(err, ErrClosed) {
		err = withContext(ctx, unavailable("attach", k.key, err))
	}
	k.config.refused(k.key, err)
	return nil, err
}
