package holdfast

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// fakeStore is a server in memory, on virtual time. Each method may be replaced by
// a function, to imitate a fault; the function may call the method of server.
type fakeStore struct {
	acquire func(context.Context, Request) (Grant, error)
	renew   func(context.Context, []Lease) []error
	extend  func(context.Context, Lease) error
	release func(context.Context, Lease) error

	server fakeServer

	mu    sync.Mutex
	calls []fakeCall
	gates []*gate
}

// change changes the functions while the store is in use.
func (s *fakeStore) change(fn func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fn()
}

// fakeCall is one call that a fakeStore got.
type fakeCall struct {
	op   string
	at   time.Time
	keys int
	ttl  time.Duration // of the first lease
}

// note writes a call down, and returns the function that stands for its method.
func note[F any](s *fakeStore, fn *F, op string, leases ...Lease) F {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, fakeCall{op, time.Now(), len(leases), leases[0].TTL})
	return *fn
}

// got returns the calls of one operation.
func (s *fakeStore) got(op string) (calls []fakeCall) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.calls {
		if c.op == op {
			calls = append(calls, c)
		}
	}
	return calls
}

func (s *fakeStore) count(op string) int { return len(s.got(op)) }

func (s *fakeStore) Acquire(ctx context.Context, r Request) (Grant, error) {
	if fn := note(s, &s.acquire, "acquire", r.Lease); fn != nil {
		return fn(ctx, r)
	}
	return s.server.Acquire(r)
}

func (s *fakeStore) Renew(ctx context.Context, leases []Lease) []error {
	if fn := note(s, &s.renew, "renew", leases...); fn != nil {
		return fn(ctx, leases)
	}
	return s.server.Renew(leases)
}

func (s *fakeStore) Extend(ctx context.Context, l Lease) error {
	if fn := note(s, &s.extend, "extend", l); fn != nil {
		return fn(ctx, l)
	}
	return s.server.Extend(l)
}

func (s *fakeStore) Release(ctx context.Context, l Lease) error {
	if fn := note(s, &s.release, "release", l); fn != nil {
		return fn(ctx, l)
	}
	return s.server.Release(l)
}

// fakeServer keeps leases as a Redis does. The zero value is ready.
type fakeServer struct {
	mu   sync.Mutex
	keys map[string]fakeEntry
}

type fakeEntry struct {
	owner string
	end   time.Time
}

// get returns who has key, and what is left; mu is held.
func (s *fakeServer) get(key string) (owner string, left time.Duration) {
	e, ok := s.keys[key]
	if left = time.Until(e.end); !ok || left <= 0 {
		delete(s.keys, key)
		return "", 0
	}
	return e.owner, left
}

// set is an admin's SET; an empty owner deletes.
func (s *fakeServer) set(key, owner string, ttl time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.put(key, owner, ttl)
}

func (s *fakeServer) put(key, owner string, ttl time.Duration) {
	if s.keys == nil {
		s.keys = make(map[string]fakeEntry)
	}
	if s.keys[key] = (fakeEntry{owner, time.Now().Add(ttl)}); owner == "" {
		delete(s.keys, key)
	}
}

// left returns what is left of key's lease, 0 if it is absent.
func (s *fakeServer) left(key string) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, left := s.get(key)
	return left
}

func (s *fakeServer) Acquire(r Request) (Grant, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch owner, left := s.get(r.Key); owner {
	case "":
		s.put(r.Key, r.Owner, r.TTL)
		return Grant{}, nil
	case r.Owner:
		return Grant{Left: left}, nil
	default:
		return Grant{}, &HeldError{Key: r.Key, Holder: holderOf(owner), TTL: left}
	}
}

// owned is nil if l is the owner's; mu is held.
func (s *fakeServer) owned(l Lease) (time.Duration, error) {
	switch owner, left := s.get(l.Key); owner {
	case l.Owner:
		return left, nil
	case "":
		return 0, &LostError{Reason: LostGone}
	default:
		return 0, &LostError{Reason: LostTaken}
	}
}

func (s *fakeServer) Renew(leases []Lease) []error {
	s.mu.Lock()
	defer s.mu.Unlock()
	errs := make([]error, len(leases))
	for i, l := range leases {
		left, err := s.owned(l)
		if errs[i] = err; err == nil && left < l.TTL {
			s.put(l.Key, l.Owner, l.TTL)
		}
	}
	return errs
}

func (s *fakeServer) Extend(l Lease) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.owned(l)
	if err == nil {
		s.put(l.Key, l.Owner, l.TTL)
	}
	return err
}

func (s *fakeServer) Release(l Lease) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.owned(l)
	if err == nil {
		s.put(l.Key, "", 0)
	}
	return err
}

// each returns one error for each lease.
func each(leases []Lease, err error) []error {
	errs := make([]error, len(leases))
	for i := range errs {
		errs[i] = err
	}
	return errs
}

// gate holds up whoever waits at it until it is opened, at the end of the test at
// the latest.
type gate struct {
	once sync.Once
	ch   chan struct{}
}

func (s *fakeStore) newGate() *gate {
	g := &gate{ch: make(chan struct{})}
	s.change(func() { s.gates = append(s.gates, g) })
	return g
}

func (g *gate) open() { g.once.Do(func() { close(g.ch) }) }
func (g *gate) wait() { <-g.ch }

// quiet keeps expected warnings out of the test's output.
func quiet() Option { return WithLogger(slog.New(slog.DiscardHandler)) }

// fakeLocker returns a Locker on s, closed at the end of the test.
func fakeLocker(t *testing.T, s *fakeStore, opts ...Option) *Locker {
	t.Helper()
	return lockerOn(t, s, s, opts...)
}

// lockerOn is fakeLocker for a store that has s in it.
func lockerOn(t *testing.T, store Store, s *fakeStore, opts ...Option) *Locker {
	t.Helper()
	l, err := NewWithStore(store, append([]Option{quiet()}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() {
		s.mu.Lock()
		gates := s.gates
		s.mu.Unlock()
		for _, g := range gates {
			g.open()
		}
		_ = l.Close()
		time.Sleep(time.Minute) // for what ends by itself
	})
	return l
}

// hold acquires, and fails the test if it cannot.
func hold(t *testing.T, l *Locker, key string, opts ...Option) *Lock {
	t.Helper()
	k, err := l.Acquire(t.Context(), key, opts...)
	require.NoError(t, err)
	return k
}

// ends waits for the end of a lock's context and returns when that was.
func ends(k *Lock) time.Time {
	<-k.Context().Done()
	return time.Now()
}

// lostBecause asserts that a lock is lost, with a reason.
func lostBecause(t *testing.T, k *Lock, reason string) {
	t.Helper()
	for _, err := range []error{k.Err(), context.Cause(k.Context())} {
		var lost *LostError
		require.ErrorAs(t, err, &lost)
		require.Equal(t, reason, lost.Reason)
		require.Equal(t, k.Key(), lost.Key)
		require.ErrorIs(t, err, ErrLost)
		require.ErrorIs(t, err, ErrNotHeld)
	}
}

// idleSoon asserts that a Locker has no goroutine left after a moment.
func idleSoon(t *testing.T, l *Locker) {
	t.Helper()
	time.Sleep(10 * time.Second)
	require.Zero(t, l.group.Running(), "goroutines of the Locker")
}
