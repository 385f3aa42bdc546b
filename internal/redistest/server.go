package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	startLimit = 10 * time.Second // within which a server must answer
	startTries = 5                // with another port each
)

// errEnded is why a server does not answer: its process has ended by itself, which it
// does when the port is in use.
var errEnded = errors.New("the process ended")

// Need skips t when there is no redis-server on the PATH, or fails it when
// HOLDFAST_REQUIRE_REDIS=1 says that there must be one.
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

// Server is a redis-server process. It is safe for concurrent use, but methods that
// can fail the test are for the goroutine of the test that started it, as FailNow is.
// It is killed, and its folder removed, at the end of that test.
type Server struct {
	t       testing.TB
	port    int
	busPort int // of a node of a cluster
	dir     string
	config  config

	mu        sync.Mutex
	proc      *process // nil when it has been killed
	suspended bool
	admin     *redis.Client
}

// Start starts a server on a free loopback port and waits until it answers. It keeps
// nothing on disk unless an option says so.
func Start(t testing.TB, opts ...Option) *Server {
	t.Helper()
	return start(t, append([]Option{dataDefaults}, opts...)...)
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

func start(t testing.TB, opts ...Option) *Server {
	t.Helper()
	Need(t)
	dir, err := os.MkdirTemp("", "redistest")
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{t: t, dir: dir}
	for _, o := range opts {
		o(&s.config)
	}
	t.Cleanup(s.cleanup)
	for try := 1; ; try++ {
		s.port = reservePort(t)
		if s.config.cluster {
			s.busPort = reservePort(t)
		}
		s.writeConfig(t)
		err := s.launch()
		if err == nil {
			return s
		}
		if try == startTries || !errors.Is(err, errEnded) {
			t.Fatalf("redistest: redis-server does not start: %v", err) // cleanup logs
		}
	}
}

func (s *Server) cleanup() {
	if s.t.Failed() {
		s.t.Logf("log of the redis-server on port %d:\n%s", s.port, s.logTail())
	}
	s.Kill()
	_ = os.RemoveAll(s.dir)
}

// launch starts the process on s.port and waits for its first answer.
func (s *Server) launch() error {
	args := []string{s.configFile()}
	if s.config.sentinel {
		args = append(args, "--sentinel")
	}
	// Errors in the configuration come before there is a log.
	log, err := os.OpenFile(s.logFile(), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }() // the process has its own
	cmd := exec.Command("redis-server", args...)
	cmd.Stdout, cmd.Stderr = log, log
	proc, err := startProcess(cmd)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.proc, s.suspended = proc, false
	s.mu.Unlock()
	if err := s.awaitReady(proc); err != nil {
		s.Kill()
		return fmt.Errorf("port %d: %w", s.port, err)
	}
	return nil
}

// awaitReady waits until the server has loaded its data and answers.
func (s *Server) awaitReady(proc *process) error {
	err := errors.New("no answer")
	ready := poll(startLimit, func() bool {
		err = s.probe(proc)
		return err == nil || !proc.alive()
	})
	switch {
	case err == nil:
		return nil
	case ready:
		return errEnded
	default:
		return fmt.Errorf("not ready within %v: %w", startLimit, err)
	}
}

// probe asks the server once, by a client of its own, since a client whose first
// connections are refused backs off.
func (s *Server) probe(proc *process) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.Addr())
	if err != nil {
		return err
	}
	_ = conn.Close()
	c := redis.NewClient(&redis.Options{
		Addr: s.Addr(), Password: s.config.password, MaxRetries: -1, DialerRetries: 1, DisableIdentity: true,
	})
	defer func() { _ = c.Close() }()
	if err := c.Ping(ctx).Err(); err != nil {
		return err
	}
	// The port may have been taken by another test's server in the meantime.
	info, err := c.Info(ctx, "server").Result()
	if err == nil && !strings.Contains(info, fmt.Sprintf("process_id:%d\r\n", proc.pid())) {
		err = errors.New("another server answers")
	}
	return err
}

// Addr returns host and port. It stays the same over Restart.
func (s *Server) Addr() string { return "127.0.0.1:" + strconv.Itoa(s.port) }

// Port returns the port. It stays the same over Restart.
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

// Stop suspends the process (SIGSTOP). The kernel goes on accepting connections for
// it, and takes what is sent.
func (s *Server) Stop() {
	s.t.Helper()
	s.signal((*process).stop, true)
}

// Cont lets a suspended process go on (SIGCONT), beginning with all it was sent.
func (s *Server) Cont() {
	s.t.Helper()
	s.signal((*process).cont, false)
}

func (s *Server) signal(send func(*process) error, suspends bool) {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil {
		s.t.Fatalf("redistest: the server on port %d has been killed", s.port)
	}
	if err := send(s.proc); err != nil {
		s.t.Fatalf("redistest: the server on port %d: %v", s.port, err)
	}
	s.suspended = suspends
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
		s.t.Fatalf("redistest: redis-server does not restart: %v", err)
	}
}

// Alive reports whether the process runs; a suspended one does.
func (s *Server) Alive() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc != nil && s.proc.alive()
}

// answering reports whether the process runs and is not suspended.
func (s *Server) answering() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc != nil && s.proc.alive() && !s.suspended
}
