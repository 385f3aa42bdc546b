package faultproxy

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// What gets through the proxy.
const (
	stateHealthy int32 = iota
	stateHung          // nothing
	stateOneWay        // requests, but no replies
)

// rebindTimeout is how long Up tries to get its port back.
const rebindTimeout = 2 * time.Second

var errClosed = errors.New("faultproxy: proxy is closed")

// Proxy stands between Redis clients and one Redis server. All its methods are
// safe for concurrent use. Close frees everything it holds.
type Proxy struct {
	addr string
	log  commandLog

	state atomic.Int32
	slow  atomic.Int64 // what Slow was given, in nanoseconds

	rulesMu sync.Mutex
	rules   []*Handle

	mu      sync.Mutex
	backend string
	ln      net.Listener // nil while down or closed
	links   map[*link]struct{}
	lastID  int
	closed  bool

	wg sync.WaitGroup // accept loops and links
}

// New starts a proxy for the server at backend and closes it when the test ends.
func New(t testing.TB, backend string) *Proxy {
	t.Helper()
	p, err := Start(backend)
	if err != nil {
		t.Fatalf("starting the proxy: %v", err)
	}
	t.Cleanup(p.Close)
	return p
}

// Start starts a proxy for the server at backend, on a free port of 127.0.0.1.
// The server is connected to when a client sends its first request, so it need
// not be there yet. The caller must call Close.
func Start(backend string) (*Proxy, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("faultproxy: %w", err)
	}
	p := &Proxy{
		addr:    ln.Addr().String(),
		backend: backend,
		links:   make(map[*link]struct{}),
	}
	p.serve(ln)
	return p, nil
}

// Close closes every connection, throws held and delayed requests away and
// returns when no goroutine of the proxy is left. It may be called repeatedly.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	p.stopListening()
	for l := range p.links {
		l.kill()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

// Addr is where clients connect to. It stays the same over Down and Up.
func (p *Proxy) Addr() string { return p.addr }

// SetBackend makes connections accepted from now on go to another server.
func (p *Proxy) SetBackend(addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.backend = addr
}

// Inject puts a rule into force, after those that are already there, for
// requests read from now on. It panics if the rule has no Action.
func (p *Proxy) Inject(r Rule) *Handle {
	h := newHandle(r)
	p.rulesMu.Lock()
	defer p.rulesMu.Unlock()
	// Rules that can never act again would make long runs slower and slower.
	p.rules = slices.DeleteFunc(p.rules, func(h *Handle) bool { return !h.usable() })
	p.rules = append(p.rules, h)
	return h
}

// takeRule finds the rule that acts on cmd, if any, and the gate a held message
// waits for.
func (p *Proxy) takeRule(cmd []string) (h *Handle, gate <-chan struct{}, ok bool) {
	p.rulesMu.Lock()
	rules := slices.Clone(p.rules)
	p.rulesMu.Unlock()
	// Without the lock, so that a Match function may use the proxy.
	for _, h := range rules {
		if gate, ok := h.take(cmd); ok {
			return h, gate, true
		}
	}
	return nil, nil, false
}

// Down stops listening, so that connections are refused, and closes those that
// exist. Requests that a rule holds or delays still reach the server: they have
// left the client already.
func (p *Proxy) Down() {
	p.mu.Lock()
	p.stopListening()
	p.mu.Unlock()
	p.CutAll()
}

// Up listens again, on the same port, after Down. It fails if another process
// has taken the port meanwhile or the proxy is closed.
func (p *Proxy) Up() error {
	for deadline := time.Now().Add(rebindTimeout); ; time.Sleep(5 * time.Millisecond) {
		err := p.listenAgain()
		if err == nil || errors.Is(err, errClosed) || time.Now().After(deadline) {
			return err
		}
	}
}

func (p *Proxy) listenAgain() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return errClosed
	}
	if p.ln != nil {
		return nil
	}
	ln, err := net.Listen("tcp", p.addr)
	if err != nil {
		return fmt.Errorf("faultproxy: listening again: %w", err)
	}
	p.serve(ln)
	return nil
}

// CutAll closes every connection that exists now. New ones are accepted.
// Requests that a rule holds or delays still reach the server.
func (p *Proxy) CutAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.closeClient()
	}
}

// Hang makes the proxy accept and read, and neither forward nor answer, on new
// and existing connections, until Heal. Replies to earlier requests are lost
// too. Requests that a rule holds or delays still reach the server. It ends
// DropReplies.
func (p *Proxy) Hang() { p.state.Store(stateHung) }

// DropReplies lets requests pass and execute and drops everything the server
// sends, until Heal: a network that is broken in one direction. It ends Hang.
func (p *Proxy) DropReplies() { p.state.Store(stateOneWay) }

// Heal ends Hang and DropReplies. Connections that have lost a request or a
// reply stay silent for good, since later replies on them would be taken for
// the missing ones; others and new ones work.
func (p *Proxy) Heal() { p.state.Store(stateHealthy) }

// Slow delays every reply and push that comes from the server from now on by d,
// in addition to what rules do. Zero ends it.
func (p *Proxy) Slow(d time.Duration) { p.slow.Store(int64(d)) }

func (p *Proxy) slowness() time.Duration { return time.Duration(p.slow.Load()) }

// Commands returns all commands read since the last ResetLog, in the order they
// were read, also those that a fault kept from the server. The log grows until
// ResetLog is called.
func (p *Proxy) Commands() []Cmd { return p.log.all() }

// Count returns how many of these commands have the name, as in [Command].
func (p *Proxy) Count(name string) int { return p.log.count(Command(name)) }

// CountMatch returns how many of these commands match.
func (p *Proxy) CountMatch(match func(cmd []string) bool) int { return p.log.count(match) }

// ResetLog forgets the commands seen so far.
func (p *Proxy) ResetLog() { p.log.reset() }

// stopListening must be called with the lock held.
func (p *Proxy) stopListening() {
	if p.ln != nil {
		_ = p.ln.Close()
		p.ln = nil
	}
}

// serve must be called with the lock held, or before p is shared.
func (p *Proxy) serve(ln net.Listener) {
	p.ln = ln
	p.wg.Go(func() { acceptLoop(ln, p.adopt) }) // ended by closing ln: Down or Close
}

// adopt starts moving data for an accepted connection.
func (p *Proxy) adopt(ln net.Listener, client net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ln != ln { // accepted just before Down or Close
		_ = client.Close()
		return
	}
	p.lastID++
	l := newLink(p, p.lastID, client, p.backend)
	p.links[l] = struct{}{}
	p.wg.Go(func() { // ended by either side closing its connection, or by Close
		l.run()
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.links, l)
	})
}

// acceptLoop gives connections to adopt until ln is closed.
func acceptLoop(ln net.Listener, adopt func(net.Listener, net.Conn)) {
	for {
		conn, err := ln.Accept()
		switch {
		case err == nil:
			adopt(ln, conn)
		case errors.Is(err, net.ErrClosed):
			return
		default:
			// Out of file descriptors, for instance: it may get better.
			time.Sleep(5 * time.Millisecond)
		}
	}
}
