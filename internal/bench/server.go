package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	startLimit = 10 * time.Second // within which a server must answer
	startTries = 5                // with another port each
	adminLimit = 5 * time.Second  // of one question to a server
)

// server is a redis-server of this program: empty, on a port of its own, and it keeps
// nothing on disk.
type server struct {
	addr  string
	dir   string
	proc  *process
	admin *redis.Client
}

// startServer starts a server and waits until it answers.
func startServer(ctx context.Context, f *family) (*server, error) {
	var errs []error
	for range startTries {
		s, err := launchServer(ctx, f)
		if err == nil || ctx.Err() != nil {
			return s, err
		}
		errs = append(errs, err) // the port may have been taken in the meantime
	}
	return nil, fmt.Errorf("redis-server does not start: %w", errors.Join(errs...))
}

func launchServer(ctx context.Context, f *family) (*server, error) {
	dir, err := os.MkdirTemp("", "holdfast-bench")
	if err != nil {
		return nil, err
	}
	s := &server{dir: dir}
	port, err := freePort()
	if err != nil {
		s.end()
		return nil, err
	}
	s.addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	s.admin = redis.NewClient(&redis.Options{
		Addr: s.addr, MaxRetries: -1, DialerRetries: 1, PoolSize: 1, DisableIdentity: true,
	})
	s.proc, err = f.start(exec.Command("redis-server", "--port", strconv.Itoa(port),
		"--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", dir,
		"--logfile", filepath.Join(dir, "log")))
	if err == nil {
		err = s.await(ctx)
	}
	if err != nil {
		s.end()
		return nil, err
	}
	return s, nil
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// await waits until this very process answers.
func (s *server) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for {
		err := s.probe(ctx)
		if err == nil || ctx.Err() != nil || !s.proc.alive() {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// probe opens a connection by itself first: a client whose first connections are
// refused backs off.
func (s *server) probe(ctx context.Context) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.addr)
	if err != nil {
		return err
	}
	_ = conn.Close()
	info, err := s.admin.Info(ctx, "server").Result()
	if err != nil {
		return err
	}
	if !strings.Contains(info, fmt.Sprintf("process_id:%d\r\n", s.proc.pid())) {
		return errors.New("another server answers")
	}
	return nil
}

// end kills the server and removes what it left. It may be called again.
func (s *server) end() {
	if s.proc != nil {
		s.proc.kill()
	}
	if s.admin != nil {
		_ = s.admin.Close() // twice: says so, does nothing
	}
	_ = os.RemoveAll(s.dir) // as far as possible
}

// usage is what a server has done so far.
type usage struct {
	commands int64 // sent ones and those run in scripts
	cpu      time.Duration
}

// adminCommands are those of this program itself.
var adminCommands = map[string]bool{"info": true, "dbsize": true, "keys": true, "pttl": true}

// usage asks the server. The call counts of commands include those that scripts run, as
// does total_commands_processed.
func (s *server) usage(ctx context.Context) (u usage, err error) {
	ctx, cancel := context.WithTimeout(ctx, adminLimit)
	defer cancel()
	info, err := s.admin.InfoMap(ctx, "commandstats", "cpu").Result()
	if err != nil {
		return u, err
	}
	for name, value := range info["Commandstats"] {
		calls, _, _ := strings.Cut(strings.TrimPrefix(value, "calls="), ",")
		n, err := strconv.ParseInt(calls, 10, 64)
		if err != nil {
			return u, fmt.Errorf("commandstats of %s: %w", name, err)
		}
		if !adminCommands[strings.TrimPrefix(name, "cmdstat_")] {
			u.commands += n
		}
	}
	for _, name := range []string{"used_cpu_sys", "used_cpu_user"} {
		seconds, err := strconv.ParseFloat(info["CPU"][name], 64)
		if err != nil {
			return u, fmt.Errorf("%s: %w", name, err)
		}
		u.cpu += time.Duration(seconds * float64(time.Second))
	}
	return u, nil
}

// keys returns how many keys the server has.
func (s *server) keys(ctx context.Context) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, adminLimit)
	defer cancel()
	return s.admin.DBSize(ctx).Result()
}

// version returns the version of the redis-server on the PATH.
func (s *server) version(ctx context.Context) string {
	info, _ := s.admin.InfoMap(ctx, "server").Result() // an error: unknown
	return info["Server"]["redis_version"]
}
