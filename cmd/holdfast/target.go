package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast"
)

const (
	redisPort    = "6379"
	sentinelPort = "26379"
)

// target is where a URL leads to.
type target struct {
	name string // its addresses, without user and password
	open func(limit time.Duration) redis.UniversalClient
}

// None of the errors quotes a part of the URL: what was meant as a password may be anywhere in
// one that cannot be read.
var (
	errScheme   = errors.New("it must begin with redis://, rediss://, redis+sentinel://, redis+cluster:// or unix://")
	errAt       = errors.New("it cannot be read: write / ? # @ in a user or password as %2F %3F %23 %40")
	errHosts    = errors.New("its host and port cannot be read")
	errOneHost  = errors.New("this scheme takes one host; see redis+sentinel:// and redis+cluster://")
	errMaster   = errors.New("the name of the master is missing: redis+sentinel://host:port,host:port/MASTER")
	errPath     = errors.New("its path cannot be read: redis://host:port/DATABASE, redis+sentinel://hosts/MASTER/DATABASE")
	errDatabase = errors.New("the database must be a number")
	errQuery    = errors.New("it has an option behind ? that is not known, or not for this scheme, or has a wrong value")
)

// parts are those of a URL.
type parts struct {
	scheme         string
	user, password string
	hosts          []string // with ports
	path           []string
	query          url.Values
}

