package main

import (
	"context"
	"net"
	"sync/atomic"
	"time"
)

// wire counts the commands that the clients of one process write to their sockets.
// The server's own counters cannot: they add what a script runs to what was sent.
type wire struct{ sent atomic.Int64 }

// dial connects as the clients do by themselves, but for the counting.
func (w *wire) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &countedConn{TCPConn: conn.(*net.TCPConn), wire: w}, nil
}

// countedConn embeds the concrete type, so that clients find the methods by which they
// look whether a connection is still good. A client writes from one goroutine at a time.
type countedConn struct {
	*net.TCPConn

	wire  *wire
	frame framer
}

func (c *countedConn) Write(p []byte) (int, error) {
	n, err := c.TCPConn.Write(p)
	c.wire.sent.Add(int64(c.frame.feed(p[:n])))
	return n, err
}

// framer finds the ends of commands in a stream of RESP arrays of bulk strings.
type framer struct {
	place place
	num   int // the number being read
	args  int // bulk strings still to come
	skip  int // bytes of the present one still to come, with its line end
}

type place int

const (
	atArray place = iota // before "*"
	inCount              // in the number of arguments
	atBulk               // before "$"
	inLength
	inBody
)

// feed takes the next bytes and returns how many commands end in them.
func (f *framer) feed(p []byte) (ends int) {
	for i := 0; i < len(p); i++ {
		c := p[i]
		switch f.place {
		case atArray, atBulk:
			f.num = 0
			f.place++
		case inCount, inLength:
			switch {
			case c >= '0' && c <= '9':
				f.num = 10*f.num + int(c-'0')
			case c == '\n' && f.place == inCount:
				f.args, f.place = f.num, atBulk
			case c == '\n':
				f.skip, f.place = f.num+len("\r\n"), inBody
			}
		case inBody:
			step := min(f.skip, len(p)-i)
			f.skip -= step
			i += step - 1
			if f.skip > 0 {
				continue
			}
			f.args--
			f.place = atBulk
			if f.args == 0 {
				f.place = atArray
				ends++
			}
		}
	}
	return ends
}
