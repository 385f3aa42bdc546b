package main

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// runSilent is the job that holds locks while the server falls silent. Times holds when
// the holder of each was told; 0 if it was not within Duration.
func runSilent(c *console, j job) (*report, error) {
	s, err := j.open()
	if err != nil {
		return nil, err
	}
	locks, err := takeMany(s, j.Keys)
	if err != nil {
		return nil, err
	}
	r := &report{Times: make([]int64, j.Keys)}
	over := make(chan struct{})
	var wg sync.WaitGroup
	for i, k := range locks {
		wg.Go(func() { // ended by over
			select {
			case <-k.lost():
				r.Times[i] = now()
			case <-over:
			}
		})
	}
	if _, err := c.ready(); err != nil {
		return nil, err
	}
	told := make(chan struct{})
	go func() { // ended by over
		wg.Wait()
		close(told)
	}()
	select {
	case <-told:
	case <-time.After(j.Duration):
	}
	close(over)
	wg.Wait()
	return r, nil // nothing is given back: the server does not answer
}

// expiries waits until no lock is about to be renewed, and returns when their keys end,
// in the order of their numbers.
func expiries(ctx context.Context, s *server, n int, ttl time.Duration) ([]int64, error) {
	// All subjects renew at a third or a half of the TTL: no renewal is due while more
	// than seven tenths are left.
	const least, most = 70, 85
	ctx, cancel := context.WithTimeout(ctx, 4*ttl)
	defer cancel()
	for {
		names, err := lockKeys(ctx, s, n)
		if err != nil {
			return nil, err
		}
		answers := make([]*redis.DurationCmd, n)
		asked := now()
		pipe := s.admin.Pipeline()
		for i, name := range names {
			answers[i] = pipe.PTTL(ctx, name)
		}
		if _, err := pipe.Exec(ctx); err != nil {
			return nil, err
		}
		fit := true
		ends := make([]int64, n)
		for i, a := range answers {
			percent := 100 * a.Val() / ttl
			fit = fit && percent >= least && percent <= most
			ends[i] = asked + int64(a.Val())
		}
		if fit {
			return ends, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("the locks are renewed at no common time: %w", ctx.Err())
		case <-time.After(ttl / 100):
		}
	}
}

// lockKeys returns the keys of the locks on the server. Subjects may put something
// before a lock's name.
func lockKeys(ctx context.Context, s *server, n int) ([]string, error) {
	all, err := s.admin.Keys(ctx, "*").Result()
	if err != nil {
		return nil, err
	}
	names := make([]string, n)
	for i := range names {
		want := fmt.Sprint("bench:", i)
		for _, key := range all {
			if key == want || strings.HasSuffix(key, ":"+want) {
				names[i] = key
			}
		}
		if names[i] == "" {
			return nil, fmt.Errorf("no key of lock %d", i)
		}
	}
	return names, nil
}

// silentFigures makes the figures of the times at which the keys ended and their holders
// were told; 0: not within the time.
func silentFigures(ends, told []int64) figures {
	var late []float64
	untold := 0
	for i, end := range ends {
		if told[i] == 0 {
			untold++
			continue
		}
		late = append(late, millis(told[i]-end))
	}
	return figures{
		figToldFirst: percentile(late, 0), figToldMedian: percentile(late, 50), figToldLast: percentile(late, 100),
		figUntold: float64(untold),
	}
}
