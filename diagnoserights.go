package holdfast

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/refusal"
	"github.com/holdfast-go/holdfast/internal/script"
)

const (
	trialTTL    = 5 * time.Second
	messageTime = time.Second // within which a published message must come

	needsWaiting = "An Acquire that must wait fails. TryAcquire works."
	needsWaking  = "Waiters are not woken. They find their grants by their calls, up to 2/3 s later."
	needsCycles  = "Deadlocks across processes are not found."
)

// fenceTrial draws a token as mint.lua does, from a counter that ends by itself.
var fenceTrial = script.New(`redis.call('SET', KEYS[1], '1', 'PX', ARGV[1]) return redis.call('INCR', KEYS[1])`)

// oddError is an answer that no server gives.
type oddError struct{ reply any }

func (e *oddError) Error() string { return fmt.Sprintf("unexpected answer %v", e.reply) }

// tried adds what came of trying something, unless it works, which it reports.
func (p *patient) tried(what string, level Level, means string, err error) bool {
	var odd *oddError
	_, refused := refusal.Text(err)
	switch {
	case err == nil:
		return true
	case p.silent:
	case refused:
		p.add(checkRights, level, "%s is refused (%s). %s", what, p.why(err), means)
	case errors.As(err, &odd):
		p.add(checkRights, DiagnosisWarning, "%s: %s. %s", what, p.why(err), means)
	default:
		p.fail(err)
	}
	return false
}

// trial is one lock that is taken, handed over and given back.
type trial struct {
	*patient
	owner, next   string
	verb, channel string
	ps            *redis.PubSub // nil: nobody listens
	queues        bool          // the key has room for companions
}

// checkRights tries what locks do. Nothing is left, whatever comes of it.
func (p *patient) checkRights(ctx context.Context) {
	if p.noTrial {
		return
	}
	if p.key == "" {
		p.add(checkRights, DiagnosisOK, "No lock with this prefix lives here. What the user may do was not tried.")
		return
	}
	id := "holdfast-diagnose/" + p.x.id
	t := &trial{patient: p, owner: id + "-a", next: id + "-b", queues: keyspace.HasCompanions(p.key)}
	defer t.sweep(ctx)
	t.run(ctx)
	p.x.mu.Lock()
	all := !p.silent && !slices.ContainsFunc(p.findings, func(f Finding) bool {
		return f.Check == checkRights || f.Check == checkWrites
	})
	p.x.mu.Unlock()
	if all {
		p.add(checkRights, DiagnosisOK, "The user may do all that locks do.")
	}
}

// run makes the trials. Those that others have shown to be hopeless are left out.
func (t *trial) run(ctx context.Context) {
	err := t.c.SetNX(ctx, t.key, t.owner, trialTTL).Err()
	if text, refused := refusal.Text(err); refused && !isDenied(text) {
		t.add(checkWrites, DiagnosisBad, "SET is refused (%s). No lock can be taken now; what the user may do was not tried.", t.why(err))
		return
	}
	set := t.tried("SET", DiagnosisBad, "No lock can be taken.", err)
	if t.silent {
		return
	}
	scripts := t.scripts(ctx)
	for _, f := range []struct {
		may bool
		run func(context.Context)
	}{
		{t.queues, t.listen}, {set && scripts, t.hold}, {set && scripts, t.handOver}, {scripts && t.queues, t.fence},
		{scripts && t.queues, t.cycles}, {t.x.cfg.replicas > 0, t.replicas},
	} {
		if f.may && !t.silent {
			f.run(ctx)
		}
	}
	if !t.queues {
		t.add(checkRights, DiagnosisWarning, "The braces of the prefix leave no room for companion keys in the slot of a lock. "+
			"Waiters poll, and fencing is refused.")
	}
}

// isDenied reports whether a refusal is about rights.
func isDenied(text string) bool {
	return refusal.Says(text, "NOPERM") || strings.Contains(text, "user executing the script can't")
}

func isUnknown(text string) bool { return strings.Contains(strings.ToLower(text), "unknown command") }

