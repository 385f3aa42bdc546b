package holdfast

import (
	"container/heap"
	"errors"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/clock"
)

const (
	settleCalls = 4               // requests under way
	settleLimit = 2 * time.Second // one request
	firstSettle = 20 * time.Millisecond
	mostSettle  = time.Second

	// settleAgain is when a key is looked at once more, and then after twice the
	// time each, settleLooks times in all. An abandoned command can still run after
	// its clean-up: a server that was stopped and goes on may execute what a closed
	// connection had sent before what came on another one.
	settleAgain = time.Second
	settleLooks = 3
)

// settler compare-and-deletes the keys of acquisitions whose fate is unknown. One
// goroutine works off a list, with a few requests under way at a time, however
// long the list is; it lives while there are entries. An entry leaves the list
// after a definite answer and a few further looks, or when every lease that it can
// have started has ended.
type settler struct {
	l    *Locker
	wake chan struct{} // one element

	mu sync.Mutex
	// What follows is guarded by mu.
	open     unsettledHeap
	flying   int // requests under way
	running  bool
	finished bool          // Close has begun: entries get one last try
	last     clock.Instant // the end of that
}

// unsettled is one entry.
type unsettled struct {
	lease Lease
	k     *Lock // whose Release got no answer; nil: nobody will ask
	late  *Lock // which is lost, and may have been given back by a late answer
	due   clock.Instant
	end   clock.Instant // give up: the lease has ended by itself
	tries int
	again bool // this is a further look
	looks int
	once  bool // every try of the acquisition was answered: no further look is needed

	unsure bool // a try went out whose answer never came
}

// add puts the key of k on the list. again starts with the second look: the key
// has just been deleted, but an abandoned try may still run.
func (s *settler) add(k *Lock, again bool) {
	now := clock.Now()
	u := newUnsettled(k, now)
	u.late = k
	if u.again = again; again {
		u.due = now.Add(settleAgain)
	}
	s.put(u)
}

// addOwner puts a lock on the list that an attempt has taken under a value of its own,
// too late. asked is what the attempt has asked for: its Lock may be held by now, with the
// value of a later one.
func (s *settler) addOwner(asked Lease, owner string) {
	now := clock.Now()
	s.put(&unsettled{
		lease: Lease{Key: asked.Key, Owner: owner}, due: now,
		end: now.Add(asked.TTL).Add(2 * settleAgain), once: true,
	})
}

// addLeft puts the place that k has in a queue on the list: one that was given up.
func (s *settler) addLeft(k *Lock) {
	u := newUnsettled(k, clock.Now())
	u.once = true
	s.put(u)
}

// addReleased puts the key of k on the list because its Release got no answer. What
// comes of it is kept for a Release that is called again.
func (s *settler) addReleased(k *Lock) {
	now := clock.Now()
	u := newUnsettled(k, now)
	u.k, u.tries, u.due = k, 1, now.Add(backoff(1, firstSettle, mostSettle))
	s.put(u)
}

func newUnsettled(k *Lock, now clock.Instant) *unsettled {
	return &unsettled{
		lease: Lease{Key: k.full, Owner: k.owner}, due: now,
		end: now.Add(k.longest).Add(2 * settleAgain),
	}
}

func (s *settler) put(u *unsettled) {
	s.mu.Lock()
	defer s.mu.Unlock()
	heap.Push(&s.open, u)
	if s.running {
		s.rouse()
		return
	}
	s.running = true
	s.l.group.Start(s.work) // ends when nothing is open and nothing under way
}

// finish lets every entry have one last try now, when Close has begun. A further
// look keeps a pause: it is there to come later.
func (s *settler) finish(end clock.Instant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.finished, s.last = true, end
	now := clock.Now()
	for _, u := range s.open {
		if u.again {
			u.due = min(u.due, now.Add(settleAgain))
		} else {
			u.due = min(u.due, now)
		}
	}
	heap.Init(&s.open)
	s.rouse()
}

func (s *settler) rouse() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *settler) work() {
	timer := time.NewTimer(mostSettle)
	defer timer.Stop()
	for {
		sleep, more := s.send()
		if !more {
			return
		}
		timer.Reset(sleep)
		select {
		case <-timer.C:
		case <-s.wake:
			timer.Stop()
		}
	}
}

// send starts the tries that are due, and returns how long none will be.
func (s *settler) send() (sleep time.Duration, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := clock.Now()
	for len(s.open) > 0 && s.flying < settleCalls && s.open[0].due <= now {
		u := heap.Pop(&s.open).(*unsettled)
		if u.end <= now || s.finished && s.last <= now {
			continue // every lease that it can have started has ended, or nobody waits
		}
		s.flying++
		s.l.group.Start(func() { s.try(u) }) // ends within settleLimit
	}
	if len(s.open) == 0 && s.flying == 0 {
		s.running = false
		return 0, false
	}
	if len(s.open) == 0 || s.flying == settleCalls {
		return mostSettle, true // an answer rouses us
	}
	return s.open[0].due.Sub(now), true
}

// try makes one try, and puts the entry back unless it is settled.
func (s *settler) try(u *unsettled) {
	c := &call{Context: s.l.base, l: s.l, op: releaseOp}
	c.request.Lease = u.lease
	if u.k != nil {
		c.request.Keep = u.k.keep()
	}
	err := c.run(nil, false, settleLimit)
	var lost *LostError
	definite := err == nil || errors.As(err, &lost)
	if definite && u.k != nil && !u.again {
		s.l.settled(u.k, lost, u.unsure)
	}
	if err == nil && u.late != nil {
		s.l.cleaned(u.late)
	}
	now := clock.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.rouse()
	s.flying--
	switch {
	case definite && u.once, definite && u.again && (s.finished || u.looks == settleLooks):
		return
	case definite:
		u.due = now.Add(settleAgain << u.looks)
		u.again, u.looks = true, u.looks+1
	case errors.Is(err, redis.ErrClosed) || s.finished:
		return // it is left to its TTL
	default:
		u.unsure = u.unsure || mayHaveRun(err)
		u.tries++
		u.due = now.Add(backoff(u.tries, firstSettle, mostSettle))
	}
	if u.due > u.end {
		return // every lease that it can have started will have ended
	}
	heap.Push(&s.open, u)
}

// unsettledHeap is a heap of entries by the moment they are due.
type unsettledHeap []*unsettled

func (h unsettledHeap) Len() int           { return len(h) }
func (h unsettledHeap) Less(i, j int) bool { return h[i].due < h[j].due }
func (h unsettledHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *unsettledHeap) Push(x any)        { *h = append(*h, x.(*unsettled)) }

func (h *unsettledHeap) Pop() any {
	last := len(*h) - 1
	u := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return u
}
