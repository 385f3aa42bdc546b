package redlock

import (
	"fmt"
	"reflect"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast"
)

// New returns a Locker on a majority of the instances that the clients lead to. Their
// number is that of the votes, whether or not they can be reached: three outlive the loss
// of one, five of two. An even number is allowed and logged: it outlives the loss of no
// more than one less. It asks the instances nothing; the first acquisition does, and
// fails with a *SameServerError if two clients lead to the same server.
//
// Each client must lead to one server: it is a *redis.Client, or a type that embeds one.
// Clients of a Cluster, a Ring or a Sentinel set are refused with ErrInvalid: keys
// that move to another server, or that a failover loses, would vote twice. The clients
// stay the caller's: Close does not close them, and they must outlive the Locker. Their
// own limits for connecting, reading and repeating do not matter; WithNodeTimeout does.
//
// Hooks of a client, such as those for tracing, and methods of a type around it are called
// only if it was made with ContextTimeoutEnabled. Else requests go out by a copy of the client
// with limits of its own (its method WithTimeout), to which go-redis gives no hooks.
//
// The options are those of package holdfast, but for WithReplicas, and those of this
// package. They are the defaults for all calls.
func New(clients []redis.UniversalClient, opts ...holdfast.Option) (*holdfast.Locker, error) {
	if len(clients) == 0 {
		return nil, invalid("no clients")
	}
	singles := make([]single, len(clients))
	for i, c := range clients {
		one, err := singleOf(c)
		if err != nil {
			return nil, invalid("client %d: %v", i, err)
		}
		for j, other := range clients[:i] {
			if v := reflect.ValueOf(c); v.Comparable() && v.Type() == reflect.TypeOf(other) && c == other {
				return nil, invalid("clients %d and %d are the same", j, i)
			}
		}
		singles[i] = one
	}
	s := &store{connect: func(s *store) []link {
		links := make([]link, len(singles))
		for i, c := range singles {
			links[i] = newRedisLink(c, s, i)
		}
		return links
	}}
	return holdfast.NewWithStore(s, opts...)
}

// single is what is needed of a client, which leads to one server.
type single interface {
	redis.UniversalClient
	Options() *redis.Options
	Conn() *redis.Conn
	WithTimeout(timeout time.Duration) *redis.Client
}

// singleOf returns c as a client of one server. A type around a client may have none in it,
// which shows as a panic when it is asked anything.
func singleOf(c redis.UniversalClient) (one single, err error) {
	defer func() {
		if p := recover(); p != nil {
			one, err = nil, fmt.Errorf("nil: %v", p)
		}
	}()
	if v := reflect.ValueOf(c); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return nil, fmt.Errorf("nil")
	}
	switch c.(type) {
	case *redis.ClusterClient:
		return nil, fmt.Errorf("a Cluster is not one instance: its slots move between servers")
	case *redis.Ring:
		return nil, fmt.Errorf("a Ring is not one instance: its keys move between servers")
	}
	one, ok := c.(single)
	if !ok {
		return nil, fmt.Errorf("a %T is not known to lead to one server", c)
	}
	// go-redis gives its Sentinel clients this address.
	if one.Options().Addr == "FailoverClient" {
		return nil, fmt.Errorf("a Sentinel set is not one instance: a failover may lose the lock, and then votes twice")
	}
	return one, nil
}

// Values of options, as the store gets them.
type (
	nodeTimeout time.Duration
	longestTTL  time.Duration
	durable     struct{}
)

// WithNodeTimeout sets how long one instance may take to answer, connecting included. The
// default is a tenth of the TTL, at most 500 ms. It is small against the TTL because what
// it takes is lost to the validity; an instance that is slower has no vote in that round.
func WithNodeTimeout(d time.Duration) holdfast.Option { return holdfast.StoreOption(nodeTimeout(d)) }

// WithLongestTTL sets the longest TTL that any Locker uses on these instances, that of
// WithTTL by default, at most 10 years. Longer ones are refused, also in WithMinHold. An
// instance has a vote once it has been up for longer than that, because only then everything
// has ended that it may have forgotten in a restart. Set it in every process to the longest TTL
// that any of them uses; without it all must have the same TTL.
func WithLongestTTL(d time.Duration) holdfast.Option { return holdfast.StoreOption(longestTTL(d)) }

// WithDurableInstances says that the instances forget nothing in a restart: each runs
// with appendonly yes and appendfsync always, on a disk that keeps what it is given. Then
// one that has just been started has a vote at once, and one before Redis 7.0 has a vote at
// all. With instances that do forget, two may hold the lock.
func WithDurableInstances() holdfast.Option { return holdfast.StoreOption(durable{}) }
