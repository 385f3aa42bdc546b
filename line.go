package holdfast

import (
	"container/heap"
	"context"
	"errors"
	"hash/maphash"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/clock"
)

const (
	// maxClaim is how long a hand-over keeps the lock for a waiter that may be dead.
	maxClaim = 2 * time.Second

	// leastWindow is how long a waiter keeps its place without a call, at the least,
	// however short its lease is: it calls three times in that time.
	leastWindow = 300 * time.Millisecond

	leastCall  = 5 * time.Millisecond // between calls that expect the lease to end
	crowdLasts = time.Second

	maxLineCalls = 100 // waiters that share a script call

	// maxLineFlights is how many calls of a waiter may be under way: enough for a place
	// to be kept while a connection hangs until the client gives it up. After
	// attemptLimit there is one more each time.
	maxLineFlights = 6
)

// lineStore is what a Store offers that keeps those who wait for a key in order,
// over all processes, and hands the lock on when it is released.
type lineStore interface {
	// hasLine reports whether key can have a queue.
	hasLine(key string) bool
	// wait makes one call of each of several waiters.
	wait(ctx context.Context, calls []lineCall) []lineAnswer
	// handOn is Release; it also tells whom it gave the lock to, if that may be a
	// waiter of this Locker, who was then not told by a message.
	handOn(ctx context.Context, l Lease) (*handed, error)

	// listen makes messages of grants come to hear, for all keys that are waited
	// for; ready is told when those of a channel begin to come. start runs a function
	// on a goroutine that Close waits for.
	listen(hear func(string), ready func(channel string), start func(func()))
	// await and enough frame the wait of one waiter for key.
	await(key string)
	enough(key string)
	// missed says that a grant was found whose message should have come before.
	missed()
	// sweep ends what has not been listened to for a while, and reports whether
	// anything is left.
	sweep(now clock.Instant) bool
	// hush ends all listening, for good.
	hush()
}

// lineCall is one call of a waiter: it asks for the lock, or keeps the place.
type lineCall struct {
	Lease
	n       int           // counts the calls of this owner
	claim   time.Duration // the lease of a hand-over
	window  time.Duration // how long the place is kept
	most    int           // waiters, when this one is new; 0: any number
	fencing bool
	floored bool   // with fencing: the token has a floor
	holds   string // what the flow holds, see holdsOf
}

// lineAnswer is the answer to one call. One of grant, held and err is not nil.
type lineAnswer struct {
	grant    *Grant
	held     *HeldError
	before   int    // waiters, if held
	full     bool   // held, and no place in the queue
	channel  string // on which a grant would be heard; "": none
	repeated bool   // a copy of the call may still run
	known    bool   // err is an answer: no copy of the call will run
	err      error
}

// handed says whom a release gave the lock to.
type handed struct {
	owner string
	n     int // the latest of its calls that had run
	token fencing.Token
}

// line is the part of a Locker that waits in queues at the server. It is guarded
// by Locker.mu.
//
// Invariant: a spot in spots is in watchdog.beats, and the other way round. It
// leaves both before its verdict is sent, and no call of it starts afterwards.
type line struct {
	store  lineStore        // nil: the store keeps no queues
	spots  map[string]*spot // by owner
	seed   maphash.Seed
	crowds [32]crowd
}

// crowd is a key that was wanted by several a moment ago.
type crowd struct {
	key   string
	until clock.Instant
}

func (l *Locker) initLine() {
	l.line.seed = maphash.MakeSeed()
	l.line.spots = make(map[string]*spot)
	if s, ok := l.store.Store.(lineStore); ok {
		l.line.store = safeLine{s}
		s.listen(l.hear, l.tuned, l.group.Start)
	}
}

func (n *line) crowd(key string) *crowd {
	return &n.crowds[maphash.String(n.seed, key)%uint64(len(n.crowds))]
}

// crowded reports whether others are likely to want key as well: then asking for a
// free lock first is a command for nothing.
func (n *line) crowded(key string) bool {
	c := n.crowd(key)
	return c.key == key && clock.Early() < c.until
}

// crowdIs notes that several want key.
func (n *line) crowdIs(key string) {
	*n.crowd(key) = crowd{key, clock.Now().Add(crowdLasts)}
}

func (n *line) sweep(now clock.Instant) bool { return n.store != nil && n.store.sweep(now) }

// spot is the place of one acquisition in the queue of its key.
type spot struct {
	k     *Lock
	holds string       // what the flow holds, see holdsOf
	got   chan verdict // one element

	// What follows is guarded by Locker.mu.
	open    bool // it waits: no verdict yet, and not given up
	at      clock.Instant
	place   int              // in watchdog.beats
	calls   int              // made so far
	flights int              // calls under way
	fails   int              // calls without an answer since the last one with
	exact   bool             // at is the end of the holder's lease, not to be anticipated
	unknown bool             // the fate of a call is not known
	sent    [8]clock.Instant // of the latest calls, by number
	channel string

	news
}

// verdict ends a stay in the queue.
type verdict struct {
	grant Grant
	sent  clock.Instant // of the call that the lease counts from
	weak  bool          // the lease is to be confirmed before the work may start
	full  bool          // the queue is full
	err   error
}

func (s *spot) key() string { return s.k.full }

// claim is the lease of a hand-over to s.
func (s *spot) claim() time.Duration { return min(s.k.config.ttl, maxClaim) }

