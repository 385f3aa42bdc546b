// Command majority shows a lock on five independent servers. It is held on while two of
// them are stopped, and given back to them when they return; with a third one stopped its
// context ends before the lease can; and nothing is left on any server at the end.
//
// The servers are miniredis, in this process. It exits with 1 if a step does not go as
// told.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/redlock"
)

const (
	// ttl is the lease. It is short, so that the program is; services use 10 to 60 s.
	ttl = 2 * time.Second
	key = "report"
)

var start = time.Now()

func main() {
	logging.Disable() // of go-redis, about the connections to what is stopped
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "majority:", err)
		os.Exit(1)
	}
}

// say prints a step with the time since the start.
func say(format string, args ...any) {
	fmt.Printf("%5.2fs  %s\n", time.Since(start).Seconds(), fmt.Sprintf(format, args...))
}

func run(ctx context.Context) error {
	f, err := newFleet(5)
	if err != nil {
		return err
	}
	defer f.close()
	// Stopped here, a miniredis keeps its data; a server that may forget them in a restart
	// needs no option, and has no vote until it has been up for a TTL.
	locker, err := redlock.New(f.clients, holdfast.WithTTL(ttl), redlock.WithDurableInstances(),
		holdfast.WithLogger(slog.New(slog.DiscardHandler))) // each step is printed anyway
	if err != nil {
		return err
	}
	defer locker.Close()

	lock, err := locker.Acquire(ctx, key, holdfast.WithWait(ttl))
	if err != nil {
		return err
	}
	defer lock.Release()
	if err := f.until(ctx, 5); err != nil {
		return err
	}
	say("the lock is on all five servers, valid for %v", time.Until(lock.ValidUntil()).Round(10*time.Millisecond))
	if err := survive(ctx, f, lock); err != nil {
		return err
	}
	if err := lose(f, lock); err != nil {
		return err
	}
	_ = lock.Release() // it says ErrLost again, and clears what is left
	if err := f.until(ctx, 0); err != nil {
		return err
	}
	say("nothing is left on any server")
	return nil
}

// survive stops two servers for longer than the lease, and brings them back.
func survive(ctx context.Context, f *fleet, lock *holdfast.Lock) error {
	f.stop(0, 1)
	say("two of them are stopped")
	select {
	case <-time.After(ttl + ttl/2):
	case <-lock.Context().Done():
		return context.Cause(lock.Context())
	}
	say("one and a half leases later it is held: three of five renew it")
	if err := f.start(0, 1); err != nil {
		return err
	}
	f.forget(0, key)
	if err := f.until(ctx, 5); err != nil {
		return err
	}
	say("both are back, one without the lock; a renewal has given it back")
	return lock.Err()
}

// lose stops a majority.
func lose(f *fleet, lock *holdfast.Lock) error {
	f.stop(0, 1, 2)
	say("three are stopped: no majority is left")
	<-lock.Context().Done()
	if cause := context.Cause(lock.Context()); !errors.Is(cause, holdfast.ErrLost) {
		return fmt.Errorf("want the lock lost, got: %w", cause)
	}
	say("its context ends before the lease on the others: %v", lock.Err())
	return f.start(0, 1, 2)
}

// fleet is a number of servers and their clients.
type fleet struct {
	servers []*miniredis.Miniredis
	clients []redis.UniversalClient
}

func newFleet(n int) (*fleet, error) {
	f := &fleet{}
	for range n {
		m, err := miniredis.Run()
		if err != nil {
			f.close()
			return nil, err
		}
		m.ClockTTL(true) // its keys expire as those of a real server do
		f.servers = append(f.servers, m)
		f.clients = append(f.clients, redis.NewClient(&redis.Options{Addr: m.Addr()}))
	}
	return f, nil
}

func (f *fleet) close() {
	for i, m := range f.servers {
		_ = f.clients[i].Close()
		m.Close()
	}
}

func (f *fleet) stop(indexes ...int) {
	for _, i := range indexes {
		f.servers[i].Close()
	}
}

func (f *fleet) start(indexes ...int) error {
	for _, i := range indexes {
		if err := f.servers[i].Restart(); err != nil {
			return err
		}
	}
	return nil
}

// forget makes a server lose a key.
func (f *fleet) forget(i int, key string) { f.servers[i].Del(key) }

// until waits until n servers have the lock.
func (f *fleet) until(ctx context.Context, n int) error {
	for {
		have := 0
		for _, m := range f.servers {
			if m.Exists(key) {
				have++
			}
		}
		if have == n {
			return nil
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("%d servers have the lock, want %d: %w", have, n, context.Cause(ctx))
		}
	}
}
