// Command quickstart shows the life of a lock that is lost. Two workers want the
// same lock. The first one is cut off from Redis while it works: its renewals do
// not arrive, its context ends before the lease can, and the second one takes
// over. The first one's late write is refused by its own check.
//
// It runs on an embedded miniredis, or on the server that REDIS_URL names, such
// as redis://localhost:6379/0. It exits with 1 if a step does not go as told.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast"
)

// ttl is the lease. It is short, so that the program is; services use 10 to 60 s.
const ttl = time.Second

var start = time.Now()

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

// say prints a step with the time since the start.
func say(format string, args ...any) {
	fmt.Printf("%5.2fs  %s\n", time.Since(start).Seconds(), fmt.Sprintf(format, args...))
}

func run(ctx context.Context) error {
	options, stop, err := server()
	if err != nil {
		return err
	}
	defer stop()

	// Each worker stands for a process: a client and a Locker of its own.
	network := &cable{}
	first, err := newWorker("first", options, network)
	if err != nil {
		return err
	}
	defer first.close()
	second, err := newWorker("second", options, &cable{})
	if err != nil {
		return err
	}
	defer second.close()

	r := &report{}
	lock, err := first.locker.Acquire(ctx, "report")
	if err != nil {
		return err
	}
	defer lock.Release()
	say("first:  has the lock, valid for %v: the lease less drift and margin", time.Until(lock.ValidUntil()).Round(10*time.Millisecond))
	if err := r.write(lock, "first"); err != nil {
		return err
	}
	say("first:  wrote the report")

	takeover := make(chan error, 1)
	release := make(chan struct{})
	go func() { takeover <- second.takeOver(ctx, r, lock, release) }() // ends with ctx at the latest

	if err := lose(ctx, lock, network); err != nil {
		return err
	}
	select {
	case err := <-takeover:
		if err != nil {
			return err
		}
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	network.mend()
	say("first:  is back, and does not know what happened meanwhile")
	return first.comeBack(lock, r, second, release)
}

// lose lets the watchdog renew the lock for a while, cuts the network, and waits
// for the end of the lock's context.
func lose(ctx context.Context, lock *holdfast.Lock, network *cable) error {
	if err := sleep(ctx, 3*ttl/2); err != nil {
		return err
	}
	if err := lock.Err(); err != nil {
		return fmt.Errorf("the lock was not renewed: %w", err)
	}
	say("first:  still has it after one and a half leases: the watchdog renews")

	network.cut()
	say("first:  is cut off from Redis, renewals hang")
	cut := time.Now()
	<-lock.Context().Done()
	cause := context.Cause(lock.Context())
	if !errors.Is(cause, holdfast.ErrLost) {
		return fmt.Errorf("want the lock lost, got: %w", cause)
	}
	say("first:  its context is cancelled %v after the cut (the lease is %v)",
		time.Since(cut).Round(10*time.Millisecond), ttl)
	say("first:  the cause: %v", cause)
	return nil
}

// takeOver waits for the lock and writes. It keeps the lock until release is
// closed.
func (w *worker) takeOver(ctx context.Context, r *report, other *holdfast.Lock, release <-chan struct{}) error {
	say("second: waits for the lock")
	lock, err := w.locker.Acquire(ctx, "report", holdfast.WithWait(8*time.Second))
	if err != nil {
		return err
	}
	if other.Context().Err() == nil {
		return errors.New("two workers hold the lock")
	}
	say("second: has the lock; the first one's context had ended before")
	if err := r.write(lock, "second"); err != nil {
		return err
	}
	say("second: wrote the report")
	w.done.Add(1)
	go func() { // ended by release, or with ctx
		defer w.done.Done()
		select {
		case <-release:
		case <-ctx.Done():
		}
		w.released = lock.Release()
	}()
	return nil
}

// comeBack is what the first worker does when it goes on: it checks, it does not
// write, and it learns at Release that somebody else has the lock.
func (w *worker) comeBack(lock *holdfast.Lock, r *report, second *worker, release chan<- struct{}) error {
	err := r.write(lock, "first")
	if !errors.Is(err, holdfast.ErrLost) {
		return fmt.Errorf("want the late write refused, got: %w", err)
	}
	say("first:  its late write is refused by lock.Err()")

	if err = lock.Release(); !errors.Is(err, holdfast.ErrLost) {
		return fmt.Errorf("want ErrLost from Release, got: %w", err)
	}
	say("first:  Release tells it too: %v", err)

	close(release)
	second.done.Wait()
	if second.released != nil {
		return fmt.Errorf("release of the second worker: %w", second.released)
	}
	say("second: released the lock, which was its own until then")
	if got := r.text(); got != "first, second" {
		return fmt.Errorf("want the report by first, second; it is by %s", got)
	}
	say("the report was written by: %s; the late write of the first is not in it", r.text())
	return nil
}

// report is what the lock protects.
type report struct {
	mu sync.Mutex
	by string
}

// write asks lock.Err before it writes. It takes no network, and is right even in
// a process that was stopped. What it cannot close is a pause after it and before
// the write: a resource closes that by checking fencing tokens (WithFencing).
func (r *report) write(lock *holdfast.Lock, by string) error {
	if err := lock.Err(); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.by != "" {
		r.by += ", "
	}
	r.by += by
	return nil
}

func (r *report) text() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.by
}

