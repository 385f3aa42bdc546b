package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/internal/leaktest"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

const patience = 20 * time.Second

// stage is what the commands of a script share.
type stage struct {
	testing.TB
	servers map[string]*redistest.Server
}

// TestScripts runs testdata/*.txtar. The commands beside those of testscript are in commands.
func TestScripts(t *testing.T) {
	redistest.Need(t)
	leaktest.Check(t)
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			tb, ok := env.T().(testing.TB)
			if !ok {
				return errors.New("no testing.TB")
			}
			env.Values["stage"] = &stage{tb, map[string]*redistest.Server{}}
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"redis":    cmdRedis,
			"cluster":  cmdCluster,
			"sentinel": cmdSentinel,
			"server":   cmdServer,
			"drop":     cmdDrop,
			"hold":     cmdHold,
			"queue":    cmdQueue,
			"await":    cmdAwait,
			"gone":     cmdGone,
			"code":     cmdCode,
		},
	})
}

func stageOf(ts *testscript.TestScript) *stage {
	s, _ := ts.Value("stage").(*stage)
	return s
}

func (s *stage) server(ts *testscript.TestScript, name string) *redistest.Server {
	found := s.servers[name]
	if found == nil {
		ts.Fatalf("there is no server %q", name)
	}
	return found
}

// redis NAME [durable] [DIRECTIVE VALUE]...: starts a server. $NAME is its URL.
func cmdRedis(ts *testscript.TestScript, _ bool, args []string) {
	s, name, opts := stageOf(ts), args[0], []redistest.Option(nil)
	args = args[1:]
	if len(args) > 0 && args[0] == "durable" {
		opts, args = append(opts, redistest.Persistent()), args[1:]
	}
	started := redistest.Start(s, append(opts, redistest.WithConfig(args...))...)
	s.servers[name] = started
	ts.Setenv(name, "redis://"+started.Addr()+"/0")
	ts.Setenv(name+"_ADDR", started.Addr())
}

// cluster NAME: starts a cluster.
func cmdCluster(ts *testscript.TestScript, _ bool, args []string) {
	var addrs []string
	for _, node := range redistest.StartCluster(stageOf(ts), 3).Nodes {
		addrs = append(addrs, node.Addr())
	}
	ts.Setenv(args[0], "redis+cluster://"+strings.Join(addrs, ","))
}

// sentinel NAME: starts a Sentinel set. The primary is a server NAME of other commands.
func cmdSentinel(ts *testscript.TestScript, _ bool, args []string) {
	set := redistest.StartSentinel(stageOf(ts))
	stageOf(ts).servers[args[0]] = set.Primary
	ts.Setenv(args[0], "redis+sentinel://"+strings.Join(set.SentinelAddrs(), ",")+"/"+set.MasterName)
}

// server NAME stop|cont|kill: to the process of a server.
func cmdServer(ts *testscript.TestScript, _ bool, args []string) {
	server := stageOf(ts).server(ts, args[0])
	switch args[1] {
	case "stop":
		server.Stop()
	case "cont":
		server.Cont()
	case "kill":
		server.Kill()
	default:
		ts.Fatalf("server: %q", args[1])
	}
}

// drop NAME KEY: deletes a key.
func cmdDrop(ts *testscript.TestScript, _ bool, args []string) {
	n, err := stageOf(ts).server(ts, args[0]).Admin().Del(context.Background(), args[1]).Result()
	ts.Check(err)
	if n != 1 {
		ts.Fatalf("drop: there is no key %q", args[1])
	}
}

// locker is a Locker of a script, called holder.
func (s *stage) locker(ts *testscript.TestScript, name, holder string) *holdfast.Locker {
	l, err := holdfast.New(s.server(ts, name).Admin(), holdfast.WithHolder(holder), holdfast.WithFencing())
	ts.Check(err)
	s.Cleanup(func() { _ = l.Close() })
	return l
}

// hold NAME KEY: holds a lock until the end of the script, as "keeper". $OWNER is its value.
func cmdHold(ts *testscript.TestScript, _ bool, args []string) {
	lock, err := stageOf(ts).locker(ts, args[0], "keeper").TryAcquire(context.Background(), args[1])
	ts.Check(err)
	ts.Setenv("OWNER", lock.Owner())
}

// queue NAME KEY N: waits for a lock N times, as "waiter".
func cmdQueue(ts *testscript.TestScript, _ bool, args []string) {
	s := stageOf(ts)
	n, err := strconv.Atoi(args[2])
	ts.Check(err)
	l := s.locker(ts, args[0], "waiter")
	for range n {
		go func() { _, _ = l.Acquire(context.Background(), args[1]) }() // ends with the Locker
	}
	redistest.Eventually(s, patience, "they wait", func() bool {
		info, err := l.Inspect(context.Background(), args[1])
		return err == nil && len(info.Waiters) == n
	})
}

// await FILE [TEXT]: waits until a file has that in it.
func cmdAwait(ts *testscript.TestScript, _ bool, args []string) {
	text := "\n"
	if len(args) > 1 {
		text = args[1]
	}
	redistest.Eventually(stageOf(ts), patience, args[0], func() bool {
		found, err := os.ReadFile(ts.MkAbs(args[0]))
		return err == nil && strings.Contains(string(found), text)
	})
}

// gone FILE: waits until the processes whose ids are in a file have ended.
func cmdGone(ts *testscript.TestScript, _ bool, args []string) {
	pids := strings.Fields(ts.ReadFile(args[0]))
	if len(pids) == 0 {
		ts.Fatalf("gone: no processes")
	}
	redistest.Eventually(stageOf(ts), patience, fmt.Sprint(pids, " have ended"), func() bool {
		return !slices.ContainsFunc(pids, lives)
	})
}

// lives reports whether a process runs. A zombie does not.
func lives(pid string) bool {
	stat, err := exec.Command("ps", "-o", "stat=", "-p", pid).Output()
	return err == nil && !strings.HasPrefix(strings.TrimSpace(string(stat)), "Z")
}

// code N PROGRAM ARGS...: runs a program, which must end with exit code N.
func cmdCode(ts *testscript.TestScript, _ bool, args []string) {
	err := ts.Exec(args[1], args[2:]...)
	code := 0
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		code = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if strconv.Itoa(code) != args[0] {
		ts.Fatalf("exit code %d", code)
	}
}
