package holdfast

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
)

// finalError is one that waiting cannot heal.
type finalError struct{ error }

func (e *finalError) Unwrap() error { return e.error }
func (e *finalError) Final() bool   { return true }

// unsentError is the error of a command that was not written to any connection.
type unsentError struct{ error }

func (e *unsentError) Unwrap() error { return e.error }

// mayHaveRun reports whether a command that failed with err may have run, or may yet.
func mayHaveRun(err error) bool {
	var unsent *unsentError
	_, refused := serverError(err)
	return !refused && !errors.As(err, &unsent)
}

// healing are the codes of server errors that pass by themselves.
var healing = []string{
	"BUSY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "ASK", "MOVED", "NOREPLICAS",
	"NOSCRIPT", "ERR max number of clients",
}

// wrap grades an error of the client. One that waiting can heal comes back as it
// is; one that it cannot is made final. A hold stands more: a lock in use is
// worth trying for while a server that is full or was demoted may recover.
func (s *redisStore) wrap(err error, hold bool) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, redis.ErrClosed) {
		return &finalError{err}
	}
	text, ok := serverError(err)
	if !ok {
		return err // network, timeout, pool
	}
	if slices.ContainsFunc(healing, func(code string) bool { return says(text, code) }) {
		return err
	}
	if says(text, "READONLY") && (hold || s.traits.failover) || says(text, "OOM") && hold {
		return err
	}
	if strings.Contains(text, "user executing the script can't") {
		err = fmt.Errorf("no permission (NOPERM) inside a script: %w", err)
	}
	return &finalError{err}
}

// replyError is an error that a server put into a list of answers.
type replyError string

func (e replyError) Error() string { return string(e) }
func (e replyError) RedisError()   {}

// serverError returns the text of an error that the server answered with, also
// when a hook has wrapped it.
func serverError(err error) (string, bool) {
	if err == nil {
		return "", false
	}
	var reply redis.Error
	if errors.As(err, &reply) {
		return reply.Error(), true
	}
	return "", false
}

// says reports whether a server's error has this code: at its beginning, or inside
// the text that servers before 7.0 put around errors within scripts.
func says(text, code string) bool {
	if strings.HasPrefix(text, code) {
		rest := text[len(code):]
		return rest == "" || rest[0] == ' '
	}
	return strings.HasPrefix(text, "ERR ") &&
		(strings.Contains(text, ": "+code+" ") || strings.Contains(text, "-"+code+" "))
}

// isSplit reports whether a slot that is moving has its keys on two servers.
func isSplit(err error) bool {
	return err != nil && (strings.Contains(err.Error(), "TRYAGAIN") || strings.Contains(err.Error(), "CROSSSLOT"))
}
