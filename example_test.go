package holdfast_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/fencing"
)

// client and ctx are what the examples take for given. In a program:
//
//	client := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
var (
	client = memoryRedis()
	ctx    = context.Background()
)

// memoryRedis returns a client of a server inside this process. It keeps no
// connections, so that no goroutine is left when nobody uses it.
func memoryRedis() redis.UniversalClient {
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true)
	return redis.NewClient(&redis.Options{
		Dialer:       func(context.Context, string, string) (net.Conn, error) { return m.Dial() },
		MaxIdleConns: -1, Protocol: 2, DisableIdentity: true,
	})
}

// ship stands for the work that a lock protects.
func ship(ctx context.Context, order int) error { return ctx.Err() }

func Example() {
	locker, err := holdfast.New(client) // any go-redis client; one Locker for a process
	if err != nil {
		return
	}
	defer locker.Close()

	lock, err := locker.Acquire(ctx, "order:1") // waits until it has the lock or ctx ends
	if err != nil {
		return
	}
	defer lock.Release()
	fmt.Println("shipped:", ship(lock.Context(), 1) == nil)
	// Output: shipped: true
}

func ExampleNew() {
	locker, err := holdfast.New(client,
		holdfast.WithTTL(10*time.Second),      // free that long after its holder died
		holdfast.WithWait(2*time.Second),      // for Acquire and Do
		holdfast.WithMaxHold(5*time.Minute),   // a stuck holder loses it then
		holdfast.WithPrefix("billing:lock:"),  // keys of locks apart from data
		holdfast.WithHolder("billing-worker"), // the name that others see
		holdfast.WithLogger(slog.Default()),
	)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer locker.Close()

	// The options of a call override those of the Locker.
	lock, err := locker.Acquire(ctx, "invoice:7", holdfast.WithTTL(time.Minute))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lock.Release()
	fmt.Println(lock.Key(), "is valid for more than 50 s:", time.Until(lock.ValidUntil()) > 50*time.Second)

	_, err = holdfast.New(client, holdfast.WithTTL(time.Millisecond))
	fmt.Println(err)
	// Output:
	// invoice:7 is valid for more than 50 s: true
	// holdfast: TTL 1ms: must be at least 10ms
}

func ExampleLocker_Acquire() {
	locker, err := holdfast.New(client)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer locker.Close()
	first, err := locker.Acquire(ctx, "report")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer first.Release()

	// WithWait limits the wait alone. A deadline on ctx would end the hold, too.
	_, err = locker.Acquire(ctx, "report", holdfast.WithWait(20*time.Millisecond))
	switch {
	case errors.Is(err, holdfast.ErrNotAcquired):
		fmt.Println("somebody has it: try later")
	case errors.Is(err, holdfast.ErrUnavailable):
		fmt.Println("nobody knows: Redis did not answer")
	case err != nil:
		fmt.Println(err)
	}
	// Output: somebody has it: try later
}

func ExampleLocker_TryAcquire() {
	locker, err := holdfast.New(client, holdfast.WithHolder("worker-1"))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer locker.Close()
	first, err := locker.TryAcquire(ctx, "nightly")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer first.Release()

	_, err = locker.TryAcquire(ctx, "nightly")
	var held *holdfast.HeldError
	if errors.As(err, &held) {
		fmt.Printf("%s has %s for less than %v\n", held.Holder, held.Key, held.TTL.Round(time.Minute/2))
	}
	// Output: worker-1 has nightly for less than 30s
}

func ExampleLocker_Do() {
	locker, err := holdfast.New(client)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer locker.Close()

	err = locker.Do(ctx, "order:2", func(ctx context.Context) error {
		return ship(ctx, 2) // ctx ends the moment ownership can no longer be trusted
	})
	fmt.Println("error:", err)
	// Output: error: <nil>
}

func ExampleLock_Err() {
	locker, err := holdfast.New(client)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer locker.Close()
	lock, err := locker.Acquire(ctx, "ledger")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lock.Release()

	// It asks nobody: it compares with the local clock. So ask before each write.
	write := func(line string) error {
		if err := lock.Err(); err != nil {
			return err // lost: do not write
		}
		fmt.Println("wrote", line)
		return nil
	}
	if err := write("a"); err != nil {
		fmt.Println(err)
		return
	}
	if err := lock.Release(); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(write("b"))
	// Output:
	// wrote a
	// holdfast: lock released
}

func ExampleLock_Extend() {
	locker, err := holdfast.New(client)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer locker.Close()
	lock, err := locker.Acquire(ctx, "import", holdfast.WithTTL(time.Second), holdfast.WithoutRenewal())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lock.Release()

	// Extend sets what is left to the given time. It does not add to it.
	if err := lock.Extend(ctx, time.Minute); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("more than 50 s left:", time.Until(lock.ValidUntil()) > 50*time.Second)
	// Output: more than 50 s left: true
}

func ExampleWithFencing() {
	locker, err := holdfast.New(client, holdfast.WithFencing())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer locker.Close()

	// A resource that refuses a token lower than the highest it has seen also
	// stops a holder that was paused between its last check and its write.
	var highest fencing.Token
	store := func(ctx context.Context, value string) error {
		token, ok := fencing.FromContext(ctx)
		if !ok || token < highest {
			return fmt.Errorf("%s: token %d is stale", value, token)
		}
		highest = token
		fmt.Println("stored", value, "with token", token)
		return nil
	}

	var old context.Context
	for _, value := range []string{"a", "b"} {
		err := locker.Do(ctx, "account:9", func(ctx context.Context) error {
			if old == nil {
				old = ctx
			}
			return store(ctx, value)
		})
		if err != nil {
			fmt.Println(err)
			return
		}
	}
	fmt.Println(store(old, "late write"))
	// Output:
	// stored a with token 1
	// stored b with token 2
	// late write: token 1 is stale
}

func ExampleWithObserver() {
	locker, err := holdfast.New(client, holdfast.WithObserver(holdfast.Observer{
		Acquired: func(key string, wait time.Duration, attempts int) { fmt.Println("acquired", key, attempts) },
		Refused:  func(key string, err error) { fmt.Println("refused", key) },
		Released: func(key string, hold time.Duration) { fmt.Println("released", key) },
	}))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer locker.Close()

	lock, err := locker.TryAcquire(ctx, "cache")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lock.Release()
	if _, err = locker.TryAcquire(ctx, "cache"); err == nil {
		fmt.Println("two holders")
		return
	}
	// Output:
	// acquired cache 1
	// refused cache
	// released cache
}

// A job that runs once a tick, on whichever host comes first.
func ExampleWithMinHold() {
	runs := 0
	for range 3 { // hosts
		locker, err := holdfast.New(client, holdfast.WithMinHold(time.Second)) // longer than clocks differ
		if err != nil {
			return
		}
		defer locker.Close()
		lock, err := locker.TryAcquire(ctx, "report")
		if errors.Is(err, holdfast.ErrNotAcquired) {
			continue // another host has it, or had it in this tick
		}
		if err != nil {
			return
		}
		runs++
		if err := lock.Release(); err != nil {
			return
		}
	}
	fmt.Println("runs:", runs)
	// Output: runs: 1
}
