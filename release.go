package holdfast

import (
	"context"
	"errors"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
)

const (
	releaseLimit = 5 * time.Second        // Release comes back within this
	releaseLeast = 250 * time.Millisecond // for the one try that it always makes
)

// giving is the state of a lock's release, guarded by Locker.mu.
type giving struct {
	busy   bool          // a Release is under way
	after  chan struct{} // closed when it is through, for those who wait
	done   bool          // there was a definite answer
	asked  bool          // a Release has begun
	behind bool          // the background has deleted the key, which was still ours
	before bool          // it has done so, after a loss, before any Release
	taken  bool          // the background has found the key somebody else's
	queued bool          // the background knows of it
	told   bool          // Observer.Released has been called
	unsure bool          // a try went out whose answer never came
	err    error         // of the last Release that got no answer
}

// Release ends the lock: renewal stops, the context ends with ErrReleased, and the
// key is deleted if it is still this lock's. It is made for defer: it takes no
// context, works when that of Acquire has ended, and comes back within 5 seconds
// or what is left of the validity, whichever is shorter, having tried at least
// once (a quarter of a second is always left for that; the log handler and the
// observer take their own time).
//
// nil means that the key was this lock's until then. ErrLost means that it was
// not: the critical section may have overlapped with another; that is also
// logged. ErrUnavailable means that no answer came, or a refusal, which it wraps.
// Without an answer the key is deleted in the background as soon as the server can
// be reached; a refused one ends with its TTL. Release may be called again in both
// cases. After a definite answer further calls, from any goroutine, ask nothing of
// the server and return ErrNotHeld.
func (k *Lock) Release() error {
	if k == nil || k.l == nil {
		return ErrNotHeld
	}
	if k.root != nil {
		return k.releaseNested()
	}
	now := clock.Early()
	return k.release(now.Add(min(releaseLimit, max(releaseLeast, k.validUntil().Sub(now)))), false)
}

// release is Release with its bound. With all it does not wait for the nested Locks.
func (k *Lock) release(end clock.Instant, all bool) error {
	l := k.l
	l.mu.Lock()
	if k.nested > 0 && !all {
		parted := k.parted
		k.parted = true
		l.mu.Unlock()
		if parted {
			return ErrNotHeld
		}
		return k.ownLoss()
	}
	for k.giving.busy { // somebody else is at it: one that gets no answer is enough
		if k.giving.after == nil {
			k.giving.after = make(chan struct{})
		}
		after := k.giving.after
		l.mu.Unlock()
		<-after
		l.mu.Lock()
		if err := k.giving.err; err != nil {
			l.mu.Unlock()
			return err
		}
	}
	if k.giving.done {
		l.mu.Unlock()
		return ErrNotHeld
	}
	if k.giving.behind {
		k.giving.done = true
		l.mu.Unlock()
		return nil
	}
	k.giving.busy, k.giving.asked, k.giving.err = true, true, nil
	stopped := l.drop(k, over)
	lease := k.lease()
	l.mu.Unlock()
	if stopped {
		k.cancel(ErrReleased)
	}
	return l.give(k, lease, end)
}

// give sends the release and keeps its outcome.
func (l *Locker) give(k *Lock, lease Lease, end clock.Instant) error {
	err := l.askRelease(k, lease, end)
	l.mu.Lock()
	if err != nil && k.giving.behind { // it came first, and has deleted what was ours
		err = nil
	}
	definite := err == nil || errors.Is(err, ErrLost)
	if definite {
		k.giving.done, k.stage = true, gone
		l.pokeLocked(k.full)
	} else {
		k.giving.err = err
	}
	again := !definite && !isFinal(err)
	if again { // the key may be deleted behind the caller's back
		again, k.giving.queued = !k.giving.queued, true
	}
	tell := definite && !k.giving.told
	k.giving.told = k.giving.told || tell
	suspect, ghost, unsure := k.suspect, k.ghost, k.giving.unsure
	k.giving.busy = false
	if k.giving.after != nil {
		close(k.giving.after)
		k.giving.after = nil
	}
	l.mu.Unlock()
	if again {
		l.settler.addReleased(k)
	}
	if !definite {
		return err
	}
	if unsure {
		l.callAll(k.full) // an answer that was lost may have named one of us
	}
	if suspect {
		l.settler.add(k, true)
	} else if ghost {
		l.settler.addLeft(k)
	}
	if tell && k.config.observer.Released != nil {
		k.config.released(k.key, clock.Now().Sub(k.since))
	}
	if err != nil && k.knownLost() == nil {
		k.config.warn(k.key, k.owner, "release found the lock no longer held", err)
		if !errors.Is(context.Cause(&k.ctx), ErrLost) { // else it has been told
			k.config.lost(k.key, err)
		}
	}
	return err
}

