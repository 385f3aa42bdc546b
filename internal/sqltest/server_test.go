//go:build unix

package sqltest

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"
)

const (
	startLimit = 60 * time.Second // for a server to be made and to answer
	stopLimit  = 10 * time.Second // for a server to end by itself
	pollPause  = 20 * time.Millisecond
	mostSocket = 100 // bytes in the path of a unix socket, on every system
)

// errMissing says that a program is not installed.
var errMissing = errors.New("not installed")

// server is a database server in a folder of its own, which listens on a unix socket there.
type server struct {
	dir  string
	cred *syscall.Credential // nil: as this process
	stop func()
}

// newServer makes a folder for a server. Where this process is root it is given to a user
// who is not: PostgreSQL refuses to run as root.
func newServer(users ...string) (*server, error) {
	s := &server{stop: func() {}}
	if os.Geteuid() == 0 {
		cred, err := credential(append(users, "nobody"))
		if err != nil {
			return nil, err
		}
		s.cred = cred
	}
	var err error
	for _, parent := range []string{os.TempDir(), "/tmp", "/var/tmp"} {
		if !usable(parent, s.cred != nil) {
			continue
		}
		if s.dir, err = os.MkdirTemp(parent, "sqltest"); err != nil {
			continue
		}
		if s.cred != nil {
			err = os.Chown(s.dir, int(s.cred.Uid), int(s.cred.Gid))
		}
		return s, err
	}
	return nil, errors.Join(errors.New("no folder for temporary files that a server can use"), err)
}

func credential(users []string) (*syscall.Credential, error) {
	for _, name := range users {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err1 == nil && err2 == nil && uid != 0 {
			return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
		}
	}
	return nil, fmt.Errorf("none of the users %q exists to run a server", users)
}

// usable reports whether a socket may lie below dir, and others may reach it.
func usable(dir string, others bool) bool {
	if len(dir)+len("/sqltest1234567890/.s.PGSQL.5432") > mostSocket {
		return false
	}
	for ; others; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err != nil || info.Mode().Perm()&1 == 0 {
			return false
		}
		if dir == filepath.Dir(dir) {
			break
		}
	}
	return true
}

func (s *server) command(ctx context.Context, name string, args ...string) (*exec.Cmd, *bytes.Buffer) {
	out := &bytes.Buffer{}
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.dir, out, out
	cmd.Env = append(os.Environ(), "LC_ALL=C", "TZ=UTC", "HOME="+s.dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.cred, Setpgid: true}
	cmd.WaitDelay = time.Second // a child of the child may hold the output
	dieWithParent(cmd.SysProcAttr)
	return cmd, out
}

// run runs a program to its end.
func (s *server) run(name string, args ...string) error {
	runtime.LockOSThread() // on Linux the child would be killed with the thread
	defer runtime.UnlockOSThread()
	ctx, cancel := context.WithTimeout(context.Background(), startLimit)
	defer cancel()
	cmd, out := s.command(ctx, name, args...)
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w\n%s", name, err, out)
	}
	return nil
}

// start starts the server and waits until db answers. quit is the signal by which it ends
// at once, with all that it has started.
func (s *server) start(db *sql.DB, quit syscall.Signal, name string, args ...string) error {
	cmd, out := s.command(context.Background(), name, args...)
	started, done := make(chan error), make(chan struct{})
	go func() { // ended by the server's end, in the last resort by stop
		runtime.LockOSThread() // which lives as long as the child, see run
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // how it ended does not matter
		}
		close(done)
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	s.stop = func() {
		_ = cmd.Process.Signal(quit) // an error says that it has ended
		select {
		case <-done:
		case <-time.After(stopLimit):
			_ = cmd.Process.Kill()
			<-done
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), startLimit)
	defer cancel()
	for {
		err := db.PingContext(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-done:
			return fmt.Errorf("%s has ended: %s", name, out)
		case <-ctx.Done():
			s.stop()
			return fmt.Errorf("%s does not answer: %w\n%s", name, err, out)
		case <-time.After(pollPause):
		}
	}
}

// close ends the server and removes its folder.
func (s *server) close() error {
	s.stop()
	return os.RemoveAll(s.dir)
}

// find returns the path of a program: on the PATH, else where a pattern finds it, the last of
// several.
func find(name string, patterns ...string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	for _, pattern := range patterns {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return "", err
		}
		if len(found) > 0 {
			slices.Sort(found)
			return found[len(found)-1], nil
		}
	}
	return "", fmt.Errorf("%s: %w", name, errMissing)
}

// startPostgres returns a server and how to reach it.
func startPostgres() (*server, string, error) {
	initdb, err1 := find("initdb", "/usr/lib/postgresql/*/bin/initdb", "/usr/pgsql-*/bin/initdb")
	postgres, err2 := find("postgres", "/usr/lib/postgresql/*/bin/postgres", "/usr/pgsql-*/bin/postgres")
	if err := errors.Join(err1, err2); err != nil {
		return nil, "", err
	}
	s, err := newServer("postgres")
	if err != nil {
		return nil, "", err
	}
	data := filepath.Join(s.dir, "data")
	dsn := "host=" + s.dir + " port=5432 user=postgres dbname=postgres sslmode=disable"
	err = s.run(initdb, "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
	if err == nil {
		err = starts(s, "pgx", dsn, syscall.SIGQUIT, postgres, "-D", data, "-k", s.dir, "-p", "5432",
			"-c", "listen_addresses=", "-c", "fsync=off", "-c", "shared_buffers=32MB", "-c", "max_connections=60")
	}
	return finish(s, dsn, err)
}

// startMariaDB returns a server and how to reach it.
func startMariaDB() (*server, string, error) {
	install, err1 := find("mariadb-install-db", "/usr/bin/mariadb-install-db", "/usr/local/*/scripts/mariadb-install-db")
	mariadbd, err2 := find("mariadbd", "/usr/sbin/mariadbd", "/usr/libexec/mariadbd", "/usr/local/*/bin/mariadbd")
	if err := errors.Join(err1, err2); err != nil {
		return nil, "", err
	}
	s, err := newServer("mysql")
	if err != nil {
		return nil, "", err
	}
	data, socket := filepath.Join(s.dir, "data"), filepath.Join(s.dir, "s")
	dsn := "root@unix(" + socket + ")/test?timeout=5s"
	// Little memory and no syncs: what is tested is not how it survives a crash.
	small := []string{"--no-defaults", "--datadir=" + data, "--innodb-log-file-size=8M", "--innodb-buffer-pool-size=32M"}
	err = s.run(install, append(slices.Clone(small), "--auth-root-authentication-method=normal", "--skip-name-resolve")...)
	if err == nil {
		err = starts(s, "mysql", dsn, syscall.SIGKILL, mariadbd, append(small, "--socket="+socket, "--skip-networking",
			"--pid-file="+filepath.Join(s.dir, "pid"), "--innodb-flush-log-at-trx-commit=0", "--skip-name-resolve",
			"--innodb-lock-wait-timeout=20")...)
	}
	return finish(s, dsn, err)
}

func starts(s *server, driver, dsn string, quit syscall.Signal, name string, args ...string) error {
	db, err := sql.Open(driver, dsn)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	return s.start(db, quit, name, args...)
}

func finish(s *server, dsn string, err error) (*server, string, error) {
	if err != nil {
		return nil, "", errors.Join(err, s.close())
	}
	return s, dsn, nil
}
