package holdfast

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/faultproxy"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

func diagnosed(t *testing.T, client redis.UniversalClient, opts ...Option) *Diagnosis {
	t.Helper()
	d, err := Diagnose(t.Context(), client, opts...)
	require.NoError(t, err)
	return d
}

// requireFinding looks for a finding whose text contains all parts.
func requireFinding(t *testing.T, d *Diagnosis, check string, level Level, parts ...string) {
	t.Helper()
	require.True(t, slices.ContainsFunc(d.Findings, func(f Finding) bool {
		return f.Check == check && f.Level == level &&
			!slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(f.Text, part) })
	}), "%s %v %q in:\n%s", check, level, parts, listed(d))
}

// requireNo looks for findings of a check with a level.
func requireNo(t *testing.T, d *Diagnosis, check string, level Level) {
	t.Helper()
	require.False(t, slices.ContainsFunc(d.Findings, func(f Finding) bool {
		return f.Check == check && f.Level == level
	}), "%s %v in:\n%s", check, level, listed(d))
}

func listed(d *Diagnosis) string {
	var b strings.Builder
	for _, f := range d.Findings {
		fmt.Fprintln(&b, f.Server, f.Check, f.Level, f.Text)
	}
	return b.String()
}

// requireNothingLeft makes sure that a diagnosis has left no key and no subscription.
func requireNothingLeft(t *testing.T, s *redistest.Server) {
	t.Helper()
	require.Empty(t, s.Admin().Keys(t.Context(), "*").Val())
	redistest.Eventually(t, time.Second, "no subscription", func() bool {
		c := s.Admin()
		return len(c.PubSubChannels(t.Context(), "holdfast:*").Val())+len(c.PubSubShardChannels(t.Context(), "*").Val()) == 0
	})
}

func TestDiagnoseASoundServer(t *testing.T) {
	s := redistest.Start(t, redistest.Persistent())
	d := diagnosed(t, s.Client(), WithPrefix("lock:"))
	require.NoError(t, d.Err())
	var checks []string
	for _, f := range d.Findings {
		require.Equal(t, s.Addr(), f.Server)
		require.True(t, strings.HasSuffix(f.Text, "."), f.Text)
		if f.Check != "uptime" { // of a server that has just been started
			require.Equal(t, DiagnosisOK, f.Level, "%+v", f)
		}
		checks = append(checks, f.Check)
	}
	require.Equal(t, []string{
		"reachable", "version", "role", "loading", "memory", "persistence", "replicas", "uptime", "clock", "scripts", "rights",
	}, checks)
	requireFinding(t, d, "uptime", DiagnosisWarning, "has no vote before 32.3s")
	requireNothingLeft(t, s)

	text, err := json.Marshal(d)
	require.NoError(t, err)
	require.Contains(t, string(text), `"check":"uptime","level":"warning","text":"It`)
	var again Diagnosis
	require.NoError(t, json.Unmarshal(text, &again))
	require.Equal(t, *d, again)
}

func TestLevels(t *testing.T) {
	for l, text := range map[Level]string{DiagnosisOK: "ok", DiagnosisWarning: "warning", DiagnosisBad: "bad"} {
		require.Equal(t, text, l.String())
	}
	require.Equal(t, "level(3)", Level(3).String())
	_, err := json.Marshal(Finding{Level: -1})
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorIs(t, json.Unmarshal([]byte(`{"level":"worse"}`), &Finding{}), ErrInvalid)
	require.NoError(t, (*Diagnosis)(nil).Err())
	require.NoError(t, (&Diagnosis{[]Finding{{Level: DiagnosisWarning}}}).Err())
	err = (&Diagnosis{[]Finding{{"a:1", "x", DiagnosisBad, "One."}, {"b:1", "x", DiagnosisOK, "Two."}, {"b:1", "y", DiagnosisBad, "Three."}}}).Err()
	require.ErrorIs(t, err, ErrUnavailable)
	require.EqualError(t, err, "holdfast: not fit for locks: a:1: x: One; b:1: y: Three")
}

