package holdfast

import (
	"context"
	"errors"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/refusal"
)

const scanPage = 500

// ownerValue is what a Locker writes: a holder's name and a UUID, and perhaps what Store.Release
// leaves of it with Keep, or what a majority puts behind it.
var ownerValue = regexp.MustCompile(`^[^/]*/[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}([.:][0-9]+)*(\.kept|\.detached)?$`)

var _ inspector = (*redisStore)(nil)

func (s *redisStore) inspect(ctx context.Context, key string) (LockInfo, error) {
	pipe := s.client.Pipeline()
	value, left := pipe.Get(ctx, key), pipe.PTTL(ctx, key)
	now := pipe.Time(ctx)
	var token *redis.StringCmd
	var queue *redis.ZSliceCmd
	var waiters, told *redis.MapStringStringCmd
	if c, ok := keyspace.CompanionsOf(key); ok {
		token = pipe.Get(ctx, c.Fence)
		queue = pipe.ZRangeWithScores(ctx, c.Queue, 0, -1)
		waiters = pipe.HGetAll(ctx, c.Waiters)
		about, _ := aboutOf(key) // there is room for it, too
		told = pipe.HGetAll(ctx, about)
	}
	if err := flush(ctx, pipe); err != nil {
		return LockInfo{}, s.wrap(err, true)
	}
	info := LockInfo{TTL: -1}
	switch err := value.Err(); {
	case err == nil && left.Err() == nil:
		info.Owner, info.Holder, info.TTL = value.Val(), holderOf(value.Val()), left.Val()
	case errors.Is(err, redis.Nil):
	default:
		return info, s.wrap(errors.Join(err, left.Err()), true)
	}
	if queue == nil {
		return info, nil
	}
	if n, err := token.Int64(); err == nil {
		info.Token = fencing.Token(n)
	}
	info.readAbout(told)
	if err := errors.Join(queue.Err(), waiters.Err(), now.Err()); err != nil {
		return info, s.wrap(err, true)
	}
	for _, z := range queue.Val() {
		owner, _ := z.Member.(string)
		if w, alive := readWaiter(owner, z.Score, waiters.Val()[owner], now.Val()); alive {
			info.Waiters = append(info.Waiters, w)
		}
	}
	return info, nil
}

// flush sends a pipeline. Its error is one that no command has: that of a connection that could
// not be made, such as WRONGPASS, is only here.
func flush(ctx context.Context, pipe redis.Pipeliner) error {
	cmds, err := pipe.Exec(ctx)
	if slices.ContainsFunc(cmds, func(c redis.Cmder) bool { return c.Err() != nil }) {
		return nil // each tells its own
	}
	return err
}

// readWaiter reads a waiter's entry, see queue.lua.
func readWaiter(owner string, ticket float64, text string, now time.Time) (w WaiterInfo, alive bool) {
	fields := strings.SplitN(text, " ", 5)
	if len(fields) < 4 {
		return w, false
	}
	deadline, err := strconv.ParseInt(fields[1], 10, 64)
	_, holds, _ := strings.Cut(fields[3], ":")
	w = WaiterInfo{Owner: owner, Holder: holderOf(owner), Holds: parseHolds(holds)}
	w.Waits = max(0, now.Sub(time.UnixMilli(int64(ticket))))
	return w, err == nil && deadline >= now.UnixMilli()
}

// masters returns a client for each server that holds keys.
func (s *redisStore) masters(ctx context.Context) (all []redis.UniversalClient, err error) {
	var mu sync.Mutex
	add := func(_ context.Context, c *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, c)
		return nil
	}
	switch c := s.client.(type) {
	case *redis.ClusterClient:
		err = c.ForEachMaster(ctx, add)
	case *redis.Ring:
		err = c.ForEachShard(ctx, add)
	default:
		all = append(all, c)
	}
	return all, err
}

// glob escapes what means something in a pattern.
var glob = strings.NewReplacer(`*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`, `\`, `\\`)

func (s *redisStore) list(ctx context.Context, prefix, pattern string, page func([]LockInfo) bool) error {
	masters, err := s.masters(ctx)
	if err != nil {
		return s.wrap(err, true)
	}
	for _, c := range masters {
		for cursor := uint64(0); ; {
			keys, next, err := c.Scan(ctx, cursor, glob.Replace(prefix)+pattern, scanPage).Result()
			if err != nil {
				return s.wrap(err, true)
			}
			infos, err := s.holders(ctx, c, keys)
			if err != nil {
				return s.wrap(err, true)
			}
			for i := range infos {
				infos[i].Key = strings.TrimPrefix(infos[i].Key, prefix)
			}
			if !page(infos) {
				return nil
			}
			if cursor = next; cursor == 0 {
				break
			}
		}
	}
	return nil
}

// holders returns those of the keys that are held locks.
func (s *redisStore) holders(ctx context.Context, c redis.UniversalClient, keys []string) (held []LockInfo, err error) {
	if len(keys) == 0 {
		return nil, nil
	}
	pipe := c.Pipeline()
	values, lefts := make([]*redis.StringCmd, len(keys)), make([]*redis.DurationCmd, len(keys))
	for i, key := range keys {
		values[i], lefts[i] = pipe.Get(ctx, key), pipe.PTTL(ctx, key)
	}
	if err := flush(ctx, pipe); err != nil {
		return nil, err
	}
	for i, key := range keys {
		value, err := values[i].Result()
		_, refused := refusal.Text(err)
		switch {
		case err != nil && !refused: // no string, or gone, is no lock
			return nil, err
		case strings.Contains(key, holderKey): // it is of ReleaseHolder
		case err == nil && lefts[i].Err() == nil && ownerValue.MatchString(value):
			held = append(held, LockInfo{Key: key, Owner: value, Holder: holderOf(value), TTL: lefts[i].Val()})
		}
	}
	return held, nil
}

// tellAll tells all Lockers that listen anywhere: what is broken by hand is nobody's daily
// work.
func (s *redisStore) tellAll(ctx context.Context, owner string) {
	masters, err := s.masters(ctx)
	if err != nil {
		return
	}
	for _, c := range masters {
		for _, channel := range c.PubSubChannels(ctx, channelPrefix+"*").Val() {
			_ = c.Publish(ctx, channel, brokenText(owner)).Err() // else it hears with its next renewal
		}
		if !s.traits.cluster {
			continue
		}
		for _, channel := range c.PubSubShardChannels(ctx, channelPrefix+"*").Val() {
			_ = c.SPublish(ctx, channel, brokenText(owner)).Err()
		}
	}
}
