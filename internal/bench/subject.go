package main

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"
)

// subject is a lock library in one process, or bare commands, ready to take locks. It
// is safe for concurrent use.
type subject interface {
	// acquire takes the lock of key and waits for it until ctx ends, with what the
	// library offers for waiting.
	acquire(ctx context.Context, key string) (hold, error)
	// keep takes the lock of key and renews it until it is released or lost, with what
	// the library offers for that.
	keep(ctx context.Context, key string) (kept, error)
	close()
}

// hold is a lock that is held.
type hold interface{ release() error }

// kept is a lock that is held and renewed.
type kept interface {
	hold
	// lost returns a channel that is closed when the holder is told that it has the
	// lock no longer.
	lost() <-chan struct{}
}

// settings are what a subject is opened with.
type settings struct {
	addrs []string // one server, or all of a majority lock
	ttl   time.Duration
	wire  *wire
}

// description is a subject by name.
type description struct {
	name   string
	module string // whose version is printed
	bare   bool   // commands without a library
	open   func(settings) (subject, error)
}

// subjects are the columns of the table. What each is set to is said where it is opened.
var subjects = []description{
	{name: "bare go-redis", module: "github.com/redis/go-redis/v9", bare: true, open: openBareGoRedis},
	{name: "bare rueidis", module: "github.com/redis/rueidis", bare: true, open: openBareRueidis},
	{name: "redislock", module: "github.com/bsm/redislock", open: openRedislock},
	{name: "redsync", module: "github.com/go-redsync/redsync/v4", open: openRedsync},
	{name: "rueidislock", module: "github.com/redis/rueidis", open: openRueidislock},
	{name: "holdfast", module: "github.com/holdfast-go/holdfast", open: openHoldfast},
}

// majoritySubjects are those that take a lock over independent servers. A library that
// learns to do so is added here, and nowhere else.
var majoritySubjects = []description{
	{name: "bare go-redis", bare: true, open: openBareMajority},
	{name: "redsync", open: openRedsync},
	{name: "holdfast", open: openHoldfastMajority},
}

// find returns the subject called name in list.
func find(list []description, name string) (description, error) {
	i := slices.IndexFunc(list, func(d description) bool { return d.name == name })
	if i < 0 {
		return description{}, fmt.Errorf("no subject %q", name)
	}
	return list[i], nil
}

// version returns the version of the module, as it was built in; "" of the checkout.
func (d description) version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, m := range info.Deps {
		if m.Path == d.module && m.Replace == nil {
			return m.Version
		}
	}
	return ""
}

// renewed is a lock whose library does not renew by itself: a goroutine does, as a user
// of that library must write it. The first error, whatever it is, tells the holder.
type renewed struct {
	give func() error
	told chan struct{}
	stop chan struct{}
	done sync.WaitGroup
}

// renew calls extend each third of ttl.
func renew(ttl time.Duration, extend, give func() error) *renewed {
	r := &renewed{give: give, told: make(chan struct{}), stop: make(chan struct{})}
	r.done.Go(func() { // ended by release, or by a refusal
		ticker := time.NewTicker(ttl / 3)
		defer ticker.Stop()
		for {
			select {
			case <-r.stop:
				return
			case <-ticker.C:
			}
			if extend() != nil {
				close(r.told)
				return
			}
		}
	})
	return r
}

func (r *renewed) lost() <-chan struct{} { return r.told }

func (r *renewed) release() error {
	close(r.stop)
	r.done.Wait()
	return r.give()
}
