package redlock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/refusal"
	"github.com/holdfast-go/holdfast/internal/script"
	"github.com/holdfast-go/holdfast/lua"
)

// floorKey is the key of an instance under which no fence counter counts.
const floorKey = "holdfast:floor"

// scripts are those of one link. The granting ones carry how long an instance must have
// been up: a server knows them only by digest, so one that was vetted for a shorter time
// does not know these.
type scripts struct {
	take, accept, keep   *script.Script
	renew, extend, floor *script.Script
	giveUp               *script.Script
}

func newScripts(maturity time.Duration, durable bool) *scripts {
	mark := fmt.Sprintf("\n-- only after %d ms\n", maturity.Milliseconds())
	if durable {
		mark = "\n-- at once\n"
	}
	return &scripts{
		take: script.New(lua.Acquire + mark), accept: script.New(lua.Accept + mark), keep: script.New(lua.Keep + mark),
		renew: script.New(lua.Renew), extend: script.New(lua.Extend), floor: script.New(lua.Floor), giveUp: script.New(lua.GiveUp),
	}
}

// redisLink is the link to a redis-server.
type redisLink struct {
	addr    string
	index   int
	client  single // the caller's, or a copy with our limit on its sockets
	s       *store
	scripts *scripts
	ear     ear

	known atomic.Bool // meet is through
	mute  atomic.Bool // the server does not answer INFO

	// vetting is a lock with one element, so that waiting for it can end with a context.
	vetting chan struct{}

	mu sync.Mutex
	// What follows is guarded by mu.
	id      string        // run_id; "" not known
	mature  clock.Instant // until then the instance has no vote; 0: not known to be young
	digests map[*script.Script]any
}

func newRedisLink(c single, s *store, index int) *redisLink {
	limited := c.WithTimeout(s.limit)
	l := &redisLink{
		addr: c.Options().Addr, index: index, client: limited, s: s,
		scripts: newScripts(s.maturity, s.durable), vetting: make(chan struct{}, 1),
		digests: make(map[*script.Script]any),
	}
	if c.Options().ContextTimeoutEnabled { // our contexts limit it: no copy, which would have no hooks
		l.client = c
	}
	l.ear.init(limited, &s.group)
	return l
}

func (l *redisLink) name() string { return l.addr }

// close ends listening.
func (l *redisLink) close() { l.ear.close() }

func (l *redisLink) listen(key string, hear func()) (stop func()) {
	return l.ear.listen(channelOf(key), hear)
}

// channelOf is where it is told that the lock of key was given up.
func channelOf(key string) string { return "holdfast:free:" + key }

// young returns a *YoungError if the instance is known to have no vote yet.
func (l *redisLink) young() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if left := l.mature.Sub(clock.Now()); l.mature > 0 && left > 0 {
		return &YoungError{Left: left}
	}
	return nil
}

// command is a request as it is sent.
type command struct {
	*redis.Cmd
	script *script.Script
}

// done takes in the error of sending it: hooks may have put none into the command.
func (c *command) done(err error) {
	if c.Cmd != nil && err != nil && c.Err() == nil && c.Val() == nil {
		c.SetErr(err)
	}
}

// NoRetry is asked by go-redis before it repeats a command: each is sent once.
func (c *command) NoRetry() bool { return true }

// send sends the requests. Scripts that the server does not know are loaded, granting
// ones after it has been vetted, and sent again: what it did not know it did not run.
func (l *redisLink) send(ctx context.Context, requests []*request) {
	defer func() {
		if p := recover(); p != nil { // a client, or its hooks
			err := refusal.Final(fmt.Errorf("client panicked: %v", p))
			for _, r := range requests {
				r.err, r.code, r.codes = err, 0, nil
			}
		}
	}()
	if err := l.meet(ctx); err != nil {
		for _, r := range requests {
			r.err = err
		}
		return
	}
	missing := l.exec(ctx, requests)
	for sc, list := range missing {
		if err := l.load(ctx, sc, list[0].kind.granting()); err != nil {
			for _, r := range list {
				r.err, r.sent = err, false
			}
			continue
		}
		for _, again := range l.exec(ctx, list) {
			for _, r := range again {
				r.err, r.sent = errors.New("the server has forgotten the script again"), false
			}
		}
	}
}