// askRelease asks until there is a definite answer, a refusal that trying again
// cannot heal, or the time is over.
func (l *Locker) askRelease(k *Lock, lease Lease, end clock.Instant) error {
	if lost := k.knownLost(); lost != nil {
		return lost
	}
	if k.deletedBefore() {
		return &LostError{Key: k.key, Reason: LostGone}
	}
	start := clock.Now()
	var before error // what an earlier try has ended with
	for n := 1; ; n++ {
		lease.Keep = k.keep()
		left := end.Sub(clock.Early())
		// A third of what is left: one lost reply must not cost the whole time.
		limit := min(left, max(left/3, releaseLeast))
		c := &call{Context: k.ctx.Context, l: l, op: releaseOp} // its values, not its end
		c.request.Lease = lease
		err := c.run(nil, false, limit)
		if err != nil {
			err = k.released(err)
		}
		if err == nil || errors.Is(err, ErrLost) {
			return err
		}
		var late *noAnswerError
		switch {
		case !errors.As(err, &late):
			before = err
		case before != nil: // the last try may be short, and then says less than that
			err = before
		default:
			err = &noAnswerError{clock.Now().Sub(start)}
		}
		pause := backoff(n, firstPause, mostPause)
		if isFinal(err) || clock.Now().Add(pause) >= end {
			return unavailable("release", k.key, err)
		}
		time.Sleep(pause)
	}
}

// sendRelease makes one try. If it has handed the lock to somebody who waits in this
// Locker, it tells him, because the server has not.
func (l *Locker) sendRelease(ctx context.Context, lease Lease) error {
	if l.line.store == nil {
		return l.store.Release(ctx, lease)
	}
	next, err := l.line.store.handOn(ctx, lease)
	if next != nil {
		l.mu.Lock()
		l.line.crowdIs(lease.Key)
		l.mu.Unlock()
		l.told(next.owner, next.n, next.token)
	}
	return err
}

// forgives reports whether an answer "not yours" to a release is what an earlier try
// of it has done, whose answer never came: nobody else can have ended a lease that is
// still valid. That try may have handed the lock on, or left it under another value.
// l.mu is held.
func (k *Lock) forgives(lost *LostError) bool {
	if !k.giving.unsure || k.giving.taken || clock.Now() >= k.validUntil() {
		return false
	}
	handed := k.l.line.store != nil && k.l.line.store.hasLine(k.full)
	return lost.Reason == LostGone || lost.Reason == LostTaken && (handed || k.config.minHold > 0)
}

// keep is what is left of the least time that the key is to stay.
func (k *Lock) keep() time.Duration {
	if k.since == 0 || k.config.minHold == 0 {
		return 0
	}
	return max(0, k.config.minHold-clock.Now().Sub(k.since))
}

// settled notes what the background has found of a lock whose Release had given up:
// deleted, still ours (lost is nil), or not; unsure if a try of its own got no answer.
func (l *Locker) settled(k *Lock, lost *LostError, unsure bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k.giving.unsure = k.giving.unsure || unsure
	if lost != nil && !k.forgives(lost) {
		k.giving.taken = lost.Reason == LostTaken
		return
	}
	k.giving.behind, k.stage = true, gone
	if !k.giving.told {
		k.giving.told = true
		hold := clock.Now().Sub(k.since)
		l.notify.tell(&l.group, false, func() { k.config.released(k.key, hold) })
	}
	l.pokeLocked(k.full)
}

// cleaned notes that the background has deleted what a late answer had left of a lost
// lock. A store may remember that, and others may have had the lock since: it is not what
// a Release that comes later has done.
func (l *Locker) cleaned(k *Lock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k.giving.before = k.giving.before || !k.giving.asked
}

// deletedBefore reports whether the lock had been deleted before Release was called.
func (k *Lock) deletedBefore() bool {
	k.l.mu.Lock()
	defer k.l.mu.Unlock()
	return k.giving.before
}

// knownLost returns the loss that the server itself has already told.
func (k *Lock) knownLost() *LostError {
	cause := context.Cause(&k.ctx)
	if cause == nil || errors.Is(cause, ErrReleased) {
		return nil
	}
	var lost *LostError
	if errors.As(cause, &lost) &&
		(lost.Reason == LostGone || lost.Reason == LostTaken || lost.Reason == LostBroken) {
		return lost
	}
	return nil
}

// released reads the answer to a try that failed.
func (k *Lock) released(err error) error {
	k.l.mu.Lock()
	defer k.l.mu.Unlock()
	var lost *LostError
	if !errors.As(err, &lost) {
		k.giving.unsure = k.giving.unsure || mayHaveRun(err)
		return err
	}
	if k.forgives(lost) {
		return nil
	}
	return &LostError{Key: k.key, Reason: lost.Reason, Err: lost.Err}
}
