package holdfast

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/url"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/fencing"
)

const (
	mostHolds      = 1 << 10 // bytes of what a waiter tells of
	inspectLimit   = 5 * time.Second
	holdsSeparator = ","
)

// LockInfo is what Inspect and List tell of a lock, as it was when they asked.
type LockInfo struct {
	Key    string        // without the prefix of the Locker
	Owner  string        // the value of the key; "": the lock is free
	Holder string        // the holder's name in that
	TTL    time.Duration // what is left of the lease; negative: no expiry, or the lock is free
	Token  fencing.Token // the latest that the counter beside the key has given; 0: none. Not in List

	// What a Locker with WithInspect or WithLabels tells; not in List.
	Since  time.Time         // since when it is held, by the holder's clock; zero: not known
	Host   string            // of the holder
	PID    int               // of its process
	Labels map[string]string // of WithLabels

	// Waiters are those who wait, the next first. Not in List.
	Waiters []WaiterInfo
}

// Free reports whether nobody holds the lock.
func (i LockInfo) Free() bool { return i.Owner == "" }

// WaiterInfo tells of one who waits for a lock.
type WaiterInfo struct {
	Owner  string        // what the value of the key will be
	Holder string        // the name in that
	Waits  time.Duration // for how long, by the server's clock
	Holds  []string      // the locks that its flow holds meanwhile, as on the server; a long list is cut
}

// inspector is what a Store offers whose locks can be looked at.
type inspector interface {
	inspect(ctx context.Context, key string) (LockInfo, error)
	// list calls page for some held locks at a time, until that says that it is enough.
	list(ctx context.Context, prefix, pattern string, page func([]LockInfo) bool) error
	// tellAll tells all Lockers that listen that the lock of owner was broken.
	tellAll(ctx context.Context, owner string)
}

func (l *Locker) inspector(what string) (inspector, error) {
	s, ok := l.store.Store.(inspector)
	if !ok {
		return nil, invalid("%s: this store cannot look at locks", what)
	}
	return s, nil
}

// Inspect tells who holds the lock of key and who waits for it, on one Redis. It changes
// nothing. It comes back within 5 seconds (or with the client's own timeouts), or when ctx ends.
// Errors: ErrInvalid, also for other stores; ErrUnavailable.
func (l *Locker) Inspect(ctx context.Context, key string) (LockInfo, error) {
	s, err := l.inspector("Inspect")
	if err != nil {
		return LockInfo{}, err
	}
	full, err := l.operated(ctx, key)
	if err != nil {
		return LockInfo{}, err
	}
	limited, cancel := context.WithTimeout(ctx, inspectLimit)
	defer cancel()
	var info LockInfo
	if panicked := contain(func() { info, err = s.inspect(limited, full) }); panicked != nil {
		err = panicked
	}
	if err != nil {
		return LockInfo{}, withContext(ctx, unavailable("inspect", key, err))
	}
	info.Key = key
	return info, nil
}

// operated checks the arguments of a call about a lock that need not be ours.
func (l *Locker) operated(ctx context.Context, key string) (full string, err error) {
	if ctx == nil {
		return "", invalid("nil context")
	}
	return l.config.fullKey(key)
}

// List iterates over the locks that are held and whose keys, without the prefix of the Locker,
// match a pattern of Redis ("order:*", see its command SCAN). It asks each master, by SCAN, a
// page at a time, and changes nothing. Values that are not those of a Locker are left out.
// Locks that are taken or released meanwhile may be in it or not, and one may come twice.
//
//	for info, err := range locker.List(ctx, "order:*") {
//
// An error is the last that it yields: ErrInvalid for an empty pattern and for other stores than
// one Redis, else ErrUnavailable.
func (l *Locker) List(ctx context.Context, pattern string) iter.Seq2[LockInfo, error] {
	return func(yield func(LockInfo, error) bool) {
		s, err := l.inspector("List")
		switch {
		case err != nil:
		case ctx == nil:
			err = invalid("nil context")
		case pattern == "":
			err = invalid("List: empty pattern")
		}
		if err != nil {
			yield(LockInfo{}, err)
			return
		}
		stopped := false
		err = s.list(ctx, l.config.prefix, pattern, func(page []LockInfo) bool {
			for _, info := range page {
				if stopped = !yield(info, nil); stopped {
					return false
				}
			}
			return true
		})
		if err != nil && !stopped {
			yield(LockInfo{}, withContext(ctx, unavailable("list", pattern, err)))
		}
	}
}

// Break takes the lock of key away from owner, the whole value that Inspect shows, and gives it
// to the first who waits. It is for an operator who knows that the holder does not need it any
// more, or must not have it. The holder's context ends with ErrLost, Reason LostBroken: at once
// if its Locker waits for any lock, else at its next renewal. What it still writes until then
// only a fencing token can stop.
//
// Errors: ErrNotHeld if the lock is not that owner's, which is also the answer when it was broken
// by a call whose answer was lost; ErrInvalid, also for other stores than one Redis;
// ErrUnavailable.
func (l *Locker) Break(ctx context.Context, key, owner string) error {
	s, err := l.inspector("Break")
	if err != nil {
		return err
	}
	full, err := l.operated(ctx, key)
	if err != nil {
		return err
	}
	if owner == "" {
		return invalid("Break: empty owner")
	}
	limited, cancel := context.WithTimeout(ctx, inspectLimit)
	defer cancel()
	err = l.sendRelease(limited, Lease{Key: full, Owner: owner})
	var lost *LostError
	switch {
	case errors.As(err, &lost):
		return fmt.Errorf("holdfast: break %q: it is not held by %q: %w", key, owner, ErrNotHeld)
	case err != nil:
		return withContext(ctx, unavailable("break", key, err))
	}
	l.mu.Lock()
	l.pokeLocked(full)
	l.mu.Unlock()
	l.heardBroken(owner) // it may be ours
	_ = contain(func() { s.tellAll(limited, owner) })
	return nil
}

// holdsOf is what a waiter tells of the locks that its flow holds: ":" and their names,
// escaped.
func holdsOf(held []*Lock) string {
	var b strings.Builder
	for i, k := range held {
		name := url.QueryEscape(k.full)
		if b.Len()+len(name) > mostHolds {
			break
		}
		b.WriteString([]string{":", holdsSeparator}[min(i, 1)])
		b.WriteString(name)
	}
	return b.String()
}

// parseHolds reads that.
func parseHolds(text string) (names []string) {
	for name := range strings.SplitSeq(strings.TrimPrefix(text, ":"), holdsSeparator) {
		if plain, err := url.QueryUnescape(name); err == nil && plain != "" {
			names = append(names, plain)
		}
	}
	return names
}