func (t *trial) sweep(ctx context.Context) {
	if t.ps != nil {
		_ = t.ps.Close() // it listens no more either way
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	keys := t.keys()
	if waits, ok := waitsOf(t.key); ok {
		keys = append(keys, waits)
	}
	pipe := t.c.Pipeline()
	for _, key := range keys { // one by one: their slot may be moving
		pipe.Del(ctx, key)
	}
	_, _ = pipe.Exec(ctx) // what stays ends by itself
}

// keys returns the key and its companions, as scripts want them.
func (t *trial) keys() []string {
	c, ok := keyspace.CompanionsOf(t.key)
	if !ok {
		return []string{t.key}
	}
	return []string{t.key, c.Queue, c.Waiters, c.Fence}
}

// scripts reports whether scripts run, by giving back a lock that nobody has.
func (t *trial) scripts(ctx context.Context) bool {
	nobody := t.owner + ".probe"
	err := releaseScript.ByText(ctx, t.c, t.keys(), nobody, "").Err()
	if err != nil {
		if t.tried("EVAL", DiagnosisBad, "Locks cannot be given back or renewed, so none is taken.", err); !t.silent {
			t.add("scripts", DiagnosisBad, "Scripts do not run. Locks consist of them.")
		}
		return false
	}
	err = releaseScript.ByDigest(ctx, t.c, t.keys(), nobody, "").Err()
	if t.tried("EVALSHA", DiagnosisWarning, "Each call sends the text of its script with it.", err) {
		t.add("scripts", DiagnosisOK, "Scripts run, by their digests.")
	} else if !t.silent {
		t.add("scripts", DiagnosisWarning, "Scripts run, but not by their digests.")
	}
	return !t.silent
}

// listen sends a message as deadlocks do, and subscribes as waiters do.
func (t *trial) listen(ctx context.Context) {
	t.verb, t.channel = "PUBLISH", channelPrefix+t.x.id
	publish, subscribe := t.c.Publish, t.c.Subscribe
	if t.cluster {
		t.verb, t.channel = "SPUBLISH", channelPrefix+"{"+keyspace.Tag(t.key)+"}:"+t.x.id
		publish, subscribe = t.c.SPublish, t.c.SSubscribe
	}
	err := publish(ctx, t.channel, "").Err()
	if text, _ := refusal.Text(err); t.cluster && isUnknown(text) { // before Redis 7
		t.verb, publish, subscribe = "PUBLISH", t.c.Publish, t.c.Subscribe
		err = publish(ctx, t.channel, "").Err()
	}
	if !t.tried(t.verb, DiagnosisWarning, needsWaking, err) {
		return
	}
	ps := subscribe(ctx, t.channel)
	_, err = ps.ReceiveTimeout(ctx, 2*time.Second)
	if !t.tried(map[string]string{"PUBLISH": "SUBSCRIBE", "SPUBLISH": "SSUBSCRIBE"}[t.verb], DiagnosisWarning, needsWaking, err) {
		_ = ps.Close() // nothing was heard
		return
	}
	t.ps = ps
}

// hold asks for the lock and renews it, as its owner does.
func (t *trial) hold(ctx context.Context) {
	ttl := clock.Millis(trialTTL)
	reply, err := acquireScript.Run(ctx, t.c, []string{t.key}, t.owner, ttl).Slice()
	if err == nil && (len(reply) < 2 || reply[0] != int64(2)) {
		err = &oddError{reply}
	}
	if !t.tried("The script that takes locks", DiagnosisBad, "Who has a lock cannot be learned.", err) && t.silent {
		return
	}
	err = answer(renewScript.Run(ctx, t.c, []string{t.key}, t.owner, ttl))
	t.tried("The script that renews locks", DiagnosisBad, "Locks are lost at the end of their first lease.", err)
}

// answer reads the first answer of a script about several locks, which should be 1.
func answer(cmd *redis.Cmd) error {
	reply, err := cmd.Slice()
	if err != nil {
		return err
	}
	if len(reply) == 1 && reply[0] == int64(1) {
		return nil
	}
	if len(reply) == 1 {
		if text, ok := reply[0].(string); ok {
			return refusal.Reply(text)
		}
	}
	return &oddError{reply}
}

// wait takes a place in the queue, and reports whether that works.
func (t *trial) wait(ctx context.Context) bool {
	verb, channel := t.verb, t.channel
	if t.ps == nil {
		verb, channel = "", ""
	}
	data := fmt.Sprintf("%d 0 %s %s", clock.Millis(trialTTL), verb, channel)
	reply, err := waitScript.Run(ctx, t.c, t.keys(), t.next, 1, clock.Millis(trialTTL), clock.Millis(trialTTL), 0, data).Slice()
	if err == nil {
		err = &oddError{reply}
		if len(reply) == 1 {
			list, _ := reply[0].([]any)
			switch {
			case len(list) > 1 && list[0] == int64(0):
				err = nil
			case len(list) > 1 && list[0] == int64(-2):
				err = refusal.Reply(fmt.Sprint(list[1]))
			}
		}
	}
	return t.tried("The script that waits for locks", DiagnosisWarning, needsWaiting, err)
}

// handOver lets somebody wait, hands the lock to him and gives it back.
func (t *trial) handOver(ctx context.Context) {
	waits := t.queues && t.wait(ctx)
	if t.silent {
		return
	}
	const what, means = "The script that gives locks back", "A lock stays until its TTL ends."
	reply, err := releaseScript.Run(ctx, t.c, t.keys(), t.owner, "").Result()
	list, _ := reply.([]any)
	if handed := len(list) == 4 && list[1] == t.next; err != nil || !handed {
		if err == nil && reply != int64(1) {
			err = &oddError{reply}
		}
		if t.tried(what, DiagnosisBad, means, err) && waits {
			t.add(checkRights, DiagnosisWarning, "A lock that is given back is handed to nobody: ZPOPMIN, HGET or HDEL may be refused. "+
				"Waiters find it free by their calls, up to 2/3 s later.")
		}
		return
	}
	if t.ps != nil && !t.heard(ctx) {
		t.add(checkRights, DiagnosisWarning, "The message of a lock that was handed over did not come. %s", needsWaking)
	}
	reply, err = releaseScript.Run(ctx, t.c, t.keys(), t.next, "").Result()
	if err == nil && reply != int64(1) {
		err = &oddError{reply}
	}
	t.tried(what, DiagnosisBad, means, err)
}

// heard reports whether the waiter is told.
func (t *trial) heard(ctx context.Context) bool {
	message, err := t.ps.ReceiveTimeout(ctx, messageTime)
	m, ok := message.(*redis.Message)
	if err != nil || !ok {
		return false
	}
	h, ok := parseHanded(m.Payload)
	return ok && h.owner == t.next
}

// fence draws a token.
func (t *trial) fence(ctx context.Context) {
	level, means := DiagnosisWarning, "Locks with WithFencing cannot be taken."
	if t.x.cfg.fencing {
		level = DiagnosisBad
	}
	err := fenceTrial.Run(ctx, t.c, t.keys()[3:], strconv.FormatInt(clock.Millis(trialTTL), 10)).Err()
	t.tried("INCR in a script", level, means, err)
}

// cycles notes that a flow waits, and reads it, as the search for deadlocks does.
func (t *trial) cycles(ctx context.Context) {
	waits, _ := waitsOf(t.key)
	for _, f := range []struct {
		what string
		run  func() error
	}{
		{"The script that notes who waits", func() error {
			return noteScript.Run(ctx, t.c, []string{waits}, "1", "{}", clock.Millis(trialTTL)).Err()
		}},
		{"GET", func() error { return notNil(t.c.Get(ctx, t.key).Err()) }},
		{"HGETALL", func() error { return t.c.HGetAll(ctx, waits).Err() }},
		{"HDEL", func() error { return t.c.HDel(ctx, waits, "1").Err() }},
	} {
		if t.tried(f.what, DiagnosisWarning, needsCycles, f.run()); t.silent {
			return
		}
	}
}

func notNil(err error) error {
	if errors.Is(err, redis.Nil) {
		return nil
	}
	return err
}

// replicas waits for none, which shows whether WAIT is allowed.
func (t *trial) replicas(ctx context.Context) {
	err := t.c.Do(ctx, "wait", 0, 1).Err()
	t.tried("WAIT", DiagnosisBad, "Locks with WithReplicas cannot be taken.", err)
}
