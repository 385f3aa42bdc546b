package holdfast

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/script"
)

// clientTraits is what differs between go-redis's clients.
type clientTraits struct {
	// sharded reports whether two keys may live on different servers, and
	// together returns what two leases must have in common to share a script.
	sharded  bool
	together func(Lease) string
	cluster  bool // it is a Redis Cluster

	// failover says that a server which turned into a replica will be left for
	// the new primary, so that READONLY heals.
	failover bool

	// node returns the client of the server that has the key; nil: not known how.
	node   func(ctx context.Context, key string) (*redis.Client, error)
	reload func(ctx context.Context)
}

func traitsOf(client redis.UniversalClient) clientTraits {
	t := clientTraits{
		reload:   func(context.Context) {},
		together: func(l Lease) string { return l.Key }, // nothing but themselves
	}
	switch c := client.(type) {
	case *redis.Client:
		// go-redis gives its Sentinel clients this address.
		t.failover = c.Options().Addr == "FailoverClient"
		t.node = func(context.Context, string) (*redis.Client, error) { return c, nil }
	case *redis.ClusterClient:
		t.sharded, t.failover, t.cluster = true, true, true
		t.together = func(l Lease) string { return keyspace.Tag(l.Key) } // the same tag, the same slot
		t.node = c.MasterForKey
		t.reload = func(ctx context.Context) { c.ReloadState(ctx) }
	case *redis.Ring:
		t.sharded = true
		t.node = func(_ context.Context, key string) (*redis.Client, error) { return c.GetShardClientForKey(key) }
	default:
		// A wrapper: nothing is known, so nothing is assumed.
		t.sharded, t.failover = true, true
	}
	return t
}

// Shards returns the indexes of the leases by the server that has them, so that a
// server which does not answer delays the renewals of its own keys only.
func (s *redisStore) Shards(ctx context.Context, leases []Lease) [][]int {
	if !s.traits.sharded || s.traits.node == nil {
		return [][]int{indexes(len(leases))}
	}
	return groupBy(leases, func(l Lease) *redis.Client {
		node, err := s.traits.node(ctx, l.Key)
		if err != nil {
			return nil // those that are not known now go together
		}
		return node
	})
}

// Renew renews many leases in one round trip: one script for all where they
// share a server, else a pipeline of one script for each group that may.
func (s *redisStore) Renew(ctx context.Context, leases []Lease) []error {
	results := make([]error, len(leases))
	groups := [][]int{indexes(len(leases))}
	if s.traits.sharded {
		groups = groupBy(leases, s.traits.together)
	}
	if len(groups) == 1 && !s.traits.sharded {
		s.renewTogether(ctx, s.client, leases, groups[0], results)
	} else {
		s.renewPiped(ctx, leases, groups, results)
	}
	return results
}

func (s *redisStore) renewTogether(ctx context.Context, c script.Evaler, leases []Lease, group []int, results []error) {
	keys, args := renewArgs(leases, group)
	cmd := renewScript.Run(ctx, c, keys, args...)
	if len(group) > 1 && s.isForOne(cmd.Err()) {
		s.renewPiped(ctx, leases, singles(group), results)
		return
	}
	s.scatter(cmd, group, results)
}

// isForOne reports whether the server refused a script for what may concern only
// one of its keys: a slot that is moving, keys of several slots, missing rights.
func (s *redisStore) isForOne(err error) bool {
	return isSplit(err) || err != nil && isFinal(s.wrap(err, true))
}

// singles returns a group for each index.
func singles(group []int) [][]int {
	groups := make([][]int, len(group))
	for i, at := range group {
		groups[i] = []int{at}
	}
	return groups
}

// indexes returns 0 to n-1.
func indexes(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// groupBy returns the indexes of the leases, those with the same key together.
func groupBy[K comparable](leases []Lease, key func(Lease) K) (groups [][]int) {
	at := make(map[K]int, len(leases))
	for i := range leases {
		k := key(leases[i])
		g, ok := at[k]
		if !ok {
			g = len(groups)
			at[k] = g
			groups = append(groups, nil)
		}
		groups[g] = append(groups[g], i)
	}
	return groups
}

// renewPiped sends one script for each group. Groups whose server did not know
// the script get its text; those that a moving slot has split go one by one.
func (s *redisStore) renewPiped(ctx context.Context, leases []Lease, groups [][]int, results []error) {
	var again [][]int
	for i, cmd := range s.pipe(ctx, leases, groups, renewScript.ByDigest) {
		switch err := cmd.Err(); {
		case script.Missing(err):
			again = append(again, groups[i])
		case len(groups[i]) > 1 && s.isForOne(err):
			again = append(again, singles(groups[i])...)
		default:
			s.scatter(cmd, groups[i], results)
		}
	}
	if len(again) > 0 {
		for i, cmd := range s.pipe(ctx, leases, again, renewScript.ByText) {
			s.scatter(cmd, again[i], results)
		}
	}
}

// pipe sends the renewals of groups in one pipeline.
func (s *redisStore) pipe(ctx context.Context, leases []Lease, groups [][]int,
	send func(context.Context, script.Evaler, []string, ...any) *redis.Cmd) []*redis.Cmd {
	p := s.client.Pipeline()
	cmds := make([]*redis.Cmd, len(groups))
	for i, g := range groups {
		keys, args := renewArgs(leases, g)
		cmds[i] = send(ctx, p, keys, args...)
	}
	execScripts(ctx, p, cmds)
	return cmds
}

// execScripts sends a pipeline of scripts, whose errors are then in them: also that of a
// connection that could not be made, such as WRONGPASS, which go-redis puts into none.
func execScripts(ctx context.Context, p redis.Pipeliner, cmds []*redis.Cmd) {
	_, err := p.Exec(ctx)
	for _, cmd := range cmds {
		if err != nil && cmd.Err() == nil && cmd.Val() == nil {
			cmd.SetErr(err)
		}
	}
}

// renewArgs returns keys and arguments of the renew script for a group of leases.
func renewArgs(leases []Lease, group []int) (keys []string, args []any) {
	keys, args = make([]string, len(group)), make([]any, 2*len(group))
	for i, at := range group {
		l := &leases[at]
		keys[i], args[2*i], args[2*i+1] = l.Key, l.Owner, clock.Millis(l.TTL)
	}
	return keys, args
}

// scatter puts the answers of a renew script to the results of its group.
func (s *redisStore) scatter(cmd *redis.Cmd, group []int, results []error) {
	reply, err := cmd.Slice()
	if err != nil {
		err = s.wrap(err, true)
	} else if len(reply) != len(group) {
		err = errors.New("renew script: wrong number of answers")
	}
	for i, at := range group {
		if results[at] = err; err == nil {
			results[at] = s.ownership(reply[i])
		}
	}
}
