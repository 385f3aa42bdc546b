//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/leaktest"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

func TestMain(m *testing.M) {
	runChild()
	leaktest.Main(m)
}

// smokeScale is as short as each part allows.
var smokeScale = scale{
	rounds: 1, together: true, tries: 1, cycles: 100 * time.Millisecond, processes: 150 * time.Millisecond, rivals: 3,
	wakeRounds: 1, wakeKeys: 4, wakeSlots: 1,
	heldRounds: 1, heldLocks: 200, heldTTL: time.Second, held: 400 * time.Millisecond,
	silentRounds: 1, silentTTL: time.Second, silentWait: 1200 * time.Millisecond,
	majorityRounds: 1, majority: 100 * time.Millisecond, callLimit: 300 * time.Millisecond,
}

// newBench is a bench of what matches, whose temporary files are in the returned folder.
func newBench(t *testing.T, run string) (*bench, string) {
	t.Helper()
	redistest.Need(t)
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	return &bench{
		options:  options{scale: smokeScale, run: regexp.MustCompile(run), subjects: regexp.MustCompile("")},
		progress: io.Discard,
	}, dir
}

// requireNothingLeft fails if one of the bench's processes or files is still there.
func requireNothingLeft(t *testing.T, b *bench, dir string) {
	t.Helper()
	require.NotEmpty(t, b.family.started)
	require.Empty(t, b.family.members)
	for _, pid := range b.family.started {
		_, err := os.Stat(filepath.Join("/proc", fmt.Sprint(pid)))
		require.ErrorIs(t, err, os.ErrNotExist, "process %d", pid)
	}
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, files)
}

// Every workload of every subject, as short as can be: what the figures rest on.
func TestSmoke(t *testing.T) {
	b, dir := newBench(t, "")
	text, err := b.do(t.Context())
	require.NoError(t, err)
	requireNothingLeft(t, b, dir)
	for _, r := range b.table.remarks {
		t.Log(r)
	}
	requireTable(t, text, len(subjects))
	for _, block := range b.table.blocks {
		require.NotEmpty(t, block.subjects)
		for _, d := range block.subjects {
			t.Run(block.id+"/"+d.name, func(t *testing.T) {
				if own := d.bare || d.name == "holdfast"; !own && block.values[d.name][block.rows[0]] == nil {
					// A peer may hang, and that is no fault here; but the table must say so.
					require.Contains(t, strings.Join(b.table.remarks, "\n"), d.name)
					return
				}
				values := func(f figure) float64 {
					require.Len(t, block.values[d.name][f], 1, f)
					return block.values[d.name][f][0]
				}
				for _, f := range block.rows {
					values(f)
				}
				checkWorkload(t, block.id, d, values)
			})
		}
	}
}

// requireTable checks that all rows have the same columns.
func requireTable(t *testing.T, text string, subjects int) {
	t.Helper()
	rows := 0
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "|") {
			rows++
			require.Equal(t, subjects+3, strings.Count(line, "|"), line)
		}
	}
	want := 2
	for _, w := range smokeScale.workloads() {
		want += len(w.rows)
	}
	require.Equal(t, want, rows)
}

func checkWorkload(t *testing.T, id string, d description, values func(figure) float64) {
	kind, _, _ := strings.Cut(id, "-")
	switch kind {
	case "one", "many":
		checkCycles(t, d, values)
		// Two commands are sent and two run in the script, in full cycles; the end of
		// the run may cut one for each worker.
		if d.name == "bare go-redis" && kind == "one" {
			n := math.Round(values(figRate) * smokeScale.cycles.Seconds())
			require.InDelta(t, 2, values(figSent), 2.5/n)
			require.InDelta(t, 2, values(figScripted), 2.5/n)
		}
	case "rivals", "processes":
		checkCycles(t, d, values)
		require.Zero(t, values(figOverlaps), "two had the lock at once")
		require.GreaterOrEqual(t, values(figMoved), 0.0)
		require.LessOrEqual(t, values(figMoved), 100.0)
		require.LessOrEqual(t, values(figWaitP50), values(figWaitP99))
		require.LessOrEqual(t, values(figWaitP99), values(figWaitMax))
	case "wake":
		require.Zero(t, values(figFailures))
		require.Positive(t, values(figGapP50))
	case "held":
		require.Zero(t, values(figFailures))
		require.Zero(t, values(figStuck))
		require.Positive(t, values(figHeap))
	case "silent":
		require.LessOrEqual(t, values(figUntold), float64(silentLocks))
	case "majority":
		if id == "majority-alone" || id == "majority-healthy" || id == "majority-far" {
			require.Positive(t, values(figCycles))
		}
		if d.name == "holdfast" { // whatever is wrong with the servers
			require.Zero(t, values(figFailures)+values(figStuck)+values(figGoroutines))
			if id == "majority-hanging" {
				// What was on its way when the server fell silent is run when the process has
				// long ended. It ends with its lease.
				require.LessOrEqual(t, values(figKeys), 4.0)
			} else {
				require.Zero(t, values(figKeys))
			}
		}
	default:
		t.Fatalf("no check for %q", id)
	}
}

