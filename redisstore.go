package holdfast

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/refusal"
	"github.com/holdfast-go/holdfast/internal/script"
	"github.com/holdfast-go/holdfast/lua"
)

var (
	acquireScript = script.New(lua.Acquire)
	releaseScript = script.New(lua.Release)
	renewScript   = script.New(lua.Renew)
	extendScript  = script.New(lua.Extend)
)

// redisStore is the Store on one Redis: a server, Sentinel, Cluster or Ring. It
// never closes the client, which is the caller's.
type redisStore struct {
	client redis.UniversalClient
	traits clientTraits
	sender commander   // of the single commands of locks: a pipeline, or the client
	ready  atomic.Bool // scripts have been seen to run
	ears   ears
}

func newRedisStore(client redis.UniversalClient) (*redisStore, error) {
	if v := reflect.ValueOf(client); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return nil, invalid("nil client")
	}
	s := &redisStore{client: client, traits: traitsOf(client), sender: client}
	// Of several servers one that hangs must not delay commands for others, and of a
	// wrapper nothing is known: there each command goes by itself.
	if c, ok := client.(*redis.Client); ok {
		s.sender = newPipeline(c)
	}
	return s, s.ears.init(s)
}

// piped reports whether r, and every Release and Extend, sends through a pipeline and
// waits for nothing else.
func (s *redisStore) piped(r *Request) bool {
	_, ok := s.sender.(*pipeline)
	return ok && r.Replicas == 0
}

// Acquire sends SET NX PX. Only if that is refused, or was a moment ago, a script
// tells who has the lock; it also knows our own value again, because go-redis
// repeats a command whose reply was lost and is then refused by its own first try.
func (s *redisStore) Acquire(ctx context.Context, r Request) (Grant, error) {
	if r.Replicas > 0 && s.traits.node == nil {
		return Grant{}, invalid("WithReplicas does not know how to use a client of type %T", s.client)
	}
	if err := s.prepare(ctx, r.Lease); err != nil {
		return Grant{}, err
	}
	if r.Replicas > 0 {
		return s.acquireReplicated(ctx, r)
	}
	grant, _, err := s.attempt(ctx, s.sender, r)
	return grant, err
}

// commander is what an attempt needs of a client or of one connection.
type commander interface {
	script.Evaler
	Process(ctx context.Context, cmd redis.Cmder) error
}

// process sends cmd. After an error cmd may still be under way: look at the error only.
func process(ctx context.Context, c commander, cmd redis.Cmder) error {
	err := c.Process(ctx, cmd)
	if err == nil {
		err = cmd.Err() // wrappers may return nothing
	}
	return err
}

// attempt takes the lock. ours says that an earlier try of the same owner had.
func (s *redisStore) attempt(ctx context.Context, c commander, r Request) (grant Grant, ours bool, err error) {
	repeated := false
	if !r.Fencing && !r.Contended {
		owner := &ownerArg{owner: r.Owner}
		cmd := redis.NewBoolCmd(ctx, "set", r.Key, owner, "nx", "px", clock.Millis(r.TTL))
		if err := process(ctx, c, cmd); err != nil || cmd.Val() {
			return Grant{Repeated: owner.repeated()}, false, s.wrap(err, false)
		}
		if repeated = owner.repeated(); r.queues && !repeated {
			return Grant{}, false, &HeldError{Key: r.Key} // its first call in the queue tells more
		}
	}
	owner := &ownerArg{owner: r.Owner}
	grant, ours, err = s.take(r, acquireScript.Run(ctx, c, lockKeys(r), grantArgs(r, owner)...))
	grant.Repeated = repeated || owner.repeated()
	return grant, ours, err
}

// prepare finds out, before anything is taken, that the server runs scripts: a
// lock that could be taken and not released would be worse than none. It is one
// EVAL in the life of a Locker, and leaves the release script in the cache. A copy of
// it may run late, so it releases for an owner who never holds anything: for its own it
// would give back the lock that the acquisition has got since.
func (s *redisStore) prepare(ctx context.Context, l Lease) error {
	if s.ready.Load() {
		return nil
	}
	var room releaseRoom
	keys, args := s.releaseArgs(l, &ownerArg{owner: l.Owner + ".probe"}, &room)
	err := process(ctx, s.sender, releaseScript.Command(ctx, true, keys, args...))
	if keys > 1 && isSplit(err) {
		err = process(ctx, s.sender, releaseScript.Command(ctx, true, 1, alone(args, keys)...))
	}
	if err != nil {
		if err = s.wrap(err, false); isFinal(err) {
			return fmt.Errorf("checking that the server runs the scripts of locks: %w", err)
		}
		return err
	}
	s.ready.Store(true)
	return nil
}

// lockKeys returns the keys of the acquire script.
func lockKeys(r Request) []string {
	if !r.Fencing {
		return []string{r.Key}
	}
	fence, _ := keyspace.Companion(r.Key, "fence") // checked before the call was made
	return []string{r.Key, fence}
}

