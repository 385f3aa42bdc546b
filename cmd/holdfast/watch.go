package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/term"

	"github.com/holdfast-go/holdfast"
)

const (
	barWidth   = 20
	keepRows   = 3 // of a terminal: title, heading, and the line that says that more follows
	homeCursor = "\x1b[H"
	restOfLine = "\x1b[K"
	restOfAll  = "\x1b[J"
)

// lockID names a lock among those of several servers.
type lockID struct{ server, key string }

// watcher is a watch under way.
type watcher struct {
	i       *invocation
	servers []*server
	single  bool // one key, no pattern

	seen   map[lockID]holdfast.LockInfo // at the last look
	failed map[string]string            // why a server could not be asked at the last look
	told   map[string]string            // what was told of that
	most   map[lockID]longest
}

// longest is the most that was seen of the lease of an owner.
type longest struct {
	owner string
	ttl   time.Duration
}

// watch is the command of that name.
func watch(ctx context.Context, i *invocation) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	w := &watcher{
		i: i, single: !strings.ContainsAny(i.operands[0], `*?[\`),
		seen: map[lockID]holdfast.LockInfo{}, failed: map[string]string{}, told: map[string]string{},
		most: map[lockID]longest{},
	}
	for _, t := range i.targets {
		s, err := i.connect(t)
		if err != nil {
			return err
		}
		defer s.close()
		w.servers = append(w.servers, s)
	}
	ticker := time.NewTicker(i.every)
	defer ticker.Stop()
	for first := true; ; first = false {
		now, err := w.look(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if first && len(w.failed) == len(w.servers) {
			return err
		}
		if err := w.show(now, first); err != nil {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// look asks all servers. Locks of one that does not answer stay as they were. The error is the
// last one.
func (w *watcher) look(ctx context.Context) (now map[lockID]holdfast.LockInfo, last error) {
	now = map[lockID]holdfast.LockInfo{}
	clear(w.failed)
	for _, s := range w.servers {
		infos, err := w.lookAt(ctx, s)
		if err != nil {
			last = err
			w.failed[s.name] = message(err)
			for id, info := range w.seen {
				if id.server == s.name {
					now[id] = info
				}
			}
			continue
		}
		for _, info := range infos {
			id := lockID{s.name, info.Key}
			now[id] = info
			if m := w.most[id]; m.owner != info.Owner || m.ttl < info.TTL {
				w.most[id] = longest{info.Owner, info.TTL}
			}
		}
	}
	for id := range w.most {
		if _, ok := now[id]; !ok {
			delete(w.most, id)
		}
	}
	return now, last
}

func (w *watcher) lookAt(ctx context.Context, s *server) ([]holdfast.LockInfo, error) {
	what := w.i.operands[0]
	infos := []holdfast.LockInfo{{Key: what}}
	if !w.single {
		var err error
		if infos, err = s.held(ctx, what); err != nil {
			return nil, err
		}
	}
	var all []holdfast.LockInfo
	for _, info := range infos {
		limited, cancel := context.WithTimeout(ctx, w.i.timeout)
		info, err := s.locker.Inspect(limited, info.Key)
		cancel()
		if err != nil {
			return nil, err
		}
		if w.single || !info.Free() {
			all = append(all, info)
		}
	}
	return all, nil
}

// show tells of what was seen.
func (w *watcher) show(now map[lockID]holdfast.LockInfo, first bool) error {
	before := w.seen
	w.seen = now
	if f := w.i.terminal(); f != nil && !w.i.json {
		return w.draw(f, first)
	}
	for _, s := range w.servers {
		if text := w.failed[s.name]; text != w.told[s.name] {
			w.told[s.name] = text
			w.i.complain("%s: %s", s.name, cmp.Or(text, "it answers again"))
		}
	}
	for _, id := range w.ids(before, now) {
		old, known := before[id]
		info, ok := now[id]
		if !ok {
			info = holdfast.LockInfo{Key: id.key, TTL: -1} // free
		}
		if known && old.Owner == info.Owner && len(old.Waiters) == len(info.Waiters) {
			continue
		}
		if err := w.line(id, info); err != nil {
			return err
		}
	}
	return nil
}

// ids returns the locks in sets, sorted.
func (w *watcher) ids(sets ...map[lockID]holdfast.LockInfo) (ids []lockID) {
	for _, set := range sets {
		for id := range set {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(a, b lockID) int {
		return cmp.Or(cmp.Compare(a.server, b.server), cmp.Compare(a.key, b.key))
	})
	return slices.Compact(ids)
}

// changeJSON is a change that watch has seen.
type changeJSON struct {
	Time time.Time `json:"time"`
	lockJSON
	Waiters int `json:"waiters"`
}

// line tells of a change.
func (w *watcher) line(id lockID, info holdfast.LockInfo) error {
	now := time.Now()
	if w.i.json {
		return w.i.printJSON(changeJSON{now, newLockJSON(id.server, info), len(info.Waiters)})
	}
	words := []string{now.Format(time.RFC3339)}
	if len(w.servers) > 1 {
		words = append(words, id.server)
	}
	words = append(words, safe(id.key))
	if info.Free() {
		words = append(words, "is free")
	} else {
		words = append(words, "held by "+safe(info.Holder)+" for another "+ttlText(info.TTL))
	}
	words = append(words, strconv.Itoa(len(info.Waiters))+" waiting")
	_, err := fmt.Fprintln(w.i.stdout, strings.Join(words, "  "))
	return err
}

// draw draws the table anew, at the place of the last one.
func (w *watcher) draw(f *os.File, first bool) error {
	width, height, err := term.GetSize(int(f.Fd()))
	if err != nil || width <= 0 || height <= keepRows {
		width, height = 80, 24
	}
	lines := append([]string{fmt.Sprintf("holdfast watch %s: %s, every %v",
		safe(w.i.operands[0]), time.Now().Format(time.TimeOnly), w.i.every)}, w.rows()...)
	for _, s := range w.servers {
		if text := w.failed[s.name]; text != "" {
			lines = slices.Insert(lines, 1, s.name+": "+hideURLs(safe(text)))
		}
	}
	if more := len(lines) - (height - 1); more > 0 {
		lines = append(lines[:height-2], fmt.Sprintf("and %d more", more+1))
	}
	var b bytes.Buffer
	if first {
		b.WriteString(homeCursor + restOfAll)
	}
	b.WriteString(homeCursor)
	for _, line := range lines {
		if runes := []rune(line); len(runes) > width {
			line = string(runes[:width])
		}
		b.WriteString(line + restOfLine + "\r\n")
	}
	b.WriteString(restOfAll)
	_, err = f.Write(b.Bytes())
	return err
}

// rows is the table.
func (w *watcher) rows() []string {
	rows := [][]string{{"KEY", "HOLDER", "TTL", "", "WAITERS"}}
	for _, id := range w.ids(w.seen) {
		info := w.seen[id]
		row := []string{safe(id.key), "-", "", "", strconv.Itoa(len(info.Waiters))}
		if !info.Free() {
			row[1], row[2], row[3] = safe(info.Holder), bar(info.TTL, w.most[id].ttl), ttlText(info.TTL)
		}
		rows = append(rows, row)
	}
	if len(w.servers) > 1 {
		for n, id := range w.ids(w.seen) {
			rows[n+1] = append([]string{id.server}, rows[n+1]...)
		}
		rows[0] = append([]string{"SERVER"}, rows[0]...)
	}
	return align(rows)
}

// bar shows what is left of a lease.
func bar(left, most time.Duration) string {
	if left < 0 || most <= 0 {
		return "[" + strings.Repeat("#", barWidth) + "]"
	}
	n := min(barWidth, int(float64(left)/float64(most)*barWidth+0.5))
	return "[" + strings.Repeat("#", n) + strings.Repeat(".", barWidth-n) + "]"
}
