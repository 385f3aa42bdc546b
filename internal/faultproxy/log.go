package faultproxy

import (
	"slices"
	"strings"
	"sync"
	"time"
)

// Cmd is one command as a client sent it.
type Cmd struct {
	// Time is when the command had been read completely.
	Time time.Time
	// Conn numbers the connection it came on, from 1 in the order of accepting.
	Conn int
	// Args are the words of the command, its name first.
	Args []string
}

// Name returns the name of the command in upper case.
func (c Cmd) Name() string {
	if len(c.Args) == 0 {
		return ""
	}
	return strings.ToUpper(c.Args[0])
}

// commandLog keeps every command since the last reset. Safe for concurrent use.
type commandLog struct {
	mu   sync.Mutex
	cmds []Cmd
}

func (l *commandLog) add(conn int, args []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	// Matchers get args too, and are not trusted to leave them alone.
	l.cmds = append(l.cmds, Cmd{Time: time.Now(), Conn: conn, Args: slices.Clone(args)})
}

func (l *commandLog) all() []Cmd {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := slices.Clone(l.cmds)
	for i := range out {
		out[i].Args = slices.Clone(out[i].Args)
	}
	return out
}

// count calls match without the lock, so that match may use the proxy.
func (l *commandLog) count(match func(cmd []string) bool) int {
	n := 0
	for _, c := range l.all() {
		if match(c.Args) {
			n++
		}
	}
	return n
}

func (l *commandLog) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cmds = nil
}
