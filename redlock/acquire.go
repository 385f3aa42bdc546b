package redlock

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/clock"
)

// fencedTries is how often an attempt proposes a token, when instances have seen greater
// ones or find it too far ahead of their clocks.
const fencedTries = 3

// Acquire makes one attempt, with a value of its own: whatever an earlier one has left on
// its way cannot be taken for this one, and what gives that up does not harm it.
func (s *store) Acquire(ctx context.Context, r holdfast.Request) (holdfast.Grant, error) {
	if r.Key == floorKey {
		return holdfast.Grant{}, invalid("%q is a key of redlock's own", r.Key)
	}
	if err := s.meet(ctx); err != nil {
		return holdfast.Grant{}, err
	}
	value := r.Owner
	if r.Attempt > 1 {
		value += "." + strconv.Itoa(r.Attempt)
	}
	if !r.Fencing {
		return s.attempt(ctx, r, value, 0)
	}
	for try := 1; ; try++ {
		p := time.Now().UnixMicro() + s.lead.Load() + 1
		grant, err := s.attempt(ctx, r, fencedValue(value, p), p)
		if err == nil || try == fencedTries || ctx.Err() != nil || !s.learn(err) {
			return grant, err
		}
	}
}

// fencedValue is the value of a lock with a token.
func fencedValue(owner string, p int64) string { return owner + ":" + strconv.FormatInt(p, 10) }

// tokenOf returns the token that stands in a value.
func tokenOf(value string) (p int64, fenced bool) {
	i := strings.LastIndexByte(value, ':')
	if i < strings.LastIndexByte(value, '/') {
		return 0, false
	}
	p, err := strconv.ParseInt(value[i+1:], 10, 64)
	return p, err == nil && p > 0
}

// tokenError says that an instance does not take a token.
type tokenError struct {
	reason error
	seen   int64 // the counter, or the instance's clock in us
	token  int64
}

func (e *tokenError) Error() string { return fmt.Sprintf("%v (%d, %d)", e.reason, e.token, e.seen) }
func (e *tokenError) Unwrap() error { return e.reason }

// learn changes the lead of the tokens by what instances have said in err, and reports
// whether another try may do better.
func (s *store) learn(err error) bool {
	var q *QuorumError
	if !errors.As(err, &q) {
		return false
	}
	low, ahead := int64(0), int64(0)
	for _, n := range q.Nodes {
		var e *tokenError
		switch {
		case !errors.As(n.Err, &e):
		case e.reason == errLow:
			low = max(low, e.seen)
		case ahead == 0 || e.seen < ahead:
			ahead = e.seen
		}
	}
	seen := max(low, ahead)
	if seen == 0 {
		return false
	}
	s.lead.Store(seen + 1 - time.Now().UnixMicro())
	return true
}

// attempt is one question to all instances for the lock.
type attempt struct {
	h      *hold
	owner  string // what the values of all attempts begin with
	ballot *ballot
	young  atomic.Bool // an instance has no vote yet
}

// goOn reports whether more answers matter. One more may make a majority; and who is told
// that instances are young wants to know how long all of them are, unless others have the
// lock anyway.
func (a *attempt) goOn(c count) bool {
	return !c.won() && !c.complete() && !c.refused() && (!c.impossible() || a.young.Load())
}

// attempt asks all instances for the lock. When no majority agrees, all that was taken is
// given back.
func (s *store) attempt(ctx context.Context, r holdfast.Request, value string, token int64) (holdfast.Grant, error) {
	if err := s.tooYoung(); err != nil {
		return holdfast.Grant{}, err
	}
	start := clock.Now()
	h := s.add(r.Key, value, token, r.Fencing)
	a := &attempt{h: h, owner: r.Owner}
	a.ballot = newBallot(len(s.nodes), a.goOn)
	h.mu.Lock()
	h.lasts(r.TTL)
	for i := range h.places {
		h.places[i].busy = true
	}
	h.mu.Unlock()
	orders := make([]order, len(s.nodes))
	for i, n := range s.nodes {
		orders[i] = order{request: h.request(take, r.TTL), asker: a}
		n.send(&orders[i])
	}
	c, answers, spent := a.ballot.wait(ctx, start, s.limit)
	if spent > 0 {
		s.took(spent)
	}
	if c.won() {
		h.mu.Lock()
		h.won = true
		h.mu.Unlock()
		return holdfast.Grant{Owner: value, Token: fencing.Token(token)}, nil
	}
	err := s.failure("acquire", c, answers)
	if s.learnable(err) { // the next try follows at once, and must find the places free
		b := newBallot(len(s.nodes), func(c count) bool { return !c.complete() })
		h.giveUp(b, 0)
		b.wait(ctx, clock.Now(), s.limit)
	} else {
		h.giveUp(nil, 0)
	}
	return holdfast.Grant{}, err
}

