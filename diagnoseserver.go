package holdfast

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/refusal"
)

// What several places find.
const (
	checkReachable = "reachable"
	checkRights    = "rights"
	checkWrites    = "writes"
)

// patient is one server under examination. What is not said to be guarded is for the
// goroutine that examines it.
type patient struct {
	x       *examination
	c       redis.UniversalClient
	key     string // of a lock to try; "": none with the prefix lives here
	secret  string // must not be told
	cluster bool   // the client is one for clusters
	single  bool   // the client is surely not one for clusters

	info    map[string]string // of INFO, and what stands in for it
	noInfo  string            // why INFO said nothing; "": it may just lack something
	noTrial bool              // a refusal that is told already
	silent  bool              // it has stopped answering

	// Guarded by x.mu.
	name     string
	findings []Finding
	reached  bool
	done     bool
	err      error // why the examination has ended early
}

func (p *patient) add(check string, level Level, format string, args ...any) {
	p.x.mu.Lock()
	defer p.x.mu.Unlock()
	p.findings = append(p.findings, Finding{Check: check, Level: level, Text: fmt.Sprintf(format, args...)})
}

// unknown adds what the server did not tell.
func (p *patient) unknown(check, why string) {
	p.add(check, DiagnosisWarning, "Not known: %s.", cmp.Or(why, "INFO does not say it"))
}

// fail notes that the server has given no answer.
func (p *patient) fail(err error) {
	p.x.mu.Lock()
	defer p.x.mu.Unlock()
	p.silent = true
	if p.err == nil {
		p.err = err
	}
}

// verdict returns what an examination that ended early has found by that; x.mu is held.
func (p *patient) verdict() []Finding {
	switch {
	case p.err == nil:
		return nil
	case !p.reached:
		return []Finding{{Check: checkReachable, Level: DiagnosisBad, Text: fmt.Sprintf(
			"It does not answer (%s). Locks whose keys live here can be neither taken nor given back.", p.why(p.err))}}
	}
	return []Finding{{Check: checkReachable, Level: DiagnosisBad, Text: fmt.Sprintf(
		"It stopped answering (%s). The rest is not known.", p.why(p.err))}}
}

// why returns what an error says, without secrets.
func (p *patient) why(err error) string {
	text := err.Error()
	if p.secret != "" {
		text = strings.ReplaceAll(text, p.secret, "***")
	}
	text, _, _ = strings.Cut(text, " script: ") // which ends with where in the script
	return oneLine(text)
}

// examine makes all checks.
func (p *patient) examine(ctx context.Context) {
	if !p.ask(ctx) {
		return
	}
	p.nameIt(ctx)
	for _, check := range []func(context.Context){
		p.checkVersion, p.checkRole, p.checkLoading, p.checkCluster, p.checkMemory, p.checkPersistence,
		p.checkReplicas, p.checkUptime, p.checkClock, p.checkRights,
	} {
		if p.silent {
			return
		}
		check(ctx)
	}
}

// ask gets INFO, or HELLO for one who may not. It reports whether the server lets us in.
func (p *patient) ask(ctx context.Context) bool {
	sent := time.Now()
	text, err := p.c.Info(ctx).Result()
	said, refused := refusal.Text(err)
	if err != nil && !refused {
		p.fail(err)
		return false
	}
	p.x.mu.Lock()
	p.reached = true
	p.x.mu.Unlock()
	if refused && !letsIn(said) {
		p.add("login", DiagnosisBad, "It refuses the connection (%s). Locks can be neither taken nor given back.", p.why(err))
		return false
	}
	p.add(checkReachable, DiagnosisOK, "It answered within %v.", time.Since(sent).Round(10*time.Microsecond))
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			p.info[name] = value
		}
	}
	if refused {
		p.noInfo = "INFO is refused (" + p.why(err) + ")"
		p.hello(ctx)
	}
	return !p.silent
}

// letsIn reports whether a refusal is about a command, not about the connection.
func letsIn(said string) bool {
	for _, code := range []string{"NOAUTH", "WRONGPASS", "DENIED"} {
		if refusal.Says(said, code) {
			return false
		}
	}
	lower := strings.ToLower(said)
	return !strings.Contains(lower, "password") && !strings.Contains(lower, "max number of clients")
}

// hello asks for what every user may know, since Redis 6.
func (p *patient) hello(ctx context.Context) {
	reply, err := p.c.Do(ctx, "hello").Result()
	if _, refused := refusal.Text(err); err != nil && !refused {
		p.fail(err)
		return
	}
	known := map[string]string{"version": "redis_version", "role": "role", "mode": "redis_mode"}
	note := func(name, value any) {
		if field := known[fmt.Sprint(name)]; field != "" {
			p.info[field] = fmt.Sprint(value)
		}
	}
	switch reply := reply.(type) {
	case map[any]any:
		for name, value := range reply {
			note(name, value)
		}
	case []any:
		for i := 0; i+1 < len(reply); i += 2 {
			note(reply[i], reply[i+1])
		}
	}
}

// nameIt finds the address where the client does not tell it, as of a Sentinel set.
func (p *patient) nameIt(ctx context.Context) {
	p.x.mu.Lock()
	name := p.name
	p.x.mu.Unlock()
	if _, _, ok := strings.Cut(name, ":"); ok || strings.HasPrefix(name, "/") {
		return
	}
	if name == "FailoverClient" { // as go-redis calls its Sentinel clients
		name = "the primary of the Sentinels"
	}
	text, _ := p.c.Do(ctx, "client", "info").Text() // since 6.2, for those who may
	for _, field := range strings.Fields(text) {
		if addr, ok := strings.CutPrefix(field, "laddr="); ok && addr != "" {
			name = addr
		}
	}
	p.x.mu.Lock()
	defer p.x.mu.Unlock()
	p.name = name
}

// setting returns a value of INFO, or else of CONFIG GET; "" with the reason if neither
// tells it. field is "" for what INFO does not have.
func (p *patient) setting(ctx context.Context, field, name string) (value, why string) {
	if value, ok := p.info[field]; ok && field != "" {
		return value, ""
	}
	all, err := p.c.ConfigGet(ctx, name).Result()
	if value, ok := all[name]; ok {
		if value == "" {
			value = "none" // save, for one
		}
		return value, ""
	}
	if err == nil {
		return "", "CONFIG does not have " + name
	}
	if _, refused := refusal.Text(err); !refused {
		p.fail(err)
		return "", "CONFIG GET " + name + " was not answered"
	}
	return "", "CONFIG GET " + name + " is refused (" + p.why(err) + ")"
}
