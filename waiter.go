package holdfast

import (
	"sync"
	"time"
)

// signal is what a call waits for.
type signal uint8

const (
	answerCame signal = iota
	timeIsUp
	lockerCloses
)

// waiter is what a caller needs to wait for a call. It is reused after a call that
// was answered.
//
// Invariant: signals has room for all that can be sent before they are received: one
// answer, and each of the other two once.
type waiter struct {
	signals  chan signal
	done     chan struct{} // closed when a call is abandoned, and then not reused
	deadline time.Time
	closes   bool // the end of the Locker ends it
	told     bool // that its time is up
	place    int  // among the busy

	// fly is the goroutine that sends the command of call on lane. It is kept
	// because making it allocates.
	fly  func()
	lane *lane
	call *call
}

// awaitAnswer waits for an answer that is certain to come at once.
func (w *waiter) awaitAnswer() {
	for <-w.signals != answerCame {
	}
}

// waiterPool keeps waiters for reuse, and the time of those in use: one timer for
// all, because nearly all calls are answered long before their time is up, and a timer
// for each costs more than what it is for. It belongs to a Locker: what a testing/
// synctest bubble has made must stay in it.
type waiterPool struct {
	mu      sync.Mutex
	idle    []*waiter
	busy    []*waiter
	timer   *time.Timer
	next    time.Time // when the timer fires; zero: not
	closing bool
}

// maxIdle is how many waiters are kept.
const maxIdle = 64

// get returns a waiter whose time is up after limit.
func (p *waiterPool) get(limit time.Duration, closes bool) *waiter {
	deadline := time.Now().Add(limit)
	p.mu.Lock()
	defer p.mu.Unlock()
	var w *waiter
	if last := len(p.idle) - 1; last >= 0 {
		w = p.idle[last]
		p.idle = p.idle[:last]
	} else {
		w = &waiter{signals: make(chan signal, 3), done: make(chan struct{})}
		w.fly = func() { w.lane.fly(&w.call.l.group, w.call, nil) }
	}
	w.deadline, w.closes, w.told, w.place = deadline, closes, false, len(p.busy)
	p.busy = append(p.busy, w)
	if p.next.IsZero() || deadline.Before(p.next) {
		p.arm(deadline, limit)
	}
	if p.closing && closes {
		w.signals <- lockerCloses
	}
	return w
}

// arm sets the timer; mu is held.
func (p *waiterPool) arm(at time.Time, in time.Duration) {
	p.next = at
	if p.timer == nil {
		p.timer = time.AfterFunc(in, p.expire)
	} else {
		p.timer.Reset(in)
	}
}

// expire tells those whose time is up.
func (p *waiterPool) expire() {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	p.next = time.Time{}
	for _, w := range p.busy {
		switch {
		case w.told:
		case !w.deadline.After(now):
			w.told = true
			w.signals <- timeIsUp
		case p.next.IsZero() || w.deadline.Before(p.next):
			p.next = w.deadline
		}
	}
	if !p.next.IsZero() {
		p.arm(p.next, p.next.Sub(now))
	}
}

// interrupt tells those who wait that the Locker is being closed.
func (p *waiterPool) interrupt() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closing = true
	for _, w := range p.busy {
		if w.closes {
			w.signals <- lockerCloses
		}
	}
}

// drop takes w out of those in use. It will not be reused.
func (p *waiterPool) drop(w *waiter) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropLocked(w)
}

func (p *waiterPool) dropLocked(w *waiter) {
	last := len(p.busy) - 1
	p.busy[w.place] = p.busy[last]
	p.busy[w.place].place = w.place
	p.busy[last] = nil
	p.busy = p.busy[:last]
}

// put takes w back, after its call was answered.
func (p *waiterPool) put(w *waiter) {
	w.call = nil
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropLocked(w)
	for len(w.signals) > 0 { // they came with the answer
		<-w.signals
	}
	if len(p.idle) < maxIdle {
		p.idle = append(p.idle, w)
	}
}
