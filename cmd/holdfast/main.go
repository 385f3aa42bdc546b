// Command holdfast is for those who operate locks of package holdfast: it lists, shows, watches
// and breaks them, says whether a server is fit for them, and runs a command while it holds one.
// "holdfast help" tells the rest.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast"
)

// Exit codes. They are part of the interface; "run" also passes on those of its command.
const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitUnavailable = 69 // EX_UNAVAILABLE of sysexits.h
	exitLost        = 70
	exitNotAcquired = 75  // EX_TEMPFAIL
	exitCannotRun   = 126 // as shells have it
	exitNoCommand   = 127
	exitSignal      = 128 // plus the number of the signal
)

func main() {
	redis.SetLogger(silent{}) // what matters comes back as an error
	os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// silent is a logger of go-redis that writes nothing.
type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

// run is the whole program. It returns the exit code.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	i := newInvocation(stdin, stdout, stderr)
	err := i.parse(args)
	if errors.Is(err, errHelp) {
		return i.finish(i.help(i.command))
	}
	if err == nil {
		err = i.command.do(ctx, i)
	}
	return i.finish(err)
}

// finish tells of an error, and returns the exit code.
func (i *invocation) finish(err error) int {
	if text := message(err); text != "" {
		i.complain("%s", text)
	}
	return exitCode(err)
}

// complain writes a line to stderr.
func (i *invocation) complain(format string, args ...any) {
	fmt.Fprintf(i.stderr, "holdfast: %s\n", hideURLs(fmt.Sprintf(format, args...)))
}

// exitError is an error with an exit code of its own. Without err nothing is left to say.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// usage makes the error of a wrong call.
func usage(format string, args ...any) error {
	return &exitError{exitUsage, fmt.Errorf(format+` (see "holdfast help")`, args...)}
}

// exitCode returns the exit code of an error.
func exitCode(err error) int {
	var own *exitError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &own):
		return own.code
	case errors.Is(err, holdfast.ErrInvalid):
		return exitUsage
	case errors.Is(err, holdfast.ErrNotAcquired):
		return exitNotAcquired
	case errors.Is(err, holdfast.ErrUnavailable):
		return exitUnavailable
	}
	return exitFailed
}

// message is the text of an error for stderr.
func message(err error) string {
	if err == nil {
		return ""
	}
	return strings.TrimPrefix(err.Error(), "holdfast: ")
}

var urlLike = regexp.MustCompile(`\b((?:rediss?|unix)[a-z+]*)://[^\s"]*`)

// hideURLs takes the URLs of servers out of a text, because they have passwords.
func hideURLs(text string) string { return urlLike.ReplaceAllString(text, "$1://***") }
