package redlock

import (
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/clock"
)

const (
	firstRetry = 20 * time.Millisecond
	mostRetry  = time.Second

	// An instance that was asked for the lock and did not answer is looked at again so
	// long after the lock was given up there, and then after twice the time each: a
	// command whose connection was closed can still run. Others wait for what it leaves,
	// so one more look comes before, when most of such commands have run.
	lookAgain = time.Second
	looks     = 4
)

// hold is what is known of one value of one key, from the first request for it to the
// last.
//
// Invariant: nothing is left on an instance that nobody holds. The request that gives
// the lock up there follows the answer to the one that might take it; where that never
// came it is sent again later; and where it fails it is repeated until every lease has
// ended.
type hold struct {
	s      *store
	key    string
	value  string
	token  int64
	fenced bool
	names  names

	mu     sync.Mutex
	places []place
	end    clock.Instant // every lease that was asked for has ended by then
	over   bool          // it is being given up: nothing is taken any more
	won    bool          // a majority had agreed, or it is not known
	kept   clock.Instant // until then the key stays after that; 0: it does not
	askers []*ballot     // of those who want to know what came of giving it up
}

// place is a lock on one instance.
type place struct {
	busy    bool          // a request that may take it is on its way
	touched bool          // one was sent
	open    bool          // one was sent that was not refused: it may have taken the lock, or may yet
	unsure  bool          // one was sent that got no answer: it may yet run
	twin    bool          // another client reaches the same server: no vote
	setting int           // Extends that are on their way
	least   time.Duration // the shortest lease that these set; 0: none
	ceiling time.Duration // one that may yet be set by an Extend without an answer; 0: none

	leaving leaving
	asking  bool // a release is on its way
	doubt   bool // one got no answer: it may have run
	tries   int
	looks   int
	timer   *time.Timer // the next try; nil: none
}

// leaving is how far a place is in being given up.
type leaving uint8

const (
	stays   leaving = iota
	waits           // for the answer to a request that may take it
	asked           // and not answered yet
	failed          // it got no answer
	deleted         // these three are definite
	absent
	foreign
)

// left reads the answer to a release.
func left(code int) leaving {
	switch code {
	case codeYes:
		return deleted
	case codeTaken:
		return foreign
	}
	return absent
}

func (l leaving) definite() bool { return l >= deleted }

// answer is what a definite one says to whoever gave the lock up.
func (l leaving) answer() answer {
	switch l {
	case deleted:
		return answer{vote: yes}
	case foreign:
		return answer{vote: no, err: errTaken}
	}
	return answer{vote: no, err: errGone}
}

// lasts notes that a lease of length ttl is being asked for; h.mu is held.
func (h *hold) lasts(ttl time.Duration) {
	h.end = max(h.end, clock.Now().Add(ttl+2*h.s.limit))
}

// request makes one for this lock.
func (h *hold) request(k kind, ttl time.Duration) request {
	return request{kind: k, lease: lease{h.key, h.value, ttl}, names: &h.names, token: h.token, fenced: h.fenced}
}

// granted takes in the answer to a request that might take the lock on instance i.
func (h *hold) granted(i int, r *request) {
	h.mu.Lock()
	p := &h.places[i]
	p.busy = false
	p.touched = p.touched || r.sent
	p.open = p.open || r.sent && !r.refused()
	p.unsure = p.unsure || r.err != nil && r.mayHaveRun()
	p.twin = p.twin || r.err == nil && r.kind == take && r.code == codeHad
	waited := p.leaving == waits
	send := waited && h.leave(i)
	h.mu.Unlock()
	switch {
	case send:
		h.sendDrop(i)
	case waited:
		h.finish()
	}
}

// obstacle says why an instance is not to be asked for a lease of length ttl now, if that
// is so; h.mu is held.
//
// Invariant: while a shorter lease is on its way to an instance, in whatever order its
// connections deliver, no longer one is believed there.
func (p *place) obstacle(ttl time.Duration) error {
	switch {
	case p.busy:
		return errBusy
	case p.setting > 0 && p.least < ttl:
		return errSetting
	}
	return nil
}

// yes is the vote of an instance that has set or raised the lease to ttl; h.mu is held.
func (p *place) yes(ttl time.Duration) answer {
	switch {
	case p.twin:
		return answer{vote: fault, err: errTwin, ran: true}
	case p.ceiling > 0 && p.ceiling < ttl:
		return answer{vote: fault, err: errCeiling, ran: true}
	}
	return answer{vote: yes, ran: true}
}

// heal gives the lock back to instance i, which does not have it, if that is still
// wanted. A majority has confirmed the lock in a round that began at began.
func (h *hold) heal(i int, ttl time.Duration, began clock.Instant) {
	h.mu.Lock()
	p := &h.places[i]
	if h.over || p.busy || clock.Now().Sub(began) > ttl/2 {
		h.mu.Unlock()
		return
	}
	p.busy = true
	h.lasts(ttl)
	h.mu.Unlock()
	h.s.nodes[i].send(&order{request: h.request(heal, ttl), asker: h})
}

// answered takes in the answers to requests that nobody waits for.
func (h *hold) answered(i int, o *order) {
	if o.kind == drop {
		h.dropped(i, &o.request)
		return
	}
	h.granted(i, &o.request)
}

