package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/redlock"
)

const (
	// silence is how long a wait may last before it is looked at whether the servers answer.
	silence = 2 * time.Second

	// killSpare is what a SIGKILL may take.
	killSpare = 100 * time.Millisecond

	signalBuffer = 16
)

// runCommand is the command run.
func runCommand(ctx context.Context, i *invocation) error {
	path, err := exec.LookPath(i.argv[0])
	if err != nil {
		return cannotRun(err)
	}
	locker, clients, err := i.lockerForRun()
	defer closeAll(clients)
	if err != nil {
		return err
	}
	defer func() { _ = locker.Close() }() // the lock has been released before

	signals := make(chan os.Signal, signalBuffer)
	for _, sig := range forwarded {
		if !signal.Ignored(sig) { // as nohup has it: for the command, too
			signal.Notify(signals, sig)
		}
	}
	defer signal.Stop(signals)

	lock, err := i.acquire(ctx, locker, clients, signals)
	if err != nil {
		return err
	}
	s := &supervisor{i: i, lock: lock, signals: signals, grace: i.graceOf()}
	err = s.run(ctx, path)
	return i.release(lock, err)
}

// cannotRun is the error for a command that cannot be started.
func cannotRun(err error) error {
	code := exitCannotRun
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		code = exitNoCommand
	}
	return &exitError{code, fmt.Errorf("run: %w", err)}
}

// graceOf is how long the command may take to end when the lock is lost.
func (i *invocation) graceOf() time.Duration {
	if i.grace >= 0 {
		return i.grace
	}
	return min(defaultGrace, i.ttl/3)
}

// lockerForRun makes the Locker. The clients are to be closed, also with an error.
func (i *invocation) lockerForRun() (l *holdfast.Locker, clients []redis.UniversalClient, err error) {
	// The margin is the time between the end of validity and the earliest end of the lease:
	// with room for the grace the command has ended before the lock can be somebody else's.
	margin := max(i.ttl/10, min(i.graceOf()+killSpare, i.ttl/2))
	opts := []holdfast.Option{
		holdfast.WithPrefix(i.prefix), holdfast.WithTTL(i.ttl), holdfast.WithMargin(margin),
		holdfast.WithMaxHold(holdfast.Unlimited),
		holdfast.WithLogger(slog.New(slog.DiscardHandler)), // all it would say is said here
	}
	if i.wait >= 0 {
		opts = append(opts, holdfast.WithWait(i.wait))
	}
	if i.fence {
		opts = append(opts, holdfast.WithFencing())
	}
	for _, t := range i.targets {
		clients = append(clients, t.open(i.timeout))
	}
	if len(clients) == 1 {
		l, err = holdfast.New(clients[0], append(opts, holdfast.WithInspect())...)
		return l, clients, err
	}
	if len(clients)%2 == 0 {
		i.complain("%d servers outlive the loss of no more of them than %d would", len(clients), len(clients)-1)
	}
	if i.durable {
		opts = append(opts, redlock.WithDurableInstances())
	}
	if i.longest != 0 {
		opts = append(opts, redlock.WithLongestTTL(i.longest))
	}
	l, err = redlock.New(clients, opts...)
	return l, clients, err
}

func closeAll(clients []redis.UniversalClient) {
	for _, c := range clients {
		_ = c.Close() // there is nothing left to do with it
	}
}

// grant is what an acquisition has come to.
type grant struct {
	lock *holdfast.Lock
	err  error
}

// acquire waits for the lock. A signal ends the wait.
func (i *invocation) acquire(
	ctx context.Context, locker *holdfast.Locker, clients []redis.UniversalClient, signals <-chan os.Signal,
) (*holdfast.Lock, error) {
	// The hold does not end with ctx: the supervisor does that, and then releases.
	waiting, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	done := make(chan grant, 1)
	go func() { // ends with the wait, which a signal ends
		lock, err := locker.Acquire(waiting, i.operands[0])
		done <- grant{lock, err}
	}()
	timer := time.NewTimer(silence)
	defer timer.Stop()
	notes := make(chan string, 1)
	for {
		select {
		case got := <-done:
			if !stop() && got.err == nil { // ctx has ended, and the hold with it
				return nil, i.release(got.lock, context.Cause(ctx))
			}
			return got.lock, got.err
		case sig := <-signals:
			cancel(fmt.Errorf("%v", sig))
			if got := <-done; got.err == nil {
				_ = i.release(got.lock, nil)
			}
			return nil, &exitError{code: exitSignal + signalNumber(sig)}
		case <-timer.C:
			go func() { notes <- unreachable(waiting, clients, i.targets) }() // ends with the clients' timeouts
		case note := <-notes:
			if note != "" {
				i.complain("still waiting: %s", note)
			}
		}
	}
}

// unreachable tells which servers do not answer.
func unreachable(ctx context.Context, clients []redis.UniversalClient, targets []target) string {
	var all []string
	for n, c := range clients {
		if err := c.Ping(ctx).Err(); err != nil {
			all = append(all, fmt.Sprintf("%s: %v", targets[n].name, err))
		}
	}
	return strings.Join(all, "; ")
}

// release gives the lock back. It returns what becomes of err.
func (i *invocation) release(lock *holdfast.Lock, err error) error {
	failed := lock.Release()
	var own *exitError
	switch {
	case failed == nil, errors.As(err, &own) && own.code == exitLost:
	case errors.Is(failed, holdfast.ErrLost):
		i.complain("%s (found when the command had ended: it may have overlapped with another)", message(failed))
		return &exitError{code: exitLost}
	default:
		i.complain("the lock could not be released, and stays for what is left of its lease: %s", message(failed))
	}
	return err
}

// environment is that of the command.
func environment(lock *holdfast.Lock, fence bool) (env []string) {
	for _, entry := range os.Environ() {
		if name, _, _ := strings.Cut(entry, "="); name != "HOLDFAST_TOKEN" { // it may be another lock's
			env = append(env, entry)
		}
	}
	env = append(env, "HOLDFAST_KEY="+lock.Key(), "HOLDFAST_OWNER="+lock.Owner())
	if fence {
		env = append(env, "HOLDFAST_TOKEN="+strconv.FormatInt(int64(lock.Token()), 10))
	}
	return env
}
