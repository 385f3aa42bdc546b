package holdfast

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/group"
)

// Locker takes locks. It is safe for concurrent use by any number of goroutines;
// one for each client is enough. Make it with New or NewWithStore, end it with
// Close. It does not implement sync.Locker: a lock on a server can fail to be
// taken and can be lost, and methods without errors could not tell.
type Locker struct {
	store    safeStore
	resource any     // what the keys live on, to tell nested locks of one key
	config   *config // defaults; not changed

	group   group.Group
	notify  notifier
	settler settler
	waiters waiterPool
	base    context.Context // for work that no caller waits for
	cancel  context.CancelFunc

	closing chan struct{} // closed by Close
	closed  chan struct{} // closed when Close is through

	// mu guards what follows, and fields of Lock that say so. With it held nothing
	// is sent, no context of a user is ended, and no code of users runs.
	mu       sync.Mutex
	ended    bool // Close has begun
	closeErr error
	watch    watchdog
	queues   map[string]*queue // of keys or stores without queues of their own
	line     line
	names    []*Lock // of ReleaseHolder: holders' names that are in use here
}

// New returns a Locker on one Redis: a server, a Sentinel set, a Cluster or a
// Ring. It asks the server nothing; the first acquisition does. The client stays the caller's: Close does not close it, and it must
// outlive the Locker. The options are the defaults for all calls.
func New(client redis.UniversalClient, opts ...Option) (*Locker, error) {
	store, err := newRedisStore(client)
	if err != nil {
		return nil, err
	}
	return newLocker(store, client, opts)
}

// NewWithStore returns a Locker on any other foundation.
func NewWithStore(store Store, opts ...Option) (*Locker, error) {
	if store == nil {
		return nil, invalid("nil store")
	}
	return newLocker(store, store, opts)
}

func newLocker(store Store, resource any, opts []Option) (*Locker, error) {
	c := defaults()
	c.holder = defaultHolder()
	cfg, err := c.with(opts)
	if err != nil {
		return nil, err
	}
	if reflect.TypeOf(resource).Kind() != reflect.Pointer {
		resource = cfg // only pointers are surely comparable, and surely the same thing
	}
	l := &Locker{
		store: safeStore{store}, resource: resource, config: cfg,
		closing: make(chan struct{}), closed: make(chan struct{}),
		queues: make(map[string]*queue),
	}
	l.base, l.cancel = context.WithCancel(context.Background())
	if err := l.configure(); err != nil {
		l.cancel()
		return nil, err
	}
	l.watch.init()
	l.initLine()
	l.settler.l, l.settler.wake = l, make(chan struct{}, 1)
	return l, nil
}

// Lock is one lock, held or once held. It is safe for concurrent use. It comes
// from Acquire or TryAcquire and must be given back with Release; it is never
// locked again. The methods of a nil or zero Lock say that nothing is held.
type Lock struct {
	l      *Locker
	config *config
	key    string
	full   string // key on the server
	owner  string
	token  fencing.Token
	ctx    lockContext
	cancel context.CancelCauseFunc
	since  clock.Instant // when it was granted
	limit  clock.Instant // the cap on the hold
	root   *Lock         // whose grant this nested Lock stands on; nil: its own
	unhook func() bool   // of a nested Lock: it does not end with root any more

	// until is the end of validity. It only moves under l.mu, and forward only,
	// but for an Extend to a shorter lease; a moment that has passed stays.
	until atomic.Int64

	// What follows is guarded by l.mu.
	stage   stage
	suspect bool // an abandoned try of this owner may still run at the server
	ghost   bool // a late call may have left a place in the queue
	broken  bool // it was told that somebody has broken it
	nested  int  // Locks on this grant that were not released, but for this one
	parted  bool // Release was called, on this one of several
	ttl     time.Duration
	longest time.Duration // of all leases that were ever asked for
	ceiling time.Duration // a lease that an Extend of unknown fate may yet set; 0: none
	epoch   int           // counts Extends: renewals sent before one say nothing
	renewal renewal
	expiry  int // place in the watchdog's schedule; 0: none
	giving  giving
	setting chan struct{} // closed when the Extend under way is through; nil: none
}

