package redlock

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/group"
)

const (
	mostNodeTimeout = 500 * time.Millisecond
	mostLongest     = 10 * 365 * 24 * time.Hour
	firstSweep      = 1024 // holds
)

// store is the holdfast.Store on a majority of instances.
type store struct {
	connect func(*store) []link // called by Configure

	nodes    []*node
	limit    time.Duration // of one request to one instance
	longest  time.Duration // TTL
	maturity time.Duration // an instance that has been up for longer has a vote
	durable  bool

	group group.Group
	trip  atomic.Int64 // what a majority takes to answer, in ns
	lead  atomic.Int64 // of tokens over our clock, in us
	met   atomic.Bool
	ended atomic.Bool // set by Drain

	// Locked before the lock of a hold, never after it.
	mu sync.Mutex
	// What follows is guarded by mu.
	meeting *meeting
	holds   map[holdKey]*hold
	sweepAt int
}

// holdKey names a hold.
type holdKey struct{ key, value string }

// meeting is the first contact with all instances.
type meeting struct {
	done chan struct{}
	err  error
}

// Configure takes the settings of the Locker.
func (s *store) Configure(set holdfast.StoreSettings) error {
	s.limit = min(set.TTL/10, mostNodeTimeout)
	s.longest = set.TTL
	for _, o := range set.Options {
		switch o := o.(type) {
		case nodeTimeout:
			s.limit = time.Duration(o)
		case longestTTL:
			s.longest = time.Duration(o)
		case durable:
			s.durable = true
		default:
			return invalid("an option of another foundation: %v", o)
		}
	}
	if s.limit <= 0 || s.limit >= set.TTL {
		return invalid("WithNodeTimeout(%v) is not between 0 and WithTTL(%v)", s.limit, set.TTL)
	}
	if s.longest < set.TTL || s.longest > mostLongest {
		return invalid("WithLongestTTL(%v) is not between WithTTL(%v) and %v", s.longest, set.TTL, mostLongest)
	}
	s.maturity = s.longest + set.Drift(s.longest)
	s.holds, s.sweepAt = make(map[holdKey]*hold), firstSweep
	for i, l := range s.connect(s) {
		s.nodes = append(s.nodes, newNode(i, l, s))
	}
	if n := len(s.nodes); n%2 == 0 && set.Logger != nil {
		set.Logger.Warn("redlock: an even number of instances outlives the loss of no more than one less",
			slog.Int("instances", n), slog.Int("needed", needed(n)))
	}
	return nil
}

// CheckCall refuses what an instance might forget in a restart, and what no majority has.
func (s *store) CheckCall(c holdfast.CallSettings) error {
	switch {
	case c.Replicas > 0:
		return invalid("WithReplicas is for one Redis; a majority has no replicas")
	case c.TTL > s.longest:
		return invalid("a TTL of %v is above the longest of %v (WithLongestTTL)", c.TTL, s.longest)
	case c.MinHold > s.longest && !s.durable:
		return invalid("WithMinHold(%v) is above the longest TTL of %v (WithLongestTTL): restarts would forget it", c.MinHold, s.longest)
	}
	return nil
}

// SettlesAcquires says that what a failed attempt has taken is given back here.
func (s *store) SettlesAcquires() {}

