package holdfast

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/group"
)

// Observer is a set of functions that are told what happens to locks, to hang
// metrics on. Any may be nil. key is the one given to Acquire, without the prefix.
// They may be called from many goroutines at once.
// Acquired, Refused and Released are called in the goroutine of the call that
// they tell of; Renewed, RenewalFailed and Lost come from one goroutine beside
// the watchdog, in order, except that a loss found by Release is told by it; so does
// Released when the background has made up for a Release that got no answer. A
// slow function delays those, and the calls that it is called by, never the
// watchdog; when too many wait, renewals go untold. A panic in one is caught and
// logged.
type Observer struct {
	// Acquired: an Acquire or TryAcquire got the lock, after wait. attempts counts the
	// calls that asked for it, those that kept a place in the queue included.
	Acquired func(key string, wait time.Duration, attempts int)

	// Refused: an Acquire or TryAcquire ended without the lock, but not for ErrInvalid.
	Refused func(key string, err error)

	Renewed       func(key string)
	RenewalFailed func(key string, err error) // not the end: it is tried again while validity lasts
	Lost          func(key string, err error) // err has the reason, a *LostError

	// Released, once for each lock: a Release got a definite answer, also that the
	// lock had been lost. hold counts from the grant. Lost may come before or after.
	Released func(key string, hold time.Duration)
}

// guard runs an observer function, whose panic must not end the process.
func (c *config) guard(key string, fn func()) {
	defer func() {
		if p := recover(); p != nil {
			defer func() { _ = recover() }() // the log handler may be what panics
			c.log().Error("holdfast: observer panicked", "key", key, "panic", p)
		}
	}()
	fn()
}

func (c *config) log() *slog.Logger {
	if c.logger != nil {
		return c.logger
	}
	return slog.Default()
}

func (c *config) acquired(key string, wait time.Duration, attempts int) {
	if f := c.observer.Acquired; f != nil {
		c.guard(key, func() { f(key, wait, attempts) })
	}
}

func (c *config) refused(key string, err error) {
	if f := c.observer.Refused; f != nil {
		c.guard(key, func() { f(key, err) })
	}
}

func (c *config) renewed(key string) {
	if f := c.observer.Renewed; f != nil {
		c.guard(key, func() { f(key) })
	}
}

func (c *config) renewalFailed(key string, err error) {
	if f := c.observer.RenewalFailed; f != nil {
		c.guard(key, func() { f(key, err) })
	}
}

func (c *config) released(key string, hold time.Duration) {
	if f := c.observer.Released; f != nil {
		c.guard(key, func() { f(key, hold) })
	}
}

// warn logs: a deferred Release throws its error away, and nobody may miss this.
func (c *config) warn(key, owner, msg string, err error) {
	c.guard(key, func() {
		c.log().LogAttrs(context.Background(), slog.LevelWarn, "holdfast: "+msg,
			slog.String("key", key), slog.String("owner", owner), slog.Any("error", err))
	})
}

func (c *config) lost(key string, err error) {
	if f := c.observer.Lost; f != nil {
		c.guard(key, func() { f(key, err) })
	}
}

// maxUntold is how many renewals may wait to be told; losses always may.
const maxUntold = 1024

// notifier tells events of the watchdog on a goroutine of its own, which lives
// while there is something to tell. So no observer and no log handler can delay
// a renewal or a loss.
type notifier struct {
	mu      sync.Mutex
	queue   []func()
	running bool
}

// tell queues fn. One that may be dropped is dropped when too many wait.
func (n *notifier) tell(g *group.Group, droppable bool, fn func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if droppable && len(n.queue) >= maxUntold {
		return
	}
	n.queue = append(n.queue, fn)
	if !n.running {
		n.running = true
		g.Start(func() { n.run(g) }) // ends when the queue is empty
	}
}

func (n *notifier) run(g *group.Group) {
	for n.next(g) {
	}
}

// next tells one event, and reports whether there was one. A function that ends
// the goroutine (runtime.Goexit, by a test's FailNow) does not end the others.
func (n *notifier) next(g *group.Group) (more bool) {
	n.mu.Lock()
	if len(n.queue) == 0 {
		n.queue, n.running = nil, false
		n.mu.Unlock()
		return false
	}
	fn := n.queue[0]
	n.queue[0] = nil
	n.queue = n.queue[1:]
	n.mu.Unlock()
	defer func() {
		if !more {
			g.Start(func() { n.run(g) }) // ends when the queue is empty
		}
	}()
	fn()
	return true
}
