// Package refusal reads the errors that servers answer with: which of them waiting can
// heal. It is for the packages of holdfast.
package refusal

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
)

// final is an error that waiting cannot heal.
type final struct{ error }

func (e *final) Unwrap() error { return e.error }
func (e *final) Final() bool   { return true }

// Final makes err one that waiting cannot heal: it has a method Final that says so.
func Final(err error) error { return &final{err} }

// healing are the codes of server errors that pass by themselves.
var healing = []string{
	"BUSY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "ASK", "MOVED", "NOREPLICAS",
	"NOSCRIPT", "ERR max number of clients",
}

// Grade grades an error of a client. One that waiting can heal comes back as it is; one
// that it cannot is made final. A hold stands more: a lock in use is worth trying for
// while a server that is full or was demoted may recover. failover says that the client
// follows a new primary, so that READONLY heals.
func Grade(err error, hold, failover bool) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, redis.ErrClosed) {
		return &final{err}
	}
	text, ok := Text(err)
	if !ok {
		return err // network, timeout, pool
	}
	if slices.ContainsFunc(healing, func(code string) bool { return Says(text, code) }) {
		return err
	}
	if Says(text, "READONLY") && (hold || failover) || Says(text, "OOM") && hold {
		return err
	}
	if strings.Contains(text, "user executing the script can't") {
		err = fmt.Errorf("no permission (NOPERM) inside a script: %w", err)
	}
	return &final{err}
}

// Reply is an error that a server put into a list of answers.
type Reply string

func (e Reply) Error() string { return string(e) }

// RedisError marks it as a server's, for go-redis.
func (e Reply) RedisError() {}

// Text returns the text of an error that the server answered with, also when a hook has
// wrapped it.
func Text(err error) (string, bool) {
	if err == nil {
		return "", false
	}
	var reply redis.Error
	if errors.As(err, &reply) {
		return reply.Error(), true
	}
	return "", false
}

// Says reports whether a server's error has this code: at its beginning, or inside the
// text that servers before 7.0 put around errors within scripts.
func Says(text, code string) bool {
	if strings.HasPrefix(text, code) {
		rest := text[len(code):]
		return rest == "" || rest[0] == ' '
	}
	return strings.HasPrefix(text, "ERR ") &&
		(strings.Contains(text, ": "+code+" ") || strings.Contains(text, "-"+code+" "))
}
