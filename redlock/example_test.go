package redlock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/redlock"
)

// clients and ctx are what the examples take for given. In a program:
//
//	for _, addr := range []string{"a:6379", "b:6379", "c:6379"} {
//		clients = append(clients, redis.NewClient(&redis.Options{Addr: addr}))
//	}
var (
	servers, clients = memoryServers(3)
	ctx              = context.Background()
)

// memoryServers returns servers inside this process and their clients, which keep no
// connections, so that no goroutine is left when nobody uses them.
func memoryServers(n int) (servers []*miniredis.Miniredis, clients []redis.UniversalClient) {
	for range n {
		m := miniredis.NewMiniRedis()
		m.ClockTTL(true)
		servers = append(servers, m)
		clients = append(clients, redis.NewClient(&redis.Options{
			Dialer:       func(context.Context, string, string) (net.Conn, error) { return m.Dial() },
			MaxIdleConns: -1, Protocol: 2, DisableIdentity: true,
		}))
	}
	return servers, clients
}

// ship stands for the work that a lock protects.
func ship(ctx context.Context, order int) error { return ctx.Err() }

func ExampleNew() {
	// A short TTL: an instance that has just been started has no vote for so long. These
	// tell nobody how long they have been up, and never restart.
	locker, err := redlock.New(clients, holdfast.WithTTL(2*time.Second), redlock.WithDurableInstances())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer locker.Close()

	servers[2].SetError("LOADING") // one of three is of no use
	defer servers[2].SetError("")
	lock, err := locker.Acquire(ctx, "order:1", holdfast.WithWait(time.Second))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lock.Release()
	fmt.Println("shipped:", ship(lock.Context(), 1) == nil)
	// Output: shipped: true
}

// An error says what each instance has answered.
func ExampleQuorumError() {
	locker, err := redlock.New(clients, holdfast.WithTTL(2*time.Second), redlock.WithDurableInstances())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer locker.Close()

	for _, s := range servers[1:] {
		s.SetError("LOADING")
		defer s.SetError("")
	}
	_, err = locker.TryAcquire(ctx, "order:1")
	var q *redlock.QuorumError
	if errors.Is(err, holdfast.ErrUnavailable) && errors.As(err, &q) {
		fmt.Println("votes needed:", q.Needed)
		for _, n := range q.Nodes {
			if n.Index > 0 { // the first has agreed, or was not waited for any more
				fmt.Println(n.Index, n.Err)
			}
		}
	}
	// Output:
	// votes needed: 2
	// 1 LOADING
	// 2 LOADING
}