// parseTarget reads a URL.
func parseTarget(raw string) (t target, err error) {
	scheme, rest, found := strings.Cut(raw, "://")
	plain, secure := strings.CutPrefix(scheme, "rediss")
	if !secure {
		plain = strings.TrimPrefix(scheme, "redis")
	}
	switch {
	case !found:
		return t, errScheme
	case scheme == "unix":
		return unixTarget(raw, rest)
	case scheme == plain:
		return t, errScheme
	}
	p, err := split(rest)
	if err != nil {
		return t, err
	}
	var secured *tls.Config
	if secure {
		secured = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	switch plain {
	case "":
		return singleTarget(raw, p)
	case "+sentinel":
		return sentinelTarget(p, secured)
	case "+cluster":
		return clusterTarget(p, secured)
	}
	return t, errScheme
}

// split takes the part behind the scheme to pieces. url.Parse does not take several hosts.
func split(rest string) (p parts, err error) {
	end := strings.IndexAny(rest, "/?#")
	if end < 0 {
		end = len(rest)
	}
	authority, tail := rest[:end], rest[end:]
	if strings.ContainsAny(tail, "@#") {
		return p, errAt
	}
	if n := strings.LastIndexByte(authority, '@'); n >= 0 {
		user, password, _ := strings.Cut(authority[:n], ":")
		if p.user, err = url.PathUnescape(user); err == nil {
			p.password, err = url.PathUnescape(password)
		}
		if err != nil || strings.Contains(authority[:n], "@") {
			return p, errAt
		}
		authority = authority[n+1:]
	}
	path, query, _ := strings.Cut(tail, "?")
	if p.query, err = url.ParseQuery(query); err != nil {
		return p, errQuery
	}
	for part := range strings.SplitSeq(strings.Trim(path, "/"), "/") {
		if part, err = url.PathUnescape(part); err != nil {
			return p, errPath
		}
		if part != "" {
			p.path = append(p.path, part)
		}
	}
	p.hosts = strings.Split(authority, ",")
	return p, nil
}

// addresses gives each host a port.
func (p *parts) addresses(port string) ([]string, error) {
	for n, host := range p.hosts {
		if bare := strings.Trim(host, "[]"); host == "" || !strings.Contains(bare, ":") || net.ParseIP(bare) != nil {
			if host == "" {
				bare = "localhost"
			}
			host = net.JoinHostPort(bare, port)
		}
		name, number, err := net.SplitHostPort(host)
		value, bad := strconv.ParseUint(number, 10, 16)
		if err != nil || bad != nil || value == 0 || strings.ContainsAny(name, " \t\r\n") {
			return nil, errHosts
		}
		if p.hosts[n] = host; name == "" {
			p.hosts[n] = net.JoinHostPort("localhost", number)
		}
	}
	return p.hosts, nil
}

func singleTarget(raw string, p parts) (t target, err error) {
	if len(p.hosts) > 1 {
		return t, errOneHost
	}
	addrs, err := p.addresses(redisPort)
	if err != nil {
		return t, err
	}
	o, err := redis.ParseURL(raw)
	switch {
	case err == nil:
	case len(p.path) > 1:
		return t, errPath
	case len(p.path) == 1 && !isNumber(p.path[0]):
		return t, errDatabase
	default:
		return t, errQuery
	}
	return single(addrs[0], o), nil
}

func isNumber(text string) bool { _, err := strconv.Atoi(text); return err == nil }

func unixTarget(raw, rest string) (t target, err error) {
	o, err := redis.ParseURL(raw)
	if err != nil || strings.Count(rest, "@") > 1 {
		return t, errPath
	}
	return single(o.Addr, o), nil
}

func single(name string, o *redis.Options) target {
	return target{name, func(limit time.Duration) redis.UniversalClient {
		limits(limit, &o.DialTimeout, &o.ReadTimeout, &o.WriteTimeout)
		o.ContextTimeoutEnabled, o.DialerRetries = true, 1
		o.MaxRetries = cmp.Or(o.MaxRetries, 1)
		return redis.NewClient(o)
	}}
}

// limits sets those that the URL has not set.
func limits(limit time.Duration, all ...*time.Duration) {
	for _, d := range all {
		if *d == 0 {
			*d = limit
		}
	}
}

func sentinelTarget(p parts, secured *tls.Config) (t target, err error) {
	addrs, err := p.addresses(sentinelPort)
	if err != nil {
		return t, err
	}
	o := &redis.FailoverOptions{
		SentinelAddrs: addrs, Username: p.user, Password: p.password, TLSConfig: secured,
		ContextTimeoutEnabled: true, DialerRetries: 1, MaxRetries: 1,
	}
	database := p.query.Get("db")
	switch len(p.path) {
	case 0:
		return t, errMaster
	case 1:
	case 2:
		database = p.path[1]
	default:
		return t, errPath
	}
	if database != "" {
		if o.DB, err = strconv.Atoi(database); err != nil || o.DB < 0 {
			return t, errDatabase
		}
	}
	o.MasterName = p.path[0]
	o.SentinelUsername, o.SentinelPassword = p.query.Get("sentinel_username"), p.query.Get("sentinel_password")
	for _, known := range []string{"db", "sentinel_username", "sentinel_password"} {
		p.query.Del(known)
	}
	if len(p.query) > 0 {
		return t, errQuery
	}
	return target{strings.Join(addrs, ",") + "/" + o.MasterName, func(limit time.Duration) redis.UniversalClient {
		limits(limit, &o.DialTimeout, &o.ReadTimeout, &o.WriteTimeout)
		return redis.NewFailoverClient(o)
	}}, nil
}

func clusterTarget(p parts, secured *tls.Config) (t target, err error) {
	addrs, err := p.addresses(redisPort)
	switch {
	case err != nil:
		return t, err
	case len(p.path) > 0:
		return t, errPath
	case len(p.query) > 0:
		return t, errQuery
	}
	o := &redis.ClusterOptions{
		Addrs: addrs, Username: p.user, Password: p.password, TLSConfig: secured,
		ContextTimeoutEnabled: true, DialerRetries: 1,
	}
	return target{strings.Join(addrs, ","), func(limit time.Duration) redis.UniversalClient {
		limits(limit, &o.DialTimeout, &o.ReadTimeout, &o.WriteTimeout)
		return redis.NewClusterClient(o)
	}}, nil
}

// server is a target that can be asked.
type server struct {
	name   string
	client redis.UniversalClient
	locker *holdfast.Locker
}

func (i *invocation) connect(t target) (*server, error) {
	client := t.open(i.timeout)
	locker, err := holdfast.New(client, holdfast.WithPrefix(i.prefix))
	if err != nil {
		_ = client.Close() // nothing was sent
		return nil, err
	}
	return &server{t.name, client, locker}, nil
}

func (s *server) close() {
	_ = s.locker.Close() // it holds nothing
	_ = s.client.Close()
}

// each does something for each server. All are tried; the error has the worst exit code.
func (i *invocation) each(ctx context.Context, do func(context.Context, *server) error) error {
	worst := exitOK
	for _, t := range i.targets {
		err := i.one(ctx, t, do)
		if err == nil {
			continue
		}
		if len(i.targets) == 1 {
			return err
		}
		if text := message(err); text != "" {
			i.complain("%s: %s", t.name, text)
		}
		worst = max(worst, exitCode(err))
	}
	if worst != exitOK {
		return &exitError{code: worst}
	}
	return nil
}

func (i *invocation) one(ctx context.Context, t target, do func(context.Context, *server) error) error {
	s, err := i.connect(t)
	if err != nil {
		return err
	}
	defer s.close()
	i.heading(t.name)
	return do(ctx, s)
}
