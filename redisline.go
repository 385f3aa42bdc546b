package holdfast

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/refusal"
	"github.com/holdfast-go/holdfast/internal/script"
	"github.com/holdfast-go/holdfast/lua"
)

var waitScript = script.New(lua.Wait)

func (s *redisStore) hasLine(key string) bool {
	return keyspace.HasCompanions(key)
}

func (s *redisStore) listen(hear func(string), ready func(string), start func(func())) {
	s.ears.hear, s.ears.ready, s.ears.start = hear, ready, start
}

func (s *redisStore) await(key string)             { s.ears.await(key) }
func (s *redisStore) enough(key string)            { s.ears.enough(key) }
func (s *redisStore) missed()                      { s.ears.missed() }
func (s *redisStore) sweep(now clock.Instant) bool { return s.ears.sweep(now) }
func (s *redisStore) hush()                        { s.ears.hush() }

// handOn gives the lock to the first who waits, or deletes it, if it is the owner's.
func (s *redisStore) handOn(ctx context.Context, l Lease) (*handed, error) {
	var room releaseRoom
	owner := &ownerArg{owner: l.Owner}
	keys, args := s.releaseArgs(l, owner, &room)
	reply, err := s.runOnce(ctx, releaseScript, keys, args...).Result()
	if keys > 1 && isSplit(err) {
		reply, err = s.runOnce(ctx, releaseScript, 1, alone(args, keys)...).Result()
	}
	if err != nil && owner.sent.Load() == 0 {
		return nil, &unsentError{s.wrap(err, true)}
	}
	if err != nil {
		return nil, s.wrap(err, true)
	}
	list, ok := reply.([]any)
	if !ok || len(list) < 4 {
		return nil, s.ownership(reply)
	}
	next, _ := list[1].(string)
	n, _ := list[2].(int64)
	text, _ := list[3].(string)
	token, _ := strconv.ParseInt(text, 10, 64)
	return &handed{next, int(n), fencing.Token(token)}, nil
}

// releaseRoom is room for the arguments of a release.
type releaseRoom [7]any

// releaseArgs returns the arguments of the release script, and how many of them are keys.
func (s *redisStore) releaseArgs(l Lease, owner *ownerArg, room *releaseRoom) (keys int, args []any) {
	args = appendKeys(room[:0], l.Key)
	keys = len(args)
	args = append(args, owner, s.ears.nameFor(l.Key))
	if l.Keep > 0 {
		args = append(args, clock.Millis(l.Keep))
	}
	return keys, args
}

// alone takes the companions out of the arguments of a script. While a slot moves, a
// server refuses a script some of whose keys it does not have, because they may be
// where the others went; companions mostly are nowhere. One key is never refused. Then
// nobody is handed the lock: those who wait find it free by their calls.
func alone(args []any, keys int) []any { return append(args[:1], args[keys:]...) }

// appendKeys appends a key and, if it can have them, its companions.
func appendKeys(args []any, key string) []any {
	args = append(args, key)
	if c, ok := keyspace.CompanionsOf(key); ok {
		room := &[3]textArg{textArg(c.Queue), textArg(c.Waiters), textArg(c.Fence)}
		args = append(args, &room[0], &room[1], &room[2])
	}
	return args
}

// wait makes the calls in one round trip, as Renew does.
func (s *redisStore) wait(ctx context.Context, calls []lineCall) []lineAnswer {
	n := len(calls)
	w := &lineBatch{
		s: s, calls: calls, answers: make([]lineAnswer, n), owners: make([]ownerArg, n), verbs: make([]string, n),
	}
	for i := range calls {
		w.owners[i].owner = calls[i].Owner
		w.verbs[i], w.answers[i].channel = s.ears.channel(calls[i].Key)
	}
	groups := [][]int{indexes(len(calls))}
	if s.traits.sharded {
		leases := make([]Lease, len(calls))
		for i := range calls {
			leases[i] = calls[i].Lease
		}
		groups = groupBy(leases, s.traits.together)
	}
	w.send(ctx, groups, false)
	for i := range w.answers {
		w.answers[i].repeated = w.owners[i].repeated()
	}
	return w.answers
}

// lineBatch is a batch of calls on its way.
type lineBatch struct {
	s       *redisStore
	calls   []lineCall
	answers []lineAnswer
	owners  []ownerArg
	verbs   []string
}

// send sends one script for each group. Groups whose server did not know the script
// get its text; those that were refused for what may concern one of them go one by one.
func (w *lineBatch) send(ctx context.Context, groups [][]int, text bool) {
	var again [][]int
	for i, cmd := range w.pipe(ctx, groups, text) {
		group := groups[i]
		switch err := cmd.Err(); {
		case !text && script.Missing(err):
			again = append(again, group)
		case len(group) > 1 && w.s.isForOne(err):
			again = append(again, singles(group)...)
		case isSplit(err) && !w.calls[group[0]].fencing:
			w.takeAlone(ctx, group[0])
		default:
			w.scatter(cmd, group)
		}
	}
	for _, group := range again {
		for _, at := range group {
			w.owners[at].refused()
		}
	}
	if len(again) > 0 { // fewer or smaller groups, so this ends
		w.send(ctx, again, true)
	}
}

