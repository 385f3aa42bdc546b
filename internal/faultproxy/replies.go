package faultproxy

import "time"

// expect puts a request in line for its reply. It must come before the write,
// or the reply could be faster.
func (l *link) expect(ex *exchange) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !ex.local() {
		ex.answers = l.subs.sent(ex.args)
	}
	l.pending = append(l.pending, ex)
	l.answerLocals()
}

// answerLocals delivers the answers of the proxy that have come to the head of
// the line. It must be called with the lock held.
func (l *link) answerLocals() {
	for len(l.pending) > 0 && l.pending[0].local() {
		l.out.push(l.pending[0].localDelivery(l.p.slowness()))
		l.pending = l.pending[1:]
	}
}

// readReplies takes messages from the server and gives each to the request it
// answers.
func (l *link) readReplies() {
	r := newRespReader(l.backend)
	for {
		f, err := r.readFrame()
		if err != nil {
			l.endReplies(f)
			return
		}
		l.handleFrame(f)
	}
}

func (l *link) handleFrame(f frame) {
	l.mu.Lock()
	defer l.mu.Unlock()
	slow := l.p.slowness()
	if len(l.pending) == 0 || !l.subs.answers(f, l.pending[0]) {
		l.out.push(delivery{raw: f.raw, push: true, due: time.Now().Add(slow)})
		return
	}
	ex := l.pending[0]
	l.out.push(ex.replyDelivery(f.raw, slow))
	if ex.answers--; ex.answers <= 0 || f.typ == '-' {
		l.pending = l.pending[1:]
	}
	l.answerLocals()
}

// endReplies passes on that the server has ended the connection, with what it
// has sent of a last message, so that the client sees the same broken end.
func (l *link) endReplies(rest frame) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost = true
	_ = l.backend.Close()
	if len(rest.raw) > 0 && (len(l.pending) == 0 || l.pending[0].handle == nil) {
		l.out.push(delivery{raw: rest.raw})
	}
	l.out.push(delivery{serverGone: true})
}

// deliver writes to the client, in order. When the client has gone it only
// empties the queue.
func (l *link) deliver() {
	for {
		d, ok := l.out.pop(l.ctx)
		if !ok {
			return
		}
		if l.await(d.gate, d.due, l.gone) {
			l.write(d)
		}
	}
}

func (l *link) write(d delivery) {
	if d.serverGone {
		l.serverGone()
		return
	}
	if l.deaf || d.drop {
		return
	}
	if l.p.state.Load() != stateHealthy {
		// With a reply missing, later ones would go to the wrong requests, so the
		// connection stays silent after Heal too. A push may be missing.
		l.deaf = !d.push
		return
	}
	if d.close {
		l.closeClient()
		return
	}
	if _, err := l.client.Write(d.raw); err != nil {
		l.closeClient()
	}
}

// serverGone tells the client that the server is not there, unless nothing
// gets through to the client at present.
func (l *link) serverGone() {
	if l.p.state.Load() == stateHealthy {
		l.closeClient()
	}
}