func grantArgs(r Request, owner *ownerArg) []any {
	if r.Fencing && r.ClockFloor {
		return []any{owner, clock.Millis(r.TTL), 1}
	}
	return []any{owner, clock.Millis(r.TTL)}
}

// take reads the answer of the acquire script. ours says that an earlier try of
// the same owner had taken the lock.
func (s *redisStore) take(r Request, cmd *redis.Cmd) (grant Grant, ours bool, err error) {
	reply, err := cmd.Slice()
	if err != nil {
		return Grant{}, false, s.wrap(err, false)
	}
	if len(reply) < 2 {
		return Grant{}, false, fmt.Errorf("acquire script: unexpected answer %v", reply)
	}
	code, _ := reply[0].(int64)
	text, _ := reply[1].(string)
	var left int64
	if len(reply) > 2 {
		left, _ = reply[2].(int64)
	}
	switch code {
	case 0:
		return Grant{}, false, &HeldError{Key: r.Key, Holder: holderOf(text), TTL: leftOf(left)}
	case 1, 2:
		token, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return Grant{}, false, refusal.Final(fmt.Errorf("acquire script: token %q is not a number", text))
		}
		if r.Fencing && token <= 0 {
			return Grant{}, false, refusal.Final(fmt.Errorf("acquire script: fence counter is gone, or holds %d", token))
		}
		grant = Grant{Token: fencing.Token(token)}
		if code == 2 {
			grant.Left = max(leftOf(left), time.Millisecond)
		}
		return grant, code == 2, nil
	}
	return Grant{}, false, fmt.Errorf("acquire script: unexpected answer %v", reply)
}

// leftOf converts a PTTL answer: -1 means no expiry, 0 less than a millisecond.
func leftOf(pttl int64) time.Duration {
	if pttl == 0 {
		pttl = 1
	}
	return time.Duration(pttl) * time.Millisecond
}

// holderOf returns the holder's name in a lock's value: what stands before the last
// "/". A value in another form was written by another client, and stands for itself.
func holderOf(value string) string {
	if i := strings.LastIndexByte(value, '/'); i > 0 {
		value = value[:i]
	}
	if len(value) > maxHolder {
		value = strings.ToValidUTF8(value[:maxHolder], "")
	}
	return value
}

// acquireReplicated takes the lock and sends WAIT on one connection: WAIT counts
// the writes of its own connection only. go-redis does not replace a pinned
// connection that broke, so the WAIT cannot slip to another one.
//
// A lock with too few acknowledgements is not given back here but settled by the
// Locker: it alone knows whether a later attempt of the same owner has succeeded.
func (s *redisStore) acquireReplicated(ctx context.Context, r Request) (Grant, error) {
	node, err := s.traits.node(ctx, r.Key)
	if err != nil {
		return Grant{}, s.wrap(err, false)
	}
	conn := node.Conn()
	defer func() { _ = conn.Close() }() // back to the pool
	grant, ours, err := s.attempt(ctx, conn, r)
	if err == nil && ours {
		// Taken by an earlier try, perhaps on another connection. A write on this
		// one comes after it, so its acknowledgement covers both. It never shortens
		// the lease: this attempt may have been given up, and the lock in use.
		grant.Left = 0
		results := make([]error, 1)
		s.renewTogether(ctx, conn, []Lease{r.Lease}, []int{0}, results)
		err = results[0]
	}
	if err != nil {
		if _, moved := redis.IsMovedError(err); moved {
			s.traits.reload(ctx)
		}
		var lost *LostError
		if errors.As(err, &lost) { // nothing was held yet that could be lost
			err = errors.New("the lock ended before it was acknowledged: " + lost.Reason)
		}
		return Grant{}, err
	}
	acked, err := conn.Wait(ctx, r.Replicas, r.ReplicaLimit).Result()
	if err == nil && acked < int64(r.Replicas) {
		return Grant{}, refusal.Final(&ReplicaError{Acked: int(acked), Wanted: r.Replicas})
	}
	return grant, s.wrap(err, false)
}

// Release gives the lock up if it is the owner's.
func (s *redisStore) Release(ctx context.Context, l Lease) error {
	_, err := s.handOn(ctx, l)
	return err
}

// Extend sets what is left of the lease.
func (s *redisStore) Extend(ctx context.Context, l Lease) error {
	return s.verdict(s.runOnce(ctx, extendScript, 1, l.Key, l.Owner, clock.Millis(l.TTL)))
}

// verdict reads an answer that says whether the key was the owner's.
func (s *redisStore) verdict(cmd *redis.Cmd) error {
	reply, err := cmd.Result()
	if err != nil {
		return s.wrap(err, true)
	}
	return s.ownership(reply)
}

// ownership reads one such answer.
func (s *redisStore) ownership(reply any) error {
	switch reply {
	case int64(1):
		return nil
	case int64(0):
		return &LostError{Reason: LostGone}
	case int64(-1):
		return &LostError{Reason: LostTaken}
	}
	if text, ok := reply.(string); ok {
		return s.wrap(refusal.Reply(text), true)
	}
	return fmt.Errorf("lock script: unexpected answer %v", reply)
}
