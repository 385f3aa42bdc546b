package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast"
)

// diagnoseAnswers is how many slow answers doctor waits for.
const diagnoseAnswers = 2

// lockJSON is a lock in JSON: a line of ls, and what inspect and watch begin with.
type lockJSON struct {
	Server string `json:"server"`
	Key    string `json:"key"`
	Held   bool   `json:"held"`
	Holder string `json:"holder,omitempty"`
	Owner  string `json:"owner,omitempty"`
	TTL    *int64 `json:"ttl_ms,omitempty"` // none: no expiry, or free
}

func newLockJSON(server string, info holdfast.LockInfo) lockJSON {
	return lockJSON{server, info.Key, !info.Free(), info.Holder, info.Owner, millis(info.TTL)}
}

// list is the command ls.
func list(ctx context.Context, i *invocation) error {
	pattern := "*"
	if len(i.operands) > 0 {
		pattern = i.operands[0]
	}
	return i.each(ctx, func(ctx context.Context, s *server) error {
		infos, err := s.held(ctx, pattern)
		if i.json {
			for _, info := range infos {
				if err := i.printJSON(newLockJSON(s.name, info)); err != nil {
					return err
				}
			}
			return err
		}
		if err != nil && len(infos) == 0 {
			return err
		}
		rows := [][]string{{"KEY", "HOLDER", "TTL"}}
		for _, info := range infos {
			rows = append(rows, []string{safe(info.Key), safe(info.Holder), ttlText(info.TTL)})
		}
		return errors.Join(table(i.stdout, rows), err)
	})
}

// held returns the locks that match a pattern, sorted. With an error it returns what came
// before that.
func (s *server) held(ctx context.Context, pattern string) (infos []holdfast.LockInfo, err error) {
	for info, err := range s.locker.List(ctx, pattern) {
		if err != nil {
			return sorted(infos), err
		}
		infos = append(infos, info)
	}
	return sorted(infos), nil
}

// sorted sorts by key, and leaves the last of those that have come twice.
func sorted(infos []holdfast.LockInfo) []holdfast.LockInfo {
	slices.Reverse(infos)
	slices.SortStableFunc(infos, func(a, b holdfast.LockInfo) int { return cmp.Compare(a.Key, b.Key) })
	return slices.CompactFunc(infos, func(a, b holdfast.LockInfo) bool { return a.Key == b.Key })
}

// inspectJSON is what inspect prints.
type inspectJSON struct {
	lockJSON
	Token int64 `json:"token,omitempty"`

	Since  *time.Time        `json:"since,omitempty"`
	Host   string            `json:"host,omitempty"`
	PID    int               `json:"pid,omitempty"`
	Labels map[string]string `json:"labels,omitempty"`

	Waiters []waiterJSON `json:"waiters"`
}

type waiterJSON struct {
	Holder string   `json:"holder"`
	Owner  string   `json:"owner"`
	Waits  int64    `json:"waits_ms"`
	Holds  []string `json:"holds"`
}

// inspect is the command of that name.
func inspect(ctx context.Context, i *invocation) error {
	return i.each(ctx, func(ctx context.Context, s *server) error {
		limited, cancel := context.WithTimeout(ctx, i.timeout)
		defer cancel()
		info, err := s.locker.Inspect(limited, i.operands[0])
		if err != nil {
			return err
		}
		if i.json {
			return i.printJSON(newInspectJSON(s.name, info))
		}
		return i.printLock(info)
	})
}

func newInspectJSON(server string, info holdfast.LockInfo) inspectJSON {
	all := inspectJSON{
		lockJSON: newLockJSON(server, info), Token: int64(info.Token),
		Host: info.Host, PID: info.PID, Labels: info.Labels, Waiters: []waiterJSON{},
	}
	if !info.Since.IsZero() {
		all.Since = &info.Since
	}
	for _, w := range info.Waiters {
		holds := append([]string{}, w.Holds...)
		all.Waiters = append(all.Waiters, waiterJSON{w.Holder, w.Owner, w.Waits.Milliseconds(), holds})
	}
	return all
}

