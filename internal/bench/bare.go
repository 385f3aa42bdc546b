package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"net"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
)

// The bare subjects are the floor: the two commands that a lock on one Redis needs, and
// nothing that makes a library of them. For waiting they poll.
const barePoll = 10 * time.Millisecond

const (
	deleteText = `if redis.call("GET", KEYS[1]) == ARGV[1] then return redis.call("DEL", KEYS[1]) end return 0`
	extendText = `if redis.call("GET", KEYS[1]) == ARGV[1] then return redis.call("PEXPIRE", KEYS[1], ARGV[2]) end return 0`
)

var errNotOurs = errors.New("the key is not ours")

// poll calls try until it succeeds or fails, or ctx ends.
func poll(ctx context.Context, try func() (bool, error)) error {
	for {
		ok, err := try()
		if ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(barePoll):
		}
	}
}

// goRedis is the client for the subjects that stand on go-redis, with its defaults.
func goRedis(s settings, addr string) *redis.Client {
	return redis.NewClient(&redis.Options{Addr: addr, Dialer: s.wire.dial})
}

type bareGoRedis struct {
	settings

	client          *redis.Client
	deletes, extend *redis.Script
}

func openBareGoRedis(s settings) (subject, error) {
	return &bareGoRedis{s, goRedis(s, s.addrs[0]), redis.NewScript(deleteText), redis.NewScript(extendText)}, nil
}

func (b *bareGoRedis) close() { _ = b.client.Close() }

func (b *bareGoRedis) acquire(ctx context.Context, key string) (hold, error) {
	h := &bareGoRedisHold{b, key, rand.Text()}
	return h, poll(ctx, func() (bool, error) { return b.client.SetNX(ctx, key, h.token, b.ttl).Result() })
}

type bareGoRedisHold struct {
	b          *bareGoRedis
	key, token string
}

func (h *bareGoRedisHold) release() error {
	return ours(h.b.deletes.Run(context.Background(), h.b.client, []string{h.key}, h.token).Int64())
}

func (b *bareGoRedis) keep(ctx context.Context, key string) (kept, error) {
	h, err := b.acquire(ctx, key)
	if err != nil {
		return nil, err
	}
	token := h.(*bareGoRedisHold).token
	return renew(b.ttl, func() error {
		return ours(b.extend.Run(context.Background(), b.client, []string{key}, token, b.ttl.Milliseconds()).Int64())
	}, h.release), nil
}

// ours makes an error of the answer of one of the scripts that says no.
func ours(n int64, err error) error {
	if err == nil && n == 0 {
		return errNotOurs
	}
	return err
}

// bareMajority asks all servers at once, and goes on with the answers of a majority. What
// the others answer, or do not, is nobody's business.
type bareMajority struct {
	settings

	clients []*redis.Client
	deletes *redis.Script
}

func openBareMajority(s settings) (subject, error) {
	b := &bareMajority{settings: s, deletes: redis.NewScript(deleteText)}
	for _, addr := range s.addrs {
		b.clients = append(b.clients, goRedis(s, addr))
	}
	return b, nil
}

func (b *bareMajority) close() {
	for _, c := range b.clients {
		_ = c.Close()
	}
}

// ask calls do for each server and returns when most have agreed, or cannot any more.
func (b *bareMajority) ask(do func(c *redis.Client) error) error {
	answers := make(chan error, len(b.clients))
	for _, c := range b.clients {
		go func() { answers <- do(c) }() // ends by the client's own timeouts
	}
	most := len(b.clients)/2 + 1
	for votes, left := 0, len(b.clients); ; left-- {
		if votes == most {
			return nil
		}
		if votes+left < most {
			return errNotOurs
		}
		if err := <-answers; err == nil {
			votes++
		}
	}
}

func (b *bareMajority) acquire(ctx context.Context, key string) (hold, error) {
	h := &bareMajorityHold{b, key, rand.Text()}
	return h, b.ask(func(c *redis.Client) error {
		ok, err := c.SetNX(ctx, key, h.token, b.ttl).Result()
		if err == nil && !ok {
			err = errNotOurs
		}
		return err
	})
}

func (b *bareMajority) keep(context.Context, string) (kept, error) {
	return nil, errors.New("not for a majority")
}

type bareMajorityHold struct {
	b          *bareMajority
	key, token string
}

func (h *bareMajorityHold) release() error {
	return h.b.ask(func(c *redis.Client) error {
		return ours(h.b.deletes.Run(context.Background(), c, []string{h.key}, h.token).Int64())
	})
}

// rueidisClient are the options for the subjects that stand on rueidis, its defaults.
func rueidisClient(s settings) rueidis.ClientOption {
	return rueidis.ClientOption{
		InitAddress: s.addrs,
		DialCtxFn: func(ctx context.Context, addr string, _ *net.Dialer, _ *tls.Config) (net.Conn, error) {
			return s.wire.dial(ctx, "tcp", addr)
		},
	}
}

type bareRueidis struct {
	settings

	client          rueidis.Client
	deletes, extend *rueidis.Lua
}

func openBareRueidis(s settings) (subject, error) {
	client, err := rueidis.NewClient(rueidisClient(s))
	if err != nil {
		return nil, err
	}
	return &bareRueidis{s, client, rueidis.NewLuaScript(deleteText), rueidis.NewLuaScript(extendText)}, nil
}

func (b *bareRueidis) close() { b.client.Close() }

func (b *bareRueidis) acquire(ctx context.Context, key string) (hold, error) {
	h := &bareRueidisHold{b, key, rand.Text()}
	return h, poll(ctx, func() (bool, error) {
		set := b.client.B().Set().Key(key).Value(h.token).Nx().PxMilliseconds(b.ttl.Milliseconds()).Build()
		err := b.client.Do(ctx, set).Error()
		if rueidis.IsRedisNil(err) {
			return false, nil
		}
		return err == nil, err
	})
}

type bareRueidisHold struct {
	b          *bareRueidis
	key, token string
}

func (h *bareRueidisHold) release() error {
	return ours(h.b.deletes.Exec(context.Background(), h.b.client, []string{h.key}, []string{h.token}).AsInt64())
}

func (b *bareRueidis) keep(ctx context.Context, key string) (kept, error) {
	h, err := b.acquire(ctx, key)
	if err != nil {
		return nil, err
	}
	args := []string{h.(*bareRueidisHold).token, strconv.FormatInt(b.ttl.Milliseconds(), 10)}
	return renew(b.ttl, func() error {
		return ours(b.extend.Exec(context.Background(), b.client, []string{key}, args).AsInt64())
	}, h.release), nil
}
