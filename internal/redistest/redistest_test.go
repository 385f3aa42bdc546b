package redistest

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/leaktest"
)

func TestMain(m *testing.M) {
	RunChild(map[string]func(){"echo": childEcho, "server": childServer})
	leaktest.Main(m)
}

// childEcho repeats lines, until one says what to exit with.
func childEcho() {
	fmt.Fprintln(os.Stderr, "for the log")
	fmt.Println("ready", os.Getenv("GREETING"))
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		if code, err := strconv.Atoi(in.Text()); err == nil {
			fmt.Println("last words")
			os.Exit(code)
		}
		fmt.Println("echo", in.Text())
	}
}

// childServer starts a server, says where, and waits for its own end.
func childServer() {
	s := Start(&fakeTB{})
	fmt.Println(s.Addr())
	_ = bufio.NewScanner(os.Stdin).Scan() // the test writes nothing
}

// fakeTB is a test that may fail, or one in a process without tests.
type fakeTB struct {
	testing.TB
	cleanups []func()
	fatal    string
	skipped  string
	log      string
}

// fake runs a test to its end and returns what became of it.
func fake(test func(t testing.TB)) *fakeTB {
	f := &fakeTB{}
	done := make(chan struct{})
	go func() { // ended by the test's end or failure
		defer close(done)
		test(f)
	}()
	<-done
	for i := len(f.cleanups) - 1; i >= 0; i-- {
		f.cleanups[i]()
	}
	return f
}

func (*fakeTB) Helper()             {}
func (f *fakeTB) Cleanup(fn func()) { f.cleanups = append(f.cleanups, fn) }
func (f *fakeTB) Failed() bool      { return f.fatal != "" }

func (f *fakeTB) Fatal(args ...any) {
	f.fatal = fmt.Sprint(args...)
	runtime.Goexit()
}

func (f *fakeTB) Logf(format string, args ...any) {
	f.log += fmt.Sprintf(format, args...)
}

func (f *fakeTB) Fatalf(format string, args ...any) {
	f.Fatal(fmt.Sprintf(format, args...))
}

func (f *fakeTB) Skip(args ...any) {
	f.skipped = fmt.Sprint(args...)
	runtime.Goexit()
}

// impatient is a client's options for servers that do not answer.
func impatient(o *redis.Options) {
	o.MaxRetries, o.ReadTimeout, o.DialTimeout = -1, 200*time.Millisecond, 200*time.Millisecond
}

