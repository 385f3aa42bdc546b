package holdfast

import (
	"context"
	"encoding"
	"sync/atomic"
	"unsafe"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/script"
)

// runOnce runs a script without repetition, but for the text of one that the server
// does not know. What matters is to know which copy of a release or an Extend was answered:
// one that was not may have run, or may yet run. So the Locker repeats those, and sees each
// answer. The keys come first in args.
func (s *redisStore) runOnce(ctx context.Context, sc *script.Script, keys int, args ...any) *redis.Cmd {
	cmd := sc.Command(ctx, false, keys, args...)
	err := process(ctx, s.sender, script.Single{Cmd: cmd})
	if script.Missing(err) {
		cmd = sc.Command(ctx, true, keys, args...)
		err = process(ctx, s.sender, script.Single{Cmd: cmd})
	}
	if err != nil {
		return failedCmd(ctx, err)
	}
	return cmd
}

// textArg is a text as a command's argument that needs no allocation of its own.
type textArg string

var _ encoding.BinaryMarshaler = (*textArg)(nil)

// MarshalBinary returns the bytes that are sent. They are only read.
func (a *textArg) MarshalBinary() ([]byte, error) {
	return unsafe.Slice(unsafe.StringData(string(*a)), len(*a)), nil
}

// String is for hooks that print commands.
func (a *textArg) String() string { return string(*a) }

// ownerArg is an owner value as a command's argument, which counts how often it
// is written to a connection. go-redis repeats commands by itself and tells nobody,
// but it asks an argument of this kind for its bytes each time. An acquisition is
// left to be repeated so, because it is idempotent; but a copy may run late.
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

// repeated reports whether the command went out more than once.
func (a *ownerArg) repeated() bool { return a.sent.Load() > 1 }

// refused takes back the only copy that was sent: the server has answered that it did
// not run it.
func (a *ownerArg) refused() { a.sent.CompareAndSwap(1, 0) }
