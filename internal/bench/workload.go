package main

import (
	"context"
	"fmt"
	"time"
)

// scale says how long the parts take.
type scale struct {
	rounds   int  // of what is short; others below
	together bool // subjects also run at once where that spoils figures
	tries    int  // how often a measurement is begun that some failure or limit ends

	cycles    time.Duration // of goroutines
	processes time.Duration // of processes that contend
	rivals    int           // so many processes

	wakeRounds, wakeKeys, wakeSlots int

	heldRounds, heldLocks int
	heldTTL, held         time.Duration

	silentRounds          int
	silentTTL, silentWait time.Duration

	majorityRounds      int
	majority, callLimit time.Duration
}

var (
	fullScale = scale{
		rounds: 5, tries: 2, cycles: 1200 * time.Millisecond, processes: 2 * time.Second, rivals: 8,
		wakeRounds: 3, wakeKeys: 16, wakeSlots: 6,
		heldRounds: 2, heldLocks: 10_000, heldTTL: 3 * time.Second, held: 15 * time.Second,
		silentRounds: 2, silentTTL: 3 * time.Second, silentWait: 30 * time.Second,
		majorityRounds: 2, majority: 2 * time.Second, callLimit: 30 * time.Second,
	}
	quickScale = scale{
		rounds: 1, tries: 2, cycles: 250 * time.Millisecond, processes: 600 * time.Millisecond, rivals: 8,
		wakeRounds: 1, wakeKeys: 32, wakeSlots: 1,
		heldRounds: 1, heldLocks: 2_000, heldTTL: time.Second, held: 1500 * time.Millisecond,
		silentRounds: 1, silentTTL: time.Second, silentWait: 3 * time.Second,
		majorityRounds: 1, majority: 300 * time.Millisecond, callLimit: 2 * time.Second,
	}
)

const (
	// cycleTTL is longer than any run, and no whole number of seconds, with which
	// go-redis would send EX instead of PX.
	cycleTTL = 9500 * time.Millisecond
	patience = 30 * time.Second // for a child, beyond the limits that it sets itself

	manyGoroutines = 64
	fewGoroutines  = 16
	section        = time.Millisecond
	pauseMin       = 2500 * time.Microsecond
	pauseMax       = 7500 * time.Microsecond
	silentLocks    = 10
)

// workload is one block of the table.
type workload struct {
	id, title string
	rows      []figure
	subjects  []description
	rounds    int
	together  bool // nobody needs the processor: all subjects at once
	measure   func(ctx context.Context, b *bench, d description) (figures, []string, error)
}

// workloads returns all of them.
func (sc scale) workloads() []workload {
	all := []workload{
		sc.cyclesOf("one", "1 goroutine, a key of its own", ownRows, sc.cycles, 1,
			job{Workers: 1}),
		sc.cyclesOf("many", "64 goroutines, keys of their own", ownRows, sc.cycles, 1,
			job{Workers: manyGoroutines}),
		sc.cyclesOf("rivals", "16 goroutines, one key, section 0", sharedRows, sc.cycles, 1,
			job{Workers: fewGoroutines, Shared: true}),
		sc.cyclesOf("rivals-1ms", "16 goroutines, one key, section 1 ms", sharedRows, sc.cycles, 1,
			job{Workers: fewGoroutines, Shared: true, Hold: section}),
		sc.cyclesOf("processes", fmt.Sprintf("%d processes, one key, section 1 ms, no pause", sc.rivals), sharedRows, sc.processes,
			sc.rivals, job{Workers: 1, Shared: true, Hold: section}),
		sc.cyclesOf("processes-pause",
			fmt.Sprintf("%d processes, one key, section 1 ms, pause 2.5–7.5 ms", sc.rivals), sharedRows, sc.processes,
			sc.rivals, job{Workers: 1, Shared: true, Hold: section, PauseMin: pauseMin, PauseMax: pauseMax}),
		{
			id: "wake", title: "a waiter in another process, after 300 to 400 ms", rows: wakeRows,
			subjects: subjects, rounds: sc.wakeRounds, measure: measureWake, together: sc.together,
		},
		{
			id: "held", rows: heldRows, subjects: subjects, rounds: sc.heldRounds, measure: measureHeld,
			together: sc.together,
			title:    fmt.Sprintf("%d locks held for %v, TTL %v", sc.heldLocks, sc.held, sc.heldTTL),
		},
		{
			id: "silent", rows: silentRows, subjects: libraries(), rounds: sc.silentRounds, together: true,
			measure: measureSilent,
			title:   fmt.Sprintf("Redis silent, %d locks held, TTL %v", silentLocks, sc.silentTTL),
		},
	}
	for _, f := range faults {
		all = append(all, workload{
			id: "majority-" + f.id, title: "5 independent servers, " + f.title, rows: majorityRows,
			subjects: majoritySubjects, rounds: sc.majorityRounds,
			measure: func(ctx context.Context, b *bench, d description) (figures, []string, error) {
				return measureMajority(ctx, b, d, f)
			},
		})
	}
	return all
}

// libraries are the subjects that are more than bare commands.
func libraries() (list []description) {
	for _, d := range subjects {
		if !d.bare {
			list = append(list, d)
		}
	}
	return list
}

// cyclesOf is a workload of processes that each do j for the length of time.
func (sc scale) cyclesOf(id, title string, rows []figure, length time.Duration, processes int, j job) workload {
	j.Kind, j.TTL, j.Duration = "cycles", cycleTTL, length
	j.Limit = length + stuckLimit + patience
	return workload{
		id: id, title: title, rows: rows, subjects: subjects, rounds: sc.rounds,
		measure: func(ctx context.Context, b *bench, d description) (figures, []string, error) {
			return measureCycle(ctx, b, d, j, processes)
		},
	}
}

