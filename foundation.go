package holdfast

import (
	"errors"
	"log/slog"
	"slices"
	"time"
)

// StoreOption returns an Option that means something to the Store alone, which gets
// value from NewWithStore in StoreSettings. It is for packages that offer a Store. Only
// constructors take it.
func StoreOption(value any) Option {
	return optionFunc(func(c *config) error {
		c.forStore = append(slices.Clip(c.forStore), value)
		return nil
	})
}

// StoreSettings are the settings of a Locker that a Store may want to know.
type StoreSettings struct {
	TTL     time.Duration
	Fencing bool
	Logger  *slog.Logger
	Options []any // the values given by StoreOption, in order

	// Drift returns what clocks may disagree over a lease.
	Drift func(ttl time.Duration) time.Duration
}

// CallSettings are the settings of one call that a Store may have to refuse.
type CallSettings struct {
	TTL        time.Duration
	MinHold    time.Duration // of WithMinHold; 0: none
	Replicas   int           // of WithReplicas; 0: none
	Fencing    bool          // tokens come with the grant, not from a fencing.Source
	ClockFloor bool          // with a floor
}

// The methods that a Store may have besides those of Store; its comment describes them.
type (
	configurer interface{ Configure(StoreSettings) error }
	checker    interface{ CheckCall(CallSettings) error }
	watcher    interface {
		Watch(key string, wake func()) (stop func())
	}
	drainer        interface{ Drain(limit time.Duration) }
	acquireSettler interface{ SettlesAcquires() }
)

// configure tells the store the Locker's settings.
func (l *Locker) configure() error {
	cfg := l.config
	if c, ok := l.store.Store.(configurer); ok {
		err := c.Configure(StoreSettings{
			TTL: cfg.ttl, Fencing: cfg.fencing, Logger: cfg.log(), Options: cfg.forStore, Drift: cfg.driftOf,
		})
		if err != nil {
			return err
		}
	} else if len(cfg.forStore) > 0 {
		return invalid("an option of another foundation")
	}
	return l.checkStore(cfg, cfg.ttl)
}

// checkCall checks the settings of one call.
func (l *Locker) checkCall(cfg *config) error {
	if len(cfg.forStore) > len(l.config.forStore) {
		return invalid("an option that is for the constructor only")
	}
	return l.checkStore(cfg, cfg.ttl)
}

// checkStore refuses what the store cannot keep.
func (l *Locker) checkStore(cfg *config, ttl time.Duration) error {
	c, ok := l.store.Store.(checker)
	if !ok {
		return nil
	}
	return c.CheckCall(CallSettings{
		TTL: ttl, MinHold: cfg.minHold, Replicas: cfg.replicas, Fencing: cfg.fencing, ClockFloor: cfg.floored,
	})
}

// watchKey makes the store wake the first who waits for full, and keeps the end of that in
// q. Its caller is in q, and leaves it afterwards.
func (l *Locker) watchKey(full string, q *queue) {
	w, ok := l.store.Store.(watcher)
	if !ok {
		return
	}
	var stop func()
	if contain(func() {
		stop = w.Watch(full, func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.pokeLocked(full)
		})
	}) != nil {
		return // who waits asks now and then
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	q.stop = stop
}

// drain ends what the store does in the background.
func (l *Locker) drain(limit time.Duration) {
	if d, ok := l.store.Store.(drainer); ok {
		_ = contain(func() { d.Drain(limit) })
	}
}

// settlesAcquires reports whether the store itself gives back what attempts without
// success may have taken.
func (l *Locker) settlesAcquires() bool {
	_, ok := l.store.Store.(acquireSettler)
	return ok
}

// retryAfter is the pause that the store wants after err; 0: any.
func retryAfter(err error) time.Duration {
	var r interface{ RetryAfter() time.Duration }
	if errors.As(err, &r) {
		return r.RetryAfter()
	}
	return 0
}