// stage is where a Lock stands in its life. It only grows.
type stage uint8

const (
	asking stage = iota // Acquire is under way
	live                // the watchdog has it
	over                // its context has ended; the key is its own until Release or its TTL
	gone                // nobody wants the key: released, lost, or never granted
)

// Context returns the context to work under, a child of the one given to
// Acquire. It ends when ownership can no longer be trusted, and its cause says
// why: *LostError, ErrReleased, ErrClosed, or the cause of the parent. With
// WithoutRenewal it carries the end of validity as its deadline; Extend moves that,
// so make contexts with deadlines of their own after it, not before.
func (k *Lock) Context() context.Context {
	if k == nil || k.l == nil {
		return notHeldContext
	}
	return &k.ctx
}

// notHeldContext is the context of a Lock that never was.
var notHeldContext = func() context.Context {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(ErrNotHeld)
	return ctx
}()

// Err is nil only while the lock is valid now; else it is the cause of the
// context. It asks nobody: it compares with the local clock, so it is right even
// in a process that was stopped and goes on. Ask it before each write.
func (k *Lock) Err() error {
	if k == nil || k.l == nil {
		return ErrNotHeld
	}
	var err error
	if k.root != nil {
		err = k.root.Err()
	} else if clock.Now() >= k.validUntil() {
		err = k.l.expire(k)
	}
	if k.ctx.Err() != nil {
		return context.Cause(&k.ctx)
	}
	return err
}

// ValidUntil is the moment at which validity ends unless a renewal is confirmed
// before. It does not tell whether the lock is held: ask Err. It is the zero time
// for a Lock that never was.
func (k *Lock) ValidUntil() time.Time {
	if k == nil || k.l == nil {
		return time.Time{}
	}
	return k.validUntil().Wall()
}

func (k *Lock) validUntil() clock.Instant {
	if k.root != nil {
		return k.root.validUntil()
	}
	return clock.Instant(k.until.Load())
}

// Token returns the fencing token, 0 without WithFencing.
func (k *Lock) Token() fencing.Token {
	if k == nil {
		return 0
	}
	return k.token
}

// Key returns the key as given to Acquire, without the prefix.
func (k *Lock) Key() string {
	if k == nil {
		return ""
	}
	return k.key
}

// Owner returns the value of the key: the holder's name, "/", and what is unique
// to this acquisition.
func (k *Lock) Owner() string {
	if k == nil {
		return ""
	}
	return k.owner
}

// lease is what the store needs to know. Call it with l.mu held, or before the
// lock is live.
func (k *Lock) lease() Lease { return Lease{Key: k.full, Owner: k.owner, TTL: k.ttl} }

// newOwner returns a value that no other acquisition has: 122 random bits.
func newOwner(holder string) (string, error) {
	id, err := uuid.NewRandom()
	if err != nil {
		return "", fmt.Errorf("holdfast: no random numbers: %w", err)
	}
	var room [maxHolder + 1 + 36]byte
	b := append(append(room[:0], holder...), '/')
	for i, part := range [...][]byte{id[:4], id[4:6], id[6:8], id[8:10], id[10:]} {
		if i > 0 {
			b = append(b, '-')
		}
		b = hex.AppendEncode(b, part)
	}
	return string(b), nil
}

// lockContext is the context of a Lock. It wraps the standard library's
// cancellable context and adds the Lock itself to its values.
type lockContext struct {
	context.Context
	k     *Lock
	drawn context.Context // carries a token that was drawn after the grant; nil: none
}

type holdKey struct{}

// Value knows the lock, so that nested acquisitions see what their flow holds.
func (c *lockContext) Value(key any) any {
	if key == (holdKey{}) {
		return c.k
	}
	if c.drawn != nil {
		if v := c.drawn.Value(key); v != nil {
			return v
		}
	}
	return c.Context.Value(key)
}