// window is how long the place is kept without a call. It should not be above the
// claim, so that of waiters which died together one costs the others time; for very
// short leases it is: they then cost the window, one claim and one call together, at
// most.
func (s *spot) window() time.Duration { return max(s.claim(), leastWindow) }

// enterLine makes the first call of a stay in the queue.
func (l *Locker) enterLine(s *spot) {
	l.mu.Lock()
	now := clock.Now()
	s.open, s.at, s.exact, s.fails = true, now.Add(s.window()/3), false, 0
	l.line.spots[s.k.owner] = s
	heap.Push(&l.watch.beats, s)
	l.lookBy(s.at)
	l.mu.Unlock()
	l.group.Start(func() { // ends with the store's answer
		ctx, cancel := context.WithTimeout(l.base, attemptLimit)
		defer cancel()
		l.call(ctx, []*spot{s})
	})
}

// close takes s out of the queue, as far as this process goes; l.mu is held.
func (l *Locker) closeSpot(s *spot) {
	if s.open {
		s.open = false
		delete(l.line.spots, s.k.owner)
		l.watch.beats.remove(s)
	}
}

// decide gives an open spot its verdict; l.mu is held.
func (l *Locker) decide(s *spot, v verdict) {
	l.closeSpot(s)
	s.got <- v
}

// callSoon makes the next call of an open spot due now; l.mu is held.
func (l *Locker) callSoon(s *spot, now clock.Instant) {
	s.at = now
	l.watch.beats.moved(s)
	l.rouse()
}

// granted gives an open spot the lock; l.mu is held. A lease shorter than what was
// asked for is enough to start with, unless too little of it is left, or nothing
// would make it longer.
func (l *Locker) granted(s *spot, g Grant, sent, now clock.Instant) {
	v := verdict{grant: g, sent: sent}
	if g.Left > 0 {
		until := sent.Add(s.k.config.validity(g.Left))
		v.weak = s.k.config.noRenewal || until.Sub(now) < s.claim()/2
	}
	v.weak = v.weak || s.k.config.replicas > 0
	l.decide(s, v)
}

// told takes in a message: the lock was given to owner after its call n had run.
//
// Invariant: a waiter's belief ends before the key does. The key was set for the
// claim after call n had reached the server, so it lives at least the claim from
// when that call was sent. A message that is read late, twice, or after another
// grant to the same owner, so yields a validity that has ended, and is not
// believed.
func (l *Locker) told(owner string, n int, token fencing.Token) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.line.spots[owner]
	if s == nil {
		return
	}
	now := clock.Now()
	sent, known := s.sentAt(n)
	claim := s.claim()
	if !known || now >= sent.Add(s.k.config.validity(claim)) ||
		s.k.config.fencing && token <= 0 {
		l.callSoon(s, now) // the server knows
		return
	}
	l.granted(s, Grant{Token: token, Left: claim}, sent, now)
}

// latest returns when the latest call was sent.
func (s *spot) latest() clock.Instant { return s.sent[s.calls%len(s.sent)] }

// sentAt returns when call n was sent.
func (s *spot) sentAt(n int) (clock.Instant, bool) {
	if n <= 0 || n > s.calls || n <= s.calls-len(s.sent) {
		return 0, false
	}
	return s.sent[n%len(s.sent)], true
}

// brokenCall is the number of the call in a message that says that a lock was broken.
const brokenCall = -1

// hear takes in a message of the store, which may come from anybody.
func (l *Locker) hear(text string) {
	h, ok := parseHanded(text)
	switch {
	case !ok:
	case h.n == brokenCall:
		l.heardBroken(h.owner)
	default:
		l.told(h.owner, h.n, h.token)
	}
}

// heardBroken is told that a lock of this Locker was broken. It asks the store.
func (l *Locker) heardBroken(owner string) {
	l.mu.Lock()
	i := slices.IndexFunc(l.watch.expiries.items, func(k *Lock) bool { return k.owner == owner })
	if i < 0 {
		l.mu.Unlock()
		return
	}
	k := l.watch.expiries.items[i]
	k.broken = true
	lease := k.lease()
	lease.TTL = time.Millisecond // it only asks: a renewal never shortens
	l.mu.Unlock()
	l.group.Start(func() { // ends with attemptLimit, or the client's own timeouts
		ctx, cancel := context.WithTimeout(l.base, attemptLimit)
		defer cancel()
		var lost *LostError
		if !errors.As(l.store.Renew(ctx, []Lease{lease})[0], &lost) {
			return
		}
		l.mu.Lock()
		was := l.drop(k, gone)
		l.mu.Unlock()
		if was && k.ctx.Err() == nil {
			l.lose(k, &LostError{Key: k.key, Reason: LostBroken})
		}
	})
}

// tuned is told that messages on a channel come from now on: one may have been
// missed before, so its waiters ask.
func (l *Locker) tuned(channel string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := clock.Now()
	for _, s := range l.line.spots {
		if s.channel == channel || s.channel == "" {
			l.callSoon(s, now)
		}
	}
}

// callAll makes all who wait for key ask now: what they should have been told may
// have been lost.
func (l *Locker) callAll(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := clock.Now()
	for _, s := range l.line.spots {
		if s.k.full == key {
			l.callSoon(s, now)
		}
	}
}
