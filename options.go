package holdfast

import (
	"crypto/rand"
	"encoding/hex"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/keyspace"
)

const (
	// Unlimited, given to WithMaxHold, lifts the cap on the hold.
	Unlimited time.Duration = 1<<63 - 1

	minTTL     = 10 * time.Millisecond
	maxTTL     = 10 * 365 * 24 * time.Hour // far below what Redis takes, and free of overflow
	maxKey     = 64 << 10
	maxHolder  = 128
	minRenewal = time.Millisecond

	defaultTTL     = 30 * time.Second
	defaultMaxHold = 10 * time.Minute
)

// Option changes a setting. Those given to New are the defaults of the Locker;
// those given to a call override them for that call; all of them may be. An Option
// may be used any number of times and by any number of goroutines.
type Option interface{ apply(*config) error }

type optionFunc func(*config) error

func (f optionFunc) apply(c *config) error { return f(c) }

// config holds the settings of one acquisition. It is not changed once it has
// been resolved, so that many locks share the Locker's.
type config struct {
	ttl          time.Duration
	wait         time.Duration // negative: until the context ends
	renewEvery   time.Duration // 0: a third of the TTL
	noRenewal    bool
	maxHold      time.Duration // 0: the default
	margin       time.Duration // negative: a tenth of the TTL
	driftShare   float64       // negative: one hundredth of the TTL
	driftPlus    time.Duration
	holder       string
	prefix       string
	fencing      bool           // the server draws a token with the grant
	floored      bool           // that is no lower than its clock
	source       fencing.Source // draws it after the grant; nil: none
	maxWaiters   int            // 0: any number
	minHold      time.Duration  // 0: none
	deadlocks    time.Duration  // when a nested wait is looked at; 0: the default
	breaks       bool           // a deadlock is ended by breaking a lock
	reentrant    bool           // a flow may take what it holds
	inspect      bool           // more is told of a lock
	labels       map[string]string
	about        string // the text of that
	replicas     int
	replicaLimit time.Duration
	logger       *slog.Logger // nil: slog.Default()
	observer     Observer
	forStore     []any // see StoreOption

	// What the list being applied has named, to find contradictions in it.
	namedRenewEvery, namedNoRenewal bool
}

// WithTTL sets the length of the lease, 30 s by default, at least 10 ms. If the
// holder dies its lock is free after that time; a living holder renews. It is
// rounded up to whole milliseconds on the server.
func WithTTL(d time.Duration) Option {
	return optionFunc(func(c *config) error {
		if err := checkTTL(d); err != nil {
			return err
		}
		c.ttl = d
		return nil
	})
}

// WithWait limits how long Acquire waits; 0 means one attempt, as TryAcquire makes
// it. Without it the wait ends with the context alone. Unlike a deadline on the
// context it does not shorten the hold. It bounds the attempts too: with a server
// that needs longer than d for an answer, Acquire ends with ErrUnavailable.
func WithWait(d time.Duration) Option {
	return optionFunc(func(c *config) error {
		if d < 0 {
			return invalid("WithWait(%v): must not be negative", d)
		}
		c.wait = d
		return nil
	})
}

// WithRenewEvery sets the time between renewals, a third of the TTL by default.
// It must be below the validity, which is TTL - drift - margin (see WithDrift).
func WithRenewEvery(d time.Duration) Option {
	return optionFunc(func(c *config) error {
		if d < minRenewal {
			return invalid("WithRenewEvery(%v): must be at least %v", d, minRenewal)
		}
		c.renewEvery, c.noRenewal, c.namedRenewEvery = d, false, true
		return nil
	})
}

// WithoutRenewal makes a fixed lease: nothing is renewed, and the context of the
// lock carries the end of its validity as its deadline.
func WithoutRenewal() Option {
	return optionFunc(func(c *config) error {
		c.noRenewal, c.namedNoRenewal = true, true
		return nil
	})
}