func TestDiagnoseRefusesNonsense(t *testing.T) {
	c := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer func() { _ = c.Close() }()
	for name, f := range map[string]func() (*Diagnosis, error){
		"context":      func() (*Diagnosis, error) { return Diagnose(nil, c) }, //nolint:staticcheck // it is refused
		"client":       func() (*Diagnosis, error) { return Diagnose(t.Context(), nil) },
		"typed client": func() (*Diagnosis, error) { return Diagnose(t.Context(), (*redis.Client)(nil)) },
		"option":       func() (*Diagnosis, error) { return Diagnose(t.Context(), c, nil) },
		"prefix": func() (*Diagnosis, error) {
			return Diagnose(t.Context(), c, WithPrefix(strings.Repeat("x", maxKey)))
		},
		"fenced braces": func() (*Diagnosis, error) { return Diagnose(t.Context(), c, WithPrefix("x}"), WithFencing()) },
	} {
		d, err := f()
		require.ErrorIs(t, err, ErrInvalid, name)
		require.Nil(t, d, name)
	}
}

func TestDiagnoseSettings(t *testing.T) {
	s := redistest.Start(t)
	set := func(pairs ...string) {
		for i := 0; i < len(pairs); i += 2 {
			require.NoError(t, s.Admin().ConfigSet(t.Context(), pairs[i], pairs[i+1]).Err())
		}
	}
	for _, c := range []struct {
		config []string
		check  string
		level  Level
		part   string
	}{
		{[]string{"maxmemory-policy", "noeviction"}, "memory", DiagnosisOK, "no lock is evicted"},
		{[]string{"maxmemory-policy", "volatile-lru"}, "memory", DiagnosisWarning, "volatile-lru"},
		{[]string{"maxmemory", "100mb"}, "memory", DiagnosisBad, "a limit of 104857600 bytes"},
		{[]string{"maxmemory-policy", "noeviction", "maxmemory", "1"}, "writes", DiagnosisBad, "OOM"},
		{[]string{"maxmemory", "0", "save", ""}, "persistence", DiagnosisWarning, "Nothing is kept"},
		{[]string{"save", "3600 1"}, "persistence", DiagnosisWarning, "snapshots (save 3600 1)"},
		{[]string{"appendonly", "yes", "appendfsync", "everysec"}, "persistence", DiagnosisWarning, "second or two"},
		{[]string{"appendfsync", "no"}, "persistence", DiagnosisWarning, "appendfsync is no."},
		{[]string{"appendfsync", "always"}, "persistence", DiagnosisOK, "forgets no lock"},
		{[]string{"min-replicas-to-write", "1"}, "writes", DiagnosisBad, "NOREPLICAS"},
	} {
		set(c.config...)
		d := diagnosed(t, s.Client())
		requireFinding(t, d, c.check, c.level, c.part)
		if c.check == "writes" {
			require.ErrorContains(t, d.Err(), "SET is refused")
			requireNo(t, d, "rights", DiagnosisOK)
		}
		require.Equal(t, c.level == DiagnosisBad, d.Err() != nil, listed(d))
		requireNothingLeft(t, s)
	}
}

