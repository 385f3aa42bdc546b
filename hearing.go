package holdfast

import (
	"context"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/refusal"
)

// listen is a connection's goroutine.
func (e *ears) listen(r *ear) {
	for fails := 0; ; {
		var msg any
		var err error
		if panicked := contain(func() { msg, err = r.ps.Receive(context.Background()) }); panicked != nil {
			err = panicked
		}
		switch m := msg.(type) {
		case *redis.Message:
			e.mu.Lock()
			e.misses = 0
			e.mu.Unlock()
			e.hear(m.Payload)
		case *redis.Subscription:
			e.subscribed(r, m)
		}
		if err == nil {
			fails = 0
			continue
		}
		fails++
		if e.failed(r, err) {
			return
		}
		pause := time.NewTimer(backoff(fails, firstPause, time.Second))
		select {
		case <-pause.C:
		case <-r.end:
			pause.Stop()
		}
	}
}

// subscribed takes in that a channel is listened to, or no longer is: then its slot
// has moved, unless we wanted it so.
func (e *ears) subscribed(r *ear, m *redis.Subscription) {
	if strings.HasSuffix(m.Kind, "unsubscribe") {
		e.mu.Lock()
		defer e.mu.Unlock()
		switch t := e.tuned[m.Channel]; {
		case r.offs[m.Channel] > 1:
			r.offs[m.Channel]--
		case r.offs[m.Channel] == 1:
			delete(r.offs, m.Channel)
		case t != nil && t.ear == r:
			e.shut(r)
		}
		return
	}
	e.ready(m.Channel)
}

// failed takes in an error of a connection, and reports whether it is closed. An
// error of the network is mended by the client, which subscribes again; one of the
// server ends the connection, and the next calls of its waiters open another one,
// or none if the server wants none.
func (e *ears) failed(r *ear, err error) bool {
	text, fromServer := refusal.Text(err)
	e.mu.Lock()
	defer e.mu.Unlock()
	if r.closed || !fromServer {
		return r.closed
	}
	switch _, moved := redis.IsMovedError(err); {
	case moved:
		e.start(func() { e.traits.reload(context.Background()) }) // ends with the client's own timeouts
	case r.sharded && strings.Contains(text, "unknown command"):
		e.flatten()
	case refusal.Says(text, "CROSSSLOT"): // the client has subscribed again to channels of several slots at once
	case e.final(err):
		e.deaf = clock.Now().Add(deafFor)
	}
	e.shut(r)
	return true
}

// flatten changes from sharded channels to one plain one; mu is held.
func (e *ears) flatten() {
	if e.plain {
		return
	}
	e.plain = true
	one := &tuned{since: clock.Now()}
	for _, t := range e.tuned {
		one.key = t.key
		one.waiters += t.waiters
	}
	clear(e.tuned)
	e.tuned[channelPrefix+e.id] = one
	for _, r := range e.ears {
		e.shut(r)
	}
}

// shut closes a connection; mu is held. Its channels are looked for again when their
// waiters call.
func (e *ears) shut(r *ear) {
	if r.closed {
		return
	}
	r.closed = true
	close(r.end)
	delete(e.ears, r.server)
	for _, t := range e.tuned {
		if t.ear == r {
			t.ear = nil
		}
	}
	if !r.working { // else who is at it closes it, and does not make us wait
		e.start(r.close) // ends at once
	}
}

// missed counts grants whose message did not come. A connection can be broken
// without an error. One may also have been found by a call just before the message, or
// before a release in this process told of it, so only several in a short time count.
func (e *ears) missed() {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := clock.Now()
	if now > e.missedAt.Add(missesLast) {
		e.misses = 0
	}
	e.missedAt = now
	if e.misses++; e.misses < maxMisses {
		return
	}
	e.misses = 0
	for _, r := range e.ears {
		e.shut(r)
	}
}

// sweep ends what nobody has waited at for a while, and reports whether anything is left.
func (e *ears) sweep(now clock.Instant) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	for channel, t := range e.tuned {
		if t.waiters > 0 || t.looking || now < t.since.Add(linger) {
			continue
		}
		delete(e.tuned, channel)
		r := t.ear
		if r == nil {
			continue
		}
		if r.count--; r.count > 0 {
			if r.offs == nil {
				r.offs = make(map[string]int)
			}
			r.offs[channel]++
			e.do(r, tuneOp{channel, false})
		} else {
			e.shut(r)
		}
	}
	return len(e.tuned) > 0
}

// hush ends all listening, for good.
func (e *ears) hush() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	clear(e.tuned)
	for _, r := range e.ears {
		e.shut(r)
	}
}
