package faultproxy

import (
	"net"
	"time"
)

// readRequests takes requests from the client, and decides at once what happens
// to each.
func (l *link) readRequests() {
	defer l.fwd.close()
	defer l.closeClient()
	r := newRespReader(l.client)
	for {
		args, raw, err := r.readRequest()
		if err != nil {
			return
		}
		if len(args) == 0 {
			continue
		}
		l.p.log.add(l.id, args)
		if l.stalled || l.p.state.Load() == stateHung {
			// Answering what comes after a lost request would give the client the
			// replies of other requests, so the connection stays silent.
			l.stalled = true
			continue
		}
		ex := &exchange{args: args, raw: raw}
		if h, gate, ok := l.p.takeRule(args); ok {
			ex.handle, ex.act, ex.gate = h, h.rule.Do, gate
		}
		if ex.act.firesOnRequest() {
			// Before the client can notice anything, so that a test which has seen
			// the fault also sees it counted.
			ex.handle.fire()
		}
		switch ex.act.kind {
		case actCut:
			return // closes the connection
		case actHang:
			l.stalled = true
			continue
		case actDelayRequest:
			ex.due = time.Now().Add(ex.act.delay)
		}
		l.fwd.push(ex)
	}
}

// forwardRequests gives the requests to the server in order. It goes on after
// the client has gone.
func (l *link) forwardRequests() {
	defer l.endBackend()
	for {
		ex, ok := l.fwd.pop(l.ctx)
		if !ok {
			return
		}
		var gate <-chan struct{}
		if ex.act.kind == actHoldRequest {
			gate = ex.gate
		}
		if !l.await(gate, ex.due, nil) {
			return
		}
		l.forward(ex)
	}
}

func (l *link) forward(ex *exchange) {
	if ex.local() {
		l.expect(ex)
		return
	}
	backend := l.dial()
	if backend == nil {
		l.out.push(delivery{serverGone: true})
		return
	}
	raw := ex.raw
	l.expect(ex)
	if ex.act.kind == actDuplicate {
		twin := ex.twin()
		l.expect(twin)
		raw = append(append([]byte(nil), raw...), twin.raw...)
	}
	if _, err := backend.Write(raw); err != nil {
		// readReplies sees the connection end and tells the client.
		_ = backend.Close()
	}
}

// dial returns the connection to the server, which is made for the first
// request, so that a hung or refusing proxy needs no server. Nil means there is
// none, now and later: a connection does not come back.
func (l *link) dial() net.Conn {
	l.mu.Lock()
	backend, lost := l.backend, l.lost
	l.mu.Unlock()
	if lost {
		return nil
	}
	if backend != nil {
		return backend
	}
	dialer := net.Dialer{Timeout: dialTimeout}
	backend, err := dialer.DialContext(l.ctx, "tcp", l.backendAddr)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.lost = true
		return nil
	}
	if l.lost { // killed while dialing
		_ = backend.Close()
		return nil
	}
	l.backend = backend
	l.producers.Go(l.readReplies) // ended by the server, by endBackend's deadline, or by kill
	return backend
}

// endBackend ends the server side once nothing more will be forwarded. Only the
// sending direction is closed: closing both could reset the connection before
// the server has read the last requests.
func (l *link) endBackend() {
	l.mu.Lock()
	backend := l.backend
	l.mu.Unlock()
	if backend == nil {
		return
	}
	_ = backend.SetReadDeadline(time.Now().Add(lingerTimeout))
	if tcp, ok := backend.(*net.TCPConn); ok {
		_ = tcp.CloseWrite()
	}
}
