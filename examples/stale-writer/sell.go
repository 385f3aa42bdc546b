//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/fencing"
)

// sell takes the lock and sells one item, if there is one.
func sell(ctx context.Context, name string, fenced bool) error {
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
	shop, err := openShop(os.Getenv("DATABASE_URL"), os.Getenv("SHOP_FILE"))
	if err != nil {
		return err
	}
	defer func() { _ = shop.db.Close() }()

	lock, err := locker.Acquire(ctx, "inventory")
	if err != nil {
		return err
	}
	defer func() { _ = lock.Release() }() // the first worker's is lost: that is what this shows
	claim := fencing.Claim{}
	if fenced {
		claim = fencing.Claim{Token: lock.Token(), Owner: lock.Owner()}
		fmt.Printf("has the lock, token %d, and enters with it\n", claim.Token)
		if err := shop.enter(ctx, claim); err != nil { // before it reads
			return err
		}
	} else {
		fmt.Println("has the lock")
	}
	stock, err := shop.stock(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("reads the stock: %d\n", stock)
	if err := lock.Err(); err != nil {
		return err
	}
	fmt.Println("asks once more: still has the lock")
	fmt.Println("ready")
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil { // here a process can stop for any time
		return err
	}
	err = shop.take(ctx, claim)
	switch {
	case errors.Is(err, fencing.ErrStale):
		fmt.Println("is refused:", err)
	case err != nil:
		return err
	default:
		fmt.Println("sells one")
	}
	return nil
}
