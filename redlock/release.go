package redlock

import (
	"context"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/clock"
)

// Release gives a lock up on all instances, whether or not they have agreed to it. What
// instances have answered to an earlier try counts; those that do not answer now are
// asked again in the background.
func (s *store) Release(ctx context.Context, l holdfast.Lease) error {
	start := clock.Now()
	b := newBallot(len(s.nodes), func(c count) bool { return !c.won() && !c.refused() && !c.complete() })
	s.find(l).giveUp(b, l.Keep)
	c, answers, _ := b.wait(ctx, start, s.limit)
	switch {
	case c.won():
		return nil
	case c.refused():
		return lostError(answers)
	}
	return s.failure("release", c, answers)
}
