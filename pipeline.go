package holdfast

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/group"
	"github.com/holdfast-go/holdfast/internal/refusal"
)

const (
	// fewFlights is how many commands of a lane are sent at once and by themselves.
	fewFlights = 4

	// gathered is how many commands must wait for a flight that comes back to take them
	// along while others are under way. While so many do, none is sent by itself:
	// those that come now fill the next batch.
	gathered = 4

	// mostBytes bounds one batch, which is a few dozen commands: a connection that
	// breaks fails all of it, and what is read only when all is written must fit into
	// the buffers between, which for net.Pipe are those of the server's reader.
	mostBytes = 4000

	// gatherLimit bounds how long a command waits for flights to come back, while few
	// are under way; see arm. It is what a connection that hangs, or a server that is
	// far away, costs the others.
	gatherLimit = 2 * time.Millisecond
)

// pipeline sends the commands of many goroutines to one server. When few are under
// way each is sent at once and by itself. When there are more, those that come
// meanwhile gather, and go together, in one write, when one comes back. So no command
// waits for company, and the more there are the fewer writes they need.
//
// It stands on the client's own Process and Pipeline, so connections, hooks and limits
// are those of the caller's client. The AutoPipeline of go-redis would be the client's,
// shared with whoever else uses it, and its goroutines stay; it splits batches where
// commands that may be repeated meet others; and it asks arguments for their bytes
// without sending them, so that ownerArg would count too much.
type pipeline struct {
	// Commands that go-redis may repeat share no batch with those that it must not:
	// it repeats a batch as a whole, unless there is one of these in it.
	repeated, once lane
}

func newPipeline(client *redis.Client) *pipeline {
	p := &pipeline{}
	p.repeated.client, p.once.client = client, client
	return p
}

// Process sends cmd and waits for the answer. For a piped call it comes back within the
// call's bounds; after an error cmd may then still be under way, and must not be
// looked at. That it waits here, on channels, and no client is ever waited for, is
// what lets a call do without a goroutine of its own.
func (p *pipeline) Process(ctx context.Context, cmd redis.Cmder) error {
	ln := &p.repeated
	if cmd.NoRetry() {
		ln = &p.once
	}
	if c, ok := ctx.(*call); ok && c.piped {
		return ln.process(c, cmd)
	}
	return ln.client.Process(ctx, cmd)
}

// Eval sends a script by its text.
func (p *pipeline) Eval(ctx context.Context, text string, keys []string, args ...any) *redis.Cmd {
	return p.script(ctx, "eval", text, keys, args)
}

// EvalSha sends a script by its digest.
func (p *pipeline) EvalSha(ctx context.Context, sha string, keys []string, args ...any) *redis.Cmd {
	return p.script(ctx, "evalsha", sha, keys, args)
}

func (p *pipeline) script(ctx context.Context, name, what string, keys []string, args []any) *redis.Cmd {
	all := make([]any, 0, 3+len(keys)+len(args))
	all = append(all, name, what, len(keys))
	for _, k := range keys {
		all = append(all, k)
	}
	cmd := redis.NewCmd(ctx, append(all, args...)...)
	if len(keys) > 0 {
		cmd.SetFirstKeyPos(3)
	}
	if err := p.Process(ctx, cmd); err != nil {
		return failedCmd(ctx, err)
	}
	return cmd
}

// failedCmd stands for a command that has failed and may yet be under way.
func failedCmd(ctx context.Context, err error) *redis.Cmd {
	cmd := redis.NewCmd(ctx)
	cmd.SetErr(err)
	return cmd
}

// lane is a pipeline for commands of one kind. A flight is a request under way, with
// one command or a batch, on a goroutine which goes on with what waits and ends when
// nothing does.
//
// Invariants: while a command waits the timer runs, which starts a flight for it. A
// command that is given up while it waits is never sent.
type lane struct {
	client *redis.Client

	mu      sync.Mutex
	flying  int     // flights
	crowded bool    // when the latest one came back
	waiting []*call // first come first served; some may have been given up
	timer   *time.Timer
	armed   bool
}

