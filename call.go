package holdfast

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// group counts the goroutines of a Locker, so that Close can wait for them.
type group struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // closed when n falls to 0; nil unless somebody waits
}

// start runs fn on a goroutine that ends when fn returns.
func (g *group) start(fn func()) {
	g.add()
	go func() { // ended by fn
		defer g.done()
		fn()
	}()
}

func (g *group) add() {
	g.mu.Lock()
	g.n++
	g.mu.Unlock()
}

func (g *group) done() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.n--
	if g.n == 0 && g.idle != nil {
		close(g.idle)
		g.idle = nil
	}
}

// wait waits until no goroutine is left, or for limit.
func (g *group) wait(limit time.Duration) {
	g.mu.Lock()
	if g.n == 0 {
		g.mu.Unlock()
		return
	}
	if g.idle == nil {
		g.idle = make(chan struct{})
	}
	idle := g.idle
	g.mu.Unlock()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-idle:
	case <-timer.C:
	}
}

// waiter is what a caller needs to wait for a call. Only this package sees it,
// so it is reused; the call itself is a context that hooks may keep.
type waiter struct {
	answered chan struct{} // one element
	timer    *time.Timer
}

// States of a call. Whoever changes running decides who deals with the result.
const (
	running int32 = iota
	answered
	abandoned
)

// call is one request to the store, on a goroutine of its own: clients may not
// heed contexts (go-redis does not apply them to its sockets by default), and
// our calls come back within their own bounds all the same. It is the context
// that the request gets.
//
// Invariant: its result is taken exactly once, by the caller (answered) or by
// late (abandoned).
type call[T any] struct {
	context.Context // for its values
	deadline        time.Time
	done            chan struct{}
	state           atomic.Int32
	result          T
}

func (c *call[T]) Deadline() (time.Time, bool) { return c.deadline, true }
func (c *call[T]) Done() <-chan struct{}       { return c.done }

func (c *call[T]) Err() error {
	if c.state.Load() == abandoned {
		return context.Canceled
	}
	return nil
}

// run runs fn and returns its result; or it gives up after limit, or when stop
// or closing is closed, and returns an error. Then late gets the result, if and when
// fn returns; it may be nil.
func run[T any](l *Locker, ctx context.Context, stop, closing <-chan struct{}, limit time.Duration,
	fn func(context.Context) T, late func(T)) (T, error) {
	w := l.waiter(limit)
	c := &call[T]{Context: ctx, deadline: time.Now().Add(limit), done: make(chan struct{})}
	l.group.add()
	go func() { // ended by fn: at the latest by the client's own timeouts
		defer l.group.done()
		c.result = fn(c)
		if c.state.CompareAndSwap(running, answered) {
			w.answered <- struct{}{}
		} else if late != nil {
			late(c.result)
		}
	}()
	var err error
	select {
	case <-w.answered:
		l.recycle(w)
		return c.result, nil
	case <-w.timer.C:
		err = &noAnswerError{limit}
	case <-stop:
		err = errInterrupted
	case <-closing:
		err = errInterrupted
	}
	if c.state.CompareAndSwap(running, abandoned) {
		close(c.done)
		l.recycle(w)
		var none T
		return none, err
	}
	<-w.answered // the answer came at the same moment, and it counts
	l.recycle(w)
	return c.result, nil
}

func (l *Locker) waiter(limit time.Duration) *waiter {
	if w, ok := l.waiters.Get().(*waiter); ok {
		w.timer.Reset(limit)
		return w
	}
	return &waiter{answered: make(chan struct{}, 1), timer: time.NewTimer(limit)}
}

// recycle puts w back. It is nobody's any more: the call has used it, or will not.
func (l *Locker) recycle(w *waiter) {
	w.timer.Stop()
	l.waiters.Put(w)
}
