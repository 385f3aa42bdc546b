package main

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast"
)

// holdfastSubject is set as in its README: nothing but the TTL of all subjects.
type holdfastSubject struct {
	client *redis.Client
	locks  *holdfast.Locker
}

func openHoldfast(s settings) (subject, error) {
	client := goRedis(s, s.addrs[0])
	locks, err := holdfast.New(client, holdfast.WithTTL(s.ttl))
	return &holdfastSubject{client, locks}, err
}

func (h *holdfastSubject) close() {
	_ = h.locks.Close() // what it could not settle shows as keys left
	_ = h.client.Close()
}

type holdfastHold struct{ *holdfast.Lock }

func (h holdfastHold) release() error        { return h.Release() }
func (h holdfastHold) lost() <-chan struct{} { return h.Context().Done() }

func (h *holdfastSubject) acquire(ctx context.Context, key string) (hold, error) {
	lock, err := h.locks.Acquire(ctx, key)
	return holdfastHold{lock}, err
}

func (h *holdfastSubject) keep(ctx context.Context, key string) (kept, error) {
	lock, err := h.locks.Acquire(ctx, key)
	return holdfastHold{lock}, err
}
