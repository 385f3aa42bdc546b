package holdfast

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/clock"
)

const (
	defaultDeadlockAfter = time.Second
	leastDeadlockAfter   = 10 * time.Millisecond

	mostEdges = 1000 // that are followed, and as many may be on a path

	// noteTTL is how long a record of a wait stays without being noted again, in probes.
	noteProbes = 3
	noteSpare  = time.Second

	unnoteLimit = 250 * time.Millisecond
)

// WithDeadlockAfter sets when a wait of a flow that holds locks already is looked at for a
// deadlock across processes, and how often from then on: 1 s by default, at least 10 ms.
// Unlimited turns that off. A wait that can never end is then ended by one of the flows, see
// DeadlockError, within twice that time and a few round trips.
//
// A flow is all that runs under contexts derived from Lock.Context. Only locks on the same
// client are seen, and only by stores that can tell who waits (Redis can, a majority cannot).
// That a wait can never end rests on the flow keeping its locks until all its waits have
// returned, as contexts are meant to be used.
//
// It costs nothing while nobody waits for so long with a lock in hand. Then each such wait
// writes a record beside each lock that its flow holds, and reads two keys for each step along
// the chain of waits. Source: edge chasing, as Chandy, Misra and Haas, "Distributed Deadlock
// Detection" (ACM TOCS 1983), with records in place of messages.
func WithDeadlockAfter(d time.Duration) Option {
	return optionFunc(func(c *config) error {
		if d < leastDeadlockAfter || d > maxTTL && d != Unlimited {
			return invalid("WithDeadlockAfter(%v): must be at least %v, or Unlimited", d, leastDeadlockAfter)
		}
		c.deadlocks = d
		return nil
	})
}

// WithDeadlockBreak ends a deadlock in another way: of the locks in the cycle the one that was
// taken first is taken away from its holder and given to who waits for it, and no Acquire
// fails. The holder's context ends with ErrLost, Reason LostBroken, as soon as it hears; what it
// still writes until then only a fencing token can stop. The youngest flow does it, if this
// is set for it.
func WithDeadlockBreak() Option {
	return optionFunc(func(c *config) error { c.breaks = true; return nil })
}

func (c *config) deadlockAfterOf() time.Duration { return cmp.Or(c.deadlocks, defaultDeadlockAfter) }

// waitGraph is what a Store offers that can tell who waits for what.
type waitGraph interface {
	// now returns the server's time.
	now(ctx context.Context) (time.Time, error)
	// note writes a record beside each lock that the flow holds, for ttl.
	note(ctx context.Context, id string, records []waitRecord, ttl time.Duration) error
	// unnote takes them away.
	unnote(ctx context.Context, id string, records []waitRecord) error
	// look returns who holds key, "" if nobody does, and what its flow waits for.
	look(ctx context.Context, key string) (owner string, waits []waitRecord, err error)
	// tellBroken tells the holder of a lock, by the channel of a record, that it was broken.
	tellBroken(ctx context.Context, r waitRecord) error
}

// waitRecord says that the flow which holds one lock waits for another.
type waitRecord struct {
	ID    string `json:"id"`    // of the wait
	Owner string `json:"owner"` // of the lock that is held
	Key   string `json:"key"`   // of that lock, as on the server
	Name  string `json:"name"`  // and as its holder calls it
	Held  int64  `json:"held"`  // since when, in ms of Unix time, by the holder's clock
	For   string `json:"for"`   // the key that is waited for, as on the server
	Want  string `json:"want"`  // and as the waiter calls it
	Since int64  `json:"since"` // since when, in us of Unix time, by the server's clock
	Born  int64  `json:"born"`  // since when the flow holds anything, by the same

	Verb    string `json:"verb,omitempty"` // how to reach the waiter
	Channel string `json:"channel,omitempty"`
}

// edge is a record that was found beside the lock that it is about.
type edge = waitRecord

// heldIn returns the live locks on resource that ctx's flow holds, the innermost first.
func heldIn(ctx context.Context, resource any) (held []*Lock) {
	for {
		k, _ := ctx.Value(holdKey{}).(*Lock)
		if k == nil {
			return held
		}
		if k.l.resource == resource && k.ctx.Err() == nil {
			held = append(held, k)
		}
		ctx = k.ctx.Context
	}
}