// printLock writes a lock and its waiters for readers.
func (i *invocation) printLock(info holdfast.LockInfo) error {
	rows := [][]string{{"KEY", safe(info.Key)}}
	if info.Free() {
		rows = append(rows, []string{"HOLDER", i.paint(green, "nobody: the lock is free")})
	} else {
		rows = append(rows, []string{"HOLDER", safe(info.Holder)}, []string{"OWNER", safe(info.Owner)},
			[]string{"TTL", ttlText(info.TTL)})
	}
	if info.Token != 0 {
		rows = append(rows, []string{"TOKEN", strconv.FormatInt(int64(info.Token), 10)})
	}
	rows = append(rows, details(info)...)
	rows = append(rows, []string{"WAITERS", strconv.Itoa(len(info.Waiters))})
	if err := table(i.stdout, rows); err != nil || len(info.Waiters) == 0 {
		return err
	}
	rows = [][]string{{"", "HOLDER", "WAITS", "HOLDS"}}
	for n, w := range info.Waiters {
		var holds []string
		for _, key := range w.Holds {
			holds = append(holds, safe(key))
		}
		row := []string{strconv.Itoa(n + 1), safe(w.Holder), short(w.Waits), cmp.Or(strings.Join(holds, ", "), "-")}
		rows = append(rows, row)
	}
	return table(i.stdout, rows)
}

// details is what only some holders tell.
func details(info holdfast.LockInfo) (rows [][]string) {
	if !info.Since.IsZero() {
		rows = append(rows, []string{"SINCE", info.Since.Local().Format(time.RFC3339)})
	}
	if info.Host != "" {
		rows = append(rows, []string{"HOST", safe(info.Host)})
	}
	if info.PID != 0 {
		rows = append(rows, []string{"PID", strconv.Itoa(info.PID)})
	}
	for _, name := range slices.Sorted(maps.Keys(info.Labels)) {
		rows = append(rows, []string{"LABEL", safe(name) + "=" + safe(info.Labels[name])})
	}
	return rows
}

// breakJSON is what break prints.
type breakJSON struct {
	Server string `json:"server"`
	Key    string `json:"key"`
	Owner  string `json:"owner"`
	Broken bool   `json:"broken"`
}

// breakLock is the command break.
func breakLock(ctx context.Context, i *invocation) error {
	key := i.operands[0]
	return i.each(ctx, func(ctx context.Context, s *server) error {
		limited, cancel := context.WithTimeout(ctx, i.timeout)
		defer cancel()
		err := s.locker.Break(limited, key, i.owner)
		if err != nil && !errors.Is(err, holdfast.ErrNotHeld) {
			return err
		}
		if i.json {
			return errors.Join(err, i.printJSON(breakJSON{s.name, key, i.owner, err == nil}))
		}
		if err == nil {
			_, err = fmt.Fprintf(i.stdout, "broken: %s, held by %s\n", safe(key), safe(i.owner))
		}
		return err
	})
}

// doctor is the command of that name.
func doctor(ctx context.Context, i *invocation) error {
	opts := []holdfast.Option{holdfast.WithPrefix(i.prefix)}
	if i.fence {
		opts = append(opts, holdfast.WithFencing())
	}
	return i.each(ctx, func(ctx context.Context, s *server) error {
		limited, cancel := context.WithTimeout(ctx, diagnoseAnswers*i.timeout)
		defer cancel()
		d, err := holdfast.Diagnose(limited, s.client, opts...)
		if err != nil {
			return err
		}
		if err := i.printDiagnosis(d); err != nil {
			return err
		}
		if d.Err() != nil {
			return &exitError{code: exitFailed} // it has been told
		}
		return nil
	})
}

func (i *invocation) printDiagnosis(d *holdfast.Diagnosis) error {
	if i.json {
		for _, f := range d.Findings {
			if err := i.printJSON(f); err != nil {
				return err
			}
		}
		return nil
	}
	var rows [][]string
	for _, f := range d.Findings {
		rows = append(rows, []string{f.Level.String(), safe(f.Server), safe(f.Check), safe(f.Text)})
	}
	colours := map[string]string{"ok": green, "warning": yellow, "bad": red}
	for n, line := range align(rows) {
		level := rows[n][0]
		_, err := fmt.Fprintln(i.stdout, i.paint(colours[level], level)+line[len(level):])
		if err != nil {
			return err
		}
	}
	return nil
}

// versionJSON is what version prints.
type versionJSON struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"`
	Go       string `json:"go"`
	OS       string `json:"os"`
	Arch     string `json:"arch"`
}

// version is the command of that name.
func version(_ context.Context, i *invocation) error {
	v := versionJSON{Version: "unknown", Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH}
	if info, ok := debug.ReadBuildInfo(); ok {
		v.Version = cmp.Or(info.Main.Version, "unknown")
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				v.Revision = s.Value
			}
		}
	}
	if i.json {
		return i.printJSON(v)
	}
	_, err := fmt.Fprintln(i.stdout, strings.Join(strings.Fields(
		"holdfast "+v.Version+" "+v.Revision+" "+v.Go+" "+v.OS+"/"+v.Arch), " "))
	return err
}