// passage is where the command of a call stands. It is guarded by lane.mu.
type passage struct {
	cmd    redis.Cmder
	bytes  int
	batch  *batch // nil: it waits, or is by itself
	landed bool   // answered in time: the caller takes it
	left   bool   // the caller has given up
}

// batch is a pipeline under way, and its context: the end of one caller must not end
// what others wait for. So it ends when nobody waits any more.
type batch struct {
	context.Context
	calls    []*call
	deadline time.Time // the latest
	done     chan struct{}
	wanted   int // calls whose callers wait; guarded by lane.mu
}

func (b *batch) Deadline() (time.Time, bool) { return b.deadline, true }
func (b *batch) Done() <-chan struct{}       { return b.done }

func (b *batch) Err() error {
	select {
	case <-b.done:
		return context.Canceled
	default:
		return nil
	}
}

// process sends cmd for c, at once or with others.
func (ln *lane) process(c *call, cmd redis.Cmder) error {
	if c.over != nil {
		c.gaveUp = c.over
		c.abandon()
		return c.over
	}
	bytes := sizeOf(cmd)
	ln.mu.Lock()
	c.passage = passage{cmd: cmd, bytes: bytes}
	if len(ln.waiting) == 0 && (ln.flying == 0 || ln.flying < fewFlights && !ln.crowded) {
		ln.flying++
		ln.mu.Unlock()
		c.l.group.Add()
		c.waiter.lane, c.waiter.call = ln, c
		go c.waiter.fly() // ends when nothing waits
	} else {
		ln.waiting = append(ln.waiting, c)
		ln.arm()
		ln.mu.Unlock()
	}
	if err := c.await(ln); err != nil {
		return err
	}
	return cmd.Err()
}

// sizeOf returns about how many bytes cmd is when it is sent.
func sizeOf(cmd redis.Cmder) int {
	const around = 10 // an argument's length and its ends
	n := around
	for _, arg := range cmd.Args() {
		switch arg := arg.(type) {
		case string:
			n += around + len(arg)
		case *ownerArg:
			n += around + len(arg.owner)
		case *textArg:
			n += around + len(*arg)
		default:
			n += around + 20 // a number
		}
	}
	return n
}

// leave notes that c's caller gives up. It reports false when the answer is there.
func (ln *lane) leave(c *call) bool {
	ln.mu.Lock()
	defer ln.mu.Unlock()
	if c.landed {
		return false
	}
	c.left = true
	if b := c.batch; b != nil {
		if b.wanted--; b.wanted == 0 {
			close(b.done)
		}
	}
	return true
}

// arm sets the timer unless it runs. The more flights there are, the longer it is
// until there is one more: a server that hangs must not get all connections.
func (ln *lane) arm() {
	if ln.armed {
		return
	}
	ln.armed = true
	limit := gatherLimit << min(ln.flying/4, 4)
	if ln.timer == nil {
		ln.timer = time.AfterFunc(limit, ln.overdue)
	} else {
		ln.timer.Reset(limit)
	}
}

// overdue starts a flight for what waits, if something still does.
func (ln *lane) overdue() {
	ln.mu.Lock()
	ln.armed = false
	b := ln.take()
	if b == nil {
		ln.mu.Unlock()
		return
	}
	ln.flying++
	g := &b.calls[0].l.group
	g.Add() // before the callers can be told, which are counted themselves
	ln.mu.Unlock()
	ln.fly(g, nil, b)
}

