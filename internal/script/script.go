// Package script runs Lua scripts by digest, and by text where the server
// does not have them. It is for the packages of holdfast.
package script

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Evaler is what a script needs of a client: any go-redis client, connection
// or pipeline has it.
type Evaler interface {
	Eval(ctx context.Context, script string, keys []string, args ...any) *redis.Cmd
	EvalSha(ctx context.Context, sha1 string, keys []string, args ...any) *redis.Cmd
}

// Script is one script. It is immutable and safe for concurrent use.
type Script struct {
	text string
	sha  string // empty where SHA-1 may not be computed: the text is sent then

	textArg, shaArg any // the same, as arguments of commands
}

// New makes a Script of its text.
func New(text string) *Script {
	s := &Script{text: text, sha: digest(text)}
	s.textArg, s.shaArg = s.text, s.sha
	return s
}

// Text returns the script's text.
func (s *Script) Text() string { return s.text }

// Digest returns what servers know the script by, a string, as an argument of a command;
// nil where it cannot be computed.
func (s *Script) Digest() any {
	if s.sha == "" {
		return nil
	}
	return s.shaArg
}

// digest names the script as the server does. It secures nothing, but a
// process under GODEBUG=fips140=only may not compute it: crypto/sha1 panics.
func digest(text string) (sha string) {
	defer func() {
		if recover() != nil {
			sha = ""
		}
	}()
	sum := sha1.Sum([]byte(text))
	return hex.EncodeToString(sum[:])
}

// Run runs the script by its digest, and by its text when the server answers
// that it does not know it: after a restart, a failover or SCRIPT FLUSH.
func (s *Script) Run(ctx context.Context, c Evaler, keys []string, args ...any) *redis.Cmd {
	cmd := s.ByDigest(ctx, c, keys, args...)
	if Missing(cmd.Err()) {
		return s.ByText(ctx, c, keys, args...)
	}
	return cmd
}

// Command returns the command that runs the script by its digest, or by its text. Its
// keys, the first of which must be a string, come before its other arguments.
func (s *Script) Command(ctx context.Context, text bool, keys int, args ...any) *redis.Cmd {
	all := make([]any, 0, 3+len(args))
	if text || s.sha == "" {
		all = append(all, "eval", s.textArg, keys)
	} else {
		all = append(all, "evalsha", s.shaArg, keys)
	}
	cmd := redis.NewCmd(ctx, append(all, args...)...)
	if keys > 0 {
		cmd.SetFirstKeyPos(3)
	}
	return cmd
}

// Single is a command that go-redis does not repeat by itself, whatever MaxRetries says.
// Redirects of a cluster are still followed; what they answer did not run.
type Single struct{ *redis.Cmd }

// NoRetry is asked by go-redis before it repeats a command.
func (Single) NoRetry() bool { return true }

// Processor is what sends a command: any go-redis client or connection.
type Processor interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// RunSingle is Run without repetition by the client: what got no answer may have run, or
// may yet run.
func (s *Script) RunSingle(ctx context.Context, c Processor, keys []string, args ...any) *redis.Cmd {
	all := make([]any, 0, len(keys)+len(args))
	for _, k := range keys {
		all = append(all, k)
	}
	all = append(all, args...)
	cmd := s.Command(ctx, false, len(keys), all...)
	err := c.Process(ctx, Single{cmd})
	if Missing(err) {
		cmd = s.Command(ctx, true, len(keys), all...)
		err = c.Process(ctx, Single{cmd})
	}
	if err != nil && cmd.Err() == nil {
		cmd.SetErr(err) // of a hook
	}
	return cmd
}

// ByDigest sends the script by its digest only. In a pipeline the answer is not
// there yet; the caller looks for Missing when it is.
func (s *Script) ByDigest(ctx context.Context, c Evaler, keys []string, args ...any) *redis.Cmd {
	if s.sha == "" {
		return c.Eval(ctx, s.text, keys, args...)
	}
	return c.EvalSha(ctx, s.sha, keys, args...)
}

// ByText sends the script's text, which also puts it into the server's cache.
func (s *Script) ByText(ctx context.Context, c Evaler, keys []string, args ...any) *redis.Cmd {
	return c.Eval(ctx, s.text, keys, args...)
}

// Missing reports whether err says that the server does not know a digest, or has
// no EVALSHA for us: then the text may do. It looks at the error's text: hooks may
// have wrapped or decorated it.
func Missing(err error) bool {
	if Unknown(err) {
		return true
	}
	if err == nil {
		return false
	}
	text := strings.ToLower(err.Error())
	return strings.Contains(text, "evalsha") &&
		(strings.Contains(text, "unknown command") || strings.Contains(text, "noperm"))
}

// Unknown reports whether err says that the server does not know a digest: it has not
// run the script.
func Unknown(err error) bool {
	return err != nil && strings.Contains(strings.ToLower(err.Error()), "noscript")
}
