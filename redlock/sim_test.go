package redlock

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast"
)

// simServer is an instance in memory, on virtual time, with a clock of its own. It does
// what the scripts do; TestLinks compares it with a real server.
type simServer struct {
	addr   string
	rate   float64       // of its clock; 1: that of the clients
	offset time.Duration // of its clock at base
	base   time.Time

	mu      sync.Mutex
	keys    map[string]simKey
	fences  map[string]int64
	floor   int64
	started time.Time // by its own clock
	vetted  bool
	hears   map[string]map[*func()]bool
}

type simKey struct {
	value string
	end   time.Time // by its own clock
}

func newSimServer(addr string) *simServer {
	s := &simServer{addr: addr, rate: 1, base: time.Now(), hears: map[string]map[*func()]bool{}}
	s.forget()
	s.started = s.now().Add(-24 * time.Hour)
	return s
}

// now is the server's clock.
func (s *simServer) now() time.Time {
	return s.base.Add(s.offset + time.Duration(s.rate*float64(time.Since(s.base))))
}

func (s *simServer) micros() int64 { return s.now().UnixMicro() }

// forget is a restart without data.
func (s *simServer) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keys, s.fences = map[string]simKey{}, map[string]int64{}
	s.floor, s.started, s.vetted = 0, s.now(), false
}

// get returns a key that has not ended; mu is held.
func (s *simServer) get(key string) (value string, left time.Duration) {
	k, ok := s.keys[key]
	if left = k.end.Sub(s.now()); !ok || left <= 0 {
		delete(s.keys, key)
		return "", 0
	}
	return k.value, left
}

func (s *simServer) put(key, value string, ttl time.Duration) {
	s.keys[key] = simKey{value, s.now().Add(ttl)}
}

// all returns the keys that have not ended.
func (s *simServer) all() (keys []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key := range s.keys {
		if _, left := s.get(key); left > 0 {
			keys = append(keys, key)
		}
	}
	return keys
}

// do runs one request; vetting as the scripts' users do it.
func (s *simServer) do(r *request, maturity time.Duration, durable bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.kind.granting() && !s.vetted {
		if left := maturity - s.now().Sub(s.started); left > 0 && !durable {
			r.err, r.sent = &YoungError{Left: left}, false
			return
		}
		s.vetted = true
		if !durable {
			s.floor = max(s.floor, s.started.Add(maturity).UnixMicro())
		}
	}
	r.sent = true
	switch r.kind {
	case renew:
		for _, x := range r.leases {
			r.codes = append(r.codes, int64(s.raise(x.key, x.value, x.ttl)))
		}
	case set:
		if r.code = s.raise(r.key, r.value, 0); r.code == codeYes {
			s.put(r.key, r.value, r.ttl)
		}
	case drop:
		s.drop(r, maturity/2)
	default:
		s.grant(r, maturity/2)
	}
}

// raise makes what is left of the owner's lease at least ttl.
func (s *simServer) raise(key, value string, ttl time.Duration) int {
	switch v, left := s.get(key); {
	case v == "":
		return codeGone
	case v != value:
		return codeTaken
	case left < ttl:
		s.put(key, value, ttl)
	}
	return codeYes
}

func (s *simServer) drop(r *request, maxLead time.Duration) {
	if r.fenced && r.token <= s.micros()+maxLead.Microseconds() {
		s.fences[r.key] = max(s.fences[r.key], r.token+1)
	}
	kept := r.value + ".kept"
	v, _ := s.get(r.key)
	switch {
	case r.keep > 0 && v == kept:
		r.code = codeYes
	case v == "":
		r.code = codeGone
	case v != r.value:
		r.code = codeTaken
	case r.keep > 0:
		s.put(r.key, kept, r.keep)
		r.code = codeYes
	default:
		delete(s.keys, r.key)
		for hear := range s.hears[r.key] {
			if !r.silent {
				go (*hear)() // it is short
			}
		}
		r.code = codeYes
	}
}