// What is needed always is bad where it is refused, and what only waiting or fencing
// needs is a warning.
func TestDiagnoseRights(t *testing.T) {
	s := redistest.Start(t)
	rights := append([]string{"+incr"}, documentedRights...)
	full := diagnosed(t, aclUser(t, s, rights...), WithPrefix("locks:"), WithFencing())
	require.NoError(t, full.Err())
	requireFinding(t, full, "rights", DiagnosisOK, "may do all")
	requireFinding(t, full, "version", DiagnosisOK, "Version") // HELLO tells it to everybody
	requireFinding(t, full, "role", DiagnosisOK, "primary")
	for _, check := range []string{"loading", "replicas", "uptime"} {
		requireFinding(t, full, check, DiagnosisWarning, "Not known: INFO is refused (NOPERM")
	}
	for check, name := range map[string]string{"memory": "maxmemory-policy", "persistence": "appendonly"} {
		requireFinding(t, full, check, DiagnosisWarning, "Not known: CONFIG GET "+name+" is refused (NOPERM")
	}
	requireNothingLeft(t, s)
	for _, c := range []struct {
		change string
		level  Level
		part   string
		opts   []Option
	}{
		{"-set", DiagnosisBad, "No lock can be taken", nil},
		{"-get", DiagnosisBad, "none is taken", nil},
		{"-eval", DiagnosisBad, "EVAL is refused (NOPERM", nil},
		{"-evalsha", DiagnosisWarning, "EVALSHA is refused (NOPERM", nil},
		{"-pttl", DiagnosisBad, "The script that renews", nil},
		{"-pexpire", DiagnosisBad, "The script that renews", nil},
		{"-del", DiagnosisBad, "The script that gives locks back", nil},
		{"-zadd", DiagnosisWarning, needsWaiting, nil},
		{"-hset", DiagnosisWarning, needsWaiting, nil},
		{"-zpopmin", DiagnosisWarning, "handed to nobody", nil},
		{"-hget", DiagnosisWarning, "handed to nobody", nil},
		{"-publish", DiagnosisWarning, "PUBLISH is refused (NOPERM", nil},
		{"-subscribe", DiagnosisWarning, "SUBSCRIBE is refused (NOPERM", nil},
		{"resetchannels", DiagnosisWarning, needsWaking, nil},
		{"-time", DiagnosisWarning, "TIME is refused (NOPERM", nil},
		{"-time", DiagnosisBad, "TIME is refused (NOPERM", []Option{WithFencing(fencing.ClockFloor)}},
		{"-hgetall", DiagnosisWarning, "HGETALL is refused (NOPERM", nil},
		{"-hdel", DiagnosisWarning, needsCycles, nil},
		{"-incr", DiagnosisWarning, "INCR in a script is refused", nil},
		{"-incr", DiagnosisBad, "WithFencing", []Option{WithFencing()}},
		{"-wait", DiagnosisBad, "WAIT is refused (NOPERM", []Option{WithReplicas(1, time.Second)}},
		{"resetkeys", DiagnosisBad, "No lock can be taken", nil},
	} {
		t.Run(c.change, func(t *testing.T) {
			client := aclUser(t, s, append(slices.Clone(rights), c.change)...)
			d := diagnosed(t, client, append(c.opts, WithPrefix("locks:"))...)
			requireFinding(t, d, "rights", c.level, c.part)
			requireNo(t, d, "rights", DiagnosisOK)
			require.Equal(t, c.level == DiagnosisBad, d.Err() != nil, listed(d))
			require.NotContains(t, listed(d), "secret", "the password")
			for _, key := range s.Admin().Keys(t.Context(), "*").Val() { // without DEL
				ttl := s.Admin().PTTL(t.Context(), key).Val()
				require.True(t, c.change == "-del" && ttl > 0 && ttl <= trialTTL, "%s %v", key, ttl)
			}
			require.NoError(t, s.Admin().FlushAll(t.Context()).Err())
		})
	}
	d := diagnosed(t, aclUser(t, s, rights...), WithPrefix("others:"))
	requireFinding(t, d, "rights", DiagnosisBad, "SET is refused (NOPERM")
	d = diagnosed(t, s.Client(), WithPrefix("x}"))
	requireFinding(t, d, "rights", DiagnosisWarning, "no room for companion keys")
	require.NoError(t, d.Err())
	requireNothingLeft(t, s)
}

func TestDiagnoseReplicas(t *testing.T) {
	set := redistest.StartSentinel(t)
	d := diagnosed(t, set.Client())
	require.NoError(t, d.Err())
	for _, f := range d.Findings {
		require.Equal(t, set.Primary.Addr(), f.Server)
	}
	requireFinding(t, d, "replicas", DiagnosisWarning, "Replicas connected: 1.", "WithReplicas")
	requireFinding(t, d, "min-replicas", DiagnosisWarning, "is off")
	requireFinding(t, d, "rights", DiagnosisOK)
	require.NoError(t, set.Primary.Admin().ConfigSet(t.Context(), "min-replicas-to-write", "1").Err())
	d = diagnosed(t, set.Client(), WithReplicas(1, time.Second))
	requireFinding(t, d, "replicas", DiagnosisOK, "WithReplicas waits for 1")
	requireFinding(t, d, "min-replicas", DiagnosisOK, "is 1, with a lag of at most 10 s")
	requireFinding(t, diagnosed(t, set.Client(), WithReplicas(2, time.Second)), "replicas", DiagnosisBad, "wants 2")

	d = diagnosed(t, set.Replica.Client())
	requireFinding(t, d, "role", DiagnosisBad, "It is a replica")
	requireFinding(t, d, "writes", DiagnosisBad, "READONLY")
	requireFinding(t, diagnosed(t, set.Sentinels[0].Client()), "role", DiagnosisBad, "It is a Sentinel")
	requireNothingLeft(t, set.Primary)
	redistest.Eventually(t, 5*time.Second, "nothing on the replica", func() bool {
		return set.Replica.Admin().DBSize(t.Context()).Val() == 0
	})
}

