package main

import (
	"net"
	"sync"
	"time"
)

const (
	chunkSize  = 16 << 10
	chunkQueue = 256 // chunks under way in one direction
)

// delayProxy imitates distance: what it forwards arrives later, in both directions, and
// nothing waits for anything else.
type delayProxy struct {
	listener net.Listener
	target   string
	oneWay   time.Duration
	running  sync.WaitGroup

	mu    sync.Mutex
	ended bool
	conns []net.Conn
}

// newDelayProxy puts target a round trip of the given length away.
func newDelayProxy(target string, roundTrip time.Duration) (*delayProxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &delayProxy{listener: l, target: target, oneWay: roundTrip / 2}
	p.running.Go(p.accept) // ended by close
	return p, nil
}

func (p *delayProxy) addr() string { return p.listener.Addr().String() }

func (p *delayProxy) accept() {
	for {
		in, err := p.listener.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", p.target)
		if err != nil {
			_ = in.Close() // as a server that is not there would
			continue
		}
		if !p.adopt(in, out) {
			return
		}
		p.running.Go(func() { p.forward(in, out) }) // all ended by the ends of the connections
		p.running.Go(func() { p.forward(out, in) })
	}
}

// adopt remembers connections for close. It closes them if that has begun.
func (p *delayProxy) adopt(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns = append(p.conns, conns...)
	if p.ended {
		p.cut()
	}
	return !p.ended
}

// cut closes all connections, with mu held.
func (p *delayProxy) cut() {
	for _, c := range p.conns {
		_ = c.Close() // nobody needs it any more
	}
}

func (p *delayProxy) close() {
	p.mu.Lock()
	p.ended = true
	_ = p.listener.Close() // accept ends in any case
	p.cut()
	p.mu.Unlock()
	p.running.Wait()
}

type chunk struct {
	data []byte
	due  time.Time
}

// forward copies what comes from one side to the other, later, and closes both.
func (p *delayProxy) forward(from, to net.Conn) {
	queue := make(chan chunk, chunkQueue)
	var writing sync.WaitGroup
	writing.Go(func() { // ended by the end of queue
		var err error
		for c := range queue {
			time.Sleep(time.Until(c.due))
			if err == nil {
				_, err = to.Write(c.data)
			}
		}
		_ = to.Close() // the other direction ends by that
	})
	for {
		data := make([]byte, chunkSize)
		n, err := from.Read(data)
		if n > 0 {
			queue <- chunk{data[:n], time.Now().Add(p.oneWay)}
		}
		if err != nil {
			break
		}
	}
	close(queue)
	writing.Wait()
	_ = from.Close() // nothing more comes
}
