package fencing

import (
	"context"
	"errors"
	"fmt"
)

// ErrStale is in the chain of every [*StaleError]: the caller's lock has ended, and
// somebody has entered the resource after it. Write nothing more; what was written before
// is in order.
var ErrStale = errors.New("fencing: stale token")

// ErrNoToken says that a token is 0 or negative. It is never let through: take the lock with
// holdfast.WithFencing, and hand on its context.
var ErrNoToken = errors.New("fencing: no token")

// StaleError says which token a resource has refused, and what it had seen. It matches
// ErrStale.
type StaleError struct {
	Resource string
	Token    Token
	Seen     Token // equal to Token: it was used up, see [Once], or is another owner's
}

// Error tells the resource and both tokens.
func (e *StaleError) Error() string {
	return fmt.Sprintf("fencing: stale token %d for %q, which has seen %d", e.Token, e.Resource, e.Seen)
}

// Unwrap returns ErrStale.
func (e *StaleError) Unwrap() error { return ErrStale }

// Rule adds to what a check asks of a token.
type Rule struct {
	once  bool
	owner string
}

// Once makes a token stale that the resource has seen already: each grant passes at most
// one check. Without it the holder may come again with the same token.
func Once() Rule { return Rule{once: true} }

// By tells who presents the token: Lock.Owner. An equal token of another owner is stale: a
// counter that was lost gives numbers twice.
func By(owner string) Rule { return Rule{owner: owner} }

// Check is what is asked of a resource: whether it has seen nothing newer than a claim.
type Check struct {
	Claim
	Once bool // an equal token is stale too
}

// NewCheck makes a check of a token and the rules for it. Its only error is ErrNoToken.
func NewCheck(token Token, rules ...Rule) (Check, error) {
	c := Check{Claim: Claim{Token: token}}
	for _, r := range rules {
		c.Once = c.Once || r.once
		if r.owner != "" {
			c.Owner = r.owner
		}
	}
	if token <= 0 {
		return c, ErrNoToken
	}
	return c, nil
}

// Admit decides. It returns what the resource has seen from now on, or a *StaleError and
// what it had seen. Nothing is stored: that must happen in one atomic step with this.
func (c Check) Admit(resource string, seen Claim) (Claim, error) {
	if c.Token <= 0 {
		return seen, ErrNoToken
	}
	stale := c.Token < seen.Token
	if c.Token == seen.Token {
		stale = c.Once || c.Owner != "" && seen.Owner != "" && c.Owner != seen.Owner
		if c.Owner == "" {
			c.Owner = seen.Owner
		}
	}
	if stale {
		return seen, &StaleError{resource, c.Token, seen.Token}
	}
	return c.Claim, nil
}

// Marks remembers the highest claim that each resource has seen: its high-water mark. It
// must be safe for concurrent use, also by other processes.
type Marks interface {
	// Load returns the mark of a resource, the zero Claim if it has none.
	Load(ctx context.Context, resource string) (Claim, error)

	// Raise does what [Check.Admit] says to the mark, in one atomic step. It returns the
	// mark as it is then; with a *StaleError, as it was.
	Raise(ctx context.Context, resource string, c Check) (Claim, error)
}
