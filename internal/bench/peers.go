package main

import (
	"context"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	syncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis/rueidislock"
)

// redislockPause is the pause between tries in the example for retries of redislock's
// documentation, to which its README refers. (The README itself makes one try.) Its
// limit of three retries is left out: a worker waits until it has the lock.
const redislockPause = 100 * time.Millisecond

type redislockSubject struct {
	settings

	client  *redis.Client
	locks   *redislock.Client
	options *redislock.Options // without state, so that all calls share them
}

func openRedislock(s settings) (subject, error) {
	client := goRedis(s, s.addrs[0])
	return &redislockSubject{s, client, redislock.New(client), &redislock.Options{
		RetryStrategy: redislock.LinearBackoff(redislockPause),
	}}, nil
}

func (r *redislockSubject) close() { _ = r.client.Close() }

type redislockHold struct{ *redislock.Lock }

func (h redislockHold) release() error { return h.Release(context.Background()) }

// acquire: a context without a deadline gets that of one TTL from redislock, which is
// longer than any run here.
func (r *redislockSubject) acquire(ctx context.Context, key string) (hold, error) {
	lock, err := r.locks.Obtain(ctx, key, r.ttl, r.options)
	return redislockHold{lock}, err
}

// keep refreshes as the README does: with a context that has no deadline.
func (r *redislockSubject) keep(ctx context.Context, key string) (kept, error) {
	lock, err := r.locks.Obtain(ctx, key, r.ttl, r.options)
	if err != nil {
		return nil, err
	}
	return renew(r.ttl, func() error { return lock.Refresh(context.Background(), r.ttl, nil) },
		redislockHold{lock}.release), nil
}

// redsyncSubject is set as in its README: a pool for each server, a mutex without
// options. Only the expiry is that of all subjects. Its waiting is the default: up to
// 32 tries with random pauses of 50 to 250 ms.
type redsyncSubject struct {
	settings

	clients []*redis.Client
	locks   *redsync.Redsync
}

func openRedsync(s settings) (subject, error) {
	r := &redsyncSubject{settings: s}
	var pools []syncredis.Pool
	for _, addr := range s.addrs {
		client := goRedis(s, addr)
		r.clients = append(r.clients, client)
		pools = append(pools, goredis.NewPool(client))
	}
	r.locks = redsync.New(pools...)
	return r, nil
}

func (r *redsyncSubject) close() {
	for _, c := range r.clients {
		_ = c.Close()
	}
}

// redsyncHold is a mutex of one acquisition: redsync's are not for several at a time.
type redsyncHold struct{ *redsync.Mutex }

func (h redsyncHold) release() error { return positive(h.Unlock()) }

// positive makes an error of an answer that says no without one.
func positive(ok bool, err error) error {
	if err == nil && !ok {
		return errNotOurs
	}
	return err
}

// acquire locks once more when the tries are used up, as the documentation of Lock
// says that one may.
func (r *redsyncSubject) acquire(ctx context.Context, key string) (hold, error) {
	mutex := r.locks.NewMutex(key, redsync.WithExpiry(r.ttl))
	for {
		err := mutex.LockContext(ctx)
		if err == nil || ctx.Err() != nil || len(r.clients) > 1 {
			return redsyncHold{mutex}, err
		}
	}
}

func (r *redsyncSubject) keep(ctx context.Context, key string) (kept, error) {
	h, err := r.acquire(ctx, key)
	if err != nil {
		return nil, err
	}
	return renew(r.ttl, func() error { return positive(h.(redsyncHold).Extend()) }, h.release), nil
}

// rueidislockSubject is set as in the example of its README, which advises KeyMajority
// 1 with a single Redis and NoLoopTracking with servers from 7.0.5 on. Waiting has no
// settings: the server tells of released keys.
type rueidislockSubject struct{ locks rueidislock.Locker }

func openRueidislock(s settings) (subject, error) {
	locks, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption: rueidisClient(s), KeyMajority: 1, NoLoopTracking: true, KeyValidity: s.ttl,
	})
	return &rueidislockSubject{locks}, err
}

func (r *rueidislockSubject) close() { r.locks.Close() }

type rueidislockHold context.CancelFunc

func (h rueidislockHold) release() error {
	h()
	return nil
}

func (r *rueidislockSubject) acquire(ctx context.Context, key string) (hold, error) {
	_, cancel, err := r.locks.WithContext(ctx, key)
	return rueidislockHold(cancel), err
}

type rueidislockKept struct {
	rueidislockHold

	ctx context.Context
}

func (k rueidislockKept) lost() <-chan struct{} { return k.ctx.Done() }

func (r *rueidislockSubject) keep(ctx context.Context, key string) (kept, error) {
	held, cancel, err := r.locks.WithContext(ctx, key)
	return rueidislockKept{rueidislockHold(cancel), held}, err
}
