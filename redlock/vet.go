package redlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/refusal"
	"github.com/holdfast-go/holdfast/internal/script"
)

// meet asks the server for its run_id, once, and compares it with those of the others.
// A server that tells nobody is met all the same if it need not be vetted.
func (l *redisLink) meet(ctx context.Context) error {
	if l.known.Load() {
		return nil
	}
	info := redis.NewStringCmd(ctx, "info", "server")
	err := l.client.Process(ctx, info)
	if err == nil {
		err = info.Err()
	}
	switch {
	case err == nil:
		if err := l.identify(info.Val()); err != nil {
			return err
		}
	case !refusedByServer(err) || !l.s.durable && isFinal(refusal.Grade(err, false, false)):
		return l.uninformed(err)
	}
	l.known.Store(true)
	return nil
}

// uninformed is the error of an INFO that failed.
func (l *redisLink) uninformed(err error) error {
	graded := refusal.Grade(err, false, false)
	if !isFinal(graded) || !refusedByServer(err) {
		return graded
	}
	return refusal.Final(fmt.Errorf("INFO is needed to learn how long the server has been up (or WithDurableInstances): %w", err))
}

// identify notes who the server is, which has answered INFO. Two clients must not lead to the
// same one.
func (l *redisLink) identify(info string) error {
	if mode := field(info, "redis_mode"); mode != "" && mode != "standalone" {
		return invalid("%s is of a %s, and not one instance", l.addr, mode)
	}
	id := field(info, "run_id")
	l.mu.Lock()
	l.id = id
	l.mu.Unlock()
	for _, n := range l.s.nodes {
		other, ok := n.link.(*redisLink)
		if !ok || other == l || id == "" {
			continue
		}
		other.mu.Lock()
		same := other.id == id
		other.mu.Unlock()
		if same {
			l.known.Store(false)
			first, second := other, l
			if other.index > l.index {
				first, second = l, other
			}
			return &SameServerError{Addrs: [2]string{first.addr, second.addr}}
		}
	}
	return nil
}

// askWho makes the question who the server is, for a flight with renewals: an address may have
// come to lead to another server, which has a vote already.
func (l *redisLink) askWho(ctx context.Context, requests []*request) *redis.StringCmd {
	renews := func(r *request) bool { return r.kind == renew }
	if l.mute.Load() || !slices.ContainsFunc(requests, renews) {
		return nil
	}
	return redis.NewStringCmd(ctx, "info", "server")
}

// isTwin reads the answer to that. Of two that lead to the same server the first one votes.
func (l *redisLink) isTwin(who *redis.StringCmd) bool {
	if err := who.Err(); err != nil {
		l.mute.Store(refusedByServer(err) && isFinal(refusal.Grade(err, true, false)))
		return false
	}
	id := field(who.Val(), "run_id")
	l.mu.Lock()
	l.id = id
	l.mu.Unlock()
	for _, n := range l.s.nodes[:l.index] {
		if other, ok := n.link.(*redisLink); ok && id != "" {
			other.mu.Lock()
			same := other.id == id
			other.mu.Unlock()
			if same {
				return true
			}
		}
	}
	return false
}

// vet loads a granting script, on an instance that has been up for long enough: what it
// may have forgotten in a restart has ended then. The scripts of a server, from 7.0 on, are gone
// after every restart, so one that knows the script has been vetted since it started. All is done on
// one connection, which is to one process.
//
// Source: Antirez and Kleppmann agree on "delayed restarts" (redis.io, "Distributed Locks
// with Redis", section "Performance, crash recovery and fsync"); here the clients see to
// it, and nobody has to delay anything.
func (l *redisLink) vet(ctx context.Context, sc *script.Script) error {
	select {
	case l.vetting <- struct{}{}:
		defer func() { <-l.vetting }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := l.young(); err != nil {
		return err
	}
	conn := l.client.Conn()
	defer func() { _ = conn.Close() }() // back to the pool
	start := int64(0)
	if !l.s.durable {
		var err error
		if start, err = l.age(ctx, conn); err != nil {
			return err
		}
	}
	granting := []*script.Script{sc}
	if sc != l.scripts.take {
		granting = []*script.Script{l.scripts.accept, l.scripts.keep} // one floor for both
		if err := l.raiseFloor(ctx, conn, start+l.s.maturity.Microseconds()); err != nil {
			return err
		}
	}
	for _, sc := range granting {
		cmd := &command{Cmd: redis.NewCmd(ctx, "script", "load", sc.Text())}
		if err := conn.Process(ctx, cmd); err != nil {
			return refusal.Grade(err, false, false)
		}
		l.learn(sc, cmd)
	}
	return nil
}

// raiseFloor makes the server refuse tokens that are older than its return.
func (l *redisLink) raiseFloor(ctx context.Context, conn *redis.Conn, floor int64) error {
	if l.s.durable {
		return nil
	}
	return refusal.Grade(l.scripts.floor.ByText(ctx, conn, []string{floorKey}, floor).Err(), false, false)
}

// age returns when the server has started, in us of its own clock, or an error if that is
// not long enough ago. The server counts whole seconds between moments that it has cut to
// seconds: it may have been up for a second less than it says.
func (l *redisLink) age(ctx context.Context, conn *redis.Conn) (start int64, err error) {
	info, err := conn.Info(ctx, "server").Result()
	if err != nil {
		return 0, l.uninformed(err)
	}
	if err := l.identify(info); err != nil {
		return 0, err
	}
	if err := forgetsScripts(field(info, "redis_version")); err != nil {
		return 0, err
	}
	seconds, err := strconv.ParseInt(field(info, "uptime_in_seconds"), 10, 64)
	if err != nil {
		return 0, refusal.Final(errors.New("INFO does not say how long the server has been up"))
	}
	up := time.Duration(seconds-1) * time.Second
	if left := l.s.maturity - up; left > 0 {
		l.mu.Lock()
		l.mature = clock.Now().Add(left)
		l.mu.Unlock()
		return 0, &YoungError{Left: left}
	}
	now, err := conn.Time(ctx).Result()
	if err != nil {
		return 0, refusal.Grade(err, false, false)
	}
	return now.UnixMicro() - up.Microseconds(), nil
}

// forgetsScripts returns an error for a server that may know scripts still after a restart:
// before 7.0 they are in its append-only file, and may be in its snapshots.
func forgetsScripts(version string) error {
	major, _, _ := strings.Cut(version, ".")
	if n, err := strconv.Atoi(major); err != nil || n < 7 {
		return refusal.Final(fmt.Errorf("version %q: a majority needs Redis 7.0 or later, or WithDurableInstances: "+
			"an older server may not show that it was restarted", version))
	}
	return nil
}

// field returns a value of an INFO text.
func field(info, name string) string {
	for line := range strings.Lines(info) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