func measureCycle(ctx context.Context, b *bench, d description, j job, processes int) (figures, []string, error) {
	s, err := startServer(ctx, b.family)
	if err != nil {
		return nil, nil, err
	}
	defer s.end()
	j.Subject, j.Addrs = d.name, []string{s.addr}
	team := make([]job, processes)
	for i := range team {
		team[i] = j
		team[i].First = i * j.Workers
	}
	c, err := muster(ctx, b.family, team...)
	if err != nil {
		return nil, nil, err
	}
	defer c.dismiss()
	before, err := s.usage(ctx)
	if err != nil {
		return nil, nil, err
	}
	if _, err := c.start(); err != nil {
		return nil, nil, err
	}
	reports, err := c.reports(ctx, j.Limit)
	if err != nil {
		return nil, nil, err
	}
	after, err := s.usage(ctx)
	if err != nil {
		return nil, nil, err
	}
	f, err := cycleFigures(reports, j.Shared, j.Duration, after.since(before))
	if err != nil {
		return nil, nil, err
	}
	keys, err := s.keys(ctx)
	f[figKeys] = float64(keys)
	return f, remarks(reports, stuckLimit), err
}

func measureWake(ctx context.Context, b *bench, d description) (figures, []string, error) {
	s, err := startServer(ctx, b.family)
	if err != nil {
		return nil, nil, err
	}
	defer s.end()
	holder := job{
		Kind: "wake", Subject: d.name, Addrs: []string{s.addr}, TTL: cycleTTL,
		Keys: b.scale.wakeKeys, Slots: b.scale.wakeSlots,
		Limit: time.Duration(b.scale.wakeSlots+1)*slotLength + patience,
	}
	waiter := holder
	waiter.Waiter = true
	c, err := muster(ctx, b.family, holder, waiter)
	if err != nil {
		return nil, nil, err
	}
	defer c.dismiss()
	if _, err := c.start(); err != nil {
		return nil, nil, err
	}
	reports, err := c.reports(ctx, holder.Limit)
	if err != nil {
		return nil, nil, err
	}
	return wakeFigures(reports[0], reports[1]), remarks(reports, holder.Limit), nil
}

func measureHeld(ctx context.Context, b *bench, d description) (figures, []string, error) {
	s, err := startServer(ctx, b.family)
	if err != nil {
		return nil, nil, err
	}
	defer s.end()
	j := job{
		Kind: "held", Subject: d.name, Addrs: []string{s.addr}, TTL: b.scale.heldTTL,
		Keys: b.scale.heldLocks, Duration: b.scale.held, Limit: b.scale.held + giveLimit + 2*patience,
	}
	c, err := muster(ctx, b.family, j)
	if err != nil {
		return nil, nil, err
	}
	defer c.dismiss()
	before, err := s.usage(ctx)
	if err != nil {
		return nil, nil, err
	}
	if _, err := c.start(); err != nil {
		return nil, nil, err
	}
	if err := c.awaitReady(ctx, j.Limit); err != nil {
		return nil, nil, err
	}
	after, err := s.usage(ctx)
	if err != nil {
		return nil, nil, err
	}
	keys, err := s.keys(ctx)
	if err != nil {
		return nil, nil, err
	}
	if _, err := c.start(); err != nil { // to release
		return nil, nil, err
	}
	reports, err := c.reports(ctx, j.Limit)
	if err != nil {
		return nil, nil, err
	}
	f := heldFigures(reports[0], j.Keys, j.Duration, keys, after.since(before))
	return f, remarks(reports, giveLimit), nil
}

func measureSilent(ctx context.Context, b *bench, d description) (figures, []string, error) {
	s, err := startServer(ctx, b.family)
	if err != nil {
		return nil, nil, err
	}
	defer s.end()
	j := job{
		Kind: "silent", Subject: d.name, Addrs: []string{s.addr}, TTL: b.scale.silentTTL,
		Keys: silentLocks, Duration: b.scale.silentWait, Limit: b.scale.silentWait + 2*patience,
	}
	c, err := muster(ctx, b.family, j)
	if err != nil {
		return nil, nil, err
	}
	defer c.dismiss()
	ends, err := expiries(ctx, s, j.Keys, j.TTL)
	if err != nil {
		return nil, nil, err
	}
	if err := suspend(s.proc.pid()); err != nil {
		return nil, nil, err
	}
	if _, err := c.start(); err != nil {
		return nil, nil, err
	}
	reports, err := c.reports(ctx, j.Limit)
	if err != nil {
		return nil, nil, err
	}
	return silentFigures(ends, reports[0].Times), nil, nil
}

// since returns what was used since before.
func (u usage) since(before usage) usage {
	return usage{u.commands - before.commands, u.cpu - before.cpu}
}

// remarks tells of calls that failed or did not come back, which no figure shows.
func remarks(reports []*report, limit time.Duration) (list []string) {
	for _, r := range reports {
		if r.Failures > 0 {
			list = append(list, fmt.Sprintf("%d calls failed, the last with %q", r.Failures, r.Failure))
		}
		if r.Late > 0 {
			list = append(list, fmt.Sprintf("%d acquisitions on a free key were not back within %v", r.Late, warmLimit))
		}
		if r.Stuck > 0 {
			list = append(list, fmt.Sprintf("%d calls were not back after %v", r.Stuck, limit))
		}
	}
	return list
}
