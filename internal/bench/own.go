package main

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/redlock"
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

// holdfastMajority is a lock on a majority. Its servers have just been started for this
// run: without the option they would have no vote for the length of a TTL, and after that
// do exactly the same.
type holdfastMajority struct {
	holdfastSubject

	clients []redis.UniversalClient
}

func openHoldfastMajority(s settings) (subject, error) {
	m := &holdfastMajority{}
	for _, addr := range s.addrs {
		m.clients = append(m.clients, goRedis(s, addr))
	}
	locks, err := redlock.New(m.clients, holdfast.WithTTL(s.ttl), redlock.WithDurableInstances())
	m.locks = locks
	return m, err
}

func (m *holdfastMajority) close() {
	_ = m.locks.Close()
	for _, c := range m.clients {
		_ = c.Close()
	}
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
