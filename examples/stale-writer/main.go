//go:build unix

// Command stale-writer shows what a lock alone cannot stop, and what fencing tokens do about
// it. Two processes sell from an inventory in SQLite that holds one item. The first takes the
// lock, reads the stock, asks once more whether it still has the lock, and is stopped by the
// system (SIGSTOP) before it writes. Its lease ends. The second takes the lock and sells the
// item. Then the first goes on, and writes. With fencing tokens the database refuses that;
// without them the item is sold twice.
//
// DATABASE_URL, such as postgres://user:password@localhost/shop, puts the inventory into
// PostgreSQL, where the tables "inventory" and "fencing_*" are then made; REDIS_URL names a
// Redis in place of the embedded one. It exits with 1 if a step does not go as told.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/holdfast-go/holdfast/internal/stage"
)

// ttl is the lease. It is short, so that the program is; services use 10 to 60 s.
const ttl = time.Second

// workerVariable tells a child process what to do: its name, and whether it shows its token.
const workerVariable = "STALE_WRITER"

func main() {
	if role := os.Getenv(workerVariable); role != "" {
		work(role)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "stale-writer:", err)
		os.Exit(1)
	}
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
	dir, err := os.MkdirTemp("", "stale-writer")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	shop, err := openShop(os.Getenv("DATABASE_URL"), filepath.Join(dir, "shop.db"))
	if err != nil {
		return err
	}
	defer func() { _ = shop.db.Close() }()
	st := stage.New(ctx, os.Stdout, workerVariable)
	for _, fenced := range []bool{true, false} {
		if err := shop.reset(ctx); err != nil {
			return err
		}
		if err := scene(ctx, st, shop, fenced, "REDIS_URL="+redisURL, "SHOP_FILE="+shop.file); err != nil {
			return err
		}
	}
	return nil
}

// scene is the whole story, with tokens or without.
func scene(ctx context.Context, st *stage.Stage, shop *shop, fenced bool, env ...string) error {
	how := map[bool]string{true: "with", false: "without"}[fenced]
	st.Say("--- %s fencing tokens, one item in stock", how)
	first, err := st.Start("first", "first "+how, env...)
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
	st.Say("first:  stopped by SIGSTOP, between its last check and its write")

	second, err := st.Start("second", "second "+how, env...)
	if err != nil {
		return err
	}
	defer second.End()
	if err := second.Until("ready"); err != nil {
		return err
	}
	if err := second.Finish(); err != nil {
		return err
	}
	st.Say("first:  goes on (SIGCONT)")
	if err := errors.Join(first.Continue(), first.Finish()); err != nil {
		return err
	}
	stock, err := shop.stock(ctx)
	if err != nil {
		return err
	}
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

// work is a worker's process.
func work(role string) {
	name, how, _ := strings.Cut(role, " ")
	if err := sell(context.Background(), name, how == "with"); err != nil {
		fmt.Fprintln(os.Stderr, "stale-writer:", name+":", err)
		os.Exit(1)
	}
	fmt.Println("done")
}
