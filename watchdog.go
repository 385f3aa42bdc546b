package holdfast

import (
	"container/heap"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
)

const (
	maxBatch = 500 // keys in one renewal

	// maxCalls is how many renewals may be under way at once. A server that does
	// not answer must not collect goroutines and connections without end.
	maxCalls = 16

	// tick is how long the watchdog sleeps at most. Timers stand still while the
	// machine is suspended, so this is how late a loss can be told after that.
	tick = 100 * time.Millisecond

	// wallJump is a difference between wall clock and elapsed time that makes the
	// watchdog ask the server about everything.
	wallJump = time.Second
)

// watchdog renews the locks of a Locker and ends those whose validity has ended.
// It is one goroutine, which lives while a lock is held. It never waits for a
// reply: renewals run on goroutines of their own, so a server that hangs cannot
// delay anybody's loss. All of it is guarded by Locker.mu.
//
// Invariant: every live lock is in expiries, and, if it is to be renewed, in
// renewals; no other lock is in either. While a lock is live, the goroutine runs.
type watchdog struct {
	expiries schedule // by the end of validity
	renewals schedule // by the next renewal due
	running  bool
	idle     bool          // no lock has been held since it looked last
	wake     chan struct{} // one element: something became due earlier
	calls    int           // renewals under way
	next     clock.Instant // when it will look again

	wallSkew time.Duration // wall clock minus elapsed time, when last looked at
}

// renewal is a lock's part in the watchdog.
type renewal struct {
	at    clock.Instant // when the next one is due
	every time.Duration
	tries int   // since the last confirmed one
	err   error // of the last try
	place int   // in the schedule; 0: none
}

func (d *watchdog) init() {
	d.wake = make(chan struct{}, 1)
	d.expiries.at = func(k *Lock) (clock.Instant, *int) { return k.validUntil(), &k.expiry }
	d.renewals.at = func(k *Lock) (clock.Instant, *int) { return k.renewal.at, &k.renewal.place }
}

// all returns the live locks.
func (d *watchdog) all() []*Lock { return append([]*Lock(nil), d.expiries.locks...) }

