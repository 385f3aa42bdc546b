package holdfast

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

const (
	// holderKey is put before a holder's name, for the key that says that it is in use.
	holderKey = "holdfast:holder:"

	// holderTTL is how long a name stays in use after the death of its Locker.
	holderTTL  = 5 * time.Second
	holderWait = holderTTL + 2*time.Second
)

// ReleaseHolder frees the locks that a former process of this holder's name has left behind, and
// returns how many: for a process with a stable name (WithHolder, such as that of a pod of a
// StatefulSet) that was restarted, and need not wait for the leases to end. Call it at the start,
// before this Locker takes locks, with the name that it has itself.
//
// The name is then in use by this Locker, until Close: a lock of its own, which is renewed every
// few seconds, tells so. A name in use by another Locker that has done the same is refused; one
// whose process has just died is free after 5 seconds, for which this waits. Lockers that never
// call it are not seen by that: one name, one Locker.
//
// It looks at all locks with the prefix of the Locker, see List, and takes each away as Break does.
// Errors: ErrNotAcquired, a *HeldError, if the name is in use; ErrInvalid, also for other stores
// than one Redis; ErrUnavailable, with the number that was freed before.
func (l *Locker) ReleaseHolder(ctx context.Context, holder string) (int, error) {
	if err := l.checkHolder(ctx, "ReleaseHolder", holder); err != nil {
		return 0, err
	}
	if err := l.useHolder(ctx, holder); err != nil {
		return 0, err
	}
	return l.breakHolder(ctx, holder)
}

// BreakHolder takes all locks of a holder's name away, as ReleaseHolder does, but whether or not
// the name is in use, and without using it: for an operator who knows that the process must not
// hold them. Locks of this very Locker stay.
func (l *Locker) BreakHolder(ctx context.Context, holder string) (int, error) {
	if err := l.checkHolder(ctx, "BreakHolder", holder); err != nil {
		return 0, err
	}
	return l.breakHolder(ctx, holder)
}

func (l *Locker) checkHolder(ctx context.Context, what, holder string) error {
	if _, err := l.inspector(what); err != nil {
		return err
	}
	if ctx == nil {
		return invalid("nil context")
	}
	var c config
	return WithHolder(holder).apply(&c) // which refuses what is no name
}

// useHolder takes the lock of a name, unless this Locker has it.
func (l *Locker) useHolder(ctx context.Context, holder string) error {
	l.mu.Lock()
	i := slices.IndexFunc(l.names, func(k *Lock) bool { return k.key == holderKey+holder })
	var old *Lock
	if i >= 0 {
		old = l.names[i]
	}
	l.mu.Unlock()
	if old != nil && old.Err() == nil {
		return nil
	}
	cfg := defaults()
	cfg.holder, cfg.prefix, cfg.logger = l.config.holder, l.config.prefix, l.config.logger
	cfg.ttl, cfg.wait, cfg.maxHold = holderTTL, holderWait, Unlimited
	// It is held by the Locker, not by a flow, and not for the time of this call.
	base, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	k, err := l.acquireWith(base, holderKey+holder, &cfg, true)
	if !stop() && err == nil {
		err = errors.Join(context.Cause(ctx), k.Release())
	}
	if err != nil {
		cancel()
		return withContext(ctx, fmt.Errorf("holdfast: the name %q may be in use: %w", holder, err))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.names = append(slices.DeleteFunc(l.names, func(x *Lock) bool { return x == old }), k)
	return nil
}

// breakHolder takes away what holder has and this Locker has not.
func (l *Locker) breakHolder(ctx context.Context, holder string) (n int, err error) {
	for info, err := range l.List(ctx, "*") {
		if err != nil {
			return n, err
		}
		if info.Holder != holder || l.owns(info.Owner) {
			continue
		}
		switch err := l.Break(ctx, info.Key, info.Owner); {
		case err == nil:
			n++
		case !errors.Is(err, ErrNotHeld): // else it has ended meanwhile
			return n, err
		}
	}
	return n, nil
}

// owns reports whether a live lock of this Locker, or one that it waits for, has this value.
func (l *Locker) owns(owner string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.line.spots[owner] != nil || slices.ContainsFunc(l.watch.expiries.items, func(k *Lock) bool { return k.owner == owner })
}