func TestDiagnoseACluster(t *testing.T) {
	set := redistest.StartCluster(t, 3)
	of := func(d *Diagnosis, node int) *Diagnosis {
		return &Diagnosis{slices.DeleteFunc(slices.Clone(d.Findings), func(f Finding) bool { return f.Server != set.Nodes[node].Addr() })}
	}
	c := set.Client()
	for _, client := range []redis.UniversalClient{c, struct{ *redis.ClusterClient }{c}} {
		d := diagnosed(t, client, WithFencing())
		require.NoError(t, d.Err())
		for i, node := range set.Nodes {
			requireFinding(t, of(d, i), "cluster", DiagnosisOK, "all slots")
			requireFinding(t, of(d, i), "rights", DiagnosisOK, "may do all")
			requireNothingLeft(t, node)
		}
	}
	d := diagnosed(t, c, WithPrefix("{locks}:"))
	require.NoError(t, d.Err())
	require.Equal(t, 2, strings.Count(listed(d), "was not tried"))
	require.Equal(t, 1, strings.Count(listed(d), "may do all"))

	d = diagnosed(t, set.Nodes[0].Client())
	requireFinding(t, d, "cluster", DiagnosisBad, "not one for Clusters")

	limited := func(rules ...string) *redis.ClusterClient {
		for _, node := range set.Nodes {
			aclUser(t, node, rules...)
		}
		return set.Client(func(o *redis.ClusterOptions) { o.Username, o.Password = "app", "secret" })
	}
	d = diagnosed(t, limited("~*", "&*", "+@all", "-cluster|info", "-ssubscribe"))
	requireFinding(t, d, "cluster", DiagnosisWarning, "Not known: CLUSTER INFO is refused (NOPERM")
	requireFinding(t, d, "rights", DiagnosisWarning, "SSUBSCRIBE is refused (NOPERM")
	d = diagnosed(t, limited("~*", "&*", "+@all", "-cluster"))
	require.Len(t, d.Findings, 1)
	requireFinding(t, d, "cluster", DiagnosisBad, "Its members cannot be learned (NOPERM")

	set.Nodes[1].Kill()
	d = diagnosed(t, c)
	requireFinding(t, of(d, 0), "rights", DiagnosisOK)
	require.Len(t, of(d, 1).Findings, 1)
	requireFinding(t, of(d, 1), "reachable", DiagnosisBad, "does not answer")
	require.ErrorIs(t, d.Err(), ErrUnavailable)
	redistest.Eventually(t, 20*time.Second, "the cluster is down", func() bool {
		return strings.Contains(set.Nodes[0].Admin().ClusterInfo(t.Context()).Val(), "cluster_state:fail")
	})
	d = diagnosed(t, set.Nodes[0].Client())
	requireFinding(t, d, "cluster", DiagnosisBad, "The Cluster is down")
	requireFinding(t, d, "writes", DiagnosisBad, "CLUSTERDOWN")
}

