package redistest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Option changes how a server starts.
type Option func(*config)

// config is what a server's configuration file is made of.
type config struct {
	directives [][2]string
	sentinel   bool
	cluster    bool
	password   string // which the package's own clients need
}

func (c *config) set(name, value string) {
	c.directives = append(c.directives, [2]string{name, value})
	if strings.EqualFold(name, "requirepass") {
		c.password = value
	}
}

// WithConfig adds directives of redis.conf, given as name, value, name, value. A value
// is written as it is, so that it may be a list of words. Later ones win.
func WithConfig(pairs ...string) Option {
	return func(c *config) {
		for i := 0; i+1 < len(pairs); i += 2 {
			c.set(pairs[i], pairs[i+1])
		}
	}
}

// Persistent lets the server keep its data over Kill and Restart: each write is on
// disk before its reply.
func Persistent() Option { return WithConfig("appendonly", "yes", "appendfsync", "always") }

// ReplicaOf makes the server a replica of another one. Start does not wait for its
// first synchronization.
func ReplicaOf(primary *Server) Option {
	return WithConfig("replicaof", fmt.Sprintf("127.0.0.1 %d", primary.port))
}

// dataDefaults are the directives of servers that hold keys.
func dataDefaults(c *config) {
	c.set("save", "")
	c.set("appendonly", "no")
	c.set("enable-debug-command", "yes")
	c.set("repl-diskless-sync-delay", "0") // else replicas wait 5 s for company
}

// writeConfig writes the file that s starts with. A restart uses it as it is then,
// since Redis itself rewrites it to remember a failover.
func (s *Server) writeConfig(t testing.TB) {
	t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "bind 127.0.0.1\nport %d\ndir %s\nlogfile %s\n", s.port, s.dir, s.logFile())
	if s.config.cluster {
		fmt.Fprintf(&b, "cluster-port %d\n", s.busPort)
	}
	for _, d := range s.config.directives {
		value := d[1]
		if value == "" {
			value = `""`
		}
		fmt.Fprintf(&b, "%s %s\n", d[0], value)
	}
	if err := os.WriteFile(s.configFile(), []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (s *Server) configFile() string { return filepath.Join(s.dir, "redis.conf") }

func (s *Server) logFile() string { return filepath.Join(s.dir, "log") }

// logTail returns the last lines of the server's log.
func (s *Server) logTail() string {
	text, err := os.ReadFile(s.logFile())
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-30):], "\n")
}
