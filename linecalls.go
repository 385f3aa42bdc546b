package holdfast

import (
	"context"

	"github.com/holdfast-go/holdfast/internal/clock"
)

// dueCalls takes the waiters whose next call is due into batches, and with them
// those whose call soon will be; l.mu is held.
func (l *Locker) dueCalls(now clock.Instant) (batches [][]*spot) {
	d := &l.watch
	for len(d.beats.items) > 0 {
		s := d.beats.items[0]
		early := s.window() / 24
		if s.exact || s.fails > 0 || d.beats.items[0].at > now && len(batches) == 0 {
			early = 0
		}
		if s.at.Add(-early) > now {
			break
		}
		n := len(batches)
		busy := s.flights >= maxLineFlights && now < s.latest().Add(attemptLimit)
		if !busy && (n == 0 || len(batches[n-1]) == maxLineCalls) && d.lineCalls >= maxCalls {
			break
		}
		s.at = now.Add(s.window() / 3) // for the case that no answer comes
		d.beats.moved(s)
		if busy {
			continue
		}
		if n == 0 || len(batches[n-1]) == maxLineCalls {
			d.lineCalls++
			batches, n = append(batches, nil), n+1
		}
		batches[n-1] = append(batches[n-1], s)
	}
	return batches
}

// callLine makes one call of each of a batch of waiters that were due. A server that
// does not answer must not use up the calls of the others for longer than is useful.
func (l *Locker) callLine(batch []*spot) {
	ctx, cancel := context.WithTimeout(l.base, attemptLimit)
	defer cancel()
	free := func() { l.freeCall(&l.watch.lineCalls, func() int { return maxCalls }) }
	inTime := context.AfterFunc(ctx, free)
	l.call(ctx, batch)
	if inTime() {
		free()
	}
}

// call makes one call of each of a batch of waiters.
func (l *Locker) call(ctx context.Context, batch []*spot) {
	l.mu.Lock()
	now := clock.Now()
	open := batch[:0]
	calls := make([]lineCall, 0, len(batch))
	for _, s := range batch {
		if !s.open {
			continue
		}
		open = append(open, s)
		s.calls++
		s.flights++
		s.sent[s.calls%len(s.sent)] = now
		call := lineCall{
			Lease: s.k.lease(), n: s.calls, claim: s.claim(), window: s.window(),
			fencing: s.k.config.fencing, floored: s.k.config.floored, holds: s.holds,
		}
		if s.held == nil { // who has had a place is not refused one
			call.most = s.k.config.maxWaiters
		}
		calls = append(calls, call)
	}
	l.mu.Unlock()
	var answers []lineAnswer
	if len(calls) > 0 {
		answers = l.line.store.wait(ctx, calls)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, s := range open {
		l.answered(s, now, answers[i])
	}
}

// answered takes in the answer to one call; l.mu is held.
func (l *Locker) answered(s *spot, sent clock.Instant, a lineAnswer) {
	s.flights--
	now := clock.Now()
	lost := a.err != nil && !a.known && mayHaveRun(a.err) || a.repeated // a copy of the call may still run
	if !s.open {
		l.stray(s.k, a, lost)
		return
	}
	s.unknown = s.unknown || lost
	s.channel = a.channel
	switch {
	case a.err != nil && isFinal(a.err):
		l.decide(s, verdict{err: a.err})
	case a.err != nil:
		s.fails++
		s.failure = opaqueContext{a.err}
		s.exact, s.at = false, min(s.at, now.Add(backoff(s.fails, firstPause, mostPause)))
		l.watch.beats.moved(s)
		l.rouse()
	case a.full:
		l.decide(s, verdict{err: a.held, full: true})
	case a.held != nil:
		l.line.crowdIs(s.k.full)
		s.news, s.fails = news{held: a.held, since: now}, 0
		s.exact, s.at = false, sent.Add(s.window()/3)
		if end := now.Add(max(a.held.TTL, leastCall)); a.before == 0 && a.held.TTL > 0 && end < s.at {
			// It will be the first: then its call is what finds that the holder is dead.
			s.exact, s.at = true, end
		}
		s.at = max(s.at, now.Add(leastCall))
		l.watch.beats.moved(s)
		if s.at < l.watch.next {
			l.rouse()
		}
	default:
		if a.grant.Left > 0 && s.held != nil && s.failure == nil && s.channel != "" {
			l.line.store.missed()
		}
		l.granted(s, *a.grant, sent, now)
	}
}

// stray takes in an answer to a call of one who waits no more: with a place in the
// queue, or the lock, that nobody wants, or not known; l.mu is held.
func (l *Locker) stray(k *Lock, a lineAnswer, lost bool) {
	left := a.held != nil && !a.full || a.grant != nil && (a.grant.Left == 0 || k.stage == gone)
	switch {
	case !left && !lost:
	case k.stage != gone:
		k.suspect, k.ghost = k.suspect || lost, true
	case lost:
		l.settler.add(k, false)
	default:
		l.settler.addLeft(k)
	}
}
