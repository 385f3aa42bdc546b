package redlock

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/refusal"
)

// renewTries is how often one instance is asked in a round.
const renewTries = 3

// round is one renewal of many leases on all instances: one request to each, and more to
// those that could not be reached.
//
// Invariant: a place is healed only when a majority of the instances, without it, has
// confirmed the lock in the same round.
type round struct {
	s     *store
	start clock.Instant

	mu    sync.Mutex
	items []roundItem
	open  int // items that are not decided
	tries []int
	ended bool
	done  chan struct{} // closed when all are decided, or nobody is left to ask
}

// roundItem is one lease in a round.
type roundItem struct {
	h       *hold
	ttl     time.Duration
	count   count
	answers []answer
	lost    []int // instances that do not have the lock, and were not healed yet
}

// part is what a round asks one instance: some of its items.
type part struct {
	*round
	items []int
}

// Renew raises what is left of the leases, each on all instances.
func (s *store) Renew(ctx context.Context, leases []holdfast.Lease) []error {
	r := &round{
		s: s, start: clock.Now(), items: make([]roundItem, len(leases)), open: len(leases),
		tries: make([]int, len(s.nodes)), done: make(chan struct{}),
	}
	for i, l := range leases {
		r.items[i] = roundItem{
			h: s.find(l), ttl: l.TTL, count: count{of: len(s.nodes)}, answers: make([]answer, len(s.nodes)),
		}
	}
	for i := range s.nodes {
		r.ask(i, r.free(i))
	}
	timer := time.NewTimer(s.limit - clock.Now().Sub(r.start))
	defer timer.Stop()
	var missing error = errNotAwaited
	select {
	case <-r.done:
	case <-ctx.Done():
	case <-timer.C:
		missing = &noAnswerError{s.limit}
	}
	return r.results(missing)
}

// free returns the items that instance i can be asked to renew: those that it is not
// being asked for at the same time.
func (r *round) free(i int) (items []int) {
	for at := range r.items {
		it := &r.items[at]
		it.h.mu.Lock()
		err := it.h.places[i].obstacle(it.ttl)
		it.h.lasts(it.ttl)
		it.h.mu.Unlock()
		if err == nil {
			items = append(items, at)
			continue
		}
		r.mu.Lock()
		r.vote(at, i, answer{vote: fault, err: err})
		r.mu.Unlock()
	}
	return items
}

// ask sends one instance its part.
func (r *round) ask(i int, items []int) {
	if len(items) == 0 {
		return
	}
	leases := make([]lease, len(items))
	for n, at := range items {
		it := &r.items[at]
		leases[n] = lease{it.h.key, it.h.value, it.ttl}
	}
	r.s.nodes[i].send(&order{request: request{kind: renew, leases: leases}, asker: &part{r, items}})
}

// vote counts an answer, and ends the round with the last item; r.mu is held.
func (r *round) vote(at, i int, a answer) {
	it := &r.items[at]
	if it.answers[i].vote != pending {
		return
	}
	before := it.decided()
	it.answers[i] = a
	it.count.add(a.vote)
	if !before && it.decided() {
		if r.open--; r.open == 0 && !r.ended {
			r.ended = true
			close(r.done)
		}
	}
}

// decided says that more answers change nothing, or that there are no more.
func (it *roundItem) decided() bool {
	return it.count.won() || it.count.refused() || it.count.complete()
}

// answered takes in the answer of instance i.
func (p *part) answered(i int, o *order) {
	r := p.round
	if o.err == nil && len(o.codes) != len(p.items) {
		o.err = errUnused
	}
	if o.err != nil && r.again(i, p, o) {
		return
	}
	type healing struct {
		h   *hold
		i   int
		ttl time.Duration
	}
	var heals []healing
	r.mu.Lock()
	for n, at := range p.items {
		it := &r.items[at]
		a := answer{vote: fault, err: o.err}
		if o.err == nil {
			a = it.read(i, o.codes[n])
		}
		if a.err == errGone {
			it.lost = append(it.lost, i)
		}
		r.vote(at, i, a)
		if it.count.won() {
			for _, lost := range it.lost {
				heals = append(heals, healing{it.h, lost, it.ttl})
			}
			it.lost = nil
		}
	}
	r.mu.Unlock()
	for _, x := range heals {
		x.h.heal(x.i, x.ttl, r.start)
	}
}

