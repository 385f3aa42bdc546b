package holdfast

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// States of a call. Whoever changes running decides who deals with the result.
const (
	running int32 = iota
	answered
	abandoned
)

// operation is what a call asks of the store.
type operation uint8

const (
	acquireOp operation = iota
	releaseOp
	extendOp
	renewOp // of one lease, by who waits for it
)

// call is one request to the store. Clients may not heed contexts (go-redis does not
// apply them to its sockets by default), and our calls come back within their own
// bounds all the same: either the store is asked on a goroutine of its own, or it
// sends through a pipeline and nothing else, where await keeps the bounds. It is the
// context that the request gets. A context that is kept beyond its call may end at
// any time.
//
// Invariant: its result is taken exactly once, by the caller (answered) or by
// late (abandoned).
type call struct {
	context.Context // for its values
	l               *Locker
	k               *Lock // nil: nobody's any more
	op              operation
	request         Request
	deadline        time.Time
	done            chan struct{}
	state           atomic.Int32
	grant           Grant
	err             error

	waiter *waiter
	piped  bool // it has no goroutine
	limit  time.Duration
	stop   <-chan struct{}
	gaveUp error // why await did
	over   error // its time was up when an answer came: it sends nothing more
	passage
}

func (c *call) Deadline() (time.Time, bool) { return c.deadline, true }
func (c *call) Done() <-chan struct{}       { return c.done }

func (c *call) Err() error {
	select {
	case <-c.done:
		return context.Canceled
	default:
		return nil
	}
}

// run sends the request and returns its error; or it gives up after limit, or when
// stop is closed, or, if it may, when the Locker is being closed, and returns an error
// of its own. Then late gets the result, if and when the store returns.
func (c *call) run(stop <-chan struct{}, closes bool, limit time.Duration) error {
	l := c.l
	w := l.waiters.get(limit, closes)
	c.deadline, c.done = w.deadline, w.done
	c.waiter, c.limit, c.stop = w, limit, stop
	if s, ok := l.store.Store.(*redisStore); ok && c.op != renewOp && s.piped(&c.request) {
		c.piped = true
		if c.ask(); c.gaveUp != nil {
			return c.gaveUp
		}
		l.waiters.put(w)
		return c.err
	}
	l.group.Add()
	go c.send() // ends with the store's answer: at the latest by the client's own timeouts
	err := c.wait()
	if err == nil {
		l.waiters.put(w)
		return c.err
	}
	if c.state.CompareAndSwap(running, abandoned) {
		c.abandon()
		return err
	}
	w.awaitAnswer() // it came at the same moment, and it counts
	l.waiters.put(w)
	return c.err
}

// wait waits for the answer, and returns an error when it is time to give up.
func (c *call) wait() error {
	var got signal
	if c.stop == nil {
		got = <-c.waiter.signals
	} else {
		select {
		case got = <-c.waiter.signals:
		case <-c.stop:
			return errInterrupted
		}
	}
	switch got {
	case answerCame:
		return nil
	case timeIsUp:
		return &noAnswerError{c.limit}
	}
	return errInterrupted
}

func (c *call) abandon() {
	close(c.waiter.done)
	c.l.waiters.drop(c.waiter)
}

// await waits until c's command on ln is answered, or returns an error for c itself.
func (c *call) await(ln *lane) error {
	err := c.wait()
	if err == nil {
		return nil
	}
	if !ln.leave(c) {
		c.waiter.awaitAnswer() // it came at the same moment, and it counts
		c.over = err
		return nil
	}
	c.gaveUp = err
	c.abandon()
	return err
}

// ask asks the store.
func (c *call) ask() {
	switch c.op {
	case acquireOp:
		c.grant, c.err = c.l.store.Acquire(c, c.request)
	case releaseOp:
		c.err = c.l.sendRelease(c, c.request.Lease)
	case extendOp:
		c.err = c.l.store.Extend(c, c.request.Lease)
	case renewOp:
		c.err = c.l.store.Renew(c, []Lease{c.request.Lease})[0]
	}
}

// send is the goroutine of a call that has one.
func (c *call) send() {
	defer c.l.group.Done()
	c.ask()
	if c.state.CompareAndSwap(running, answered) {
		c.waiter.signals <- answerCame
		return
	}
	c.late(c.grant, c.err)
}

// late deals with an answer that its caller had given up on, or with that to one of
// its commands (then g is empty, and c.grant its caller's). A grant or a longer lease that nobody wants is settled. If the
// acquisition is still under way or has been granted since, what is open will be
// settled when it ends.
func (c *call) late(g Grant, err error) {
	if c.op == releaseOp && err == nil && c.l.line.store != nil {
		c.l.callAll(c.request.Key) // it may have handed the lock to one of us
	}
	if c.op == acquireOp && err == nil && g.Owner != "" {
		c.l.settler.addOwner(c.request.Lease, g.Owner)
		return
	}
	var held *HeldError
	lengthens := c.op == extendOp || c.op == renewOp
	unwanted := err == nil && (lengthens || c.op == acquireOp) ||
		c.op == acquireOp && !errors.As(err, &held) && !c.l.settlesAcquires()
	if !unwanted || c.k == nil {
		return
	}
	c.l.mu.Lock()
	open := c.k.stage == gone
	if lengthens {
		open = open && !c.k.giving.done
	} else if !open {
		c.k.suspect = true
	}
	c.l.mu.Unlock()
	if open {
		c.l.settler.add(c.k, false)
	}
}