// take makes a batch of what waits, or returns nil. It is called with mu held.
func (ln *lane) take() *batch {
	var b *batch
	n, room := 0, mostBytes
	for _, c := range ln.waiting {
		if room -= c.bytes; room < 0 && b != nil {
			break
		}
		n++
		if c.left {
			room += c.bytes
			continue
		}
		if b == nil {
			b = &batch{
				Context: context.Background(), done: make(chan struct{}),
				calls: make([]*call, 0, min(len(ln.waiting), mostBytes/100)),
			}
		}
		c.batch = b
		b.calls, b.wanted = append(b.calls, c), b.wanted+1
		if c.deadline.After(b.deadline) {
			b.deadline = c.deadline
		}
	}
	rest := copy(ln.waiting, ln.waiting[n:])
	clear(ln.waiting[rest:])
	if ln.waiting = ln.waiting[:rest]; rest > 0 {
		ln.arm()
	}
	return b
}

// land ends a flight, or returns what it goes on with. What waits and is not enough
// is left to a flight that is still under way.
func (ln *lane) land() *batch {
	ln.mu.Lock()
	defer ln.mu.Unlock()
	ln.crowded = len(ln.waiting) >= gathered
	if ln.crowded || ln.flying == 1 {
		if b := ln.take(); b != nil {
			return b
		}
	}
	if ln.flying--; ln.flying == 0 && ln.armed {
		ln.armed = !ln.timer.Stop() // nothing waits
	}
	return nil
}

// fly is the goroutine of a flight, counted in g. It sends the command of c, or b, and
// then what waits, until nothing does.
func (ln *lane) fly(g *group.Group, c *call, b *batch) {
	through := false
	defer func() {
		if !through { // a hook has ended this goroutine (runtime.Goexit)
			g.Add()
			go ln.fly(g, nil, nil) // ends when nothing waits
		}
		g.Done()
	}()
	if c != nil {
		ln.send(c)
	}
	for {
		if b != nil {
			ln.sendAll(b)
		}
		// Let those run who have just been answered: most of them come back with
		// the next command, and go along.
		runtime.Gosched()
		if b = ln.land(); b == nil {
			break
		}
	}
	through = true
}

// send sends a command by itself.
func (ln *lane) send(c *call) {
	through := false
	defer func() {
		if !through {
			c.cmd.SetErr(panicked(recover()))
		}
		ln.tell(c)
	}()
	_ = ln.client.Process(c, c.cmd) // the error is in cmd
	through = true
}

// sendAll sends a batch. Each command has an error of its own.
func (ln *lane) sendAll(b *batch) {
	if len(b.calls) == 1 {
		ln.send(b.calls[0])
		return
	}
	through := false
	defer func() {
		if !through { // which may have been for one of them: the others may be tried again
			b.fail(fmt.Errorf("client panicked: %v", recover()))
		}
		ln.tell(b.calls...)
	}()
	cmds := make([]redis.Cmder, len(b.calls))
	for i, c := range b.calls {
		cmds[i] = c.cmd
	}
	pipe := ln.client.Pipeline()
	_ = pipe.BatchProcess(b, cmds...)
	_, err := pipe.Exec(b)
	failed := func(cmd redis.Cmder) bool { return cmd.Err() != nil }
	if err != nil && !slices.ContainsFunc(cmds, failed) {
		b.fail(err) // a hook did not let it through
	}
	through = true
}

// fail gives all commands of b an error.
func (b *batch) fail(err error) {
	for _, c := range b.calls {
		c.cmd.SetErr(err)
	}
}

// panicked is the error for a hook that has panicked with p, or has ended the
// goroutine.
func panicked(p any) error { return refusal.Final(fmt.Errorf("client panicked: %v", p)) }

// tell hands the answers to the callers, or settles those that nobody waits for. A
// call belongs to its caller again when it has been told.
func (ln *lane) tell(calls ...*call) {
	ln.mu.Lock()
	var late []*call
	for _, c := range calls {
		if c.landed = !c.left; c.left {
			late = append(late, c)
		}
	}
	ln.mu.Unlock()
	for _, c := range calls {
		if !slices.Contains(late, c) {
			c.waiter.signals <- answerCame
		}
	}
	for _, c := range late {
		c.late(Grant{}, c.cmd.Err())
	}
}
