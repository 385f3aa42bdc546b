package holdfast

import (
	"container/heap"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
)

const (
	maxBatch = 500 // keys in one renewal

	// maxCalls is how many renewals may be under way at once, and as many batches of
	// waiters' calls; callsPerBatch how many more renewals for each full batch of locks;
	// maxFlights how many for one lock. A
	// server that does not answer must not collect goroutines and connections
	// without end, nor use up what the others need.
	maxCalls      = 128
	callsPerBatch = 8
	maxFlights    = 3

	// tick is how long the watchdog sleeps at most. Timers stand still while the
	// machine is suspended, so this is how late a loss can be told after that.
	tick = 100 * time.Millisecond

	// wallJump is a difference between wall clock and elapsed time that makes the
	// watchdog ask the server about everything.
	wallJump = time.Second
)

// watchdog renews the locks of a Locker and ends those whose validity has ended.
// It also makes the calls of those who wait. It is one goroutine, which lives while a
// lock is held or waited for. It never waits for a reply: renewals run on goroutines of
// their own, so a server that hangs cannot delay anybody's loss. All of it is guarded
// by Locker.mu.
//
// Invariant: every live lock is in expiries, and, if it is to be renewed, in
// renewals; no other lock is in either. While a lock is live, the goroutine runs.
type watchdog struct {
	expiries  schedule[*Lock] // by the end of validity
	renewals  schedule[*Lock] // by the next renewal due
	beats     schedule[*spot] // by a waiter's next call
	running   bool
	idle      bool          // it had nothing to do when it looked last
	wake      chan struct{} // one element: something became due earlier
	calls     int           // renewals under way
	lineCalls int           // batches of waiters' calls under way
	next      clock.Instant // when it will look again

	wallSkew time.Duration // wall clock minus elapsed time, when last looked at
}

func (d *watchdog) init() {
	d.wake = make(chan struct{}, 1)
	d.expiries.at = func(k *Lock) (clock.Instant, *int) { return k.validUntil(), &k.expiry }
	d.renewals.at = func(k *Lock) (clock.Instant, *int) { return k.renewal.at, &k.renewal.place }
	d.beats.at = func(s *spot) (clock.Instant, *int) { return s.at, &s.place }
}

// all returns the live locks.
func (d *watchdog) all() []*Lock { return append([]*Lock(nil), d.expiries.items...) }

// arm puts a live lock into the watchdog's care; l.mu is held.
func (l *Locker) arm(k *Lock, renewAt clock.Instant) {
	d := &l.watch
	k.renewal.every = k.config.renewalOf(k.ttl)
	k.renewal.at = renewAt
	heap.Push(&d.expiries, k)
	if !k.config.noRenewal {
		heap.Push(&d.renewals, k)
	}
	at := k.validUntil()
	if k.renewal.place > 0 {
		at = min(at, k.renewal.at)
	}
	l.lookBy(at)
}

// lookBy makes the watchdog look at at, at the latest, and runs it; l.mu is held.
func (l *Locker) lookBy(at clock.Instant) {
	d := &l.watch
	d.idle = false
	if !d.running {
		d.running = true
		d.wallSkew = wallSkew()
		l.group.Start(l.watchLoop) // ends when no lock is live and nobody waits
	} else if at < d.next {
		l.rouse()
	}
}

// rouse makes the watchdog look again.
func (l *Locker) rouse() {
	select {
	case l.watch.wake <- struct{}{}:
	default:
	}
}

// drop takes a lock out of the watchdog's care, once, for to be over or gone. From
// then on nothing renews it. l.mu is held.
func (l *Locker) drop(k *Lock, next stage) bool {
	was := k.stage
	k.stage = max(was, next)
	if was != live {
		return false
	}
	l.watch.expiries.remove(k)
	l.watch.renewals.remove(k)
	for _, f := range k.renewal.flights {
		if f.live--; f.live == 0 {
			f.cancel()
		}
	}
	return true
}

// end ends a live lock's context with cause, and reports whether it has.
func (l *Locker) end(k *Lock, cause error) bool {
	l.mu.Lock()
	ended := l.drop(k, over) && k.ctx.Err() == nil
	l.mu.Unlock()
	if ended {
		k.cancel(cause)
	}
	return ended
}

// expire ends a lock whose validity has ended, and returns why; nil if a renewal
// has just been confirmed. Another goroutine may have dropped the lock and not yet
// ended its context: that is no reason to call it valid.
func (l *Locker) expire(k *Lock) error {
	l.mu.Lock()
	if clock.Now() < k.validUntil() {
		l.mu.Unlock()
		return nil
	}
	ended := k.ctx.Err() == nil && l.drop(k, gone)
	err := k.expiredError()
	l.mu.Unlock()
	if ended {
		l.lose(k, err)
	}
	return err
}

