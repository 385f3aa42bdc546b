package redlock

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/internal/group"
)

const (
	maxFlights = 4  // of one instance, while it answers
	maxBatch   = 64 // requests that share one
	maxProbe   = 16 // and while it does not answer
)

// order is a request on its way, and who gets its answer.
type order struct {
	request
	asker asker
}

// asker gets the answer of instance i, once for each order, on a goroutine of the node.
// It must not block.
type asker interface {
	answered(i int, o *order)
}

// node sends the requests of all locks to one instance: each at once while few are under
// way, else those that gather meanwhile share a flight. While the instance does not
// answer there is one flight at a time, a probe, and what has gathered when that fails
// fails with it, unsent: an instance that hangs costs a goroutine and a connection, and
// leaves nothing to clean up.
type node struct {
	index int
	link  link
	limit time.Duration // of a flight
	group *group.Group
	wake  chan struct{} // one element: for the goroutine that is parked
	quit  chan struct{} // closed by close

	mu sync.Mutex
	// What follows is guarded by mu.
	queue  []*order
	flying int
	broken bool // the latest flight got no answer
	parked bool // a goroutine waits for wake
	closed bool
}

func newNode(i int, l link, s *store) *node {
	return &node{
		index: i, link: l, limit: s.limit, group: &s.group,
		wake: make(chan struct{}, 1), quit: make(chan struct{}),
	}
}

// send sends o some time soon. It does not block, and does not call the asker itself.
func (n *node) send(o *order) {
	n.mu.Lock()
	n.queue = append(n.queue, o)
	start := n.flying == 0 || n.flying < maxFlights && !n.broken
	wake := start && n.parked
	if start {
		n.flying++
	}
	if wake {
		n.parked = false
	}
	n.mu.Unlock()
	switch {
	case wake:
		n.wake <- struct{}{}
	case start:
		n.group.Start(n.work) // ended by close; one that need not stay ends with the queue
	}
}

// close ends the goroutine that has nothing to do. What is sent later is sent all the
// same.
func (n *node) close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.closed {
		n.closed = true
		close(n.quit)
	}
}

// work sends what has gathered. One goroutine stays when there is nothing: a new one
// would first have to grow its stack. Each flight ends with the limit, or with the
// client's own timeouts.
func (n *node) work() {
	var f flight
	for {
		for n.gather(&f) {
			f.ctx = f.ctx.start(n.limit)
			n.link.send(f.ctx, f.requests)
			f.ctx = f.ctx.stop()
			for _, o := range n.landed(&f) {
				o.asker.answered(n.index, o)
			}
		}
		if !n.park() {
			return
		}
		select {
		case <-n.wake:
		case <-n.quit:
			if n.leave() {
				return
			}
			<-n.wake // it comes, or has come
		}
	}
}

// park reports whether this goroutine is to wait for more.
func (n *node) park() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.parked || n.closed {
		return false
	}
	n.parked = true
	return true
}

// leave reports whether the parked goroutine may end: nobody is about to wake it.
func (n *node) leave() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	was := n.parked
	n.parked = false
	return was
}

// flight is what goes out at once. It is used again and again by one goroutine.
type flight struct {
	ctx      *deadline
	orders   []*order
	requests []*request
}

// gather takes a batch, or ends the flight of this goroutine.
func (n *node) gather(f *flight) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(f.orders)
	clear(f.requests)
	f.orders, f.requests = f.orders[:0], f.requests[:0]
	if len(n.queue) == 0 || n.broken && n.flying > 1 {
		n.flying--
		return false
	}
	most := maxBatch
	if n.broken {
		most = maxProbe
	}
	size := min(most, len(n.queue))
	for _, o := range n.queue[:size] {
		f.orders, f.requests = append(f.orders, o), append(f.requests, &o.request)
	}
	rest := copy(n.queue, n.queue[size:])
	clear(n.queue[rest:])
	n.queue = n.queue[:rest]
	return true
}

// landed takes in how a flight went, and returns the orders that have their answers.
func (n *node) landed(f *flight) []*order {
	heard := false
	for _, o := range f.orders {
		if errors.Is(o.err, context.DeadlineExceeded) { // the flight's, which is nobody's context
			o.err = &noAnswerError{n.limit}
		}
		heard = heard || isAnswer(o.err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	probe := n.broken
	if n.broken = !heard; heard || !probe {
		return f.orders
	}
	err := f.orders[0].err
	for _, o := range n.queue {
		o.err = err
	}
	f.orders = append(f.orders, n.queue...)
	n.queue = nil
	return f.orders
}

// isAnswer reports whether err, if any, is what an instance has said, or is known of it:
// it is there.
func isAnswer(err error) bool {
	if err == nil {
		return true
	}
	var young *YoungError
	return refusedByServer(err) || errors.As(err, &young)
}

// deadline is the context of one flight after the other, until one is late: clients may
// keep the context of a flight that they have given up.
type deadline struct {
	end   atomic.Int64 // Unix time in ns
	done  chan struct{}
	timer *time.Timer // closes done
}

var _ context.Context = (*deadline)(nil)

// start returns a context that ends after limit: d itself, unless it is nil.
func (d *deadline) start(limit time.Duration) *deadline {
	if d == nil {
		d = &deadline{done: make(chan struct{})}
		done := d.done
		d.timer = time.AfterFunc(limit, func() { close(done) })
	} else {
		d.timer.Reset(limit)
	}
	d.end.Store(time.Now().Add(limit).UnixNano())
	return d
}

// stop returns d if it can be started again: its end has not come.
func (d *deadline) stop() *deadline {
	if d.timer.Stop() {
		return d
	}
	return nil
}

// Deadline is when it ends.
func (d *deadline) Deadline() (time.Time, bool) { return time.Unix(0, d.end.Load()), true }

// Done is closed then.
func (d *deadline) Done() <-chan struct{} { return d.done }

// Err is context.DeadlineExceeded from then on.
func (d *deadline) Err() error {
	select {
	case <-d.done:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// Value is nil.
func (d *deadline) Value(any) any { return nil }