// WithMaxHold caps the total hold, 10 minutes by default (or the TTL, if that is
// longer): a stuck holder that still renews would keep everybody out for ever.
// At the cap the context ends with ErrMaxHold and nothing is renewed any more; the
// key stays until Release or the end of its TTL. Unlimited lifts the cap.
func WithMaxHold(d time.Duration) Option {
	return optionFunc(func(c *config) error {
		if d <= 0 {
			return invalid("WithMaxHold(%v): must be positive; Unlimited lifts the cap", d)
		}
		c.maxHold = d
		return nil
	})
}

// WithMargin sets the time between the end of validity and the earliest moment
// at which the key can expire, a tenth of the TTL by default: the time that the
// holder has to stop.
func WithMargin(d time.Duration) Option {
	return optionFunc(func(c *config) error {
		if d < 0 {
			return invalid("WithMargin(%v): must not be negative", d)
		}
		c.margin = d
		return nil
	})
}

// WithDrift sets what clocks may disagree over a lease: share of its length (at least 0
// and below 0.5; 0.01 by default), for their rates, and plus (2 ms by default). Validity
// is shorter by that.
func WithDrift(share float64, plus time.Duration) Option {
	return optionFunc(func(c *config) error {
		if !(share >= 0 && share < 0.5) || plus < 0 || plus > maxTTL {
			return invalid("WithDrift(%v, %v): the share must be at least 0 and below 0.5, the time at least 0 and at most %v",
				share, plus, maxTTL)
		}
		c.driftShare, c.driftPlus = share, plus
		return nil
	})
}

// WithHolder sets the name that others see while this Locker holds a lock; by
// default host name, process id and four random hex digits. Printable characters,
// no "/", at most 128 bytes of UTF-8.
func WithHolder(name string) Option {
	return optionFunc(func(c *config) error {
		if err := checkHolder(name); err != nil {
			return err
		}
		c.holder = name
		return nil
	})
}

// WithPrefix puts prefix before every key, to keep locks apart from data.
func WithPrefix(prefix string) Option {
	return optionFunc(func(c *config) error {
		c.prefix = prefix
		return nil
	})
}

// WithMaxWaiters limits how many may wait for a key, over all processes, to n, at least
// 1: Acquire is refused at once with a *HeldError whose Full is set when n others wait
// already. Each caller applies its own n. (A key that has no queue, see Acquire, counts the waiters of this Locker.)
func WithMaxWaiters(n int) Option {
	return optionFunc(func(c *config) error {
		if n < 1 {
			return invalid("WithMaxWaiters(%d): must be at least 1", n)
		}
		c.maxWaiters = n
		return nil
	})
}

// WithMinHold keeps the key for at least d from the grant, even after Release, at most
// 10 years: for jobs that run once a tick on many hosts, some of which are late. Take
// those with TryAcquire, and let d be longer than the lateness and shorter than the
// tick. Release returns at once all the same, and the lock is over for its holder;
// whoever waits gets it when d has passed. A holder that dies keeps the key for its
// TTL only.
func WithMinHold(d time.Duration) Option {
	return optionFunc(func(c *config) error {
		if d <= 0 || d > maxTTL {
			return invalid("WithMinHold(%v): must be positive and at most %v", d, maxTTL)
		}
		c.minHold = d
		return nil
	})
}

// WithReplicas grants a lock only after n replicas have acknowledged it within
// timeout (Redis command WAIT); otherwise it is given back and the call fails
// with a *ReplicaError. A lock that no replica has seen is gone after a failover.
// An acknowledged one can still be lost, if a replica without it is promoted.
// n = 0 switches it off.
func WithReplicas(n int, timeout time.Duration) Option {
	return optionFunc(func(c *config) error {
		if n < 0 {
			return invalid("WithReplicas(%d, %v): the number must not be negative", n, timeout)
		}
		if n > 0 && timeout < time.Millisecond {
			return invalid("WithReplicas(%d, %v): the timeout must be at least 1ms", n, timeout)
		}
		c.replicas, c.replicaLimit = n, timeout
		return nil
	})
}

// WithLogger sets where rare warnings go, slog.Default() by default: a lock
// that was lost, and a Release that found the lock no longer its own.
func WithLogger(logger *slog.Logger) Option {
	return optionFunc(func(c *config) error {
		if logger == nil {
			return invalid("WithLogger: nil logger")
		}
		c.logger = logger
		return nil
	})
}

