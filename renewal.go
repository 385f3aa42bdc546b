package holdfast

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
)

// renewal is a lock's part in the watchdog.
type renewal struct {
	at    clock.Instant // when the next one is due
	every time.Duration
	tries int   // since the last confirmed one
	err   error // of the last try
	place int   // in the schedule; 0: none

	flights []*flight // the calls under way that renew this lock
}

// flight is one call under way. When none of its locks is live any more it is
// ended, so that the client does not send it again by itself.
type flight struct {
	live   int
	cancel context.CancelFunc
}

// renewing is one lock in a batch, as it was when the batch was made.
type renewing struct {
	k     *Lock
	epoch int
	lease time.Duration
}

func (r renewing) key() string { return r.k.full }

// due takes the locks that are due for renewal into batches, and with them those
// that soon will be: locks taken at different moments so come to share a call.
// l.mu is held.
func (l *Locker) due(now clock.Instant) (batches [][]renewing) {
	d := &l.watch
	if len(d.renewals.items) == 0 || d.renewals.items[0].renewal.at > now {
		return nil
	}
	for len(d.renewals.items) > 0 {
		k := d.renewals.items[0]
		early := k.renewal.every / 8
		if k.renewal.tries > 0 {
			early /= 4 // a retry waits for its pause
		}
		early = min(early, max(0, k.validUntil().Sub(now)/16)) // below nextTry, or this would not end
		if k.renewal.at.Add(-early) > now {
			break
		}
		if k.ctx.Err() != nil {
			l.drop(k, over)
			continue
		}
		if len(k.renewal.flights) >= maxFlights { // their answers, or their ends, come first
			k.renewal.at = now.Add(k.nextTry(now))
			d.renewals.moved(k)
			continue
		}
		n := len(batches)
		if n == 0 || len(batches[n-1]) == maxBatch {
			if d.calls >= d.mostCalls() {
				break
			}
			d.calls++
			batches, n = append(batches, nil), n+1
		}
		batches[n-1] = append(batches[n-1], renewing{k, k.epoch, k.ttl})
		// The next one, for the case that no answer to this one comes: one lost
		// reply must not cost the lock.
		k.renewal.tries++
		k.renewal.at = now.Add(k.nextTry(now))
		d.renewals.moved(k)
	}
	return batches
}

// nextTry is the time to the next renewal when no answer comes to this one. What is
// left after a hand-over is much less than a TTL, and must do for several. l.mu is held.
func (k *Lock) nextTry(now clock.Instant) time.Duration {
	return max(min(k.renewal.every/2, k.validUntil().Sub(now)/4), minRenewal)
}

// sharder is what a Store may offer whose keys live on several servers: one that
// does not answer must not delay the renewals of the others' keys.
type sharder interface {
	Shards(ctx context.Context, leases []Lease) [][]int
}

// spread sends one batch, in as many calls as its keys have servers.
// under counts the calls under way.
func spread[T any](l *Locker, batch []T, key func(T) string, under *int, send func([]T)) {
	shards := shardsOf(l, batch, key)
	if len(shards) <= 1 {
		send(batch)
		return
	}
	for n, shard := range shards {
		part := make([]T, len(shard))
		for i, at := range shard {
			part[i] = batch[at]
		}
		if n == len(shards)-1 {
			send(part)
			return
		}
		l.mu.Lock()
		*under++
		l.mu.Unlock()
		l.group.Start(func() { send(part) }) // ends with the store's answer
	}
}

// shardsOf returns the indexes of a batch by server, or nil if they are not known.
func shardsOf[T any](l *Locker, batch []T, key func(T) string) (shards [][]int) {
	s, ok := l.store.Store.(sharder)
	if !ok || len(batch) == 1 {
		return nil
	}
	defer func() {
		if recover() != nil { // a client that panics here does so in the call, too
			shards = nil
		}
	}()
	leases := make([]Lease, len(batch))
	for i := range batch {
		leases[i].Key = key(batch[i])
	}
	ctx, cancel := context.WithTimeout(l.base, minTTL) // it should not ask anybody
	defer cancel()
	return s.Shards(ctx, leases)
}

