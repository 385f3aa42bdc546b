package holdfast

import (
	"errors"
	"strings"

	"github.com/holdfast-go/holdfast/internal/refusal"
)

// unsentError is the error of a command that was not written to any connection.
type unsentError struct{ error }

func (e *unsentError) Unwrap() error { return e.error }

// mayHaveRun reports whether a command that failed with err may have run, or may yet.
func mayHaveRun(err error) bool {
	var said interface{ MayHaveRun() bool }
	if errors.As(err, &said) {
		return said.MayHaveRun()
	}
	var unsent *unsentError
	_, refused := refusal.Text(err)
	return !refused && !errors.As(err, &unsent)
}

// wrap grades an error of the client.
func (s *redisStore) wrap(err error, hold bool) error {
	return refusal.Grade(err, hold, s.traits.failover)
}

// isSplit reports whether a slot that is moving has its keys on two servers.
func isSplit(err error) bool {
	return err != nil && (strings.Contains(err.Error(), "TRYAGAIN") || strings.Contains(err.Error(), "CROSSSLOT"))
}
