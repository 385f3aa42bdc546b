package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"io"
	"os"
	"slices"
	"strings"
	"time"
)

const (
	defaultURL     = "redis://localhost:6379/0"
	defaultTimeout = 5 * time.Second
	defaultTTL     = 30 * time.Second
	defaultGrace   = 5 * time.Second
	defaultEvery   = time.Second
	leastEvery     = 50 * time.Millisecond
)

// errHelp says that help was asked for.
var errHelp = errors.New("help")

// command is one of the verbs.
type command struct {
	name        string
	least, most int  // operands
	runs        bool // a command of the user follows "--"
	local       bool // it asks no server
	flags       func(*invocation, *flag.FlagSet)
	do          func(context.Context, *invocation) error
}

// commands returns all of them, in the order of the help.
func commands() []*command {
	return []*command{
		{name: "ls", most: 1, do: list},
		{name: "inspect", least: 1, most: 1, do: inspect},
		{name: "break", least: 1, most: 1, do: breakLock, flags: func(i *invocation, f *flag.FlagSet) {
			f.StringVar(&i.owner, "owner", "", "")
		}},
		{name: "run", least: 1, most: 1, runs: true, do: runCommand, flags: func(i *invocation, f *flag.FlagSet) {
			f.DurationVar(&i.ttl, "ttl", defaultTTL, "")
			f.Func("wait", "", i.setWait)
			f.Func("grace", "", i.setGrace)
			f.BoolVar(&i.fence, "fence", false, "")
			f.BoolVar(&i.durable, "durable", false, "")
			f.DurationVar(&i.longest, "longest-ttl", 0, "")
		}},
		{name: "doctor", do: doctor, flags: func(i *invocation, f *flag.FlagSet) {
			f.BoolVar(&i.fence, "fence", false, "")
		}},
		{name: "watch", least: 1, most: 1, do: watch, flags: func(i *invocation, f *flag.FlagSet) {
			f.DurationVar(&i.every, "every", defaultEvery, "")
		}},
		{name: "help", most: 1, local: true, do: helpFor},
		{name: "version", local: true, do: version},
	}
}

func commandOf(name string) *command {
	all := commands()
	if n := slices.IndexFunc(all, func(c *command) bool { return c.name == name }); n >= 0 {
		return all[n]
	}
	return nil
}

// invocation is one call of the program, as its arguments describe it.
type invocation struct {
	stdin          io.Reader
	stdout, stderr io.Writer

	command  *command // nil: none was named
	operands []string
	argv     []string // what follows "--" of run

	urls    []string
	targets []target // what urls mean
	prefix  string
	json    bool
	timeout time.Duration

	owner        string
	ttl, longest time.Duration
	wait         time.Duration // negative: for ever
	grace        time.Duration // negative: the default
	fence        bool
	durable      bool
	every        time.Duration
}

func newInvocation(stdin io.Reader, stdout, stderr io.Writer) *invocation {
	return &invocation{stdin: stdin, stdout: stdout, stderr: stderr, timeout: defaultTimeout, wait: -1, grace: -1}
}

func (i *invocation) setWait(text string) (err error)  { return setDuration(&i.wait, text) }
func (i *invocation) setGrace(text string) (err error) { return setDuration(&i.grace, text) }

func setDuration(to *time.Duration, text string) error {
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return errors.New("must be a duration such as 10s, at least 0")
	}
	*to = d
	return nil
}

// common adds the flags that all commands have. Values that are set stay.
func (i *invocation) common(name string) *flag.FlagSet {
	f := flag.NewFlagSet(name, flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.Func("url", "", func(text string) error { i.urls = append(i.urls, text); return nil })
	f.StringVar(&i.prefix, "prefix", i.prefix, "")
	f.BoolVar(&i.json, "json", i.json, "")
	f.DurationVar(&i.timeout, "timeout", i.timeout, "")
	return f
}

// parse reads the arguments. Flags may stand anywhere before "--".
func (i *invocation) parse(args []string) error {
	var behind []string
	n := slices.Index(args, "--")
	if n >= 0 {
		args, behind = args[:n], args[n+1:]
	}
	f := i.common("holdfast")
	if err := parseFlags(f, args); err != nil {
		return err
	}
	if f.NArg() == 0 {
		return usage("no command")
	}
	if i.command = commandOf(f.Arg(0)); i.command == nil {
		return usage("unknown command %q", f.Arg(0))
	}
	rest := f.Args()[1:]
	f = i.common(i.command.name)
	if i.command.flags != nil {
		i.command.flags(i, f)
	}
	for {
		if err := parseFlags(f, rest); err != nil {
			return err
		}
		if f.NArg() == 0 {
			break
		}
		i.operands, rest = append(i.operands, f.Arg(0)), f.Args()[1:]
	}
	if i.command.runs {
		i.argv = behind
	} else {
		i.operands = append(i.operands, behind...)
	}
	return i.check(n >= 0)
}

func parseFlags(f *flag.FlagSet, args []string) error {
	err := f.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return errHelp
	case err != nil:
		return usage("%v", err)
	}
	return nil
}

// check looks at what the flags do not check themselves.
func (i *invocation) check(dashes bool) error {
	c := i.command
	switch n := len(i.operands); {
	case n > c.most && c.runs:
		return usage("run takes one KEY, then -- and the command")
	case n > c.most:
		return usage("%s: too many operands", c.name)
	case n < c.least:
		return usage("%s: the %s is missing", c.name, operandOf(c))
	case c.runs && (!dashes || len(i.argv) == 0):
		return usage("run: the command is missing: run KEY -- command args...")
	case c.name == "break" && i.owner == "":
		return usage("break: --owner is missing: the OWNER that inspect shows")
	case c.name == "ls" && n == 0 && i.prefix == "":
		return usage("ls needs a PATTERN or --prefix; for all locks on the server: ls '*'")
	case c.name == "watch" && i.every < leastEvery:
		return usage("--every %v: must be at least %v", i.every, leastEvery)
	case i.timeout <= 0:
		return usage("--timeout %v: must be positive", i.timeout)
	case (i.durable || i.longest != 0) && len(i.urls) < 2:
		return usage("--durable and --longest-ttl are for a majority: several --url")
	}
	for _, operand := range i.operands {
		if operand == "" {
			return usage("%s: the %s is empty", c.name, operandOf(c))
		}
		if urlLike.MatchString(operand) {
			return usage("%s: the %s is the URL of a server: --url is missing before it", c.name, operandOf(c))
		}
	}
	if c.local {
		return nil
	}
	return i.resolve()
}

// resolve makes targets of the URLs.
func (i *invocation) resolve() error {
	if len(i.urls) == 0 {
		i.urls = []string{cmp.Or(os.Getenv("REDIS_URL"), defaultURL)}
	}
	for n, raw := range i.urls {
		t, err := parseTarget(strings.TrimSpace(raw))
		if err != nil {
			return usage("URL %d: %w", n+1, err)
		}
		i.targets = append(i.targets, t)
	}
	return nil
}

func operandOf(c *command) string {
	switch c.name {
	case "ls":
		return "PATTERN"
	case "watch":
		return "KEY or PATTERN"
	case "help":
		return "COMMAND"
	}
	return "KEY"
}