// prober looks, while a flow that holds locks waits for another one, whether its wait can
// end. It is there from when the wait has lasted for the limit.
//
// A cycle of waits is told from what looks like one by looking twice: owner values and ids of
// waits are never used again, so an edge that was seen both times stood all the time in
// between, and all edges of the path stood together at the moment between the two walks.
type prober struct {
	w     *want
	graph waitGraph
	held  []*Lock
	mine  waitRecord // what all records of this wait have in common
	found chan error // one element: the wait is to end with this
	ctx   context.Context
	end   context.CancelFunc
	timer *time.Timer
	done  chan struct{} // closed when the goroutine has ended

	noted  bool
	failed bool
}

// probe starts a prober for a wait that is about to begin; nil: it needs none.
func (w *want) probe() *prober {
	graph, ok := w.l.store.Store.(waitGraph)
	after := w.k.config.deadlockAfterOf()
	if !ok || after == Unlimited {
		return nil
	}
	held := heldIn(w.ctx, w.l.resource)
	if len(held) == 0 {
		return nil
	}
	p := &prober{w: w, graph: graph, held: held, found: make(chan error, 1), done: make(chan struct{})}
	p.ctx, p.end = context.WithCancel(w.l.base)
	w.l.group.Add() // done by run, or by stop
	p.timer = time.AfterFunc(after, p.run)
	return p
}

// stop ends the prober. A wait that has failed leaves no record behind, as far as that
// can be done in a moment: others would follow it.
func (p *prober) stop(err error) {
	if p == nil {
		return
	}
	p.end()
	if p.timer.Stop() {
		p.w.l.group.Done()
		return
	}
	if err == nil {
		return
	}
	timer := time.NewTimer(unnoteLimit)
	defer timer.Stop()
	select {
	case <-p.done:
	case <-timer.C: // it goes on without us
	}
}

// verdict is nil without a prober: nothing ever comes from it.
func (p *prober) verdict() <-chan error {
	if p == nil {
		return nil
	}
	return p.found
}

// run is the prober's goroutine. It ends with the wait.
func (p *prober) run() {
	defer p.w.l.group.Done()
	defer close(p.done)
	defer func() { _ = contain(p.unnote) }()
	after := p.w.k.config.deadlockAfterOf()
	timer := time.NewTimer(after)
	defer timer.Stop()
	for {
		var stuck error
		if err := contain(func() { stuck = p.look(after) }); err != nil {
			stuck = nil
		}
		if stuck != nil {
			p.found <- stuck
			return
		}
		timer.Reset(after)
		select {
		case <-timer.C:
		case <-p.ctx.Done():
			return
		}
	}
}

// records returns those of this wait, one for each lock that the flow holds.
func (p *prober) records() (all []waitRecord) {
	for _, k := range p.held {
		if k.ctx.Err() == nil {
			r := p.mine
			r.Owner, r.Key, r.Name, r.Held = k.owner, k.full, k.key, k.since.Wall().UnixMilli()
			all = append(all, r)
		}
	}
	return all
}

// look notes the wait and looks for a cycle. It returns the error to end the wait with, if
// this flow is to yield.
func (p *prober) look(after time.Duration) error {
	ctx, cancel := context.WithTimeout(p.ctx, max(after, attemptLimit))
	defer cancel()
	err := p.note(ctx, after)
	var first, second []edge
	if err == nil {
		first, err = p.walk(ctx)
	}
	if err == nil && first != nil {
		second, err = p.walk(ctx)
	}
	if err != nil && p.ctx.Err() == nil && !p.failed {
		p.failed = true
		p.w.k.config.warn(p.w.k.key, p.w.k.owner, "cannot look for deadlocks", err)
	}
	if err != nil || first == nil || !slices.EqualFunc(first, second, sameEdge) {
		return nil
	}
	closing := p.holds(first[len(first)-1].For) // what the last of them waits for is ours
	if closing == nil || !p.yields(first) {
		return nil
	}
	return p.resolve(ctx, closing, first)
}

func sameEdge(a, b edge) bool { return a.ID == b.ID && a.Owner == b.Owner && a.Key == b.Key }

