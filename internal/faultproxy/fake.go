package faultproxy

import (
	"bytes"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// Fake is a server that answers every command by calling a function. All its
// methods are safe for concurrent use. Close frees everything it holds.
type Fake struct {
	handler func(cmd []string) []byte
	ln      net.Listener
	log     commandLog

	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	lastID int
	closed bool

	wg sync.WaitGroup // the accept loop and one goroutine for each connection
}

// NewFake starts a fake server on a free port of 127.0.0.1 and closes it when
// the test ends.
//
// The handler gets the words of a command and returns the bytes of the reply;
// [ErrorReply] and its like make them. If it returns nil, HELLO is answered
// with the error of a server that does not know it, so that clients use RESP2,
// CLIENT with OK, and any other command never. Calls for one connection come
// one after the other, those for different connections at the same time. The
// handler must return for Close to return.
func NewFake(t testing.TB, handler func(cmd []string) []byte) *Fake {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("starting the fake server: %v", err)
	}
	f := &Fake{handler: handler, ln: ln, conns: make(map[net.Conn]struct{})}
	f.wg.Go(func() { acceptLoop(ln, f.adopt) }) // ended by Close closing ln
	t.Cleanup(f.Close)
	return f
}

// Addr is where clients connect to.
func (f *Fake) Addr() string { return f.ln.Addr().String() }

// Commands returns all commands received, in the order they were received.
func (f *Fake) Commands() []Cmd { return f.log.all() }

// Count returns how many of these commands have the name, as in [Command].
func (f *Fake) Count(name string) int { return f.log.count(Command(name)) }

// Close stops listening, closes every connection and returns when no goroutine
// of the server is left. It may be called repeatedly.
func (f *Fake) Close() {
	f.mu.Lock()
	f.closed = true
	_ = f.ln.Close()
	for c := range f.conns {
		_ = c.Close()
	}
	f.mu.Unlock()
	f.wg.Wait()
}

func (f *Fake) adopt(_ net.Listener, conn net.Conn) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		_ = conn.Close()
		return
	}
	f.lastID++
	id := f.lastID
	f.conns[conn] = struct{}{}
	f.wg.Go(func() { // ended by the client or Close closing conn
		f.serve(id, conn)
		_ = conn.Close()
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.conns, conn)
	})
}

func (f *Fake) serve(id int, conn net.Conn) {
	r := newRespReader(conn)
	for {
		args, _, err := r.readRequest()
		if err != nil {
			return
		}
		if len(args) == 0 {
			continue
		}
		f.log.add(id, args)
		reply := f.handler(args)
		if reply == nil {
			reply = defaultReply(args[0])
		}
		if len(reply) == 0 {
			continue
		}
		if _, err := conn.Write(reply); err != nil {
			return
		}
	}
}

func defaultReply(name string) []byte {
	switch strings.ToUpper(name) {
	case "HELLO":
		return ErrorReply("ERR unknown command 'HELLO'")
	case "CLIENT":
		return SimpleReply("OK")
	}
	return nil
}

// ErrorReply is an error. The text begins with the error code and has no dash
// before it.
func ErrorReply(text string) []byte { return []byte("-" + oneLine(text) + "\r\n") }

// SimpleReply is a simple string such as OK.
func SimpleReply(s string) []byte { return []byte("+" + oneLine(s) + "\r\n") }

// BulkReply is a bulk string.
func BulkReply(s string) []byte {
	return []byte("$" + strconv.Itoa(len(s)) + "\r\n" + s + "\r\n")
}

// NilReply is the null of RESP2, which RESP3 clients understand too.
func NilReply() []byte { return []byte("$-1\r\n") }

// IntReply is an integer.
func IntReply(n int64) []byte { return []byte(":" + strconv.FormatInt(n, 10) + "\r\n") }

// ArrayReply is an array of replies.
func ArrayReply(elements ...[]byte) []byte {
	head := []byte("*" + strconv.Itoa(len(elements)) + "\r\n")
	return append(head, bytes.Join(elements, nil)...)
}
