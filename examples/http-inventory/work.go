//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/fencing/httpfence"
)

// work is a worker's process: it takes the lock and orders one item, if there is one.
func work(ctx context.Context, name string) error {
	options, err := redis.ParseURL(os.Getenv("REDIS_URL"))
	if err != nil {
		return err
	}
	client := redis.NewClient(options)
	defer func() { _ = client.Close() }()
	locker, err := holdfast.New(client, holdfast.WithTTL(ttl), holdfast.WithFencing(),
		holdfast.WithHolder(name), holdfast.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return err
	}
	defer func() { _ = locker.Close() }()
	lock, err := locker.Acquire(ctx, "stock:shoe")
	if err != nil {
		return err
	}
	defer func() { _ = lock.Release() }() // the first worker's is lost: that is what this shows
	fmt.Printf("has the lock, token %d, and enters\n", lock.Token())

	// The transport sends the token that lock.Context() carries.
	web := &http.Client{Transport: &httpfence.Transport{}}
	defer web.CloseIdleConnections()
	if _, err := call(lock.Context(), web, http.MethodPost, "/stock/shoe/enter"); err != nil {
		return err
	}
	stock, err := call(lock.Context(), web, http.MethodGet, "/stock/shoe")
	if err != nil {
		return err
	}
	fmt.Println("reads the stock:", stock)
	if stock == "0" {
		return errors.New("nothing is left to sell")
	}
	if err := lock.Err(); err != nil {
		return err
	}
	fmt.Println("asks once more: still has the lock")
	fmt.Println("ready")
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil { // here a process can stop for any time
		return err
	}
	// The context ends when the process goes on, and a request of its would not be sent. It
	// stands for one that was on its way by then, which no context can call back.
	_, err = call(context.WithoutCancel(lock.Context()), web, http.MethodPost, "/stock/shoe/order")
	switch {
	case errors.Is(err, fencing.ErrStale):
		fmt.Println("is refused:", err)
	case err != nil:
		return err
	default:
		fmt.Println("sells one")
	}
	fmt.Println("done")
	return nil
}

// call sends a request to the shop, and returns the body of the answer.
func call(ctx context.Context, web *http.Client, method, path string) (string, error) {
	request, err := http.NewRequestWithContext(ctx, method, os.Getenv("SHOP_URL")+path, nil)
	if err != nil {
		return "", err
	}
	response, err := web.Do(request)
	if err != nil {
		return "", err
	}
	defer func() { _ = response.Body.Close() }()
	if err := httpfence.ErrorOf(response); err != nil { // fencing.ErrStale, for a 409 of the middleware
		return "", fmt.Errorf("%s: %w", response.Status, err)
	}
	var body strings.Builder
	if _, err := io.Copy(&body, response.Body); err != nil {
		return "", err
	}
	if response.StatusCode >= http.StatusBadRequest {
		return "", errors.New(response.Status)
	}
	return body.String(), nil
}
