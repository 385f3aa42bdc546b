//go:build unix

// Command http-inventory shows fencing tokens between services. One process keeps the
// inventory, with one item, and serves it by HTTP; two workers sell from it. The first takes
// the lock, reads the stock, asks once more whether it still has the lock, and is stopped by
// the system (SIGSTOP) before it sends its order. Its lease ends. The second takes the lock and
// sells the item. Then the first goes on, and orders. With the middleware of httpfence in front
// of it the service answers 409; without it the item is sold twice.
//
// REDIS_URL names a Redis in place of the embedded one. It exits with 1 if a step does not go
// as told.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/holdfast-go/holdfast/internal/stage"
)

const (
	// ttl is the lease. It is short, so that the program is; services use 10 to 60 s.
	ttl = time.Second

	// workerVariable has the name of a worker, in its process.
	workerVariable = "HTTP_INVENTORY"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := play(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "http-inventory:", err)
		os.Exit(1)
	}
}

// play runs a worker, or the whole story.
func play(ctx context.Context) error {
	if name := os.Getenv(workerVariable); name != "" {
		return work(ctx, name)
	}
	return run(ctx)
}

func run(ctx context.Context) error {
	redisURL := os.Getenv("REDIS_URL")
	if redisURL == "" {
		server, err := miniredis.Run()
		if err != nil {
			return err
		}
		defer server.Close()
		server.ClockTTL(true) // leases end by themselves, as on a real server
		redisURL = "redis://" + server.Addr()
	}
	st := stage.New(ctx, os.Stdout, workerVariable)
	for _, fenced := range []bool{true, false} {
		if err := scene(st, fenced, "REDIS_URL="+redisURL); err != nil {
			return err
		}
	}
	return nil
}

// scene is the whole story, behind the middleware or not.
func scene(st *stage.Stage, fenced bool, env string) (err error) {
	st.Say("--- %s tokens checked by the service, one item in stock", map[bool]string{true: "with", false: "without"}[fenced])
	shop := newShop()
	handler, err := shop.handler(fenced)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: time.Second}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }() // ends with Close
	defer func() {
		err = errors.Join(err, server.Close())
		if e := <-served; !errors.Is(e, http.ErrServerClosed) {
			err = errors.Join(err, e)
		}
	}()
	if err := pauseOne(st, env, "SHOP_URL=http://"+listener.Addr().String()); err != nil {
		return err
	}
	stock := shop.left("shoe")
	st.Say("stock is %d", stock)
	switch {
	case fenced && stock != 0:
		return fmt.Errorf("the stock is %d with tokens", stock)
	case !fenced && stock != -1:
		return fmt.Errorf("the stock is %d without tokens: nothing was oversold", stock)
	case !fenced:
		st.Say("one item was sold twice")
	}
	return nil
}

// pauseOne lets one worker sell while another is paused before its order.
func pauseOne(st *stage.Stage, env ...string) error {
	first, err := st.Start("first", "first", env...)
	if err != nil {
		return err
	}
	defer first.End()
	if err := first.Until("ready"); err != nil {
		return err
	}
	if err := first.Pause(); err != nil {
		return err
	}
	st.Say("first:  stopped by SIGSTOP, between its last check and its order")

	second, err := st.Start("second", "second", env...)
	if err != nil {
		return err
	}
	defer second.End()
	if err := errors.Join(second.Until("ready"), second.Finish()); err != nil {
		return err
	}
	st.Say("first:  goes on (SIGCONT)")
	return errors.Join(first.Continue(), first.Finish())
}
