package redistest

import (
	"context"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Client returns a new client of the server, closed at the end of the test. The
// options are go-redis's defaults, but for the address, as opts change them.
func (s *Server) Client(opts ...func(*redis.Options)) *redis.Client {
	o := &redis.Options{Addr: s.Addr()}
	for _, f := range opts {
		f(o)
	}
	c := redis.NewClient(o)
	s.t.Cleanup(func() { _ = c.Close() }) // before the server, which began earlier
	return c
}

// Admin returns a client for the test's own commands, the same one each time. It has
// the password, if one is configured. The test must not close it.
func (s *Server) Admin() *redis.Client {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.admin == nil {
		s.admin = s.Client(func(o *redis.Options) { o.Password = s.config.password })
	}
	return s.admin
}

// CommandStats returns how often each command ran since ResetStats, by its name in
// lower case, with a bar before subcommands: "config|get". It counts the commands of
// scripts, and those that Admin was used for, like its own INFO the next time.
func (s *Server) CommandStats() map[string]int64 {
	s.t.Helper()
	text, err := s.Admin().Info(context.Background(), "commandstats").Result()
	if err != nil {
		s.t.Fatalf("redistest: the server on port %d: %v", s.port, err)
	}
	stats := map[string]int64{}
	for line := range strings.Lines(text) {
		name, rest, ok := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls=")
		if !ok {
			continue // the heading
		}
		calls, _, _ := strings.Cut(rest, ",")
		n, err := strconv.ParseInt(calls, 10, 64)
		if err != nil {
			s.t.Fatalf("redistest: INFO commandstats: %q", line)
		}
		stats[strings.ToLower(name)] = n
	}
	return stats
}

// ResetStats sets the counts of CommandStats to 0.
func (s *Server) ResetStats() {
	s.t.Helper()
	if err := s.Admin().ConfigResetStat(context.Background()).Err(); err != nil {
		s.t.Fatalf("redistest: the server on port %d: %v", s.port, err)
	}
}
