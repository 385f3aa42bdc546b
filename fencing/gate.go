package fencing

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"sync"
)

const (
	shards = 256 // of a Gate: enough that its goroutines rarely meet

	// mostResources is how many resources a Gate with a store remembers by default.
	mostResources = 1 << 16
)

// Gate checks tokens in front of the resources of one process: a service that keeps state
// in its memory, or is the only one to write to something that cannot check by itself. It
// is safe for concurrent use, and needs no closing. Make one with [NewGate]: the zero value
// has nowhere to remember.
//
// Its memory is one entry for each resource that it has seen, which a restart forgets: a
// stale token is then let through if it comes before the newer one. [WithMarks] gives it a
// store, which forgets nothing, and bounds its memory. A check of a token that it knows
// already asks the store nothing; where several processes guard the same resource, use
// [AskEachTime].
type Gate struct {
	marks  Marks
	ask    bool
	most   int // resources in each shard; 0: no limit
	seed   maphash.Seed
	shards [shards]shard
}

// shard holds what is known of some resources.
//
// Invariant: the mark of an entry never goes down while the entry is there, and a claim is
// admitted only in the same critical section that compares it with the mark. With a store
// a mark is raised there first, so that dropping an entry loses nothing.
type shard struct {
	mu      sync.Mutex
	entries map[string]*entry
	used    list.List // of *entry, the last used in front; only with a limit
	_       [64]byte  // a cache line of its own
}

type entry struct {
	resource string
	mark     Claim
	at       *list.Element // nil without a limit
	asking   int           // questions to the store under way
	running  []*run        // work under way, in the order of its admission
}

// run is work that Do has let through.
type run struct {
	claim  Claim
	cancel context.CancelCauseFunc
	done   chan struct{}
}

// GateOption is a setting of a Gate.
type GateOption func(*Gate) error

// WithMarks keeps the marks in a store as well: each is raised there before its token is
// let through. If the store fails, so does the check.
func WithMarks(m Marks) GateOption {
	return func(g *Gate) error {
		if m == nil {
			return errors.New("fencing: WithMarks: nil store")
		}
		g.marks = m
		return nil
	}
}

// WithMostResources sets how many resources are remembered, about, beside the store: those
// that have not been seen for longest are forgotten first, and the store is asked when they
// come again. The default is 65,536. It needs WithMarks: without a store nothing is
// forgotten.
func WithMostResources(n int) GateOption {
	return func(g *Gate) error {
		if n < 1 {
			return fmt.Errorf("fencing: WithMostResources: %d is below 1", n)
		}
		g.most = (n + shards - 1) / shards
		return nil
	}
}

// AskEachTime asks the store of WithMarks at every check, because other processes raise its
// marks too. That stops no work that is under way in another process: there [Gate.Do] promises
// only that it began before the newer token was seen, so let what it writes to check as well.
func AskEachTime() GateOption {
	return func(g *Gate) error {
		g.ask = true
		return nil
	}
}

// NewGate makes a Gate. Its errors are those of options that make no sense.
func NewGate(opts ...GateOption) (*Gate, error) {
	g := &Gate{seed: maphash.MakeSeed()}
	for _, o := range opts {
		if o == nil {
			return nil, errors.New("fencing: nil option")
		}
		if err := o(g); err != nil {
			return nil, err
		}
	}
	switch {
	case g.marks == nil && (g.ask || g.most > 0):
		return nil, errors.New("fencing: AskEachTime and WithMostResources need WithMarks")
	case g.marks != nil && g.most == 0:
		g.most = mostResources / shards
	}
	for i := range g.shards {
		g.shards[i].entries = map[string]*entry{}
	}
	return g, nil
}

// Enter lets a token through and refuses from then on every lower one: nil, or a
// [*StaleError], ErrNoToken, or what the store has failed with. Call it before you read
// what you will change.
//
// If work of an older token is under way in [Gate.Do], its context is cancelled and Enter
// waits for its end, or for that of ctx: the token counts as seen then too.
//
// With a store an Enter that failed may have raised the mark nevertheless.
func (g *Gate) Enter(ctx context.Context, resource string, token Token, rules ...Rule) error {
	c, err := NewCheck(token, rules...)
	if err != nil {
		return err
	}
	older, err := g.admit(ctx, resource, c, nil)
	if err != nil || older == nil {
		return err
	}
	return await(ctx, resource, older)
}