func checkCycles(t *testing.T, d description, values func(figure) float64) {
	t.Helper()
	require.Zero(t, values(figFailures))
	require.Zero(t, values(figStuck))
	require.Positive(t, values(figRate))
	require.LessOrEqual(t, values(figLeast), values(figMost))
	require.Positive(t, values(figMost))
	require.GreaterOrEqual(t, values(figSent), 1.9, "%s cannot do with less than two commands", d.name)
}

// A run that is broken off leaves nothing behind either.
func TestBrokenOff(t *testing.T) {
	b, dir := newBench(t, "^processes$")
	b.scale.processes = time.Minute
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := b.do(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	requireNothingLeft(t, b, dir)
}

func TestChildTellsWhyItCannot(t *testing.T) {
	b, _ := newBench(t, "")
	b.family = newFamily()
	defer b.family.close()
	_, err := muster(t.Context(), b.family, job{Kind: "cycles", Subject: "nobody", Limit: time.Minute})
	require.ErrorContains(t, err, `no subject "nobody"`)
	// A child that does not come to its end ends itself.
	_, err = muster(t.Context(), b.family, job{
		Kind: "cycles", Subject: "bare go-redis", Addrs: []string{"192.0.2.1:1"}, Workers: 1, Limit: 50 * time.Millisecond,
	})
	require.ErrorContains(t, err, "not done within 50ms")
}

func TestMedian(t *testing.T) {
	require.True(t, math.IsNaN(median(nil)))
	require.InDelta(t, 7, median([]float64{7}), 0)
	require.InDelta(t, 3, median([]float64{9, 1, 3}), 0)
	require.InDelta(t, 2.5, median([]float64{4, 1, 3, 2}), 0)
}

func TestPercentile(t *testing.T) {
	require.True(t, math.IsNaN(percentile(nil, 50)))
	values := []float64{15, 20, 35, 40, 50}
	// Nearest rank of five: 30 % is rank 1.5, so the second; 40 % exactly the second.
	for p, want := range map[float64]float64{0: 15, 5: 15, 30: 20, 40: 20, 50: 35, 99: 50, 100: 50} {
		require.InDelta(t, want, percentile(values, p), 0, p)
	}
	var hundred []float64
	for i := range 100 {
		hundred = append(hundred, float64(100-i))
	}
	require.InDelta(t, 50, percentile(hundred, 50), 0)
	require.InDelta(t, 99, percentile(hundred, 99), 0)
}

func TestCell(t *testing.T) {
	require.Equal(t, "–", cell(nil))
	require.Equal(t, "–", cell([]float64{math.NaN()}))
	require.Equal(t, "12.3", cell([]float64{12.34}))
	require.Equal(t, "12.3 (12–13)", cell([]float64{12.34, 12, 13}))
	require.Equal(t, "2", cell([]float64{2, 2.001, 1.999}))
	require.Equal(t, "-2 (-3 to 1)", cell([]float64{-3, 1, -2}))
	for v, want := range map[float64]string{
		0: "0", -0.001: "0", 0.256: "0.26", 9.996: "10", 99.96: "100", 100: "100", 1234.5: "1234", -12.34: "-12.3",
	} {
		require.Equal(t, want, number(v))
	}
}

// Commands are found wherever the stream is cut, also if a body looks like a frame.
func TestFramer(t *testing.T) {
	stream := "*1\r\n$4\r\nPING\r\n*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$9\r\n*1\r\n$1\r\nx\r\n*2\r\n$3\r\nGET\r\n$0\r\n\r\n"
	for i := range len(stream) {
		for j := i; j <= len(stream); j++ {
			var f framer
			n := f.feed([]byte(stream[:i])) + f.feed([]byte(stream[i:j])) + f.feed([]byte(stream[j:]))
			require.Equal(t, 3, n, "cut at %d and %d", i, j)
		}
	}
}

// Times in milliseconds, of two workers:
//
//	0: asks 0, has 1, releases 3, through 4; asks 4, has 9, releases 10, through 11
//	1: asks 0, has 5, releases 8, through 9; asks 9, cut off after 7
func TestHistory(t *testing.T) {
	ms := func(begin, got, gone, back int64) event {
		return event{begin * 1e6, got * 1e6, gone * 1e6, back * 1e6}
	}
	reports := []*report{
		{Workers: []workerReport{{Events: pack([]event{ms(0, 1, 3, 4), ms(4, 9, 10, 11)})}}, Sent: 7, Mallocs: 30},
		{Workers: []workerReport{{Events: pack([]event{ms(0, 5, 8, 9)}), Cut: 7e6}}, Sent: 5},
	}
	h, err := newHistory(reports)
	require.NoError(t, err)
	require.Equal(t, []int{2, 1}, h.counts)
	require.Equal(t, []float64{1, 5, 5, 7}, h.waits())
	require.Equal(t, []float64{2, 1}, h.gaps())
	require.InDelta(t, 100, h.moved(), 0)
	require.Zero(t, h.overlaps())
	require.Equal(t, []float64{2000, 6000, 6000}, h.cycles())

	f, err := cycleFigures(reports, true, 30*time.Millisecond, usage{commands: 18, cpu: 3 * time.Millisecond})
	require.NoError(t, err)
	for name, want := range (figures{
		figRate: 100, figCut: 1, figWaitP50: 5, figWaitP99: 7, figWaitMax: 7, figGapP50: 1, figGapP99: 2,
		figSent: 4, figScripted: 2, figMallocs: 10, figServerCPU: 1000, figLeast: 1, figMost: 2, figMoved: 100,
		figOverlaps: 0, figCycleP50: 6000,
	}) {
		require.InDelta(t, want, f[name], 1e-9, name)
	}

	// One holds long; the other two have it meanwhile, one after the other.
	h, err = newHistory([]*report{{Workers: []workerReport{
		{Events: pack([]event{ms(0, 1, 20, 21)})}, {Events: pack([]event{ms(0, 2, 3, 4), ms(4, 5, 6, 7)})},
	}}})
	require.NoError(t, err)
	require.Equal(t, 2, h.overlaps())
	require.InDelta(t, 50, h.moved(), 0)
}

func TestOtherFigures(t *testing.T) {
	f := wakeFigures(&report{Times: []int64{10e6, 0, 30e6}}, &report{Times: []int64{14e6, 99e6, 0}})
	require.InDelta(t, 4, f[figGapP50], 0)
	require.InDelta(t, 360, f[figGapP99], 0, "one that did not come counts with what was left of its slot")
	require.InDelta(t, 1, f[figCut], 0)

	f = silentFigures([]int64{100e6, 100e6, 100e6}, []int64{90e6, 0, 107e6})
	require.InDelta(t, -10, f[figToldFirst], 0)
	require.InDelta(t, 7, f[figToldLast], 0)
	require.InDelta(t, 1, f[figUntold], 0)

	r := &report{Lost: 1, Sent: 40, Heap: 1000, CPU: time.Second}
	f = heldFigures(r, 10, 4*time.Second, 7, usage{commands: 100, cpu: 2 * time.Second})
	for name, want := range (figures{
		figLost: 3, figSentRate: 10, figScriptedRate: 15, figHeap: 100, figCPUShare: 25, figServerCPUShare: 50,
	}) {
		require.InDelta(t, want, f[name], 1e-9, name)
	}

	f = majorityFigures(&report{Times: []int64{1e6, 2e6, 3e6}}, 4)
	require.InDelta(t, 1, f[figCycles], 0)
	require.InDelta(t, 3, f[figAcquireP99], 0)
	require.InDelta(t, 2, f[figReleaseP99], 0)
	require.InDelta(t, 4, f[figKeys], 0)
}

func TestDelayProxy(t *testing.T) {
	redistest.Need(t)
	s := redistest.Start(t)
	p, err := newDelayProxy(s.Addr(), 2*time.Millisecond)
	require.NoError(t, err)
	defer p.close()
	c := goRedis(settings{wire: &wire{}}, p.addr())
	defer func() { _ = c.Close() }()
	long := strings.Repeat("x", 100_000)
	require.NoError(t, c.Set(t.Context(), "k", long, 0).Err())
	require.Equal(t, long, c.Get(t.Context(), "k").Val())
}