// takeAlone takes the lock if it is free, in a slot that is moving: without a place in
// the queue, so the answer that it is held is an error that passes.
func (w *lineBatch) takeAlone(ctx context.Context, at int) {
	c, a := &w.calls[at], &w.answers[at]
	w.owners[at].refused()
	r := Request{Lease: c.Lease}
	grant, _, err := w.s.take(r, acquireScript.Run(ctx, w.s.client, []string{c.Key}, &w.owners[at], clock.Millis(c.TTL)))
	if a.err = err; err == nil {
		a.grant = &grant
	}
	var held *HeldError
	if errors.As(err, &held) {
		a.known, a.err = true, fmt.Errorf("the slot of the key is moving: %w", errors.New(held.Error()))
	}
}

func (w *lineBatch) pipe(ctx context.Context, groups [][]int, text bool) []*redis.Cmd {
	cmds := make([]*redis.Cmd, len(groups))
	for i, g := range groups {
		cmds[i] = waitScript.Command(ctx, text, 4*len(g), w.args(g)...)
	}
	if len(cmds) == 1 {
		_ = w.s.client.Process(ctx, cmds[0]) // the error is in the command
		return cmds
	}
	p := w.s.client.Pipeline()
	for _, cmd := range cmds {
		_ = p.Process(ctx, cmd)
	}
	execScripts(ctx, p, cmds)
	return cmds
}

// args returns the arguments of the wait script for a group of calls, keys first.
func (w *lineBatch) args(group []int) []any {
	args := make([]any, 0, 10*len(group))
	for _, at := range group {
		args = appendKeys(args, w.calls[at].Key)
	}
	for _, at := range group {
		c := &w.calls[at]
		fenced := '0' // as queue.lua says
		switch {
		case c.fencing && c.floored:
			fenced = '2'
		case c.fencing:
			fenced = '1'
		}
		args = append(args, &w.owners[at], c.n, clock.Millis(c.TTL), clock.Millis(c.window), c.most,
			fmt.Sprintf("%d %c%s %s %s", clock.Millis(c.claim), fenced, c.holds, w.verbs[at], w.answers[at].channel))
	}
	return args
}

// scatter puts the answers of a wait script to their calls.
func (w *lineBatch) scatter(cmd *redis.Cmd, group []int) {
	reply, err := cmd.Slice()
	if err != nil {
		err = w.s.wrap(err, false)
	} else if len(reply) != len(group) {
		err = errors.New("wait script: wrong number of answers")
	}
	for i, at := range group {
		a := &w.answers[at]
		if a.err = err; err == nil {
			a.err = w.s.readLine(&w.calls[at], reply[i], a)
		}
	}
}

// readLine reads one answer of the wait script.
func (s *redisStore) readLine(c *lineCall, reply any, a *lineAnswer) error {
	list, _ := reply.([]any)
	if len(list) < 2 {
		return fmt.Errorf("wait script: unexpected answer %v", reply)
	}
	code, _ := list[0].(int64)
	text, _ := list[1].(string)
	var pttl int64
	if len(list) > 2 {
		pttl, _ = list[2].(int64)
	}
	switch code {
	case 1, 2:
		token, err := strconv.ParseInt(text, 10, 64)
		if err != nil || c.fencing && token <= 0 {
			return refusal.Final(fmt.Errorf("wait script: fence counter is gone, or holds %q", text))
		}
		a.grant = &Grant{Token: fencing.Token(token)}
		if code == 2 {
			a.grant.Left = max(leftOf(pttl), time.Millisecond)
		}
	case 0, -1:
		a.held = &HeldError{Key: c.Key, Holder: holderOf(text), TTL: leftOf(pttl)}
		a.full = code == -1
		a.held.Full = a.full
		if len(list) > 3 {
			before, _ := list[3].(int64)
			a.before = int(before)
		}
	default:
		return s.wrap(refusal.Reply(text), false)
	}
	return nil
}

// parseHanded reads a message of the scripts: "call token owner".
func parseHanded(text string) (h handed, ok bool) {
	call, rest, _ := strings.Cut(text, " ")
	token, owner, _ := strings.Cut(rest, " ")
	n, err := strconv.Atoi(call)
	t, err2 := strconv.ParseInt(token, 10, 64)
	return handed{owner, n, fencing.Token(t)}, err == nil && err2 == nil && owner != ""
}