// Do runs fn if the token is let through, as by [Gate.Enter], and returns its error. No
// newer token is let through to its work while fn runs: one that comes cancels the context
// of fn, with a *StaleError as the cause, and waits for its end. So what fn does is done
// before the newer holder begins. It is not rolled back.
//
// Work under the same token runs side by side. An fn that takes no notice of its context
// delays newer holders for as long as it runs, and must not call Do or Enter for the same
// resource with a newer token: that would wait for itself.
func (g *Gate) Do(ctx context.Context, resource string, token Token, fn func(ctx context.Context) error, rules ...Rule) error {
	c, err := NewCheck(token, rules...)
	if err != nil {
		return err
	}
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r := &run{c.Claim, cancel, make(chan struct{})}
	older, err := g.admit(ctx, resource, c, r)
	if err != nil {
		return err
	}
	defer g.leave(resource, r)
	if err := await(inner, resource, older); err != nil {
		return err
	}
	if inner.Err() != nil { // a newer one came meanwhile, or ctx has ended
		return context.Cause(inner)
	}
	return fn(inner)
}

// Len returns how many resources are remembered in memory.
func (g *Gate) Len() (n int) {
	for i := range g.shards {
		s := &g.shards[i]
		s.mu.Lock()
		n += len(s.entries)
		s.mu.Unlock()
	}
	return n
}

// admit decides, and raises the mark. r, which may be nil, is under way from then on. It
// returns the work of older claims, which has been told to stop.
func (g *Gate) admit(ctx context.Context, resource string, c Check, r *run) ([]*run, error) {
	s := &g.shards[maphash.String(g.seed, resource)%shards]
	s.mu.Lock()
	defer s.mu.Unlock()
	e := g.entry(s, resource)
	if g.marks == nil {
		return e.raise(c, r)
	}
	// Most claims can be refused, or let through, without the store.
	mark, err := c.Admit(resource, e.mark)
	if err != nil {
		return nil, err
	}
	if !g.ask && mark == e.mark {
		return e.raise(c, r)
	}
	e.asking++ // it must not be forgotten meanwhile, with a mark that may be newer than ours
	s.mu.Unlock()
	mark, err = g.raiseStored(ctx, resource, c)
	s.mu.Lock()
	e.asking--
	switch {
	case errors.Is(err, ErrStale):
		e.tell(mark)
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("fencing: mark of %q: %w", resource, err)
	}
	c.Once = false // the store has answered that
	return e.raise(c, r)
}

// raiseStored raises the mark in the store, which is the user's code: it may panic.
func (g *Gate) raiseStored(ctx context.Context, resource string, c Check) (mark Claim, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panicked: %v", p)
		}
	}()
	return g.marks.Raise(ctx, resource, c)
}

// raise decides by what memory knows.
func (e *entry) raise(c Check, r *run) ([]*run, error) {
	mark, err := c.Admit(e.resource, e.mark)
	if err != nil {
		return nil, err
	}
	older := e.tell(mark)
	if r != nil {
		e.running = append(e.running, r)
	}
	return older, nil
}

// tell notes a mark, and stops the work of older claims, which it returns.
func (e *entry) tell(mark Claim) (older []*run) {
	if mark.Token < e.mark.Token {
		return nil
	}
	e.mark = mark
	for _, o := range e.running {
		if o.claim.Token < mark.Token {
			o.cancel(&StaleError{e.resource, o.claim.Token, mark.Token})
			older = append(older, o)
		}
	}
	return older
}

// entry returns the entry of a resource, and makes it. s.mu is held.
func (g *Gate) entry(s *shard, resource string) *entry {
	e := s.entries[resource]
	if e == nil {
		if g.most > 0 && len(s.entries) >= g.most {
			s.forget()
		}
		e = &entry{resource: resource}
		s.entries[resource] = e
		if g.most > 0 {
			e.at = s.used.PushFront(e)
		}
	} else if e.at != nil {
		s.used.MoveToFront(e.at)
	}
	return e
}

// forget drops the entry that was not used for longest, except where something is under way:
// newer claims must find that.
func (s *shard) forget() {
	for at := s.used.Back(); at != nil; at = at.Prev() {
		if e := at.Value.(*entry); len(e.running) == 0 && e.asking == 0 {
			s.used.Remove(at)
			delete(s.entries, e.resource)
			return
		}
	}
}

// leave ends r.
func (g *Gate) leave(resource string, r *run) {
	s := &g.shards[maphash.String(g.seed, resource)%shards]
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[resource] // which stays while r runs
	for i, o := range e.running {
		if o == r {
			e.running = append(e.running[:i], e.running[i+1:]...)
			break
		}
	}
	if len(e.running) == 0 {
		e.running = nil
	}
	close(r.done)
}

// await waits for the end of older work.
func await(ctx context.Context, resource string, older []*run) error {
	for _, o := range older {
		select {
		case <-o.done:
		case <-ctx.Done():
			return fmt.Errorf("fencing: work under token %d for %q is still under way: %w",
				o.claim.Token, resource, context.Cause(ctx))
		}
	}
	return nil
}