// meet makes first contact with all instances, once: two clients that reach the same
// server are found before anything is taken. Those that do not answer in time are met
// when they do.
func (s *store) meet(ctx context.Context) error {
	if s.met.Load() {
		return nil
	}
	s.mu.Lock()
	m := s.meeting
	if m == nil {
		m = &meeting{done: make(chan struct{})}
		s.meeting = m
		s.group.Start(func() { s.meetAll(m) }) // ends with its limit
	}
	s.mu.Unlock()
	select {
	case <-m.done:
		return m.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *store) meetAll(m *meeting) {
	ctx, cancel := context.WithTimeout(context.Background(), s.limit)
	defer cancel()
	errs := make(chan error, len(s.nodes))
	for _, n := range s.nodes {
		s.group.Start(func() { errs <- n.link.meet(ctx) }) // ends with ctx, or the client's own timeouts
	}
	for range s.nodes {
		select {
		case err := <-errs:
			if same := (*SameServerError)(nil); errors.As(err, &same) {
				m.err = same
			}
		case <-ctx.Done():
		}
	}
	s.mu.Lock()
	s.met.Store(m.err == nil)
	s.meeting = nil
	s.mu.Unlock()
	close(m.done)
}

func (s *store) newHold(key, value string, token int64, fenced bool) *hold {
	h := &hold{s: s, key: key, value: value, token: token, fenced: fenced, places: make([]place, len(s.nodes))}
	h.names.key, h.names.channel = key, channelOf(key)
	if fenced {
		h.names.fence = fenceOf(key)
	}
	return h
}

// add makes the record of a value that is about to be asked for.
func (s *store) add(key, value string, token int64, fenced bool) *hold {
	h := s.newHold(key, value, token, fenced)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.holds[holdKey{key, value}] = h
	if len(s.holds) >= s.sweepAt {
		s.sweep()
	}
	return h
}

// sweep forgets what nobody has given up and has ended by itself; s.mu is held.
func (s *store) sweep() {
	now := clock.Now()
	for k, h := range s.holds {
		if h.idle(now) {
			delete(s.holds, k)
		}
	}
	s.sweepAt = max(firstSweep, 2*len(s.holds))
}

// find returns the record of a lock. Of one without, such as one that was given up, all
// that is known is that it may be anywhere.
func (s *store) find(l holdfast.Lease) *hold {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := holdKey{l.Key, l.Owner}
	h := s.holds[k]
	if h == nil {
		token, fenced := tokenOf(l.Owner)
		h = s.newHold(l.Key, l.Owner, token, fenced)
		h.over, h.won = true, true
		for i := range h.places {
			h.places[i].touched, h.places[i].open = true, true
		}
		h.lasts(max(l.TTL, l.Keep))
	}
	return h
}

// remember makes sure that h is known, so that Drain finds it.
func (s *store) remember(h *hold) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := (holdKey{h.key, h.value}); s.holds[k] == nil {
		s.holds[k] = h
	}
}

func (s *store) forget(h *hold) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := (holdKey{h.key, h.value}); s.holds[k] == h {
		delete(s.holds, k)
	}
}

// Drain ends what goes on in the background: each release that is to be sent again is
// sent once more.
func (s *store) Drain(limit time.Duration) {
	s.ended.Store(true) // before a look at what is open: what comes later sees it
	s.mu.Lock()
	var open []*hold
	for _, h := range s.holds {
		open = append(open, h)
	}
	s.mu.Unlock()
	for _, h := range open {
		h.hurry()
	}
	for _, n := range s.nodes {
		n.link.close()
		n.close()
	}
	s.group.Wait(limit)
}

// took notes how long a majority took to answer.
func (s *store) took(d time.Duration) {
	old := s.trip.Load()
	if old == 0 {
		s.trip.Store(int64(d))
		return
	}
	s.trip.Store(old + (int64(d)-old)/8)
}

// between returns a random time of at least, and at most, so many round trips.
func (s *store) between(least, most float64) time.Duration {
	trip := float64(min(max(s.trip.Load(), int64(100*time.Microsecond)), int64(s.limit)))
	return time.Duration(trip * (least + (most-least)*rand.Float64()))
}

// Watch wakes the first who waits for a key when instances say that it was given up. The
// others are about to hear of it, so it pauses a moment; and competitors should not ask
// all at once.
func (s *store) Watch(key string, wake func()) (stop func()) {
	w := &watch{s: s, wake: wake}
	stops := make([]func(), len(s.nodes))
	for i, n := range s.nodes {
		stops[i] = n.link.listen(key, w.hear)
	}
	return func() {
		for _, stop := range stops {
			stop()
		}
		w.end()
	}
}

// watch is one Watch.
type watch struct {
	s    *store
	wake func()

	mu    sync.Mutex
	timer *time.Timer // nil: nothing was heard
	ended bool
}

func (w *watch) hear() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.timer != nil || w.ended {
		return
	}
	w.s.group.Add() // done when the timer has run, or by end
	w.timer = time.AfterFunc(w.s.between(0.5, 2), func() {
		defer w.s.group.Done()
		w.mu.Lock()
		w.timer = nil
		ended := w.ended
		w.mu.Unlock()
		if !ended {
			w.wake()
		}
	})
}

func (w *watch) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
	if w.timer != nil && w.timer.Stop() {
		w.s.group.Done()
	}
}
