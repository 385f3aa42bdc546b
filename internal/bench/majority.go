package main

import (
	"context"
	"fmt"
	"time"
)

// distance is the round trip to the far servers of a majority lock.
const distance = 30 * time.Millisecond

// fault is what is wrong with some of the servers of a majority lock.
type fault struct {
	id, title string
	far       int // so many are distant
	hanging   int // so many take what is sent and do not answer
	killed    int
	alone     bool // one server is asked for locks, to compare with
}

const majorityServers = 5

var faults = []fault{
	{id: "alone", title: "1 of them alone", alone: true},
	{id: "healthy", title: "all well"},
	{id: "far", title: "2 of them 30 ms away", far: 2},
	{id: "hanging", title: "1 of them silent", hanging: 1},
	{id: "killed", title: "2 of them killed", killed: 2},
}

// runMajority is the job that takes one lock after the other, each on a key of its own.
// Times holds the lengths of acquisition and release by turns.
func runMajority(c *console, j job) (*report, error) {
	s, err := j.open()
	if err != nil {
		return nil, err
	}
	late, err := warmAll(s, 1)
	if err != nil {
		return nil, err
	}
	start, err := c.ready()
	if err != nil {
		return nil, err
	}
	sleepUntil(start)
	r := &report{Late: late}
	spent := make(chan time.Duration)
	failed := make(chan error)
	go cycleMajority(s, start+int64(j.Duration), spent, failed)
	limit := time.NewTimer(j.Hold)
	defer limit.Stop()
	for over := false; !over; limit.Reset(j.Hold) {
		select {
		case d, ok := <-spent:
			if over = !ok; ok {
				r.Times = append(r.Times, int64(d))
			}
		case err := <-failed:
			r.Failures++
			r.Failure = err.Error()
		case <-limit.C:
			r.Stuck, over = 1, true
			r.Failure = []string{"acquisition", "release"}[len(r.Times)%2]
		}
	}
	r.Goroutines = max(0, s.shut()-r.Stuck) // the stuck one is ours
	return r, nil
}

// cycleMajority goes on until end, or with this process.
func cycleMajority(s subject, end int64, spent chan<- time.Duration, failed chan<- error) {
	defer close(spent)
	for i := 0; now() < end; i++ {
		begin := now()
		h, err := s.acquire(context.Background(), fmt.Sprint("bench:", i))
		if err != nil {
			failed <- fmt.Errorf("acquisition: %w", err)
			continue
		}
		spent <- time.Duration(now() - begin)
		begin = now()
		err = h.release()
		spent <- time.Duration(now() - begin)
		if err != nil {
			failed <- fmt.Errorf("release: %w", err)
		}
	}
}

// measureMajority runs one subject against five servers.
func measureMajority(ctx context.Context, b *bench, d description, fault fault) (figures, []string, error) {
	servers, addrs, end, err := b.independent(ctx, fault)
	defer end()
	if err != nil {
		return nil, nil, err
	}
	if fault.alone {
		addrs = addrs[:1]
	}
	limit := b.scale.callLimit
	c, err := muster(ctx, b.family, job{
		Kind: "majority", Subject: d.name, Majority: !fault.alone, Addrs: addrs, TTL: cycleTTL,
		Duration: b.scale.majority, Hold: limit, Limit: b.scale.majority + 3*limit + patience,
	})
	if err != nil {
		return nil, nil, err
	}
	defer c.dismiss()
	for i, s := range servers { // the far ones are the first
		switch {
		case i >= majorityServers-fault.killed:
			s.proc.kill()
		case i >= majorityServers-fault.hanging:
			if err := suspend(s.proc.pid()); err != nil {
				return nil, nil, err
			}
		}
	}
	if _, err := c.start(); err != nil {
		return nil, nil, err
	}
	reports, err := c.reports(ctx, b.scale.majority+3*limit+patience)
	if err != nil {
		return nil, nil, err
	}
	c.dismiss()
	keys, err := orphans(ctx, servers[:majorityServers-fault.killed], fault.hanging > 0)
	return majorityFigures(reports[0], keys), remarks(reports, limit), err
}

// independent starts the servers of a majority lock, the far ones behind proxies. end
// must be called in any case.
func (b *bench) independent(ctx context.Context, fault fault) (servers []*server, addrs []string, end func(), err error) {
	var proxies []*delayProxy
	end = func() {
		for _, p := range proxies {
			p.close()
		}
		for _, s := range servers {
			s.end()
		}
	}
	for i := range majorityServers {
		s, err := startServer(ctx, b.family)
		if err != nil {
			return servers, nil, end, err
		}
		servers = append(servers, s)
		addr := s.addr
		if i < fault.far {
			p, err := newDelayProxy(addr, distance)
			if err != nil {
				return servers, nil, end, err
			}
			proxies = append(proxies, p)
			addr = p.addr()
		}
		addrs = append(addrs, addr)
	}
	return servers, addrs, end, nil
}

// orphans returns how many keys are left when all that is under way has arrived.
func orphans(ctx context.Context, servers []*server, hung bool) (sum int64, err error) {
	if hung {
		if err := resume(servers[len(servers)-1].proc.pid()); err != nil {
			return 0, err
		}
	}
	time.Sleep(10 * distance)
	for _, s := range servers {
		n, err := s.keys(ctx)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

func majorityFigures(r *report, keys int64) figures {
	var acquire, release []float64
	for i, d := range r.Times {
		if i%2 == 0 {
			acquire = append(acquire, millis(d))
		} else {
			release = append(release, millis(d))
		}
	}
	return figures{
		figCycles:     float64(len(release)),
		figAcquireP50: percentile(acquire, 50), figAcquireP99: percentile(acquire, 99),
		figReleaseP50: percentile(release, 50), figReleaseP99: percentile(release, 99),
		figFailures: float64(r.Failures), figStuck: float64(r.Stuck),
		figKeys: float64(keys), figGoroutines: float64(r.Goroutines),
	}
}
