package redlock

import (
	"context"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/group"
)

const (
	linger   = time.Second // a connection without channels stays for so long
	earPause = time.Second // before an ear that failed listens again
)

// ear listens to one instance, on one connection while anybody waits and a moment longer.
// What it hears only makes waiting faster: a waiter asks now and then in any case.
type ear struct {
	client *redis.Client
	group  *group.Group

	// mu is never held during a call of the client: its own lock is held while it
	// connects.
	mu sync.Mutex
	// What follows is guarded by mu.
	wanted  map[string]map[*func()]struct{} // by channel
	have    map[string]bool                 // channels that were subscribed to
	conn    *earConn
	working bool
	idle    *time.Timer // closes conn; nil: none
	closed  bool
}

// earConn is a connection for messages.
type earConn struct {
	*redis.PubSub
	ctx    context.Context // ends with it
	cancel context.CancelFunc
}

func (e *ear) init(client *redis.Client, g *group.Group) {
	e.client, e.group = client, g
	e.wanted, e.have = make(map[string]map[*func()]struct{}), make(map[string]bool)
}

// listen calls hear for each message of a channel, until stop is called. Neither blocks.
func (e *ear) listen(channel string, hear func()) (stop func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.wanted[channel] == nil {
		e.wanted[channel] = make(map[*func()]struct{})
	}
	e.wanted[channel][&hear] = struct{}{}
	e.tune()
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.wanted[channel], &hear)
		if len(e.wanted[channel]) == 0 {
			delete(e.wanted, channel)
			e.tune()
		}
	}
}

// tune makes somebody bring the subscriptions up to date; mu is held.
func (e *ear) tune() {
	if e.closed || e.working {
		return
	}
	e.working = true
	e.group.Start(e.work) // ends when they are, or with the client's own timeouts
}

func (e *ear) work() {
	for {
		conn, on, off := e.next()
		if conn == nil {
			return
		}
		ctx, cancel := context.WithTimeout(conn.ctx, earPause)
		contain(func() { // errors are the listener's
			if len(on) > 0 {
				_ = conn.Subscribe(ctx, on...)
			}
			if len(off) > 0 {
				_ = conn.Unsubscribe(ctx, off...)
			}
		})
		cancel()
	}
}

// next returns what is to be done, or a nil connection when that is nothing.
func (e *ear) next() (conn *earConn, on, off []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for channel := range e.wanted {
		if !e.have[channel] {
			on = append(on, channel)
		}
	}
	for channel := range e.have {
		if e.wanted[channel] == nil {
			off = append(off, channel)
		}
	}
	if e.closed || len(on)+len(off) == 0 {
		e.working = false
		e.rest()
		return nil, nil, nil
	}
	if e.idle != nil && e.idle.Stop() {
		e.group.Done()
	}
	e.idle = nil
	if e.conn == nil {
		conn := &earConn{}
		conn.ctx, conn.cancel = context.WithCancel(context.Background())
		conn.PubSub = e.client.Subscribe(conn.ctx) // sends nothing yet
		e.conn = conn
		e.group.Start(func() { e.hear(conn) }) // ended by shut
	}
	e.have = make(map[string]bool, len(e.wanted))
	for channel := range e.wanted {
		e.have[channel] = true
	}
	return e.conn, on, off
}

// rest closes the connection, or does so soon, when nothing is listened to; mu is held.
func (e *ear) rest() {
	if e.conn == nil || len(e.wanted) > 0 && !e.closed {
		return
	}
	if e.closed {
		e.shut()
		return
	}
	if e.idle != nil {
		return
	}
	e.group.Add() // done when the timer has run, or by who stops it
	var timer *time.Timer
	timer = time.AfterFunc(linger, func() {
		defer e.group.Done()
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.idle == timer && len(e.wanted) == 0 && !e.working {
			e.shut()
		}
		if e.idle == timer {
			e.idle = nil
		}
	})
	e.idle = timer
}

// shut closes the connection; mu is held. It does not wait for that.
func (e *ear) shut() {
	conn := e.conn
	e.conn, e.have = nil, make(map[string]bool)
	conn.cancel()
	e.group.Start(func() { contain(func() { _ = conn.Close() }) }) // ends when a dial does, which is over
}

// close ends listening for good.
func (e *ear) close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	if e.idle != nil && e.idle.Stop() {
		e.group.Done()
	}
	e.idle = nil
	if e.conn != nil {
		e.shut()
	}
}

// hear is the goroutine of a connection.
func (e *ear) hear(conn *earConn) {
	for {
		var msg any
		err := errUnused // of a client that panics
		contain(func() { msg, err = conn.Receive(conn.ctx) })
		e.mu.Lock()
		if e.conn != conn {
			e.mu.Unlock()
			return
		}
		var hears []func()
		if m, ok := msg.(*redis.Message); ok {
			for hear := range e.wanted[m.Channel] {
				hears = append(hears, *hear)
			}
		}
		e.mu.Unlock()
		for _, hear := range hears {
			hear()
		}
		if err != nil && !conn.pause() {
			return
		}
	}
}

// pause waits a moment after an error; the client then connects and subscribes anew. It
// reports whether the connection is still wanted.
func (c *earConn) pause() bool {
	timer := time.NewTimer(earPause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-c.ctx.Done():
		return false
	}
}

// contain runs fn, and stops a panic of a client or its hooks.
func contain(fn func()) {
	defer func() { _ = recover() }()
	fn()
}