// expiredError tells why validity ended; l.mu is held.
func (k *Lock) expiredError() *LostError {
	if k.validUntil() >= k.limit {
		return &LostError{Key: k.key, Reason: LostMaxHold, Err: ErrMaxHold}
	}
	err := k.renewal.err
	if err == nil && k.renewal.tries > 0 {
		err = fmt.Errorf("no answer to %d renewals", k.renewal.tries)
	}
	return &LostError{Key: k.key, Reason: LostExpired, Err: err}
}

// lose ends the context of a lock that has been dropped, and tells of it.
func (l *Locker) lose(k *Lock, err *LostError) {
	k.cancel(err)
	l.notify.tell(&l.group, false, func() {
		k.config.warn(k.key, k.owner, "lock lost", err)
		k.config.lost(k.key, err)
	})
}

// watchLoop is the watchdog's goroutine.
func (l *Locker) watchLoop() {
	timer := time.NewTimer(tick)
	defer timer.Stop()
	for {
		next, more := l.watchOnce()
		if !more {
			return
		}
		timer.Reset(next)
		select {
		case <-timer.C:
		case <-l.watch.wake:
			timer.Stop()
		}
	}
}

// loss is a lock that has been dropped, and why.
type loss struct {
	k   *Lock
	err *LostError // nil: its parent had ended before
}

// watchOnce ends what has expired, sends what is due, and returns how long it may
// sleep. Contexts are ended before anything is sent, and with l.mu free.
func (l *Locker) watchOnce() (sleep time.Duration, more bool) {
	l.mu.Lock()
	now := clock.Now()
	l.watch.lookAtWall(now)
	losses := l.expired(now)
	batches, calls := l.due(now), l.dueCalls(now)
	tuned := l.line.sweep(now)
	sleep = l.watch.sleep(now)
	l.watch.next = now.Add(sleep)
	more = !l.watch.idles(l.ended, tuned)
	l.mu.Unlock()
	for _, lost := range losses {
		if lost.err != nil {
			l.lose(lost.k, lost.err)
		}
	}
	for _, batch := range batches {
		l.group.Start(func() { spread(l, batch, renewing.key, &l.watch.calls, l.renew) }) // ends with the store's answer
	}
	for _, batch := range calls {
		l.group.Start(func() { spread(l, batch, (*spot).key, &l.watch.lineCalls, l.callLine) }) // ends with the store's answer
	}
	return sleep, more
}

// expired drops the locks whose validity has ended; l.mu is held.
func (l *Locker) expired(now clock.Instant) (losses []loss) {
	for q := &l.watch.expiries; len(q.items) > 0 && q.items[0].validUntil() <= now; {
		k := q.items[0]
		if k.ctx.Err() != nil {
			l.drop(k, over) // its parent has ended, and with it the hold: nothing is lost
			continue
		}
		losses = append(losses, loss{k, k.expiredError()})
		l.drop(k, gone)
	}
	return losses
}

// sleep returns how long nothing will be due; l.mu is held.
func (d *watchdog) sleep(now clock.Instant) time.Duration {
	at := d.expiries.first(now.Add(tick))
	if d.calls < d.mostCalls() { // else an answer rouses us
		at = d.renewals.first(at)
	}
	if d.lineCalls < maxCalls {
		at = d.beats.first(at)
	}
	return max(0, at.Sub(now))
}

// idles ends the watchdog when no lock is held, nobody waits and nothing is listened
// to for a whole tick, or at once when the Locker is being closed: a service that takes
// one short lock after the other need not start it each time. l.mu is held.
func (d *watchdog) idles(closing, tuned bool) bool {
	none := len(d.expiries.items) == 0 && len(d.beats.items) == 0 && (closing || !tuned)
	if none && (d.idle || closing) {
		d.running = false
	}
	d.idle = none
	return !d.running
}

// mostCalls is how many renewals may be under way at once; l.mu is held.
func (d *watchdog) mostCalls() int {
	return maxCalls + callsPerBatch*(len(d.expiries.items)/maxBatch)
}

// lookAtWall makes everything due when the wall clock has moved by itself: the
// machine may have been suspended without our knowing, or the server's clock may
// have been set as well. Nothing is declared lost for it. l.mu is held.
func (d *watchdog) lookAtWall(now clock.Instant) {
	skew := wallSkew()
	if diff := skew - d.wallSkew; diff < wallJump && diff > -wallJump {
		return
	}
	d.wallSkew = skew
	for _, k := range d.renewals.items {
		k.renewal.at = now
	}
	heap.Init(&d.renewals)
}

// wallSkew is the wall clock minus elapsed time. Round drops the monotonic part.
func wallSkew() time.Duration {
	return time.Duration(time.Now().Round(0).UnixNano()) - time.Duration(clock.Now())
}
