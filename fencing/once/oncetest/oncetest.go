// Package oncetest tests stores of package once: each store passes the same suite.
package oncetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/fencing/once"
)

// Run tests a store, which may have records of other ids than those of the suite, which
// begin with the name of the test. It fails t.
func Run(t *testing.T, s once.Store) {
	for name, test := range map[string]func(*suite){
		"begin": (*suite).begin, "end": (*suite).end, "abandon": (*suite).abandon,
		"resolve": (*suite).resolve, "forget": (*suite).forget, "race": (*suite).race,
		"ids": (*suite).ids, "sizes": (*suite).sizes, "crowd": (*suite).crowd, "ended": (*suite).ended,
		"resolveRace": (*suite).resolveRace,
	} {
		t.Run(name, func(t *testing.T) { test(&suite{t, s, t.Context(), t.Name()}) })
	}
}

type suite struct {
	t   *testing.T
	s   once.Store
	ctx context.Context
	id  string
}

func (s *suite) check(ok bool, what string) {
	s.t.Helper()
	if !ok {
		s.t.Fatal("not so: " + what)
	}
}

func (s *suite) ok(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// is checks the record of the suite's id, which must be there.
func (s *suite) is(state once.State, run, payload string) {
	s.t.Helper()
	r, err := s.s.Begin(s.ctx, s.id, "another")
	s.ok(err)
	if r.State != state || r.Run != run || string(r.Payload) != payload {
		s.t.Fatalf("the record is %q of %q with %q, not %q of %q with %q", r.State, r.Run, r.Payload, state, run, payload)
	}
}

func (s *suite) claim(run string) {
	s.t.Helper()
	r, err := s.s.Begin(s.ctx, s.id, run)
	s.ok(err)
	s.check(r.State == once.Running && r.Run == run, "the claim is the caller's")
}

func (s *suite) begin() {
	s.claim("a")
	s.claim("a") // as after a lost answer
	s.is(once.Running, "a", "")
}

func (s *suite) end() {
	s.claim("a")
	s.check(errors.Is(s.s.End(s.ctx, s.id, "b", once.Done, []byte("b")), once.ErrLost), "another run ends nothing")
	result := "result \x00\xff"
	s.ok(s.s.End(s.ctx, s.id, "a", once.Done, []byte(result)))
	s.ok(s.s.End(s.ctx, s.id, "a", once.Done, []byte(result)))
	s.is(once.Done, "a", result)
	s.check(errors.Is(s.s.End(s.ctx, s.id, "a", once.Unknown, nil), once.ErrLost), "what is done stays done")
	s.ok(s.s.Abandon(s.ctx, s.id, "a"))
	s.is(once.Done, "a", result)

	s.id += "/lost" // the claim is gone, the effect is not
	s.ok(s.s.End(s.ctx, s.id, "a", once.Unknown, []byte("why")))
	s.is(once.Unknown, "a", "why")
	s.id += "/empty"
	s.ok(s.s.End(s.ctx, s.id, "a", once.Done, nil))
	s.is(once.Done, "a", "")
}

func (s *suite) abandon() {
	s.claim("a")
	s.ok(s.s.Abandon(s.ctx, s.id, "b"))
	s.is(once.Running, "a", "")
	s.ok(s.s.Abandon(s.ctx, s.id, "a"))
	s.ok(s.s.Abandon(s.ctx, s.id, "a"))
	s.claim("c")
}

func (s *suite) resolve() {
	s.claim("a")
	s.ok(s.s.End(s.ctx, s.id, "a", once.Unknown, []byte("why")))
	s.ok(s.s.Resolve(s.ctx, s.id, []byte("found")))
	s.ok(s.s.Resolve(s.ctx, s.id, []byte("found")))
	s.is(once.Done, "", "found")
	s.check(s.s.Resolve(s.ctx, s.id, []byte("other")) != nil, "another result stays")
	s.check(errors.Is(s.s.End(s.ctx, s.id, "a", once.Done, []byte("late")), once.ErrLost), "its run has lost it")
	s.is(once.Done, "", "found")
	s.id += "/none"
	s.ok(s.s.Resolve(s.ctx, s.id, nil))
	s.is(once.Done, "", "")
}

func (s *suite) forget() {
	s.ok(s.s.Forget(s.ctx, s.id))
	s.claim("a")
	s.ok(s.s.Forget(s.ctx, s.id))
	s.claim("b")
}

// race lets many claim at the same moment: one has it.
func (s *suite) race() {
	for n := range 20 {
		var (
			wg  sync.WaitGroup
			mu  sync.Mutex
			who = map[string]int{}
			id  = fmt.Sprint(s.id, "/", n)
		)
		for i := range 8 {
			wg.Go(func() { // ends with the answer
				run := fmt.Sprint(i)
				r, err := s.s.Begin(s.ctx, id, run)
				if err != nil {
					s.t.Error(err)
					return
				}
				mu.Lock()
				who[r.Run]++
				mu.Unlock()
			})
		}
		wg.Wait()
		s.check(len(who) == 1, "all are told of one run")
	}
}

// ids are compared byte by byte.
func (s *suite) ids() {
	for _, id := range []string{"a", "A", "a ", " a", "ä", "a\u0308", "🔒", "'\"`;--", "%_", "{a}", "a\nb"} {
		id = s.id + id
		r, err := s.s.Begin(s.ctx, id, id)
		s.ok(err)
		s.check(r.Run == id, "an id of its own")
	}
}

// sizes are the greatest that a Runner lets through.
func (s *suite) sizes() {
	long := strings.Repeat("ä", once.MaxID/2)
	s.id = (s.id + "/" + long)[:once.MaxID]
	for !utf8.ValidString(s.id) {
		s.id = s.id[:len(s.id)-1]
	}
	result := make([]byte, once.MaxResult)
	for i := range result {
		result[i] = byte(i * 31 >> 3)
	}
	s.claim("a")
	s.ok(s.s.End(s.ctx, s.id, "a", once.Done, result))
	s.is(once.Done, "a", string(result))
	s.ok(s.s.Resolve(s.ctx, s.id, result))
	s.id = s.id[:len(s.id)-2] // not told apart if ids were cut
	for !utf8.ValidString(s.id) {
		s.id = s.id[:len(s.id)-1]
	}
	s.claim("b")
}

// crowd lets many claim and give back one id: never two have it at once.
func (s *suite) crowd() {
	var (
		wg   sync.WaitGroup
		held atomic.Int64
	)
	for i := range 8 {
		wg.Go(func() { // ends with its rounds
			run := fmt.Sprint(i)
			for range 30 {
				r, err := s.s.Begin(s.ctx, s.id, run)
				if err != nil {
					s.t.Error(err)
					return
				}
				if r.Run != run {
					continue
				}
				if held.Add(1) != 1 {
					s.t.Error("two have the claim at once")
				}
				held.Add(-1)
				if err := s.s.Abandon(s.ctx, s.id, run); err != nil {
					s.t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// resolveRace lets somebody resolve what another one is just beginning: what Resolve says is so.
func (s *suite) resolveRace() {
	for n := range 40 {
		id, result := fmt.Sprint(s.id, "/", n), []byte("found")
		if n%2 == 0 {
			result = nil
		}
		var wg sync.WaitGroup
		wg.Go(func() { // ends with the answer
			if _, err := s.s.Begin(s.ctx, id, "a"); err != nil {
				s.t.Error(err)
			}
		})
		err := s.s.Resolve(s.ctx, id, result)
		wg.Wait()
		s.ok(err)
		r, err := s.s.Begin(s.ctx, id, "b")
		s.ok(err)
		s.check(r.State == once.Done && string(r.Payload) == string(result), "it is resolved")
	}
}

// ended calls with a context that has ended: it is an error, and nothing happens later.
func (s *suite) ended() {
	s.claim("a")
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	_, err := s.s.Begin(ctx, s.id+"/other", "a")
	for what, err := range map[string]error{
		"begin": err, "end": s.s.End(ctx, s.id, "a", once.Done, nil), "abandon": s.s.Abandon(ctx, s.id, "a"),
		"resolve": s.s.Resolve(ctx, s.id, nil), "forget": s.s.Forget(ctx, s.id),
	} {
		s.check(errors.Is(err, context.Canceled), what+" says that its context has ended")
	}
	s.is(once.Running, "a", "")
	s.id += "/other"
	s.claim("b")
}