// read reads what instance i says of one lease.
func (it *roundItem) read(i int, code any) answer {
	switch code {
	case int64(codeYes):
		it.h.mu.Lock()
		defer it.h.mu.Unlock()
		return it.h.places[i].yes(it.ttl)
	case int64(codeGone):
		return answer{vote: no, err: errGone}
	case int64(codeTaken):
		return answer{vote: no, err: errTaken}
	}
	if text, ok := code.(string); ok {
		return answer{vote: fault, err: refusal.Grade(refusal.Reply(text), true, false)}
	}
	return answer{vote: fault, err: errUnused}
}

// again asks instance i once more, after a pause, if there is time and there are tries.
func (r *round) again(i int, p *part, o *order) bool {
	pause := r.s.limit/16 + rand.N(r.s.limit/8+1)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tries[i]++
	late := clock.Now().Add(pause).Sub(r.start) > r.s.limit*3/4
	if r.ended || late || r.tries[i] >= renewTries || isFinal(o.err) || r.s.ended.Load() {
		return false
	}
	r.s.group.Add()
	time.AfterFunc(pause, func() {
		defer r.s.group.Done()
		r.ask(i, p.items)
	})
	return true
}

// results ends the round and returns what came of it.
func (r *round) results(missing error) []error {
	r.mu.Lock()
	r.ended = true
	errs := make([]error, len(r.items))
	var lost []*hold
	for at := range r.items {
		it := &r.items[at]
		switch {
		case it.count.won():
		case it.count.refused():
			errs[at] = lostError(it.answers)
			lost = append(lost, it.h)
		default:
			errs[at] = r.s.failure("renew", it.count, open(it.answers, missing))
		}
	}
	r.mu.Unlock()
	for _, h := range lost {
		h.giveUp(nil, 0) // it is lost, and what is left of it would be in the way of others
	}
	return errs
}

// open returns the answers, with missing in place of those that have not come.
func open(answers []answer, missing error) []answer {
	all := make([]answer, len(answers))
	for i, a := range answers {
		if all[i] = a; a.vote == pending {
			all[i].err = missing
		}
	}
	return all
}

// lostError is the error of a lock that a majority does not have.
func lostError(answers []answer) error {
	gone, taken := 0, 0
	for _, a := range answers {
		switch a.err {
		case errGone:
			gone++
		case errTaken:
			taken++
		}
	}
	if taken > gone {
		return &holdfast.LostError{Reason: holdfast.LostTaken}
	}
	return &holdfast.LostError{Reason: holdfast.LostGone}
}

// setting is an Extend on all instances.
type setting struct {
	h      *hold
	ttl    time.Duration
	ballot *ballot
}

// Extend sets what is left of a lease on all instances.
func (s *store) Extend(ctx context.Context, l holdfast.Lease) error {
	start := clock.Now()
	h := s.find(l)
	e := &setting{h, l.TTL, newBallot(len(s.nodes), func(c count) bool {
		return !c.won() && !c.refused() && !c.complete()
	})}
	h.mu.Lock()
	h.lasts(l.TTL)
	var asks []int
	for i := range h.places {
		p := &h.places[i]
		if err := p.obstacle(l.TTL); err != nil {
			e.ballot.add(i, answer{vote: fault, err: err})
			continue
		}
		if p.setting++; p.setting == 1 || l.TTL < p.least {
			p.least = l.TTL
		}
		asks = append(asks, i)
	}
	h.mu.Unlock()
	for _, i := range asks {
		s.nodes[i].send(&order{request: h.request(set, l.TTL), asker: e})
	}
	c, answers, _ := e.ballot.wait(ctx, start, s.limit)
	switch {
	case c.won():
		return nil
	case c.refused():
		h.giveUp(nil, 0)
		return lostError(answers)
	}
	return s.failure("extend", c, answers)
}

// answered takes in the answer of one instance. One that did not come leaves a ceiling
// there: the shorter lease may yet be set, after a longer one.
func (e *setting) answered(i int, o *order) {
	var a answer
	e.h.mu.Lock()
	p := &e.h.places[i]
	p.setting--
	switch {
	case o.err != nil:
		a = answer{vote: fault, err: o.err, ran: o.mayHaveRun()}
		if a.ran && (p.ceiling == 0 || e.ttl < p.ceiling) {
			p.ceiling = e.ttl
		}
	case o.code == codeYes:
		a = p.yes(e.ttl)
	case o.code == codeGone:
		a = answer{vote: no, err: errGone}
	case o.code == codeTaken:
		a = answer{vote: no, err: errTaken}
	default:
		a = answer{vote: fault, err: errUnused, ran: true}
	}
	e.h.mu.Unlock()
	e.ballot.add(i, a)
}