// learnable reports whether tokens stood in the way.
func (s *store) learnable(q *QuorumError) bool {
	for _, n := range q.Nodes {
		if e := (*tokenError)(nil); errors.As(n.Err, &e) {
			return true
		}
	}
	return false
}

// answered takes in the answer of one instance.
func (a *attempt) answered(i int, o *order) {
	a.h.granted(i, &o.request)
	if y := (*YoungError)(nil); errors.As(o.err, &y) {
		a.young.Store(true)
	}
	a.ballot.add(i, a.read(&o.request))
}

func (a *attempt) read(r *request) answer {
	if r.err != nil {
		return answer{vote: fault, err: r.err, ran: r.mayHaveRun()}
	}
	switch r.code {
	case codeYes:
		return answer{vote: yes, ran: true}
	case codeHad:
		return answer{vote: fault, err: errTwin, ran: true}
	case codeTaken:
		if rest, ok := strings.CutPrefix(r.holder, a.owner); ok && strings.Trim(rest, ".:0123456789") == "" {
			return answer{vote: fault, err: errOwn} // nobody else has the lock
		}
		return answer{vote: no, err: &holdfast.HeldError{Key: a.h.key, Holder: holderOf(r.holder), TTL: r.left}, value: r.holder}
	case codeLow:
		return answer{vote: fault, err: &tokenError{errLow, r.counter, r.token}}
	case codeAhead:
		return answer{vote: fault, err: &tokenError{errAhead, r.counter, r.token}}
	}
	return answer{vote: fault, err: errUnused, ran: true}
}

// tooYoung returns an error if it is known that too few instances have a vote.
func (s *store) tooYoung() error {
	c := count{of: len(s.nodes)}
	var answers []answer
	for _, n := range s.nodes {
		a := answer{err: errNotAwaited}
		if err := n.link.young(); err != nil {
			a = answer{vote: fault, err: err}
		}
		c.add(a.vote)
		answers = append(answers, a)
	}
	if !c.impossible() {
		return nil
	}
	return s.failure("acquire", c, answers)
}

// failure makes the error of a question that no majority has agreed to.
func (s *store) failure(op string, c count, answers []answer) *QuorumError {
	q := &QuorumError{op: op, Votes: c.yes, Needed: needed(c.of)}
	faults, finals := 0, 0
	holders, lefts := map[string]int{}, map[string]time.Duration{} // by value
	for i, a := range answers {
		if a.vote == yes {
			q.ran = true
			continue
		}
		var held *holdfast.HeldError
		switch {
		case errors.As(a.err, &held):
			holders[a.value]++
			if left, seen := lefts[a.value]; !seen || held.TTL > left {
				lefts[a.value] = held.TTL
			}
			if q.held == nil || holders[a.value] > holders[q.holder] {
				q.held, q.holder = &holdfast.HeldError{Key: held.Key, Holder: held.Holder}, a.value
			}
		case a.err != errNotAwaited:
			faults++
			if isFinal(a.err) {
				finals++
			}
		}
		q.ran = q.ran || a.ran || a.vote == pending
		q.Nodes = append(q.Nodes, NodeError{i, s.nodes[i].link.name(), a.err})
	}
	if q.held != nil {
		q.held.TTL = lefts[q.holder]
	}
	q.final = finals > c.of-needed(c.of)
	if faults > c.of-needed(c.of) {
		q.held = nil
	}
	if q.held != nil && holders[q.holder] < needed(c.of) { // the votes are split
		q.pause = s.between(1, 3*float64(len(holders)))
	}
	return q
}

// holderOf returns the holder's name in a lock's value: what stands before the last "/".
// A value in another form was written by another client, and stands for itself.
func holderOf(value string) string {
	if i := strings.LastIndexByte(value, '/'); i > 0 {
		return value[:i]
	}
	return value
}