func TestDiagnoseARing(t *testing.T) {
	a, b := redistest.Start(t), redistest.Start(t)
	ring := redis.NewRing(&redis.RingOptions{
		Addrs: map[string]string{"a": a.Addr(), "b": b.Addr()}, HeartbeatFrequency: 20 * time.Millisecond,
	})
	defer func() { _ = ring.Close() }()
	d := diagnosed(t, ring)
	require.NoError(t, d.Err())
	require.Equal(t, 2, strings.Count(listed(d), "may do all"))
	requireNothingLeft(t, a)
	requireNothingLeft(t, b)
	b.Kill()
	redistest.Eventually(t, 20*time.Second, "the shard is out", func() bool { return ring.Len() == 1 })
	d = diagnosed(t, ring)
	requireFinding(t, d, "reachable", DiagnosisBad, "the Ring has taken it out")
	require.ErrorContains(t, d.Err(), b.Addr())
	a.Kill()
	redistest.Eventually(t, 20*time.Second, "all shards are out", func() bool { return ring.Len() == 0 })
	_, err := Diagnose(t.Context(), ring)
	require.ErrorIs(t, err, ErrUnavailable)
}

func TestDiagnoseWithoutAnAnswer(t *testing.T) {
	s := redistest.Start(t)
	once := func(o *redis.Options) { o.MaxRetries, o.ReadTimeout = -1, 300*time.Millisecond }
	ended, cancel := context.WithCancelCause(t.Context())
	why := errors.New("enough")
	cancel(why)
	d, err := Diagnose(ended, s.Client())
	require.Nil(t, d)
	for _, target := range []error{ErrUnavailable, context.Canceled, why} {
		require.ErrorIs(t, err, target)
	}
	p := faultproxy.New(t, s.Addr())
	hung := redis.NewClient(&redis.Options{Addr: p.Addr(), MaxRetries: -1, ReadTimeout: 2 * time.Second})
	defer func() { _ = hung.Close() }()
	p.Hang()
	short, cancelShort := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancelShort()
	began := time.Now()
	_, err = Diagnose(short, hung)
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Less(t, time.Since(began), time.Second, "it does not wait for the client")
	p.Heal()

	s.Kill()
	d, err = Diagnose(t.Context(), s.Client(once))
	require.Nil(t, d)
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, s.Addr())
	require.NotErrorIs(t, err, context.DeadlineExceeded)
	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{s.Addr()}, MaxRedirects: 1})
	defer func() { _ = c.Close() }()
	_, err = Diagnose(t.Context(), c)
	require.ErrorIs(t, err, ErrUnavailable)
	url := redis.NewClient(&redis.Options{Addr: "redis://app:hunter2@localhost:6379", MaxRetries: -1})
	defer func() { _ = url.Close() }()
	_, err = Diagnose(t.Context(), url)
	require.ErrorIs(t, err, ErrUnavailable)
	require.NotContains(t, err.Error(), "hunter2")
}

// A server that stops answering in between is told of, and keeps nothing for long.
func TestDiagnoseThatIsCutOff(t *testing.T) {
	s := redistest.Start(t)
	p := faultproxy.New(t, s.Addr())
	c := redis.NewClient(&redis.Options{Addr: p.Addr(), MaxRetries: -1, ReadTimeout: 200 * time.Millisecond})
	defer func() { _ = c.Close() }()
	for _, command := range []string{"CONFIG", "TIME", "SET", "EVAL", "EVALSHA", "PUBLISH", "SUBSCRIBE", "HGETALL"} {
		p.Inject(faultproxy.Rule{Match: faultproxy.Command(command), Times: 1, Do: faultproxy.DropReply()})
		d := diagnosed(t, c)
		requireFinding(t, d, "reachable", DiagnosisBad, "It stopped answering")
		requireNo(t, d, "rights", DiagnosisOK)
		redistest.Eventually(t, trialTTL+time.Second, "nothing is left", func() bool {
			return s.Admin().DBSize(t.Context()).Val() == 0
		})
	}
}

