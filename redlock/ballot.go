package redlock

import (
	"context"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
)

// answer is what one instance said to a question.
type answer struct {
	vote  vote
	err   error  // why it is not yes
	ran   bool   // what was asked may have been done
	value string // of the lock that stands in the way
}

// ballot collects the answers to one question, until it is decided.
type ballot struct {
	goOn func(count) bool // whether it is still open

	mu      sync.Mutex
	count   count
	answers []answer
	closed  bool
	decided chan struct{}
}

func newBallot(n int, goOn func(count) bool) *ballot {
	return &ballot{
		goOn: goOn, count: count{of: n}, answers: make([]answer, n), decided: make(chan struct{}),
	}
}

// add counts the answer of instance i, unless it has one or the ballot is decided.
func (b *ballot) add(i int, a answer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || b.answers[i].vote != pending {
		return
	}
	b.answers[i] = a
	b.count.add(a.vote)
	if !b.goOn(b.count) {
		b.closed = true
		close(b.decided)
	}
}

// wait waits until the ballot is decided, ctx has ended, or limit is over since start.
// After it nothing is counted any more. spent says how long the decision took, or 0.
func (b *ballot) wait(ctx context.Context, start clock.Instant, limit time.Duration) (c count, answers []answer, spent time.Duration) {
	timer := time.NewTimer(limit - clock.Now().Sub(start))
	defer timer.Stop()
	missing := error(errNotAwaited)
	select {
	case <-b.decided:
		spent = max(clock.Now().Sub(start), 1)
	case <-ctx.Done():
	case <-timer.C:
		missing = &noAnswerError{limit}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	for i := range b.answers {
		if a := &b.answers[i]; a.vote == pending {
			a.err = missing
		}
	}
	return b.count, b.answers, spent
}