// note writes or refreshes the records.
func (p *prober) note(ctx context.Context, after time.Duration) error {
	if p.mine.ID == "" {
		now, err := p.graph.now(ctx)
		if err != nil {
			return err
		}
		id, err := uuid.NewRandom()
		if err != nil {
			return err
		}
		first := p.held[len(p.held)-1].since
		before := func(at clock.Instant) int64 { return now.Add(-clock.Now().Sub(at)).UnixMicro() }
		p.mine = waitRecord{
			ID: id.String(), For: p.w.k.full, Want: p.w.k.key, Since: before(p.w.start), Born: before(first),
		}
	}
	p.noted = true // it may be there from here on
	return p.graph.note(ctx, p.mine.ID, p.records(), noteProbes*after+noteSpare)
}

func (p *prober) unnote() {
	if !p.noted {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), unnoteLimit)
	defer cancel()
	_ = p.graph.unnote(ctx, p.mine.ID, p.records()) // else they end by themselves
}

// holds returns the flow's own lock of a key; nil: it has none.
func (p *prober) holds(full string) *Lock {
	for _, k := range p.held {
		if k.full == full && k.ctx.Err() == nil {
			return k
		}
	}
	return nil
}

// walk follows the waits from the key that is waited for, and returns the first path it finds
// that comes back to a lock of this flow; nil: there is none.
func (p *prober) walk(ctx context.Context) ([]edge, error) {
	var (
		path []edge
		seen = map[string]bool{}
		step func(key string) (bool, error)
	)
	step = func(key string) (bool, error) {
		if seen[key] || len(seen) >= mostEdges {
			return false, nil // a cycle that is not ours, or more than can be looked at
		}
		seen[key] = true
		owner, waits, err := p.graph.look(ctx, key)
		if err != nil || owner == "" {
			return false, err
		}
		if k := p.holds(key); k != nil && k.owner == owner {
			return len(path) > 0, nil
		}
		slices.SortFunc(waits, func(a, b waitRecord) int { return cmp.Compare(a.ID, b.ID) })
		for _, r := range waits {
			if r.Owner != owner || r.Key != key {
				continue // of somebody who held it before
			}
			path = append(path, r)
			if found, err := step(r.For); found || err != nil {
				return found, err
			}
			path = path[:len(path)-1]
		}
		return false, nil
	}
	found, err := step(p.w.k.full)
	if !found {
		return nil, err
	}
	return path, nil
}

// yields reports whether this flow is the youngest of a cycle. All members see the same
// records, so they agree on that, and one of them acts. The age is that of the flow, and not of
// the wait: else who has come farther would always yield, and nobody might ever be through. So
// the oldest flow of all never yields, and gets all its locks in the end.
func (p *prober) yields(path []edge) bool {
	return !slices.ContainsFunc(path, func(r edge) bool {
		return cmp.Or(cmp.Compare(r.Born, p.mine.Born), cmp.Compare(r.ID, p.mine.ID)) > 0
	})
}

// resolve ends a deadlock: by the error that it returns, or by breaking a lock.
func (p *prober) resolve(ctx context.Context, closing *Lock, path []edge) error {
	k := p.w.k
	found := &DeadlockError{Key: k.key}
	own := p.mine
	own.Owner, own.Key, own.Name, own.Held = closing.owner, closing.full, closing.key, closing.since.Wall().UnixMilli()
	for _, r := range append([]edge{own}, path...) {
		found.Cycle = append(found.Cycle, DeadlockWait{
			Holder: holderOf(r.Owner), Key: r.Name, WaitsFor: r.Want,
			Since: time.UnixMilli(r.Held), Waits: time.UnixMicro(r.Since),
		})
	}
	if !k.config.breaks {
		k.config.warn(k.key, k.owner, "deadlock: this flow yields", found)
		return found
	}
	oldest := own
	for _, r := range path {
		if cmp.Or(cmp.Compare(r.Held, oldest.Held), cmp.Compare(r.Owner, oldest.Owner)) < 0 {
			oldest = r
		}
	}
	k.config.warn(k.key, k.owner, "deadlock: breaking the lock "+oldest.Name+" of "+oldest.Owner, found)
	err := k.l.sendRelease(ctx, Lease{Key: oldest.Key, Owner: oldest.Owner})
	if err == nil {
		err = p.graph.tellBroken(ctx, oldest)
	}
	if err != nil && !errors.Is(err, ErrLost) {
		k.config.warn(k.key, k.owner, "deadlock: the lock could not be broken, or its holder not be told", err)
	}
	if oldest.Owner == closing.owner {
		closing.l.heardBroken(closing.owner)
	}
	return nil
}