// What servers answer that cannot be had here.
func TestDiagnoseOtherServers(t *testing.T) {
	s := redistest.Start(t)
	p := faultproxy.New(t, s.Addr())
	c := redis.NewClient(&redis.Options{Addr: p.Addr(), Password: "hunter2", MaxRetries: -1, Protocol: 2})
	defer func() { _ = c.Close() }()
	require.NoError(t, s.Admin().ConfigSet(t.Context(), "requirepass", "hunter2").Err())
	answering := func(command string, do faultproxy.Action) *Diagnosis {
		t.Helper()
		h := p.Inject(faultproxy.Rule{Match: faultproxy.Command(command), Do: do})
		defer h.Remove()
		return diagnosed(t, c)
	}
	told := func(text string) faultproxy.Action { return faultproxy.RawInstead(faultproxy.BulkReply(text)) }
	requireFinding(t, answering("INFO", told("redis_version:4.0.14\r\nrole:master\r\n")), "version", DiagnosisBad, "5.0 or later")
	requireFinding(t, answering("INFO", told("redis_version:6.2.6\r\n")), "version", DiagnosisWarning, "a majority needs 7.0")
	d := answering("INFO", told("loading:1\r\nuptime_in_seconds:3600\r\nrole:slave\r\n"))
	requireFinding(t, d, "loading", DiagnosisBad, "is loading")
	requireFinding(t, d, "uptime", DiagnosisOK, "1h0m0s")
	requireFinding(t, d, "role", DiagnosisBad, "replica")
	requireFinding(t, d, "version", DiagnosisWarning, "INFO does not say it")
	for _, far := range []time.Duration{time.Hour, -time.Hour} {
		now := time.Now().Add(far)
		d = answering("TIME", faultproxy.Raw(faultproxy.ArrayReply(
			faultproxy.BulkReply(fmt.Sprint(now.Unix())), faultproxy.BulkReply("0"))))
		requireFinding(t, d, "clock", DiagnosisWarning, map[bool]string{true: "ahead of", false: "behind"}[far > 0], "ClockFloor")
		require.NoError(t, d.Err())
	}
	d = answering("INFO", faultproxy.Error("ERR unknown command 'INFO' of hunter2"))
	requireFinding(t, d, "version", DiagnosisOK, "Version") // by HELLO, as a list
	requireFinding(t, d, "uptime", DiagnosisWarning, "Not known: INFO is refused", "***")
	requireFinding(t, answering("SET", faultproxy.Error("MISCONF no snapshots")), "writes", DiagnosisBad, "MISCONF")
	requireFinding(t, answering("EVALSHA", faultproxy.Error("ERR unknown command 'evalsha'")), "scripts", DiagnosisWarning, "not by their digests")
	for _, text := range []string{"WRONGPASS invalid username-password pair or user is disabled.", "NOAUTH Authentication required.",
		"ERR invalid password hunter2", "ERR max number of clients reached"} {
		d = answering("INFO", faultproxy.Error(text))
		require.Len(t, d.Findings, 1)
		requireFinding(t, d, "login", DiagnosisBad, "It refuses the connection")
		require.NotContains(t, d.Err().Error(), "hunter2")
	}
	d = diagnosed(t, s.Client())
	requireFinding(t, d, "login", DiagnosisBad, "NOAUTH")
}

// panicking is a hook that panics on one command.
type panicking struct{ command string }

func (h panicking) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h panicking) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
func (h panicking) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == h.command {
			panic("hook of " + h.command)
		}
		return next(ctx, cmd)
	}
}

func TestDiagnoseWrappedClients(t *testing.T) {
	s := redistest.Start(t)
	d := diagnosed(t, struct{ redis.UniversalClient }{s.Client()})
	require.NoError(t, d.Err())
	requireFinding(t, d, "rights", DiagnosisOK)
	require.Equal(t, s.Addr(), d.Findings[0].Server, "as the server itself says")

	c := s.Client()
	c.AddHook(panicking{"evalsha"})
	requireFinding(t, diagnosed(t, c), "reachable", DiagnosisBad, "panicked: hook of evalsha")
	c.AddHook(panicking{"info"})
	_, err := Diagnose(t.Context(), c)
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "hook of info")
	requireNothingLeft(t, s)
}

// It may be called by many at once, and beside locks, which it does not touch.
func TestDiagnoseBesideLocks(t *testing.T) {
	s := redistest.Start(t)
	c := s.Client()
	l := newTestLocker(t, c, WithTTL(5*time.Second), WithRenewEvery(10*time.Millisecond))
	k, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			d, err := Diagnose(t.Context(), c)
			if err != nil || d.Err() != nil {
				t.Error(err, d.Err())
			}
		})
	}
	wg.Wait()
	require.NoError(t, k.Err())
	require.NoError(t, k.Release())
	requireNothingLeft(t, s)
}
