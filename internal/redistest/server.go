package redistest

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

const startLimit = 10 * time.Second

// Need skips t when there is no redis-server on the PATH, or fails it when
// HOLDFAST_REQUIRE_REDIS=1 says that it must be there.
func Need(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("redis-server"); err == nil {
		return
	}
	const text = "redis-server is not on the PATH: tests on real servers do not run"
	if os.Getenv("HOLDFAST_REQUIRE_REDIS") == "1" {
		t.Fatal(text)
	}
	t.Skip(text)
}

// Option changes how a server starts.
type Option func(*Server)

// WithConfig adds directives, given as name, value, name, value.
func WithConfig(pairs ...string) Option {
	return func(s *Server) {
		for i := 0; i+1 < len(pairs); i += 2 {
			s.args = append(s.args, "--"+pairs[i], pairs[i+1])
		}
	}
}

// Persistent lets the server keep its data over Kill and Restart.
func Persistent() Option { return WithConfig("appendonly", "yes", "appendfsync", "always") }

// ReplicaOf makes the server a replica of another one.
func ReplicaOf(primary *Server) Option {
	return WithConfig("replicaof", "127.0.0.1 "+strconv.Itoa(primary.port), "repl-diskless-sync-delay", "0")
}

// Server is a redis-server process. It is safe for concurrent use, and ends with
// the test.
type Server struct {
	t    testing.TB
	port int
	dir  string
	args []string

	mu    sync.Mutex
	proc  *process
	admin *redis.Client
}

// Start starts a server and waits until it answers.
func Start(t testing.TB, opts ...Option) *Server {
	t.Helper()
	Need(t)
	s := newServer(t, opts)
	for try := 1; ; try++ {
		s.port = freePort(t)
		err := s.launch()
		if err == nil {
			return s
		}
		if try == 5 {
			t.Fatalf("redis-server does not start: %v\n%s", err, s.logTail())
		}
	}
}

// StartN starts n servers that know nothing of each other.
func StartN(t testing.TB, n int, opts ...Option) []*Server {
	t.Helper()
	servers := make([]*Server, n)
	for i := range servers {
		servers[i] = Start(t, opts...)
	}
	return servers
}

func newServer(t testing.TB, opts []Option) *Server {
	t.Helper()
	dir, err := os.MkdirTemp("", "redistest")
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{t: t, dir: dir}
	for _, o := range opts {
		o(s)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of the server on port %d:\n%s", s.port, s.logTail())
		}
		s.Kill()
		_ = os.RemoveAll(dir)
	})
	return s
}

// launch starts the process on s.port and waits for its first answer.
func (s *Server) launch() error {
	port := strconv.Itoa(s.port)
	args := append([]string{"--port", port, "--bind", "127.0.0.1", "--dir", s.dir, "--logfile", s.log(),
		"--save", "", "--enable-debug-command", "yes"}, s.args...)
	proc, err := startProcess(exec.Command("redis-server", args...))
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.proc = proc
	s.mu.Unlock()
	if s.answers(proc) {
		return nil
	}
	s.Kill()
	return fmt.Errorf("no answer on port %s", port)
}

// answers waits for the server to be through with loading.
func (s *Server) answers(proc *process) bool {
	c := redis.NewClient(&redis.Options{Addr: s.Addr(), MaxRetries: -1, DisableIdentity: true})
	defer func() { _ = c.Close() }()
	for deadline := time.Now().Add(startLimit); time.Now().Before(deadline) && proc.alive(); {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		err := c.Ping(ctx).Err()
		cancel()
		if err == nil || strings.Contains(err.Error(), "NOAUTH") {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

func (s *Server) log() string { return filepath.Join(s.dir, "log") }

func (s *Server) logTail() string {
	text, err := os.ReadFile(s.log())
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-30):], "\n")
}

// freePort returns a port that was free a moment ago.
func freePort(t testing.TB) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port
}

// Addr returns host and port.
func (s *Server) Addr() string { return "127.0.0.1:" + strconv.Itoa(s.port) }

// Port returns the port.
func (s *Server) Port() int { return s.port }

// PID returns the process id, 0 when the server has been killed.
func (s *Server) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil {
		return 0
	}
	return s.proc.pid()
}

// Client returns a new client, closed at the end of the test.
func (s *Server) Client(opts ...func(*redis.Options)) *redis.Client {
	o := &redis.Options{Addr: s.Addr()}
	for _, f := range opts {
		f(o)
	}
	c := redis.NewClient(o)
	s.t.Cleanup(func() { _ = c.Close() })
	return c
}

// Admin returns a client for the test's own commands, the same one each time.
func (s *Server) Admin() *redis.Client {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.admin == nil {
		s.admin = s.Client()
	}
	return s.admin
}

// Stop suspends the process (SIGSTOP).
func (s *Server) Stop() { s.signal(syscall.SIGSTOP) }

// Cont lets a suspended process go on (SIGCONT).
func (s *Server) Cont() { s.signal(syscall.SIGCONT) }

func (s *Server) signal(sig syscall.Signal) {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil {
		s.t.Fatal("redistest: the server is not running")
	}
	if err := s.proc.signal(sig); err != nil {
		s.t.Fatal(err)
	}
}

// Kill ends the process at once (SIGKILL) and waits until it has ended. It may be
// called again.
func (s *Server) Kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc != nil {
		s.proc.kill()
		s.proc = nil
	}
}

// Restart starts the server again on the same port and folder, having killed it if
// it runs, and waits until it answers.
func (s *Server) Restart() {
	s.t.Helper()
	s.Kill()
	if err := s.launch(); err != nil {
		s.t.Fatalf("redis-server does not restart: %v\n%s", err, s.logTail())
	}
}

// Alive reports whether the process runs; a suspended one does.
func (s *Server) Alive() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc != nil && s.proc.alive()
}

// CommandStats returns how often each command ran since ResetStats, by its name in
// lower case.
func (s *Server) CommandStats() map[string]int64 {
	s.t.Helper()
	text, err := s.Admin().Info(context.Background(), "commandstats").Result()
	if err != nil {
		s.t.Fatal(err)
	}
	stats := map[string]int64{}
	for line := range strings.Lines(text) {
		name, rest, ok := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "cmdstat_"), ":calls=")
		if !ok {
			continue
		}
		calls, _, _ := strings.Cut(rest, ",")
		n, err := strconv.ParseInt(calls, 10, 64)
		if err != nil {
			s.t.Fatal(err)
		}
		stats[strings.ToLower(name)] = n
	}
	return stats
}

// ResetStats sets the counts of CommandStats to 0.
func (s *Server) ResetStats() {
	s.t.Helper()
	if err := s.Admin().ConfigResetStat(context.Background()).Err(); err != nil {
		s.t.Fatal(err)
	}
}

// Eventually waits until cond is true, and fails t after within, naming what was
// waited for.
func Eventually(t testing.TB, within time.Duration, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(within); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", within, what)
		}
	}
}