// worker has a client and a Locker.
type worker struct {
	client *redis.Client
	locker *holdfast.Locker

	done     sync.WaitGroup
	released error // read after done.Wait
}

func newWorker(name string, o redis.Options, network *cable) (*worker, error) {
	client := redis.NewClient(&o)
	client.AddHook(network)
	locker, err := holdfast.New(client,
		holdfast.WithTTL(ttl), holdfast.WithHolder(name), holdfast.WithPrefix("quickstart:"),
		// By default losses are also logged; here each step is printed anyway.
		holdfast.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return nil, errors.Join(err, client.Close())
	}
	return &worker{client: client, locker: locker}, nil
}

// close ends the Locker before the client: the Locker still releases with it.
func (w *worker) close() {
	if err := errors.Join(w.locker.Close(), w.client.Close()); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart: close:", err)
	}
}

// server returns the options of a client, and what stops an embedded server.
func server() (o redis.Options, stop func(), err error) {
	if url := os.Getenv("REDIS_URL"); url != "" {
		parsed, err := redis.ParseURL(url)
		if err != nil {
			return o, nil, err
		}
		say("server: %s", parsed.Addr)
		return *parsed, func() {}, nil
	}
	m, err := miniredis.Run()
	if err != nil {
		return o, nil, err
	}
	m.ClockTTL(true) // its keys expire as those of a real server do
	say("server: miniredis in this process")
	return redis.Options{Addr: m.Addr()}, m.Close, nil
}

// cable is the network of one client, as a hook: while it is cut, commands wait
// for an answer that does not come.
type cable struct {
	mu     sync.Mutex
	mended chan struct{} // nil: it is not cut
}

func (c *cable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mended == nil {
		c.mended = make(chan struct{})
	}
}

func (c *cable) mend() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mended != nil {
		close(c.mended)
		c.mended = nil
	}
}

// pass waits while the cable is cut.
func (c *cable) pass(ctx context.Context) error {
	c.mu.Lock()
	mended := c.mended
	c.mu.Unlock()
	if mended == nil {
		return nil
	}
	select {
	case <-mended:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// DialHook lets connections be made: the commands on them are what is cut.
func (c *cable) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook holds up single commands.
func (c *cable) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if err := c.pass(ctx); err != nil {
			cmd.SetErr(err)
			return err
		}
		return next(ctx, cmd)
	}
}

// ProcessPipelineHook holds up pipelines.
func (c *cable) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if err := c.pass(ctx); err != nil {
			return err
		}
		return next(ctx, cmds)
	}
}

// sleep waits for d, or for the end of ctx.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