func (s *simServer) grant(r *request, maxLead time.Duration) {
	v, left := s.get(r.key)
	counter := max(s.fences[r.key], s.floor)
	ahead := r.token > s.micros()+maxLead.Microseconds()
	low := counter > r.token || counter == r.token && r.kind == take
	switch {
	case v == r.value:
		if r.code = codeHad; r.kind == heal && r.token > 0 {
			s.raise(r.key, r.value, r.ttl)
		}
		return
	case v != "":
		r.code, r.holder, r.left, r.counter = codeTaken, v, left, counter
		return
	case r.token > 0 && r.kind == heal && (low || ahead):
		r.code = codeTaken
		return
	case r.token > 0 && low:
		r.code, r.counter = codeLow, counter
		return
	case r.token > 0 && ahead:
		r.code, r.counter = codeAhead, s.micros()
		return
	}
	s.put(r.key, r.value, r.ttl)
	if r.token > 0 {
		s.fences[r.key] = r.token
	}
	r.code = codeYes
}

// simNet is what happens to requests on their way. The zero value delivers at once.
type simNet struct {
	mu   sync.Mutex
	rand *rand.Rand

	delay     time.Duration // the most, each way
	loss      float64       // of requests, and of answers
	duplicate float64
	late      float64 // of requests: up to 20 delays more, or latest
	down      map[string]bool
}

// latest is how late a request may arrive whose sender has given up: less than what the
// last look at an instance comes after.
const latest = 5 * time.Second

// draw returns the fate of one flight.
func (n *simNet) draw(addr string) (there, back, again time.Duration, lost, mute, refused bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.rand == nil {
		return 0, 0, 0, false, false, n.down[addr]
	}
	span := func(most time.Duration) time.Duration { return time.Duration(n.rand.Int64N(int64(most) + 1)) }
	there, back = span(n.delay), span(n.delay)
	if n.rand.Float64() < n.late {
		there = span(min(20*n.delay, latest))
	}
	if n.rand.Float64() < n.duplicate {
		again = span(min(20*n.delay, latest)) + 1
	}
	return there, back, again, n.rand.Float64() < n.loss, n.rand.Float64() < n.loss, n.down[addr]
}

// set makes an instance unreachable, or reachable again.
func (n *simNet) set(addr string, down bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down == nil {
		n.down = map[string]bool{}
	}
	n.down[addr] = down
}

// calm ends the loss; what is late already arrives as late as it would have.
func (n *simNet) calm() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.loss, n.late = 0, 0
}

// simLink leads to a simServer over a simNet.
type simLink struct {
	server *simServer
	net    *simNet
	s      *store
}

func (l *simLink) name() string               { return l.server.addr }
func (l *simLink) meet(context.Context) error { return nil }
func (l *simLink) young() error               { return nil }
func (l *simLink) close()                     {}

func (l *simLink) listen(key string, hear func()) (stop func()) {
	s := l.server
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hears[key] == nil {
		s.hears[key] = map[*func()]bool{}
	}
	s.hears[key][&hear] = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.hears[key], &hear)
	}
}

var errDown = errors.New("connection refused")

func (l *simLink) send(ctx context.Context, requests []*request) {
	there, back, again, lost, mute, refused := l.net.draw(l.server.addr)
	if refused {
		for _, r := range requests {
			r.err = errDown
		}
		return
	}
	done := make(chan []request, 1)
	run := func() []request {
		all := make([]request, len(requests))
		for i, r := range requests {
			all[i] = *r
			all[i].codes = nil
			l.server.do(&all[i], l.s.maturity, l.s.durable)
		}
		return all
	}
	originals := requests
	requests = make([]*request, len(originals)) // which a late copy does not share
	for i, r := range originals {
		c := *r
		requests[i] = &c
	}
	go func() { // ends when all that was sent has arrived
		time.Sleep(there)
		if lost {
			return
		}
		all := run()
		if again > 0 {
			go func() { // likewise
				time.Sleep(again)
				run()
			}()
		}
		time.Sleep(back)
		if !mute {
			done <- all
		}
	}()
	select {
	case all := <-done:
		for i, r := range originals {
			*r = all[i]
		}
	case <-ctx.Done():
		for _, r := range originals {
			r.err, r.sent = &noAnswerError{}, true
		}
	}
}

// simLocker returns a Locker on simulated instances.
func simLocker(t *testing.T, servers []*simServer, net *simNet, opts ...holdfast.Option) (*holdfast.Locker, *store) {
	s := &store{connect: func(s *store) (links []link) {
		for _, server := range servers {
			links = append(links, &simLink{server, net, s})
		}
		return links
	}}
	l, err := holdfast.NewWithStore(s, opts...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l, s
}

func simServers(n int) (servers []*simServer) {
	for i := range n {
		servers = append(servers, newSimServer("node-"+strings.Repeat("i", i+1)))
	}
	return servers
}
