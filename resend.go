package holdfast

import (
	"context"
	"encoding"
	"errors"
	"sync/atomic"
	"unsafe"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/script"
)

// errRepeated says that the client has sent a command more than once, because a
// reply did not come: what was answered may be the second copy, and the first may
// have run, or may yet run.
var errRepeated = errors.New("the client sent the command more than once")

// ownerArg is an owner value as a command's argument, which counts how often it
// is written to a connection. go-redis repeats commands by itself and tells nobody,
// but it asks an argument of this kind for its bytes each time.
type ownerArg struct {
	owner string
	sent  atomic.Int32
}

var _ encoding.BinaryMarshaler = (*ownerArg)(nil)

// MarshalBinary returns the bytes that are sent. They are only read, so the string's
// own are good.
func (a *ownerArg) MarshalBinary() ([]byte, error) {
	a.sent.Add(1)
	return unsafe.Slice(unsafe.StringData(a.owner), len(a.owner)), nil
}

// String is for hooks that print commands.
func (a *ownerArg) String() string { return a.owner }

// runScript runs a script for an owner. One that the server does not know has not
// run, so that does not count as sent.
func runScript(ctx context.Context, c script.Evaler, s *script.Script, keys []string, owner *ownerArg, args ...any) *redis.Cmd {
	args = append([]any{owner}, args...)
	cmd := s.ByDigest(ctx, c, keys, args...)
	if script.Missing(cmd.Err()) {
		owner.sent.Add(-1) // an earlier copy may yet run, and then find the script
		cmd = s.ByText(ctx, c, keys, args...)
	}
	return cmd
}

// repeated reports whether the command went out more than once.
func (a *ownerArg) repeated() bool { return a.sent.Load() > 1 }
