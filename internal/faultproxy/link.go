package faultproxy

import (
	"context"
	"net"
	"sync"
	"time"
)

const (
	dialTimeout = 5 * time.Second
	// lingerTimeout is how long the server may take to end a connection whose
	// client has gone and whose requests have all been forwarded.
	lingerTimeout = 5 * time.Second
)

// link is one connection of a client with its connection to the server. Four
// goroutines move the data, so that neither direction nor a delay in it stops
// the others:
//
//	client -> readRequests -> fwd -> forwardRequests -> server
//	client <- deliver      <- out <- readReplies     <- server
//
// They end in this order. The client side closes, by whoever: readRequests ends
// and closes fwd. forwardRequests forwards what is left, held and delayed
// requests included, and half-closes the server side. The server closes in turn
// and readReplies ends. With all three ended, run closes out, which ends
// deliver. kill ends them all at once.
type link struct {
	p           *Proxy
	id          int
	client      net.Conn
	backendAddr string

	ctx    context.Context
	cancel context.CancelFunc

	fwd *queue[*exchange]
	out *queue[delivery]

	goneOnce sync.Once
	gone     chan struct{} // closed when the client side is closed

	// producers are the goroutines that put something into out.
	producers sync.WaitGroup

	mu      sync.Mutex
	backend net.Conn // nil until the first request is forwarded
	lost    bool     // the server side has failed or ended, or must not begin
	pending []*exchange
	subs    subscriptions

	stalled bool // readRequests only: everything that comes is thrown away
	deaf    bool // deliver only: nothing is delivered any more
}

func newLink(p *Proxy, id int, client net.Conn, backendAddr string) *link {
	ctx, cancel := context.WithCancel(context.Background())
	return &link{
		p: p, id: id, client: client, backendAddr: backendAddr,
		ctx: ctx, cancel: cancel,
		fwd: newQueue[*exchange](), out: newQueue[delivery](),
		gone: make(chan struct{}),
	}
}

// run moves data until both sides have ended.
func (l *link) run() {
	var delivering sync.WaitGroup
	delivering.Go(l.deliver)          // ended by out being closed below, or by kill
	l.producers.Go(l.readRequests)    // ended by closeClient
	l.producers.Go(l.forwardRequests) // ended by readRequests closing fwd, or by kill
	l.producers.Wait()
	l.out.close()
	delivering.Wait()
	l.kill() // frees the context
}

// closeClient closes the client side. Requests already read still go on.
func (l *link) closeClient() {
	l.goneOnce.Do(func() {
		close(l.gone)
		_ = l.client.Close()
	})
}

// kill ends the link at once, throwing away what is held or delayed.
func (l *link) kill() {
	l.cancel()
	l.closeClient()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost = true
	if l.backend != nil {
		_ = l.backend.Close()
	}
}

// await waits for the gate to open and the time to come. It reports false if
// the link was killed or giveUp was closed before that. A nil channel never
// comes into it.
func (l *link) await(gate <-chan struct{}, due time.Time, giveUp <-chan struct{}) bool {
	if gate != nil {
		select {
		case <-gate:
		case <-giveUp:
			return false
		case <-l.ctx.Done():
			return false
		}
	}
	if wait := time.Until(due); wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-giveUp:
			return false
		case <-l.ctx.Done():
			return false
		}
	}
	return l.ctx.Err() == nil
}
