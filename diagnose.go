package holdfast

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/refusal"
)

const (
	// diagnosisLimit bounds a Diagnose, whatever its context says.
	diagnosisLimit = 10 * time.Second

	// maxKeyTries is how many names are tried to find a key that lives on a certain
	// master of a cluster. One with a single slot has each 16384th.
	maxKeyTries = 1 << 17

	trialName = "holdfast-diagnose:" // what keys of Diagnose begin with, after the prefix
)

// Level says how much a Finding matters. It prints as "ok", "warning" or "bad", also in
// JSON.
type Level int

const (
	// DiagnosisOK says that locks need nothing more here.
	DiagnosisOK Level = iota

	// DiagnosisWarning says that locks work, but not all of them or not in all cases;
	// or that something could not be learned.
	DiagnosisWarning

	// DiagnosisBad says that locks do not work, or may be lost in normal operation.
	DiagnosisBad
)

var levelNames = [...]string{"ok", "warning", "bad"}

func (l Level) String() string {
	if l < 0 || int(l) >= len(levelNames) {
		return fmt.Sprintf("level(%d)", int(l))
	}
	return levelNames[l]
}

// MarshalText returns what String does. The error is ErrInvalid, for a Level that is none.
func (l Level) MarshalText() ([]byte, error) {
	if l < 0 || int(l) >= len(levelNames) {
		return nil, invalid("%v of a finding", l)
	}
	return []byte(l.String()), nil
}

// UnmarshalText reads what MarshalText wrote. The error is ErrInvalid.
func (l *Level) UnmarshalText(text []byte) error {
	i := slices.Index(levelNames[:], string(text))
	if i < 0 {
		return invalid("%q is no level of a finding", text)
	}
	*l = Level(i)
	return nil
}

// Finding is one thing that Diagnose has looked at. It is a plain value.
type Finding struct {
	Server string `json:"server"` // its address, as far as the client tells it
	Check  string `json:"check"`  // what was looked at, one word such as "version"
	Level  Level  `json:"level"`
	Text   string `json:"text"` // what it is, and what it means for locks
}

// Diagnosis is what Diagnose has found: by server, the same checks in the same order. It
// is a plain value, and any number of goroutines may read it.
type Diagnosis struct {
	Findings []Finding `json:"findings"`
}

// Err returns nil unless a finding is bad. Its error names those that are, and matches
// ErrUnavailable: it is for services that do not want to start then.
func (d *Diagnosis) Err() error {
	if d == nil {
		return nil
	}
	var texts []string
	for _, f := range d.Findings {
		if f.Level >= DiagnosisBad {
			texts = append(texts, fmt.Sprintf("%s: %s: %s", f.Server, f.Check, strings.TrimSuffix(f.Text, ".")))
		}
	}
	if len(texts) == 0 {
		return nil
	}
	return &chain{texts: "holdfast: not fit for locks: " + strings.Join(texts, "; "), errs: []error{ErrUnavailable}}
}

// Diagnose looks at the server behind a client, and says what there matters to locks: of
// a Sentinel set the primary, of a Cluster every master, of a Ring every shard. It looks
// at version, role, memory policy, persistence, replicas, clock and uptime, and tries
// whether this client's user may do what locks do. What a server does not tell is a
// finding as well. It never waits for a lock, and is over after 10 seconds at most.
//
// opts are those of the Locker. WithPrefix says where keys are tried; what other options
// need, such as WithFencing and WithReplicas, is then bad where it is missing.
//
// It is safe for concurrent use, also beside locks. On each server it takes a lock with a
// random name of its own, which nobody else waits for, hands it over and gives it back.
// Nothing is left behind: the keys are deleted, and have a TTL of some seconds for the
// case that they cannot be. What a user may not do is in the server's ACL LOG afterwards.
//
// Errors: ErrInvalid for a nil context or client, or options that make no sense;
// ErrUnavailable when no server could be reached (it also matches ctx's error and cause,
// if that ended). All else is in the Diagnosis. Passwords are in neither.
func Diagnose(ctx context.Context, client redis.UniversalClient, opts ...Option) (*Diagnosis, error) {
	if ctx == nil {
		return nil, invalid("nil context")
	}
	if v := reflect.ValueOf(client); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return nil, invalid("nil client")
	}
	base := defaults()
	cfg, err := base.with(opts)
	if err != nil {
		return nil, err
	}
	x := &examination{client: client, cfg: cfg, id: rand.Text()}
	if _, err := cfg.fullKey(x.keyName(maxKeyTries)); err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeoutCause(ctx, diagnosisLimit, &noAnswerError{diagnosisLimit})
	defer cancel()
	done := make(chan error, 1)
	go func() { // ends with limited, or the client's own timeouts
		var err error
		if panicked := contain(func() { err = x.run(limited) }); panicked != nil {
			err = panicked
		}
		done <- err
	}()
	select {
	case err = <-done:
	case <-limited.Done():
		err = context.Cause(limited)
	}
	return x.result(ctx, err)
}

// examination is one Diagnose.
type examination struct {
	client redis.UniversalClient
	cfg    *config
	id     string // random

	mu       sync.Mutex
	patients []*patient // guarded by mu
	extra    []Finding  // guarded by mu: about servers that could not be looked at
}

func (x *examination) keyName(n int) string { return fmt.Sprintf("%s%s:%d", trialName, x.id, n) }

