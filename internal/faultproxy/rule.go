package faultproxy

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"
)

// Rule says which commands a fault happens to and what it is. Rules are tried
// in the order they were injected; the first that takes the command acts on it
// and the others do not see it.
type Rule struct {
	// Match picks the commands, given as the client sent them, name first. It is
	// called from the goroutines of the connections, several at a time, and must
	// not change the slice. Nil means [Any].
	Match func(cmd []string) bool
	// Times is how many commands the rule acts on; 0 means all of them.
	Times int
	// Skip is how many matching commands pass before the first is acted on. A
	// skipped command is offered to the rules injected later.
	Skip int
	// Do is what happens to the command.
	Do Action
}

// Command matches commands by name, in upper or lower case. A name of several
// words, as in "SCRIPT LOAD", compares as many words of the command.
func Command(name string) func(cmd []string) bool {
	words := strings.Fields(name)
	return func(cmd []string) bool {
		if len(words) == 0 || len(cmd) < len(words) {
			return false
		}
		for i, w := range words {
			if !strings.EqualFold(w, cmd[i]) {
				return false
			}
		}
		return true
	}
}

// AnyOf matches commands that have one of the names, as [Command] does.
func AnyOf(names ...string) func(cmd []string) bool {
	matchers := make([]func([]string) bool, len(names))
	for i, name := range names {
		matchers[i] = Command(name)
	}
	return func(cmd []string) bool {
		for _, m := range matchers {
			if m(cmd) {
				return true
			}
		}
		return false
	}
}

// Script matches EVAL and EVALSHA.
func Script() func(cmd []string) bool { return AnyOf("EVALSHA", "EVAL") }

var handshake = AnyOf("HELLO", "AUTH", "CLIENT", "SELECT", "COMMAND", "READONLY", "PING")

// Any matches every command except those that clients send on their own to set
// up and check a connection (HELLO, AUTH, CLIENT, SELECT, COMMAND, READONLY and
// PING). With these included, "the first command" would depend on whether the
// client had a connection left in its pool. Name them with [Command] to act on
// them.
func Any() func(cmd []string) bool {
	return func(cmd []string) bool { return !handshake(cmd) }
}

// AfterHandshake narrows match to the commands that [Any] matches.
func AfterHandshake(match func(cmd []string) bool) func(cmd []string) bool {
	return func(cmd []string) bool { return !handshake(cmd) && match(cmd) }
}

// Handle is an injected [Rule]. It is safe for concurrent use, holds nothing
// that must be freed, and may be used after the proxy is closed.
type Handle struct {
	rule Rule

	mu      sync.Mutex
	skip    int
	taken   int
	fired   int
	removed bool
	// gate is what messages held now wait for. Release closes it and puts a new
	// one in its place for those that come later.
	gate chan struct{}

	firstFired chan struct{} // closed when fired becomes 1
}

func newHandle(r Rule) *Handle {
	if r.Do.kind == actNone {
		panic("faultproxy: Rule without an Action")
	}
	if r.Match == nil {
		r.Match = Any()
	}
	return &Handle{
		rule:       r,
		skip:       r.Skip,
		gate:       make(chan struct{}),
		firstFired: make(chan struct{}),
	}
}

// Remove ends the rule for commands that come from now on. What it already does
// to earlier ones goes on: held messages stay held until Release.
func (h *Handle) Remove() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.removed = true
}

// Release lets go of everything the rule holds now. Commands that match later
// are held again; to end that too, call Remove first.
func (h *Handle) Release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.gate)
	h.gate = make(chan struct{})
}

// Fired returns how often the fault has happened. Faults on requests count when
// the request has been read; faults on replies count when the reply has come
// from the server, so the command has been executed by then. Either way a fault
// is counted before the client can notice it. Only Duplicate, which the client
// cannot notice, counts when the command has been executed twice.
func (h *Handle) Fired() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.fired
}

// Wait blocks until the fault has happened at least once, in the sense of Fired,
// or until ctx is done.
func (h *Handle) Wait(ctx context.Context) error {
	select {
	case <-h.firstFired:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("faultproxy: waiting for the fault to happen: %w", ctx.Err())
	}
}

// WaitTimeout is Wait with a limit of d.
func (h *Handle) WaitTimeout(d time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return h.Wait(ctx)
}

// take decides whether the rule acts on cmd and returns the gate that a held
// message waits for.
func (h *Handle) take(cmd []string) (gate <-chan struct{}, ok bool) {
	if !h.usable() || !h.rule.Match(cmd) {
		return nil, false
	}
	// Match has run without the lock, so the rule may be used up by now.
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.spent() {
		return nil, false
	}
	if h.skip > 0 {
		h.skip--
		return nil, false
	}
	h.taken++
	return h.gate, true
}

func (h *Handle) usable() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return !h.spent()
}

// spent must be called with the lock held.
func (h *Handle) spent() bool {
	return h.removed || (h.rule.Times > 0 && h.taken >= h.rule.Times)
}

func (h *Handle) fire() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fired++
	if h.fired == 1 {
		close(h.firstFired)
	}
}