// giveUp sends the release to all instances. b, if not nil, gets what comes of it.
func (h *hold) giveUp(b *ballot, keep time.Duration) {
	var sends [16]int
	list := sends[:0]
	h.mu.Lock()
	h.over = true
	if keep > 0 {
		h.kept = max(h.kept, clock.Now().Add(keep))
		h.lasts(keep)
	}
	if b != nil {
		h.askers = append(h.askers, b)
	}
	for i := range h.places {
		switch p := &h.places[i]; {
		case p.leaving.definite():
			if b != nil {
				b.add(i, p.leaving.answer())
			}
		case p.busy:
			p.leaving = waits
		case p.leaving != asked && h.leave(i):
			list = append(list, i)
		}
	}
	h.mu.Unlock()
	h.s.remember(h)
	for _, i := range list {
		h.sendDrop(i)
	}
	h.finish()
}

// leave reports whether the release for instance i must be sent now; h.mu is held.
func (h *hold) leave(i int) bool {
	p := &h.places[i]
	if !p.touched { // there is nothing to release
		p.leaving = absent
		h.tell(i, p.leaving.answer())
		return false
	}
	h.still(p)
	p.leaving, p.asking = asked, true
	return true
}

// still stops the timer of a place; h.mu is held.
func (h *hold) still(p *place) {
	if p.timer != nil && p.timer.Stop() {
		h.s.group.Done()
	}
	p.timer = nil
}

func (h *hold) sendDrop(i int) {
	r := h.request(drop, 0)
	h.mu.Lock()
	// The counter is raised to keep out what is still on its way. Where nothing is it must stay:
	// a token that was refused for being far ahead of all clocks would shut out all others.
	r.fenced = r.fenced && h.places[i].open
	// Those who wait are told when a lock becomes free. What a failed attempt gives back
	// was never one: told of it they would ask, fail, and tell each other without end.
	r.silent = !h.won
	if h.kept > 0 {
		r.keep = max(h.kept.Sub(clock.Now()), time.Millisecond)
	}
	h.mu.Unlock()
	h.s.nodes[i].send(&order{request: r, asker: h})
}

// tell gives an answer to those who wait for it; h.mu is held.
func (h *hold) tell(i int, a answer) {
	for _, b := range h.askers {
		b.add(i, a)
	}
}

// dropped takes in the answer to a release.
func (h *hold) dropped(i int, r *request) {
	h.mu.Lock()
	p := &h.places[i]
	p.asking = false
	switch {
	case r.err != nil:
		if !p.leaving.definite() {
			p.leaving = failed
			h.tell(i, answer{vote: fault, err: r.err, ran: r.mayHaveRun()})
		}
		p.doubt = p.doubt || r.mayHaveRun()
		p.tries++
		if !errors.Is(r.err, redis.ErrClosed) { // what a server refuses now it may do before the lease ends
			h.later(i, backoff(p.tries))
		}
	case !p.leaving.definite():
		if p.leaving = left(r.code); p.doubt && p.leaving == foreign {
			p.leaving = absent // others could come after the one without an answer
		}
		h.tell(i, p.leaving.answer())
		fallthrough
	default:
		p.tries = 0
		if p.unsure && p.looks < looks {
			pause := min(2*h.s.limit, lookAgain)
			if p.looks > 0 {
				pause = lookAgain << (p.looks - 1)
			}
			h.later(i, pause)
			p.looks++
		}
	}
	h.mu.Unlock()
	h.finish()
}

// later sends the release for instance i again after a pause; h.mu is held. The last of
// them, when the Locker has been closed, is sent soon.
func (h *hold) later(i int, pause time.Duration) {
	p := &h.places[i]
	if h.s.ended.Load() {
		if p.leaving == failed || p.looks > 0 {
			return
		}
		pause = min(pause, lookAgain)
	}
	if clock.Now().Add(pause) > h.end {
		return // every lease will have ended
	}
	h.s.group.Add() // done when the timer has run, or by who stops it
	p.timer = time.AfterFunc(pause, func() {
		defer h.s.group.Done()
		h.mu.Lock()
		send := p.timer != nil // else somebody has sent it since
		p.timer = nil
		p.asking = p.asking || send
		if send && p.leaving == failed {
			p.leaving = asked
		}
		h.mu.Unlock()
		if send {
			h.sendDrop(i)
		}
	})
}

// hurry makes all that is to be sent later be sent now, or after a last pause, because
// the Locker is being closed.
func (h *hold) hurry() {
	h.mu.Lock()
	var now []int
	for i := range h.places {
		p := &h.places[i]
		if p.timer == nil {
			continue
		}
		if p.leaving == failed {
			now = append(now, i)
			h.leave(i)
		} else if p.timer.Stop() {
			p.timer.Reset(lookAgain)
		}
	}
	h.mu.Unlock()
	for _, i := range now {
		h.sendDrop(i)
	}
}

// finish forgets a lock that is given up everywhere.
func (h *hold) finish() {
	h.mu.Lock()
	done := h.over
	for i := range h.places {
		p := &h.places[i]
		done = done && !p.busy && !p.asking && p.timer == nil && p.leaving != waits &&
			(p.leaving.definite() || clock.Now() > h.end)
	}
	h.mu.Unlock()
	if done {
		h.s.forget(h)
	}
}

// idle reports whether nothing of the lock is left: h can be forgotten.
func (h *hold) idle(now clock.Instant) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if now <= h.end {
		return false
	}
	for i := range h.places {
		if p := &h.places[i]; p.busy || p.asking || p.timer != nil {
			return false
		}
	}
	return true
}

// backoff is the pause before try n.
func backoff(n int) time.Duration {
	d := min(firstRetry<<min(n-1, 10), mostRetry)
	return d/2 + rand.N(d/2)
}