// Of clients, also when a wrapper embeds one.
type (
	clusterLike interface {
		ForEachMaster(context.Context, func(context.Context, *redis.Client) error) error
		MasterForKey(context.Context, string) (*redis.Client, error)
	}
	ringLike interface {
		ForEachShard(context.Context, func(context.Context, *redis.Client) error) error
		Options() *redis.RingOptions
	}
	singleLike interface{ Options() *redis.Options }
)

// run finds the servers and looks at each.
func (x *examination) run(ctx context.Context) error {
	key := x.cfg.prefix + x.keyName(0)
	switch c := x.client.(type) {
	case clusterLike:
		err := c.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error {
			x.visit(ctx, &patient{c: node, key: x.keyOn(ctx, c, node), cluster: true})
			return nil
		})
		x.mu.Lock()
		defer x.mu.Unlock()
		if _, refused := refusal.Text(err); refused && len(x.patients) == 0 {
			x.extra = append(x.extra, Finding{"the cluster", "cluster", DiagnosisBad, fmt.Sprintf(
				"Its members cannot be learned (%s). Without them the client finds no key.", oneLine(err.Error()))})
			return nil
		}
		return err
	case ringLike:
		err := c.ForEachShard(ctx, func(ctx context.Context, shard *redis.Client) error {
			x.visit(ctx, &patient{c: shard, key: key})
			return nil
		})
		x.missShards(c)
		return err
	default:
		x.visit(ctx, &patient{c: x.client, key: key})
		return nil
	}
}

// keyOn returns a key that lives on a master, or "" if none with the prefix does.
func (x *examination) keyOn(ctx context.Context, c clusterLike, node *redis.Client) string {
	tries := maxKeyTries
	if a, b := x.cfg.prefix+x.keyName(0), x.cfg.prefix+x.keyName(1); keyspace.Tag(a) == keyspace.Tag(b) {
		tries = 1 // the prefix says where all keys live
	}
	for i := range tries {
		key := x.cfg.prefix + x.keyName(i)
		owner, err := c.MasterForKey(ctx, key)
		if err == nil && owner.Options().Addr == node.Options().Addr {
			return key
		}
		if ctx.Err() != nil {
			break
		}
	}
	return ""
}

// missShards finds the shards that a Ring has taken out because they do not answer.
func (x *examination) missShards(c ringLike) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, addr := range c.Options().Addrs {
		addr = addressOf(addr)
		if slices.ContainsFunc(x.patients, func(p *patient) bool { return p.name == addr }) {
			continue
		}
		x.extra = append(x.extra, Finding{addr, checkReachable, DiagnosisBad, "It does not answer, and the Ring has taken it out. " +
			"Its keys live on other servers now, which do not know the locks that are held here."})
	}
}

// visit examines one server.
func (x *examination) visit(ctx context.Context, p *patient) {
	p.x, p.info = x, map[string]string{}
	p.name = fmt.Sprintf("the server behind %T", p.c)
	if c, ok := p.c.(singleLike); ok {
		p.name, p.secret, p.single = addressOf(c.Options().Addr), c.Options().Password, !p.cluster
	}
	x.mu.Lock()
	x.patients = append(x.patients, p)
	x.mu.Unlock()
	if panicked := contain(func() { p.examine(ctx) }); panicked != nil {
		p.fail(panicked)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	p.done = true
}

// result makes a Diagnosis of what is known by now. err is why not all is.
func (x *examination) result(ctx context.Context, err error) (*Diagnosis, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	slices.SortStableFunc(x.patients, func(a, b *patient) int { return cmp.Compare(a.name, b.name) })
	d := &Diagnosis{}
	errs, texts, reached := []error(nil), []string(nil), false
	for _, p := range x.patients {
		if !p.done && p.err == nil {
			p.err = cmp.Or(err, context.Canceled)
		}
		for _, f := range append(slices.Clip(p.findings), p.verdict()...) {
			f.Server = p.name
			d.Findings = append(d.Findings, f)
		}
		reached = reached || p.reached
		if p.err != nil {
			errs, texts = append(errs, p.err), append(texts, p.name+": "+p.why(p.err))
		}
	}
	slices.SortFunc(x.extra, func(a, b Finding) int { return cmp.Compare(a.Server, b.Server) })
	d.Findings = append(d.Findings, x.extra...)
	refused := slices.ContainsFunc(x.extra, func(f Finding) bool { return f.Check != checkReachable })
	if reached || refused {
		return d, nil
	}
	if err != nil && len(errs) == 0 {
		errs, texts = append(errs, err), append(texts, oneLine(err.Error()))
	}
	if len(errs) == 0 {
		texts = append(texts, "the client knows none that is up")
	}
	return nil, withContext(ctx, &chain{
		texts: "holdfast: diagnose: no server could be reached: " + strings.Join(texts, "; "),
		errs:  []error{ErrUnavailable, opaqueContext{errors.Join(errs...)}},
	})
}

// addressOf returns an address without what some put before it: a user and a password.
func addressOf(addr string) string { return addr[strings.LastIndexByte(addr, '@')+1:] }

// oneLine makes a short line of a text that comes from elsewhere.
func oneLine(text string) string {
	if at := strings.LastIndexByte(text, '@'); at >= 0 && strings.Contains(text[:at], "://") {
		return "an address is a URL with a user, and no address" // the text would tell the password
	}
	text = strings.Join(strings.Fields(strings.ToValidUTF8(text, "?")), " ")
	if len(text) > 200 {
		text = strings.ToValidUTF8(text[:200], "") + "..."
	}
	return strings.TrimSuffix(text, ".")
}
