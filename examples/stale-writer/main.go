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
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/alicebob/miniredis/v2"
)

// ttl is the lease. It is short, so that the program is; services use 10 to 60 s.
const ttl = time.Second

// workerVariable tells a child process what to do: its name, and whether it shows its token.
const workerVariable = "STALE_WRITER"

var start = time.Now()

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

// say prints a step with the time since the start.
func say(format string, args ...any) {
	fmt.Printf("%6.2fs  %s\n", time.Since(start).Seconds(), fmt.Sprintf(format, args...))
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
	for _, fenced := range []bool{true, false} {
		if err := shop.reset(ctx); err != nil {
			return err
		}
		env := append(os.Environ(), "REDIS_URL="+redisURL, "SHOP_FILE="+shop.file)
		if err := scene(ctx, shop, fenced, env); err != nil {
			return err
		}
	}
	return nil
}

// scene is the whole story, with tokens or without.
func scene(ctx context.Context, shop *shop, fenced bool, env []string) (err error) {
	how := map[bool]string{true: "with", false: "without"}[fenced]
	say("--- %s fencing tokens, one item in stock", how)
	first, err := startWorker("first", how, env)
	if err != nil {
		return err
	}
	defer first.end()
	if err := first.until("ready"); err != nil {
		return err
	}
	if err := first.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	say("first:  stopped by SIGSTOP, between its last check and its write")

	second, err := startWorker("second", how, env)
	if err != nil {
		return err
	}
	defer second.end()
	if err := second.until("ready"); err != nil {
		return err
	}
	if err := second.goOn(); err != nil {
		return err
	}
	say("first:  goes on (SIGCONT)")
	if err := errors.Join(first.cmd.Process.Signal(syscall.SIGCONT), first.goOn()); err != nil {
		return err
	}
	stock, err := shop.stock(ctx)
	if err != nil {
		return err
	}
	say("stock is %d", stock)
	switch {
	case fenced && stock != 0:
		return fmt.Errorf("the stock is %d with tokens", stock)
	case !fenced && stock != -1:
		return fmt.Errorf("the stock is %d without tokens: nothing was oversold", stock)
	case !fenced:
		say("one item was sold twice")
	}
	return nil
}

// worker is a child process.
type worker struct {
	name  string
	cmd   *exec.Cmd
	in    io.Closer
	lines *bufio.Scanner
}

func startWorker(name, how string, env []string) (*worker, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self)
	cmd.Env = append(env, workerVariable+"="+name+" "+how)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &worker{name, cmd, in, bufio.NewScanner(out)}, nil
}

// until prints what the worker says, until it says word.
func (w *worker) until(word string) error {
	for w.lines.Scan() {
		if w.lines.Text() == word {
			return nil
		}
		say("%-7s %s", w.name+":", w.lines.Text())
	}
	return errors.Join(fmt.Errorf("the %s worker ended before it was %s", w.name, word), w.lines.Err())
}

// goOn lets the worker write, and waits for its end.
func (w *worker) goOn() error {
	if err := w.in.Close(); err != nil {
		return err
	}
	if err := w.until("done"); err != nil {
		return err
	}
	return w.cmd.Wait()
}

// end ends a worker that is still there, also a stopped one.
func (w *worker) end() {
	if w.cmd.ProcessState == nil {
		_ = w.cmd.Process.Kill() // an error says that it has ended
		_ = w.cmd.Wait()
	}
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
