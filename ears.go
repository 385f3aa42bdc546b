package holdfast

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/keyspace"
)

const (
	// linger is how long a channel without waiters is still listened to: the next
	// one may come soon.
	linger = 500 * time.Millisecond

	// deafFor is how long no subscription is tried after the server has refused one.
	deafFor = time.Minute

	// maxMisses is how many grants in a row may be found without their messages
	// before all connections are made anew.
	maxMisses  = 2
	missesLast = 10 * time.Second

	channelPrefix = "holdfast:"
)

// ears listen for the messages that tell waiters of their grants. Messages only
// make it faster: a waiter whose message is lost finds the grant by its next call.
//
// Where keys live on several servers (Cluster, Ring) there is a channel for each
// slot tag that is waited for, on the server of that tag; on a Cluster these are
// sharded channels, if its servers know them (Redis 7). Else one channel serves all
// keys. Each server costs one connection, while anybody waits there and a moment
// longer.
type ears struct {
	client redis.UniversalClient
	traits *clientTraits
	id     string
	final  func(error) bool // whether waiting cannot heal an error of the server

	hear  func(text string)
	ready func(channel string)
	start func(func())

	mu sync.Mutex
	// What follows is guarded by mu, which is not held while something is sent, or
	// while hear or ready run.
	ears     map[any]*ear // by server
	tuned    map[string]*tuned
	deaf     clock.Instant // until then
	plain    bool          // the cluster has no sharded channels
	misses   int           // in a row, the latest at missedAt
	missedAt clock.Instant
	closed   bool
}

// tuned is a channel that is waited at.
type tuned struct {
	key     string // one whose grants it tells of
	waiters int
	since   clock.Instant // when the last waiter left
	ear     *ear          // nil: nobody listens yet
	looking bool          // somebody is about to
}

// ear is one connection.
type ear struct {
	server  any
	ps      *redis.PubSub
	sharded bool
	todo    []tuneOp // in order, by one goroutine at a time
	working bool
	heard   bool           // the first of todo is done, and somebody listens
	count   int            // channels
	offs    map[string]int // unsubscribed from, and not confirmed
	closed  bool           // nobody listens any more
	end     chan struct{}  // closed with it
}

type tuneOp struct {
	channel string
	on      bool
}

// subscriber is what an ear needs of a client.
type subscriber interface {
	Subscribe(ctx context.Context, channels ...string) *redis.PubSub
	SSubscribe(ctx context.Context, channels ...string) *redis.PubSub
}

func (e *ears) init(s *redisStore) error {
	id, err := uuid.NewRandom()
	if err != nil {
		return fmt.Errorf("holdfast: no random numbers: %w", err)
	}
	e.client, e.traits, e.id = s.client, &s.traits, fmt.Sprintf("%x", id[:8])
	e.final = func(err error) bool { return isFinal(s.wrap(err, false)) }
	e.ears, e.tuned = make(map[any]*ear), make(map[string]*tuned)
	return nil
}

// many reports whether there are several channels; mu is held.
func (e *ears) many() bool {
	return e.traits.sharded && e.traits.node != nil && !(e.traits.cluster && e.plain)
}

// verb is the command that sends to the channels; mu is held.
func (e *ears) verb() string {
	if e.traits.cluster && e.many() {
		return "SPUBLISH"
	}
	return "PUBLISH"
}

// nameOf returns the channel of a key; mu is held.
func (e *ears) nameOf(key string) string {
	if e.many() {
		return channelPrefix + "{" + keyspace.Tag(key) + "}:" + e.id
	}
	return channelPrefix + e.id
}

// nameFor returns the channel of a key if anybody waits at any, else "".
func (e *ears) nameFor(key string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.tuned) == 0 {
		return ""
	}
	return e.nameOf(key)
}

// channel returns the command and the channel that tell a waiter for key, "" when
// it would not hear it; and it sees to it that somebody listens.
func (e *ears) channel(key string) (verb, channel string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if clock.Now() < e.deaf {
		return "", ""
	}
	channel = e.nameOf(key)
	e.tune(e.get(channel, key), channel)
	return e.verb(), channel
}

// get returns the entry of a channel; mu is held.
func (e *ears) get(channel, key string) *tuned {
	t := e.tuned[channel]
	if t == nil {
		t = &tuned{key: key, since: clock.Now()}
		e.tuned[channel] = t
	}
	return t
}

// tune makes somebody listen to a channel; mu is held.
func (e *ears) tune(t *tuned, channel string) {
	if t.ear == nil && !t.looking && !e.closed {
		t.looking = true
		e.start(func() { _ = contain(func() { e.look(t, channel) }) }) // ends with the client's own timeouts
	}
}

func (e *ears) await(key string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.get(e.nameOf(key), key).waiters++
}

func (e *ears) enough(key string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if t := e.tuned[e.nameOf(key)]; t != nil {
		t.waiters = max(0, t.waiters-1)
		t.since = clock.Now()
	}
}

// look finds the server of a channel and subscribes there.
func (e *ears) look(t *tuned, channel string) {
	defer func() { // also when the client panics: the next call of a waiter tries again
		e.mu.Lock()
		defer e.mu.Unlock()
		t.looking = false
	}()
	server, client, sharded := any(nil), subscriber(e.client), false
	e.mu.Lock()
	many := e.many()
	e.mu.Unlock()
	if many {
		node, err := e.traits.node(context.Background(), t.key)
		if err != nil {
			return
		}
		server, client, sharded = node, node, e.traits.cluster
	}
	ps := client.Subscribe(context.Background()) // sends nothing yet
	if !e.add(t, channel, &ear{server: server, ps: ps, sharded: sharded, end: make(chan struct{})}) {
		_ = ps.Close() // it has no connection
	}
}

// add gives a channel to the connection to its server, which is r if there is none
// yet; it reports whether r is used.
func (e *ears) add(t *tuned, channel string, r *ear) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed || e.tuned[channel] != t {
		return false
	}
	old := e.ears[r.server]
	if old == nil {
		e.ears[r.server] = r
	} else {
		r = old
	}
	t.ear = r
	r.count++
	e.do(r, tuneOp{channel, true})
	return old == nil
}

// do sends something on a connection, in order; mu is held.
func (e *ears) do(r *ear, op tuneOp) {
	r.todo = append(r.todo, op)
	if !r.working {
		r.working = true
		e.start(func() { e.work(r) }) // ends with the list, or the client's own timeouts
	}
}

func (e *ears) work(r *ear) {
	ctx := context.Background()
	for {
		e.mu.Lock()
		todo := r.todo
		r.todo = nil
		if len(todo) == 0 || r.closed {
			r.working = false
			closed := r.closed
			e.mu.Unlock()
			if closed {
				r.close()
			}
			return
		}
		e.mu.Unlock()
		for _, op := range todo { // one by one: several may be of several slots
			contain(func() {
				switch { // an error comes to listen as well
				case op.on && r.sharded:
					_ = r.ps.SSubscribe(ctx, op.channel)
				case op.on:
					_ = r.ps.Subscribe(ctx, op.channel)
				case r.sharded:
					_ = r.ps.SUnsubscribe(ctx, op.channel)
				default:
					_ = r.ps.Unsubscribe(ctx, op.channel)
				}
			})
		}
		e.mu.Lock()
		if !r.heard && !r.closed {
			r.heard = true
			e.start(func() { e.listen(r) }) // ended by shut
		}
		e.mu.Unlock()
	}
}

// close closes the connection, which ends listening.
func (r *ear) close() { _ = contain(func() { _ = r.ps.Close() }) }
