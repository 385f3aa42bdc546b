package faultproxy

import (
	"context"
	"sync"
)

// queue is an unbounded FIFO for one consumer and any number of producers. It
// has no bound because a held message must not stop the proxy from reading, and
// so from seeing and counting, what comes behind it.
type queue[T any] struct {
	mu     sync.Mutex
	items  []T
	closed bool
	// wake holds at most one token: it says "look again", not how often.
	wake chan struct{}
}

func newQueue[T any]() *queue[T] {
	return &queue[T]{wake: make(chan struct{}, 1)}
}

// push appends an item. After close it does nothing.
func (q *queue[T]) push(item T) {
	q.mu.Lock()
	if !q.closed {
		q.items = append(q.items, item)
	}
	q.mu.Unlock()
	q.signal()
}

// close lets the consumer take what is left and then end.
func (q *queue[T]) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.signal()
}

func (q *queue[T]) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// pop waits for the next item. It reports false when the queue is closed and
// empty, or when ctx is done, whichever is first.
func (q *queue[T]) pop(ctx context.Context) (item T, ok bool) {
	for ctx.Err() == nil {
		q.mu.Lock()
		if len(q.items) > 0 {
			item = q.items[0]
			var zero T
			q.items[0] = zero // the slice must not keep the item alive
			q.items = q.items[1:]
			q.mu.Unlock()
			return item, true
		}
		closed := q.closed
		q.mu.Unlock()
		if closed {
			return item, false
		}
		select {
		case <-q.wake:
		case <-ctx.Done():
		}
	}
	return item, false
}