// arm puts a live lock into the watchdog's care; l.mu is held. at once asks for a
// renewal now, because little may be left of the lease.
func (l *Locker) arm(k *Lock, sent clock.Instant, atOnce bool) {
	d := &l.watch
	d.idle = false
	k.renewal.every = k.config.renewalOf(k.ttl)
	k.renewal.at = sent.Add(k.renewal.every)
	if atOnce {
		k.renewal.at = sent
	}
	heap.Push(&d.expiries, k)
	if !k.config.noRenewal {
		heap.Push(&d.renewals, k)
	}
	if !d.running {
		d.running = true
		d.wallSkew = wallSkew()
		l.group.start(l.watchLoop) // ends when no lock is live
	} else if k.validUntil() < d.next || k.renewal.place > 0 && k.renewal.at < d.next {
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
	heap.Remove(&l.watch.expiries, k.expiry-1)
	if k.renewal.place > 0 {
		heap.Remove(&l.watch.renewals, k.renewal.place-1)
	}
	return true
}

// end ends a live lock's context with cause.
func (l *Locker) end(k *Lock, cause error) {
	l.mu.Lock()
	ended := l.drop(k, over)
	l.mu.Unlock()
	if ended {
		k.cancel(cause)
	}
}

// expire ends a lock whose validity has ended; it looks again, because a renewal
// may just have been confirmed.
func (l *Locker) expire(k *Lock) {
	l.mu.Lock()
	ended := clock.Now() >= k.validUntil() && k.ctx.Err() == nil && l.drop(k, gone)
	err := k.expiredError()
	l.mu.Unlock()
	if ended {
		l.lose(k, err)
	}
}

// expiredError tells why validity ended; l.mu is held.
func (k *Lock) expiredError() *LostError {
	if k.validUntil() >= k.limit {
		return &LostError{Key: k.key, Reason: LostMaxHold, Err: ErrMaxHold}
	}
	return &LostError{Key: k.key, Reason: LostExpired, Err: k.renewal.err}
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
	batches := l.due(now)
	sleep = l.watch.sleep(now)
	l.watch.next = now.Add(sleep)
	more = !l.watch.idles(l.ended)
	l.mu.Unlock()
	for _, lost := range losses {
		if lost.err != nil {
			l.lose(lost.k, lost.err)
		}
	}
	for _, batch := range batches {
		l.group.start(func() { l.renew(batch) }) // ends with the store's answer
	}
	return sleep, more
}

// expired drops the locks whose validity has ended; l.mu is held.
func (l *Locker) expired(now clock.Instant) (losses []loss) {
	for q := &l.watch.expiries; len(q.locks) > 0 && q.locks[0].validUntil() <= now; {
		k := q.locks[0]
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
	at := now.Add(tick)
	if len(d.expiries.locks) > 0 {
		at = min(at, d.expiries.locks[0].validUntil())
	}
	if len(d.renewals.locks) > 0 && d.calls < maxCalls { // else an answer rouses us
		at = min(at, d.renewals.locks[0].renewal.at)
	}
	return max(0, at.Sub(now))
}

// idles ends the watchdog when no lock is held for a whole tick, or at once when
// the Locker is being closed: a service that takes one short lock after the other
// need not start it each time. l.mu is held.
func (d *watchdog) idles(closing bool) bool {
	none := len(d.expiries.locks) == 0
	if none && (d.idle || closing) {
		d.running = false
	}
	d.idle = none
	return !d.running
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
	for _, k := range d.renewals.locks {
		k.renewal.at = now
	}
	heap.Init(&d.renewals)
}

// wallSkew is the wall clock minus elapsed time. Round drops the monotonic part.
func wallSkew() time.Duration {
	return time.Duration(time.Now().Round(0).UnixNano()) - time.Duration(clock.Now())
}

// renewing is one lock in a batch, as it was when the batch was made.
type renewing struct {
	k     *Lock
	epoch int
	lease time.Duration
}

// due takes the locks that are due for renewal into batches, and with them those
// that soon will be: locks taken at different moments so come to share a call.
// l.mu is held.
func (l *Locker) due(now clock.Instant) (batches [][]renewing) {
	d := &l.watch
	if len(d.renewals.locks) == 0 || d.renewals.locks[0].renewal.at > now {
		return nil
	}
	for len(d.renewals.locks) > 0 {
		k := d.renewals.locks[0]
		early := k.renewal.every / 8
		if k.renewal.tries > 0 {
			early /= 4 // a retry waits for its pause
		}
		if k.renewal.at.Add(-early) > now {
			break
		}
		if k.ctx.Err() != nil {
			l.drop(k, over)
			continue
		}
		if k.validUntil() >= k.limit { // what is confirmed reaches to the cap
			heap.Remove(&d.renewals, k.renewal.place-1)
			continue
		}
		n := len(batches)
		if n == 0 || len(batches[n-1]) == maxBatch {
			if d.calls == maxCalls {
				break
			}
			d.calls++
			batches, n = append(batches, nil), n+1
		}
		batches[n-1] = append(batches[n-1], renewing{k, k.epoch, k.ttl})
		// The next one, for the case that no answer to this one comes: one lost
		// reply must not cost the lock.
		k.renewal.tries++
		k.renewal.at = now.Add(max(k.renewal.every/2, minRenewal))
		heap.Fix(&d.renewals, k.renewal.place-1)
	}
	return batches
}

// renew sends one batch and takes in its results. A lock that has been released or
// lost since the batch was made is left out: no renewal starts after that.
func (l *Locker) renew(batch []renewing) {
	l.mu.Lock()
	now := clock.Now()
	left := time.Duration(0)
	batch = slices.DeleteFunc(batch, func(r renewing) bool { return r.k.stage != live })
	leases := make([]Lease, len(batch))
	for i, r := range batch {
		leases[i] = Lease{Key: r.k.full, Owner: r.k.owner, TTL: r.lease}
		left = max(left, r.k.validUntil().Sub(now))
	}
	l.mu.Unlock()
	// No answer can help when the validity of all has ended: then the next calls
	// no longer wait for this one.
	ctx, cancel := context.WithTimeout(l.base, max(left, minTTL))
	defer cancel()
	inTime := context.AfterFunc(ctx, l.freeCall)
	var results []error
	sent := clock.Now()
	if len(batch) > 0 {
		results = l.store.Renew(ctx, leases)
	}
	if inTime() {
		l.freeCall()
	}

	l.mu.Lock()
	now = clock.Now()
	share := rand.Float64() // one for all, so that they go on sharing calls
	var losses []loss
	for i, r := range batch {
		if lost := l.renewed(r, sent, now, share, results[i]); lost != nil {
			losses = append(losses, loss{r.k, lost})
		}
	}
	l.rouse()
	l.mu.Unlock()
	for _, lost := range losses {
		l.lose(lost.k, lost.err)
	}
}

// freeCall makes room for another renewal.
func (l *Locker) freeCall() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.watch.calls--
	l.rouse()
}

// renewed takes in the result of one renewal; l.mu is held. It returns why the
// lock is lost, if it is, having dropped it.
func (l *Locker) renewed(r renewing, sent, now clock.Instant, share float64, err error) *LostError {
	k := r.k
	if k.stage != live {
		if k.stage == gone && err == nil && !k.giving.done {
			// A renewal does not revive a lost lock, and nobody else may be kept out.
			l.settler.add(k, false)
		}
		return nil
	}
	var lost *LostError
	switch {
	case err == nil && r.epoch != k.epoch: // an Extend has overtaken it
	case err == nil && now >= k.validUntil():
		l.settler.add(k, false) // too late; the watchdog is about to end it
	case err == nil:
		l.confirm(k, sent, r.lease)
		l.tellRenewed(k)
	case errors.As(err, &lost):
		l.drop(k, gone)
		return &LostError{Key: k.key, Reason: lost.Reason, Err: lost.Err}
	case k.renewal.tries > 0: // else another try has been confirmed meanwhile
		l.retryRenewal(k, now, share, opaqueContext{err})
	}
	return nil
}

// confirm moves the validity of a live lock after a command sent at sent has
// started its lease anew; l.mu is held. Validity never moves back here.
func (l *Locker) confirm(k *Lock, sent clock.Instant, lease time.Duration) {
	until := validUntil(sent, lease, k.config.marginOf(lease), k.limit)
	if until > k.validUntil() {
		l.setValidity(k, until)
	}
	k.renewal.tries, k.renewal.err = 0, nil
	if k.renewal.place > 0 {
		k.renewal.at = sent.Add(k.renewal.every)
		heap.Fix(&l.watch.renewals, k.renewal.place-1)
	}
}

// renewBy makes the next renewal of a live lock due at the latest at at, also if
// the lease had reached to the cap on the hold and needed none; l.mu is held.
func (l *Locker) renewBy(k *Lock, at clock.Instant) {
	if k.config.noRenewal {
		return
	}
	if k.renewal.place == 0 {
		k.renewal.at = at
		heap.Push(&l.watch.renewals, k)
		return
	}
	k.renewal.at = min(k.renewal.at, at)
	heap.Fix(&l.watch.renewals, k.renewal.place-1)
}

func (l *Locker) setValidity(k *Lock, until clock.Instant) {
	k.until.Store(int64(until))
	heap.Fix(&l.watch.expiries, k.expiry-1)
}

// retryRenewal arms the next try after one that failed: pauses grow from an
// eighth of the interval to half of it, but do not outlast the validity.
func (l *Locker) retryRenewal(k *Lock, now clock.Instant, share float64, err error) {
	k.renewal.err = err
	if k.renewal.place > 0 {
		pause := jitter(k.renewal.tries, k.renewal.every/8+1, k.renewal.every/2+1, share)
		pause = min(pause, k.validUntil().Sub(now)/2)
		k.renewal.at = min(k.renewal.at, now.Add(max(pause, minRenewal)))
		heap.Fix(&l.watch.renewals, k.renewal.place-1)
	}
	if k.config.observer.RenewalFailed != nil {
		l.notify.tell(&l.group, true, func() { k.config.renewalFailed(k.key, err) })
	}
}

func (l *Locker) tellRenewed(k *Lock) {
	if k.config.observer.Renewed != nil {
		l.notify.tell(&l.group, true, func() { k.config.renewed(k.key) })
	}
}

// schedule is a heap of locks by a moment. Each lock knows its place, from 1.
type schedule struct {
	locks []*Lock
	at    func(*Lock) (clock.Instant, *int)
}

func (s *schedule) Len() int { return len(s.locks) }

func (s *schedule) Less(i, j int) bool {
	a, _ := s.at(s.locks[i])
	b, _ := s.at(s.locks[j])
	return a < b
}

func (s *schedule) Swap(i, j int) {
	_, a := s.at(s.locks[i])
	_, b := s.at(s.locks[j])
	*a, *b = j+1, i+1
	s.locks[i], s.locks[j] = s.locks[j], s.locks[i]
}

func (s *schedule) Push(x any) {
	k := x.(*Lock)
	_, place := s.at(k)
	s.locks = append(s.locks, k)
	*place = len(s.locks)
}

func (s *schedule) Pop() any {
	last := len(s.locks) - 1
	k := s.locks[last]
	_, place := s.at(k)
	*place = 0
	s.locks[last] = nil
	s.locks = s.locks[:last]
	return k
}
