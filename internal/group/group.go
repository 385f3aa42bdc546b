// Package group counts goroutines, and timers that will start some, so that a Close can
// wait for them with a limit. It is for the packages of holdfast.
package group

import (
	"sync"
	"time"
)

// Group counts what is under way. The zero value is ready. It is safe for concurrent
// use; and unlike a sync.WaitGroup it may grow while somebody waits.
type Group struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // closed when n falls to 0; nil unless somebody waits
}

// Start runs fn on a goroutine that ends when fn returns.
func (g *Group) Start(fn func()) {
	g.Add()
	go func() { // ended by fn
		defer g.Done()
		fn()
	}()
}

// Add counts one more.
func (g *Group) Add() {
	g.mu.Lock()
	g.n++
	g.mu.Unlock()
}

// Done counts one less.
func (g *Group) Done() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.n--
	if g.n == 0 && g.idle != nil {
		close(g.idle)
		g.idle = nil
	}
}

// Running returns how many are under way.
func (g *Group) Running() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.n
}

// Wait waits until nothing is left, or for limit.
func (g *Group) Wait(limit time.Duration) {
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