// renew sends one call and takes in its results. A lock that has been released or
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
	// No answer can help when the validity of all has ended: then the next calls
	// no longer wait for this one.
	ctx, cancel := context.WithTimeout(l.base, max(left, minTTL))
	defer cancel()
	f := &flight{live: len(batch), cancel: cancel}
	for _, r := range batch {
		r.k.renewal.flights = append(r.k.renewal.flights, f)
	}
	l.mu.Unlock()
	free := func() { l.freeCall(&l.watch.calls, l.watch.mostCalls) }
	inTime := context.AfterFunc(ctx, free)
	var results []error
	sent := clock.Now()
	if len(batch) > 0 {
		results = l.store.Renew(ctx, leases)
	}
	if inTime() {
		free()
	}

	l.mu.Lock()
	now = clock.Now()
	share := rand.Float64() // one for all, so that they go on sharing calls
	var losses []loss
	var told []*Lock
	for i, r := range batch {
		r.k.renewal.flights = slices.DeleteFunc(r.k.renewal.flights, func(g *flight) bool { return g == f })
		if lost := l.renewed(r, sent, now, share, results[i]); lost != nil {
			losses = append(losses, loss{r.k, lost})
		} else if r.k.config.inspect && results[i] == nil {
			told = append(told, r.k)
		}
	}
	l.rouse()
	l.mu.Unlock()
	for _, lost := range losses {
		l.lose(lost.k, lost.err)
	}
	if len(told) > 0 {
		l.describe(told...)
	}
}

// freeCall makes room for another call.
func (l *Locker) freeCall(under *int, most func() int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	full := *under >= most()
	*under--
	if full { // the watchdog may be waiting for this
		l.rouse()
	}
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
	if k.ctx.Err() != nil { // its parent has ended, and with it the hold
		l.drop(k, over)
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
		if k.broken {
			return &LostError{Key: k.key, Reason: LostBroken}
		}
		return &LostError{Key: k.key, Reason: lost.Reason, Err: lost.Err}
	case k.renewal.tries > 0: // else another try has been confirmed meanwhile
		l.retryRenewal(k, now, share, opaqueContext{err})
	}
	return nil
}

// confirm moves the validity of a live lock after a command sent at sent has
// started its lease anew; l.mu is held. Validity never moves back here.
func (l *Locker) confirm(k *Lock, sent clock.Instant, lease time.Duration) {
	until := k.config.validUntil(sent, lease, k.limit)
	if until > k.validUntil() {
		l.setValidity(k, until)
	}
	k.renewal.tries, k.renewal.err = 0, nil
	k.renewal.at = sent.Add(k.renewal.every)
	l.watch.renewals.moved(k)
}

// renewBy makes the next renewal of a live lock due at the latest at at; l.mu is
// held.
func (l *Locker) renewBy(k *Lock, at clock.Instant) {
	k.renewal.at = min(k.renewal.at, at)
	l.watch.renewals.moved(k)
}

func (l *Locker) setValidity(k *Lock, until clock.Instant) {
	k.until.Store(int64(until))
	l.watch.expiries.moved(k)
}

// retryRenewal arms the next try after one that failed: pauses grow from an
// eighth of the interval to half of it, but do not outlast the validity.
func (l *Locker) retryRenewal(k *Lock, now clock.Instant, share float64, err error) {
	k.renewal.err = err
	if k.renewal.place > 0 {
		pause := jitter(k.renewal.tries, k.renewal.every/8+1, k.renewal.every/2+1, share)
		pause = min(pause, k.validUntil().Sub(now)/2)
		k.renewal.at = min(k.renewal.at, now.Add(max(pause, minRenewal)))
		l.watch.renewals.moved(k)
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