// exec sends the requests and reads the answers. It returns those whose script the
// server does not know.
func (l *redisLink) exec(ctx context.Context, requests []*request) (missing map[*script.Script][]*request) {
	miss := func(r *request) {
		if missing == nil {
			missing = make(map[*script.Script][]*request)
		}
		missing[r.cmd.script] = append(missing[r.cmd.script], r)
	}
	var pipe redis.Pipeliner
	who := l.askWho(ctx, requests)
	if len(requests) > 1 || who != nil {
		pipe = l.client.Pipeline()
	}
	if who != nil {
		_ = pipe.Process(ctx, who)
	}
	for _, r := range requests {
		r.cmd.Cmd, r.cmd.script = l.command(ctx, r)
		switch {
		case r.cmd.Cmd == nil:
			miss(r)
		case pipe != nil:
			_ = pipe.Process(ctx, &r.cmd)
		default:
			r.cmd.done(l.client.Process(ctx, &r.cmd))
		}
	}
	if pipe != nil {
		_, err := pipe.Exec(ctx)
		for _, r := range requests {
			r.cmd.done(err)
		}
	}
	for _, r := range requests {
		switch {
		case r.cmd.Cmd == nil:
		case script.Unknown(r.cmd.Err()):
			r.sent = false
			miss(r)
		default:
			r.read()
		}
	}
	if who != nil && l.isTwin(who) {
		for _, r := range requests {
			r.err = errTwin
		}
	}
	return missing
}

// load makes a script known to the server.
func (l *redisLink) load(ctx context.Context, sc *script.Script, granting bool) error {
	if granting {
		return l.vet(ctx, sc)
	}
	cmd := &command{Cmd: redis.NewCmd(ctx, "script", "load", sc.Text())}
	if err := l.client.Process(ctx, cmd); err != nil {
		return refusal.Grade(err, true, false)
	}
	l.learn(sc, cmd)
	return nil
}

// learn keeps the digest that a server knows a script by, where it cannot be computed.
func (l *redisLink) learn(sc *script.Script, loaded *command) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.digests[sc] = loaded.Val()
}

// digest returns the digest of a script, nil if the server must be asked first.
func (l *redisLink) digest(sc *script.Script) any {
	if d := sc.Digest(); d != nil {
		return d
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.digests[sc]
}

// sentArg is a value as a command's argument. go-redis asks it for its bytes when it
// writes the command to a connection.
type sentArg struct{ r *request }

// MarshalBinary returns the bytes that are sent.
func (a sentArg) MarshalBinary() ([]byte, error) {
	a.r.sent = true
	return []byte(a.value()), nil
}

func (a sentArg) value() string {
	if a.r.kind == renew {
		return a.r.leases[0].value
	}
	return a.r.value
}

// String is for hooks that print commands.
func (a sentArg) String() string { return a.value() }

// command makes the command of a request; nil: the digest of its script is not known.
func (l *redisLink) command(ctx context.Context, r *request) (*redis.Cmd, *script.Script) {
	var keys, args []any
	var sc *script.Script
	value := sentArg{r}
	switch {
	case r.kind == renew:
		sc = l.scripts.renew
		keys, args = make([]any, len(r.leases)), make([]any, 0, 2*len(r.leases))
		for i, x := range r.leases {
			keys[i], args = x.key, append(args, x.value, clock.Millis(x.ttl))
		}
		args[0] = value
	case r.kind == set:
		sc, keys, args = l.scripts.extend, []any{r.names.key}, []any{value, clock.Millis(r.ttl)}
	case r.kind == drop:
		channel := r.names.channel
		if r.silent {
			channel = "" // nobody listens there
		}
		sc, keys, args = l.scripts.giveUp, []any{r.names.key}, []any{value, channel, clock.Millis(r.keep)}
		if r.fenced {
			keys, args = append(keys, r.names.fence), append(args, r.token+1, l.lead())
		}
	case r.token == 0:
		sc, keys, args = l.scripts.take, []any{r.names.key}, []any{value, clock.Millis(r.ttl)}
	default:
		if sc = l.scripts.accept; r.kind == heal {
			sc = l.scripts.keep
		}
		keys = []any{r.names.key, r.names.fence, floorKey}
		args = []any{value, clock.Millis(r.ttl), r.token, l.lead()}
	}
	digest := l.digest(sc)
	if digest == nil {
		return nil, sc
	}
	all := append(append(append(make([]any, 0, 3+len(keys)+len(args)), "evalsha", digest, len(keys)), keys...), args...)
	cmd := redis.NewCmd(ctx, all...)
	cmd.SetFirstKeyPos(3)
	return cmd, sc
}

// lead is how far a token may be ahead of the server's clock, in us.
func (l *redisLink) lead() int64 { return (l.s.maturity / 2).Microseconds() }

// fenceOf is the key of a lock's fence counter.
func fenceOf(key string) string {
	fence, _ := keyspace.Companion(key, "fence") // the Locker has checked that there is one
	return fence
}