// Deadline is the end of a fixed lease, or the parent's deadline before it.
func (c *lockContext) Deadline() (time.Time, bool) {
	deadline, ok := c.Context.Deadline()
	if c.k.config.noRenewal {
		if end := c.k.ValidUntil(); !ok || end.Before(deadline) {
			return end, true
		}
	}
	return deadline, ok
}

// heldBy returns the live lock of full on resource that ctx's flow holds, or nil.
func heldBy(ctx context.Context, resource any, full string) *Lock {
	for {
		k, _ := ctx.Value(holdKey{}).(*Lock)
		if k == nil {
			return nil
		}
		if k.full == full && k.l.resource == resource && k.ctx.Err() == nil {
			return k
		}
		ctx = k.ctx.Context
	}
}

// Do runs fn under the lock and releases it when fn returns or panics. It waits
// for the lock as Acquire does; if it does not get it, fn is not run. fn gets the
// lock's context, and Do waits for it also when that has ended. The error is fn's,
// joined with that of the release.
func (l *Locker) Do(ctx context.Context, key string, fn func(ctx context.Context) error, opts ...Option) (err error) {
	if fn == nil {
		return invalid("nil function")
	}
	k, err := l.Acquire(ctx, key, opts...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, k.Release()) }()
	return fn(k.Context())
}

// closeLimit bounds Close; closers is how many releases it sends at a time.
const (
	closeLimit = 5 * time.Second
	closers    = 16
)

// Close releases all that is held, ends the contexts with ErrClosed and leaves no
// goroutine behind, within 5 seconds (a request that hangs in the client ends by
// the client's own timeouts; log handlers and observers take their own time). Calls that wait return ErrClosed. It returns what
// releases failed with. A lock whose parent context had ended keeps its key, for
// those who clean up under it; Release works after Close too. Further calls do
// nothing and return the same.
func (l *Locker) Close() error {
	l.mu.Lock()
	first := !l.ended
	l.ended = true
	locks := l.watch.all()
	l.mu.Unlock()
	if !first {
		<-l.closed
		return l.closeErr
	}
	start := clock.Now()
	close(l.closing)
	l.waiters.interrupt()
	l.cancel() // renewals under way serve nobody now
	// A lock whose parent context has ended is not held any more: its key stays
	// for those who still clean up under it.
	locks = slices.DeleteFunc(locks, func(k *Lock) bool { return !l.end(k, ErrClosed) })
	l.closeErr = l.releaseAll(locks, start.Add(closeLimit))
	l.rouse() // the watchdog has nothing left, and ends
	if l.line.store != nil {
		l.line.store.hush()
	}
	l.settler.finish(start.Add(closeLimit))
	l.group.Wait(closeLimit - clock.Now().Sub(start))
	l.drain(max(closeLimit-clock.Now().Sub(start), time.Millisecond)) // it must hear of the end, also when all time is used up
	close(l.closed)
	return l.closeErr
}

// releaseAll releases what is held, as far as it comes until end.
func (l *Locker) releaseAll(locks []*Lock, end clock.Instant) error {
	var (
		wg   sync.WaitGroup
		next atomic.Int64
		errs = make([]error, len(locks))
	)
	var work func()
	work = func() {
		through := false
		defer func() {
			if !through { // an observer has ended this goroutine (runtime.Goexit)
				wg.Go(work)
			}
		}()
		for i := next.Add(1) - 1; int(i) < len(locks); i = next.Add(1) - 1 {
			errs[i] = unavailable("release", locks[i].key, &noAnswerError{closeLimit})
			if clock.Now() >= end {
				continue
			}
			err := locks[i].release(end, true)
			if errors.Is(err, ErrNotHeld) && !errors.Is(err, ErrLost) {
				err = nil // it was released at the same moment
			}
			if errors.Is(err, ErrLost) && l.undrawn(locks[i]) {
				err = nil // its Acquire has failed, and given it back, at the same moment
			}
			errs[i] = err
		}
		through = true
	}
	for range min(closers, len(locks)) {
		wg.Go(work) // ended by the end of the list: each release is bounded
	}
	wg.Wait()
	return errors.Join(errs...)
}