// value returns what a command does, and fails t on an error.
func value[T any](t *testing.T, cmd interface{ Result() (T, error) }) T {
	t.Helper()
	v, err := cmd.Result()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func equal[T comparable](t *testing.T, got, want T) {
	t.Helper()
	if got != want {
		t.Fatalf("%v, want %v", got, want)
	}
}

func TestNeed(t *testing.T) {
	t.Setenv("PATH", "")
	t.Setenv("HOLDFAST_REQUIRE_REDIS", "")
	f := fake(Need)
	equal(t, f.fatal, "")
	equal(t, strings.Contains(f.skipped, "redis-server"), true)
	t.Setenv("HOLDFAST_REQUIRE_REDIS", "1")
	f = fake(Need)
	equal(t, strings.Contains(f.fatal, "redis-server"), true)
	equal(t, f.skipped, "")
}

func TestStartN(t *testing.T) {
	leaktest.Check(t)
	servers := StartN(t, 3, WithConfig("maxmemory", "4mb", "client-output-buffer-limit", "normal 0 0 0"))
	for i, s := range servers {
		c := s.Client()
		value(t, c.Set(t.Context(), "k", i, 0))
		equal(t, c.ConfigGet(t.Context(), "maxmemory").Val()["maxmemory"], "4194304")
		value[any](t, c.Do(t.Context(), "DEBUG", "SLEEP", "0"))
	}
	for i, s := range servers {
		equal(t, value(t, s.Client().Get(t.Context(), "k")), strconv.Itoa(i))
		equal(t, strings.HasSuffix(s.Addr(), ":"+strconv.Itoa(s.Port())), true)
	}
}

func TestPassword(t *testing.T) {
	s := Start(t, WithConfig("requirepass", "sesame"))
	equal(t, s.Admin().Ping(t.Context()).Val(), "PONG")
	if err := s.Client().Ping(t.Context()).Err(); err == nil {
		t.Fatal("no password is asked for")
	}
}

func TestDoesNotStart(t *testing.T) {
	Need(t)
	f := fake(func(t testing.TB) { Start(t, WithConfig("maxmemory", "no number")) })
	equal(t, strings.Contains(f.fatal, "does not start"), true)
	equal(t, strings.Contains(f.log, "no number"), true)
}

func TestStopAndCont(t *testing.T) {
	leaktest.Check(t)
	s := Start(t)
	c := s.Client(impatient)
	for range 5 {
		equal(t, c.Ping(t.Context()).Val(), "PONG")
		s.Stop()
		if err := c.Ping(t.Context()).Err(); !os.IsTimeout(err) {
			t.Fatalf("want a timeout: %v", err)
		}
		equal(t, s.Alive(), true)
		s.Cont()
		equal(t, s.Admin().Ping(t.Context()).Val(), "PONG")
	}
	s.Stop()
	s.Kill()
	equal(t, s.Alive(), false)
	equal(t, s.PID(), 0)
}

func TestRestart(t *testing.T) {
	for _, c := range []struct {
		name string
		opts []Option
		keys int64
	}{{"memory", nil, 0}, {"persistent", []Option{Persistent()}, 1}} {
		t.Run(c.name, func(t *testing.T) {
			s := Start(t, c.opts...)
			addr, pid := s.Addr(), s.PID()
			value(t, s.Admin().Set(t.Context(), "k", "v", 0))
			s.Kill()
			s.Kill()
			s.Restart()
			equal(t, value(t, s.Client().Exists(t.Context(), "k")), c.keys)
			s.Restart() // of a running one
			equal(t, value(t, s.Client().Exists(t.Context(), "k")), c.keys)
			equal(t, s.Addr(), addr)
			equal(t, s.PID() != pid, true)
		})
	}
}

// The thread on which a test runs may end while its servers run.
func TestOutlivesThread(t *testing.T) {
	var servers [3]*Server // the process's first thread does not end
	var locked, done sync.WaitGroup
	locked.Add(len(servers))
	for i := range servers {
		done.Add(1)
		go func() { // ended by itself, and its thread with it
			defer done.Done()
			runtime.LockOSThread()
			locked.Done()
			locked.Wait()
			servers[i] = Start(t)
		}()
	}
	done.Wait()
	equal(t, poll(200*time.Millisecond, func() bool {
		return slices.ContainsFunc(servers[:], func(s *Server) bool { return !s.Alive() })
	}), false)
}

func TestEndsByItself(t *testing.T) {
	s := Start(t)
	s.Admin().ShutdownNoSave(t.Context())
	Eventually(t, 5*time.Second, "the server ended", func() bool { return !s.Alive() })
	s.Restart()
	equal(t, s.Alive(), true)
}

func TestCommandStats(t *testing.T) {
	s := Start(t)
	c := s.Client()
	value(t, c.Set(t.Context(), "k", "v", 0))
	s.ResetStats()
	for range 3 {
		value(t, c.Get(t.Context(), "k"))
	}
	stats := s.CommandStats()
	equal(t, stats["get"], 3)
	equal(t, stats["set"], 0)
}

func TestReplica(t *testing.T) {
	primary := Start(t)
	replica := Start(t, ReplicaOf(primary))
	value(t, primary.Admin().Set(t.Context(), "k", "v", 0))
	Eventually(t, 5*time.Second, "the key is there", func() bool {
		return replica.Admin().Get(t.Context(), "k").Val() == "v"
	})
}

func TestEventuallyFails(t *testing.T) {
	f := fake(func(t testing.TB) { Eventually(t, 20*time.Millisecond, "pigs fly", func() bool { return false }) })
	equal(t, strings.Contains(f.fatal, "pigs fly"), true)
}

func TestFailover(t *testing.T) {
	leaktest.Check(t)
	s := StartSentinel(t)
	c := s.Client()
	value(t, c.Set(t.Context(), "k", "before", 0))
	s.Primary.Stop()
	s.WaitFailover(20 * time.Second)
	Eventually(t, 10*time.Second, "the client follows", func() bool {
		return c.Set(t.Context(), "k", "after", 0).Err() == nil
	})
	equal(t, s.Replica.Admin().Get(t.Context(), "k").Val(), "after")
	s.Primary.Cont()
	Eventually(t, 20*time.Second, "the old primary follows", func() bool {
		return s.Primary.Admin().Get(t.Context(), "k").Val() == "after"
	})
}

func TestClusterMove(t *testing.T) {
	leaktest.Check(t)
	c := StartCluster(t, 3)
	client := c.Client()
	for _, key := range []string{"a", "b", "c", "d", "{a}2"} {
		value(t, client.Set(t.Context(), key, "v", 0))
	}
	slot := int(value(t, client.ClusterKeySlot(t.Context(), "a")))
	equal(t, slot > 0, true)
	from := c.SlotOwner(slot)
	to := (from + 1) % 3

	c.BeginMove(slot, to)
	readable := func(key string) {
		t.Helper()
		equal(t, value(t, client.Get(t.Context(), key)), "v")
	}
	readable("a") // at the old owner
	value(t, client.Set(t.Context(), "{a}3", "v", 0))
	equal(t, keysIn(t, c.Nodes[to], slot), 1) // by ASK
	equal(t, c.SlotOwner(slot), from)
	c.MoveKeys(slot, to)
	equal(t, keysIn(t, c.Nodes[from], slot), 0)
	readable("a") // by ASK
	c.FinishMove(slot, to)
	equal(t, c.SlotOwner(slot), to)
	for _, key := range []string{"a", "b", "c", "d", "{a}2", "{a}3"} {
		readable(key)
	}
	c.MoveSlot(slot, from)
	equal(t, c.SlotOwner(slot), from)
	readable("a")
}

func keysIn(t *testing.T, s *Server, slot int) int64 {
	t.Helper()
	return value(t, s.Admin().ClusterCountKeysInSlot(t.Context(), slot))
}

func TestClusterOfOne(t *testing.T) {
	c := StartCluster(t, 1)
	equal(t, c.Client().Set(t.Context(), "k", "v", 0).Err(), nil)
	equal(t, c.SlotOwner(slotCount-1), 0)
	c.Nodes[0].Restart()
	Eventually(t, 10*time.Second, "the node serves again", func() bool { return c.serves(0) })
}

func TestChild(t *testing.T) {
	leaktest.Check(t)
	p := Child(t, "echo", "GREETING=hello")
	equal(t, p.ReadLine(10*time.Second), "ready hello")
	equal(t, p.PID() != os.Getpid(), true)
	p.Stop()
	fmt.Fprintln(p.Stdin, "one")
	select {
	case line := <-p.lines:
		t.Fatalf("a suspended child says %q", line)
	case <-time.After(50 * time.Millisecond):
	}
	p.Cont()
	equal(t, p.ReadLine(10*time.Second), "echo one")
	fmt.Fprintln(p.Stdin, "7")
	equal(t, p.Wait(), 7)
	equal(t, p.ReadLine(time.Second), "last words") // also after the end

	p = Child(t, "echo")
	p.Kill()
	p.Kill()
	equal(t, p.Wait(), -1)
	equal(t, Child(t, "nobody").Wait(), 2)
}

func TestServerDiesWithKilledChild(t *testing.T) {
	Need(t)
	p := Child(t, "server")
	addr := p.ReadLine(20 * time.Second)
	c := redis.NewClient(&redis.Options{Addr: addr})
	t.Cleanup(func() { _ = c.Close() })
	equal(t, c.Ping(t.Context()).Val(), "PONG")
	dir := c.ConfigGet(t.Context(), "dir").Val()["dir"]
	t.Cleanup(func() { _ = os.RemoveAll(dir) }) // which the killed child cannot
	p.Kill()
	Eventually(t, 5*time.Second, "the server is gone", func() bool {
		conn, err := net.DialTimeout("tcp", addr, time.Second)
		if err == nil {
			_ = conn.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	})
}
