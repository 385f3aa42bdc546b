package main

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
)

// figure is what a row of the table shows.
type figure string

// figures are the results of one measurement.
type figures map[figure]float64

const (
	figRate      figure = "acquisitions a second"
	figCycleP50  figure = "acquire + release p50, µs"
	figCycleP99  figure = "acquire + release p99, µs"
	figWaitP50   figure = "wait p50, ms"
	figWaitP99   figure = "wait p99, ms"
	figWaitMax   figure = "longest wait, ms"
	figGapP50    figure = "release to next holder p50, ms"
	figGapP99    figure = "release to next holder p99, ms"
	figSent      figure = "commands sent per acquisition"
	figScripted  figure = "commands in scripts per acquisition"
	figLeast     figure = "acquisitions of the least lucky worker"
	figMost      figure = "acquisitions of the most lucky worker"
	figMoved     figure = "went to another worker than before, %"
	figMallocs   figure = "allocations per acquisition"
	figCPU       figure = "CPU of the processes per acquisition, µs"
	figServerCPU figure = "CPU of Redis per acquisition, µs"

	figGoroutines figure = "goroutines left"
	figKeys       figure = "keys left"

	figLost           figure = "locks lost"
	figSentRate       figure = "commands sent a second"
	figScriptedRate   figure = "commands in scripts a second"
	figHeap           figure = "heap per lock, bytes"
	figStack          figure = "stacks per lock, bytes"
	figHeldGoroutines figure = "goroutines"
	figCPUShare       figure = "CPU of the process, % of a core"
	figServerCPUShare figure = "CPU of Redis, % of a core"

	figToldFirst  figure = "told after the TTL, first, ms"
	figToldMedian figure = "told after the TTL, median, ms"
	figToldLast   figure = "told after the TTL, last, ms"
	figUntold     figure = "not told in time"

	figCycles     figure = "cycles"
	figAcquireP50 figure = "acquire p50, ms"
	figAcquireP99 figure = "acquire p99, ms"
	figReleaseP50 figure = "release p50, ms"
	figReleaseP99 figure = "release p99, ms"

	figCut      figure = "waits that the end cut off"
	figOverlaps figure = "overlapping holds"
	figFailures figure = "calls that failed"
	figStuck    figure = "calls not back in time"
)

var (
	costRows = []figure{
		figSent, figScripted, figMallocs, figCPU, figServerCPU, figGoroutines, figKeys,
	}
	ownRows    = append([]figure{figRate, figCycleP50, figCycleP99}, costRows...)
	sharedRows = append([]figure{
		figRate, figWaitP50, figWaitP99, figWaitMax, figGapP50, figGapP99, figLeast, figMost, figMoved, figOverlaps,
	}, costRows...)
	wakeRows = []figure{figGapP50, figGapP99, figCut}
	heldRows = []figure{
		figLost, figSentRate, figScriptedRate, figHeap, figStack, figHeldGoroutines, figCPUShare, figServerCPUShare,
	}
	silentRows   = []figure{figToldFirst, figToldMedian, figToldLast, figUntold}
	majorityRows = []figure{
		figAcquireP50, figAcquireP99, figReleaseP50, figReleaseP99, figFailures, figStuck,
		figKeys, figGoroutines,
	}
)

// table collects the results of all rounds.
type table struct {
	mu      sync.Mutex // for note
	columns []description
	blocks  []*block
	remarks []string
}

// block is the rows of one workload.
type block struct {
	workload

	values map[string]map[figure][]float64 // by the subject's name
}

func newTable(columns []description) *table { return &table{columns: columns} }

// add opens the block of w.
func (t *table) add(w workload) *block {
	b := &block{w, map[string]map[figure][]float64{}}
	t.blocks = append(t.blocks, b)
	return b
}

// note keeps a result of one round. It is safe for concurrent use.
func (t *table) note(b *block, subject string, f figures, remarks []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if b.values[subject] == nil {
		b.values[subject] = map[figure][]float64{}
	}
	for name, v := range f {
		b.values[subject][name] = append(b.values[subject][name], v)
	}
	for _, r := range remarks {
		r = fmt.Sprintf("%s, %s: %s", b.title, subject, r)
		if !slices.Contains(t.remarks, r) {
			t.remarks = append(t.remarks, r)
		}
	}
}

// markdown writes the table and what is to be known about it.
func (t *table) markdown(redis, load string) string {
	var out strings.Builder
	fmt.Fprintf(&out, "%d cores, load average before %s, %s, Redis %s. Medians of rounds (least–greatest), ",
		runtime.NumCPU(), load, runtime.Version(), redis)
	out.WriteString("in each of which all subjects took turns; a cell without a range is one round, or all agreed.\n\n")
	heads := []string{"Workload", "Figure"}
	for _, d := range t.columns {
		heads = append(heads, strings.TrimSpace(d.name+" "+d.version()))
	}
	row(&out, heads)
	row(&out, append([]string{"---", "---"}, slices.Repeat([]string{"---:"}, len(t.columns))...))
	for _, b := range t.blocks {
		title := b.title
		for _, f := range b.rows {
			cells := []string{title, string(f)}
			for _, d := range t.columns {
				cells = append(cells, cell(b.values[d.name][f]))
			}
			row(&out, cells)
			title = "" // in the first row only
		}
	}
	out.WriteString("\n")
	for _, line := range append(t.notes(), t.remarks...) {
		fmt.Fprintf(&out, "- %s\n", line)
	}
	return out.String()
}

func row(out *strings.Builder, cells []string) {
	fmt.Fprintf(out, "| %s |\n", strings.Join(cells, " | "))
}

// notes say what the rows mean, where their names do not.
func (t *table) notes() []string {
	has := map[figure]bool{}
	for _, b := range t.blocks {
		for _, f := range b.rows {
			has[f] = true
		}
	}
	texts := []struct {
		row  figure
		text string
	}{
		{figSent, "Commands sent are counted on the clients' sockets; commands in scripts are those that the server " +
			"counts beyond them."},
		{figWaitMax, "Waits that the end of a run cut off count with the length that they had."},
		{figGapP50, "The time of the next holder is counted from the moment at which the one before began to release. " +
			"The bare subjects poll every 10 ms."},
		{figSentRate, "The bare subjects, redislock and redsync do not renew by themselves: a goroutine for each lock " +
			"does, every third of the TTL, without a deadline."},
		{figToldMedian, "Negative: told before the TTL of the key had passed. For redislock and redsync the refresh " +
			"that fails tells; nothing else does."},
		{figAcquireP50, "Five servers: " + strings.Join(without(), ", ") + " have no lock over independent servers, or " +
			"put all keys of one on the same deployment."},
	}
	var list []string
	for _, t := range texts {
		if has[t.row] {
			list = append(list, t.text)
		}
	}
	return list
}

// without returns the names of the libraries that take no majority lock.
func without() (names []string) {
	for _, d := range libraries() {
		if _, err := find(majoritySubjects, d.name); err != nil {
			names = append(names, d.name)
		}
	}
	return names
}