// WithObserver sets functions that are told what happens. See Observer.
func WithObserver(o Observer) Option {
	return optionFunc(func(c *config) error {
		c.observer = o
		return nil
	})
}

// defaults returns the settings of a Locker without options.
func defaults() config {
	return config{ttl: defaultTTL, wait: -1, margin: -1, driftShare: -1, driftPlus: driftPlus}
}

// with returns c with opts applied and checked.
func (c *config) with(opts []Option) (*config, error) {
	if len(opts) == 0 {
		return c, nil
	}
	n := *c
	n.namedRenewEvery, n.namedNoRenewal = false, false
	for _, o := range opts {
		if o == nil {
			return nil, invalid("nil option")
		}
		if err := o.apply(&n); err != nil {
			return nil, err
		}
	}
	if n.namedRenewEvery && n.namedNoRenewal {
		return nil, invalid("WithRenewEvery and WithoutRenewal contradict each other")
	}
	return &n, n.check(n.ttl)
}

// check refuses settings that leave no validity with a lease of length ttl.
func (c *config) check(ttl time.Duration) error {
	left := c.validity(ttl)
	if left <= 0 {
		return invalid("WithMargin(%v) and a drift of %v leave no validity of WithTTL(%v)", c.marginOf(ttl), c.driftOf(ttl), ttl)
	}
	if every := c.renewalOf(ttl); !c.noRenewal && every >= left {
		return invalid("WithRenewEvery(%v) is not below the validity %v of WithTTL(%v)", every, left, ttl)
	}
	if c.replicas > 0 && c.replicaLimit >= left {
		return invalid("the timeout %v of WithReplicas is not below the validity %v of WithTTL(%v)",
			c.replicaLimit, left, ttl)
	}
	return nil
}

func (c *config) marginOf(ttl time.Duration) time.Duration {
	if c.margin >= 0 {
		return c.margin
	}
	return ttl / 10
}

func (c *config) renewalOf(ttl time.Duration) time.Duration {
	if c.renewEvery > 0 {
		return c.renewEvery
	}
	return ttl / 3
}

func (c *config) maxHoldOf(ttl time.Duration) time.Duration {
	if c.maxHold > 0 {
		return c.maxHold
	}
	return max(defaultMaxHold, ttl)
}

// fullKey returns the key on the server.
func (c *config) fullKey(key string) (string, error) {
	if key == "" {
		return "", invalid("empty key")
	}
	if len(c.prefix)+len(key) > maxKey {
		return "", invalid("key of %d bytes: at most %d with its prefix", len(c.prefix)+len(key), maxKey)
	}
	full := c.prefix + key
	if c.fencing {
		if _, ok := keyspace.Companion(full, "fence"); !ok {
			return "", invalid("key %q: its braces leave no room for a companion key in its cluster slot", full)
		}
	}
	return full, nil
}

func checkTTL(d time.Duration) error {
	if d < minTTL {
		return invalid("TTL %v: must be at least %v", d, minTTL)
	}
	if d > maxTTL {
		return invalid("TTL %v: must be at most %v", d, maxTTL)
	}
	return nil
}

func checkHolder(name string) error {
	if name == "" || len(name) > maxHolder {
		return invalid("holder name of %d bytes: must have 1 to %d", len(name), maxHolder)
	}
	if !utf8.ValidString(name) {
		return invalid("holder name %q: not UTF-8", name)
	}
	for _, r := range name {
		if r == '/' || !strconv.IsPrint(r) {
			return invalid("holder name %q: %q is not allowed", name, r)
		}
	}
	return nil
}

// defaultHolder is host name, process id and four random hex digits.
func defaultHolder() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	host = strings.Map(func(r rune) rune {
		if r == '/' || !strconv.IsPrint(r) {
			return '_'
		}
		return r
	}, host)
	if len(host) > 64 {
		host = strings.ToValidUTF8(host[:64], "_")
	}
	var b [2]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand
	return host + "-" + strconv.Itoa(os.Getpid()) + "-" + hex.EncodeToString(b[:])
}
