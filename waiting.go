package holdfast

import (
	"errors"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
)

// Pauses between the attempts of a waiter.
const (
	firstPause = 10 * time.Millisecond
	mostPause  = 250 * time.Millisecond
	leastPause = time.Millisecond
)

// queue holds the goroutines of this Locker that wait for one key, first come
// first served. Only the first of them asks the store.
//
// Invariant: while anybody waits, exactly one turn has been given: to waiting[0].
type queue struct {
	waiting []*turn
	stop    func() // ends the store's watch; nil: there is none
	news           // of the first
}

// news is what was heard last of a lock that is waited for.
type news struct {
	held    *HeldError
	heldBy  error         // see want.heldBy
	since   clock.Instant // of held
	failure error         // newer than held, if not nil
}

// turn is one waiter's place.
type turn struct {
	first chan struct{} // closed when it is this one's turn to ask
	poke  chan struct{} // a local release: ask now
}

// wait tries to take the lock until it is held, the wait ends, or a refusal
// cannot be healed by waiting.
func (w *want) wait() (err error) {
	p := w.probe()
	defer func() { p.stop(err) }()
	w.stuck = p.verdict()
	if s := w.l.line.store; s != nil && s.hasLine(w.k.full) {
		return w.waitInLine()
	}
	if !w.l.contended(w.k.full) {
		if err = w.try(false); err == nil || !w.again(err) {
			return err
		}
	}
	q, t, first := w.l.join(w.k.full, w)
	if q == nil { // as many wait as may
		if err == nil {
			err = w.try(false)
		}
		if w.held != nil {
			w.held.Full = true
		}
		return err
	}
	defer w.l.leave(w.k.full, q, t)
	if first {
		w.l.watchKey(w.k.full, q)
	}
	var over <-chan time.Time
	if w.end != 0 {
		timer := time.NewTimer(w.end.Sub(clock.Now()))
		defer timer.Stop()
		over = timer.C
	}
	select {
	case <-t.first:
	case err := <-w.stuck:
		return err
	case <-over:
		return w.giveUp(q, errWaitOver)
	case <-w.ctx.Done():
		return w.giveUp(q, w.ctx.Err())
	case <-w.l.closing:
		return ErrClosed
	}
	return w.poll(q, t, over, err)
}

// mostSoon is how many pauses in a row are the store's own: what has not healed by then is
// no clash of two who came at the same moment, and must not be asked for in a loop.
const mostSoon = 8

// poll asks again and again, with pauses that grow; err is what was learned last.
func (w *want) poll(q *queue, t *turn, over <-chan time.Time, err error) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	soon := 0 // pauses of the store's own in a row
	for n := 1; ; n++ {
		pause := retryAfter(err)
		if soon++; pause <= 0 || pause > mostPause || soon > mostSoon {
			pause = w.l.pause(q, n)
		}
		timer.Reset(pause)
		select {
		case <-timer.C:
		case <-t.poke:
			timer.Stop()
			soon = 0
		case err := <-w.stuck:
			return err
		case <-over:
			return w.giveUp(q, errWaitOver)
		case <-w.ctx.Done():
			return w.giveUp(q, w.ctx.Err())
		case <-w.l.closing:
			return ErrClosed
		}
		err = w.try(true)
		if err == nil || !w.again(err) {
			return err
		}
		w.l.note(q, w)
	}
}

// again reports whether an attempt that failed may be made again.
func (w *want) again(err error) bool {
	return w.ctx.Err() == nil && !errors.Is(err, errWaitOver) && !w.l.isClosing() && !isFinal(err)
}

// giveUp takes over what the first in the queue has learned, for the error.
func (w *want) giveUp(q *queue, err error) error {
	w.l.mu.Lock()
	defer w.l.mu.Unlock()
	w.take(q.news, true)
	return err
}

// take makes n what the error of the wait will tell. If nothing has come since the
// holder's lease must have ended, silent says that something should have: then nobody
// knows who has the lock.
func (w *want) take(n news, silent bool) {
	if silent && n.failure == nil && n.held.ended(n.since) {
		n.failure = errSilent
	}
	if n.held != nil {
		held := *n.held
		held.Key = w.k.key
		if held.TTL > 0 {
			held.TTL = max(0, held.TTL-clock.Now().Sub(n.since))
		}
		w.held, w.heldBy = &held, n.heldBy
	}
	if n.failure != nil {
		w.failure = n.failure
	}
	w.unsure = n.failure != nil || w.held == nil && w.failure != nil
}

// pause returns how long the first in the queue waits before attempt n: never
// past the moment at which the holder's lease ends.
func (l *Locker) pause(q *queue, n int) time.Duration {
	d := backoff(n, firstPause, mostPause)
	l.mu.Lock()
	defer l.mu.Unlock()
	if q.held != nil && q.failure == nil && q.held.TTL > 0 {
		d = min(d, q.held.TTL-clock.Now().Sub(q.since))
	}
	return max(d, leastPause)
}

// contended reports whether somebody in this process waits for the key already.
func (l *Locker) contended(full string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.queues[full] != nil
}

// join puts a waiter at the end of the key's queue, unless as many wait as may. first
// says that it is a new queue.
func (l *Locker) join(full string, w *want) (q *queue, t *turn, first bool) {
	t = &turn{first: make(chan struct{}), poke: make(chan struct{}, 1)}
	l.mu.Lock()
	defer l.mu.Unlock()
	q = l.queues[full]
	if most := w.k.config.maxWaiters; q != nil && most > 0 && len(q.waiting) >= most {
		return nil, nil, false
	}
	if first = q == nil; first {
		q = &queue{}
		l.queues[full] = q
		close(t.first)
	}
	q.waiting = append(q.waiting, t)
	q.learn(w)
	return q, t, first
}

// leave takes a waiter out, whatever it got, and gives its turn on.
func (l *Locker) leave(full string, q *queue, t *turn) {
	var stop func()
	l.mu.Lock()
	i := slices.Index(q.waiting, t)
	q.waiting = slices.Delete(q.waiting, i, i+1)
	if len(q.waiting) == 0 {
		delete(l.queues, full)
		stop = q.stop
	} else if i == 0 {
		close(q.waiting[0].first)
	}
	l.mu.Unlock()
	if stop != nil {
		_ = contain(stop)
	}
}

// note keeps what the first in the queue has learned, for the others.
func (l *Locker) note(q *queue, w *want) {
	l.mu.Lock()
	defer l.mu.Unlock()
	q.learn(w)
}

func (q *queue) learn(w *want) {
	switch {
	case w.unsure:
		q.failure = w.failure
	case w.held != nil:
		q.held, q.heldBy, q.since, q.failure = w.held, w.heldBy, w.heldAt, nil
	}
}

// pokeLocked tells the first who waits in this process that the key was released here;
// l.mu is held.
func (l *Locker) pokeLocked(full string) {
	if q := l.queues[full]; q != nil {
		select {
		case q.waiting[0].poke <- struct{}{}:
		default:
		}
	}
}
