package holdfast

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/keyspace"
)

// clientTraits is what differs between go-redis's clients.
type clientTraits struct {
	// sharded reports whether two keys may live on different servers, and
	// together returns what two keys must have in common to share a script.
	sharded  bool
	together func(key string) int

	// failover says that a server which turned into a replica will be left for
	// the new primary, so that READONLY heals.
	failover bool

	// node returns the client of the server that has the key; nil: not known how.
	node   func(ctx context.Context, key string) (*redis.Client, error)
	reload func(ctx context.Context)
}

func traitsOf(client redis.UniversalClient) clientTraits {
	t := clientTraits{reload: func(context.Context) {}}
	switch c := client.(type) {
	case *redis.Client:
		// go-redis gives its Sentinel clients this address.
		t.failover = c.Options().Addr == "FailoverClient"
		t.node = func(context.Context, string) (*redis.Client, error) { return c, nil }
	case *redis.ClusterClient:
		t.sharded, t.failover = true, true
		t.together = keyspace.Slot
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

// Renew renews many leases in one round trip: one script for all where they
// share a server, else a pipeline of one script for each group that does.
func (s *redisStore) Renew(ctx context.Context, leases []Lease) []error {
	results := make([]error, len(leases))
	if !s.traits.sharded {
		s.renewTogether(ctx, leases, results)
		return results
	}
	s.renewPiped(ctx, leases, s.groups(leases), results)
	return results
}

func (s *redisStore) renewTogether(ctx context.Context, leases []Lease, results []error) {
	keys, args := renewArgs(leases, nil)
	s.scatter(renewScript.Run(ctx, s.client, keys, args...), nil, results)
}

// groups returns the indexes of the leases that may share a script.
func (s *redisStore) groups(leases []Lease) [][]int {
	groups := make([][]int, 0, len(leases))
	if s.traits.together == nil {
		return singles(leases, groups)
	}
	at := make(map[int]int, len(leases))
	for i := range leases {
		k := s.traits.together(leases[i].Key)
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

func singles(leases []Lease, groups [][]int) [][]int {
	for i := range leases {
		groups = append(groups, []int{i})
	}
	return groups
}

// renewPiped sends one script for each group. Groups whose server did not know
// the script get its text; those that a moving slot has split go one by one.
func (s *redisStore) renewPiped(ctx context.Context, leases []Lease, groups [][]int, results []error) {
	cmds := s.pipe(ctx, leases, groups, false)
	var missing, split [][]int
	for i, cmd := range cmds {
		switch err := cmd.Err(); {
		case isMissing(err):
			missing = append(missing, groups[i])
		case isSplit(err) && len(groups[i]) > 1:
			for _, j := range groups[i] {
				split = append(split, []int{j})
			}
		default:
			s.scatter(cmd, groups[i], results)
		}
	}
	if again := append(missing, split...); len(again) > 0 {
		for i, cmd := range s.pipe(ctx, leases, again, true) {
			s.scatter(cmd, again[i], results)
		}
	}
}

// pipe sends the renewals of groups in one pipeline, by digest or by text.
func (s *redisStore) pipe(ctx context.Context, leases []Lease, groups [][]int, text bool) []*redis.Cmd {
	send := renewScript.Queue
	if text {
		send = renewScript.Load
	}
	p := s.client.Pipeline()
	cmds := make([]*redis.Cmd, len(groups))
	for i, g := range groups {
		keys, args := renewArgs(leases, g)
		cmds[i] = send(ctx, p, keys, args...)
	}
	_, _ = p.Exec(ctx) // the errors are in the commands
	return cmds
}

// renewArgs returns keys and arguments of the renew script for the leases at
// indexes, or for all if that is nil.
func renewArgs(leases []Lease, indexes []int) (keys []string, args []any) {
	n := len(indexes)
	if indexes == nil {
		n = len(leases)
	}
	keys, args = make([]string, n), make([]any, 2*n)
	for i := range n {
		l := &leases[i]
		if indexes != nil {
			l = &leases[indexes[i]]
		}
		keys[i], args[2*i], args[2*i+1] = l.Key, l.Owner, millis(l.TTL)
	}
	return keys, args
}

// scatter puts the answers of a renew script to their leases' results.
func (s *redisStore) scatter(cmd *redis.Cmd, indexes []int, results []error) {
	n := len(indexes)
	if indexes == nil {
		n = len(results)
	}
	reply, err := cmd.Slice()
	if err != nil {
		err = s.wrap(err, true)
	} else if len(reply) != n {
		err = errors.New("renew script: wrong number of answers")
	}
	for i := range n {
		at := i
		if indexes != nil {
			at = indexes[i]
		}
		if err != nil {
			results[at] = err
		} else {
			results[at] = s.ownership(reply[i])
		}
	}
}
