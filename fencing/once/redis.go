package once

import (
	"context"
	_ "embed" // for the scripts
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/script"
)

var (
	//go:embed lua/begin.lua
	beginLua string
	//go:embed lua/end.lua
	endLua string
	//go:embed lua/abandon.lua
	abandonLua string
	//go:embed lua/resolve.lua
	resolveLua string

	beginScript   = script.New(beginLua)
	endScript     = script.New(endLua)
	abandonScript = script.New(abandonLua)
	resolveScript = script.New(resolveLua)
)

const (
	defaultPrefix = "once:"
	defaultKeep   = 7 * 24 * time.Hour
)

// errOtherResult is that of a Resolve.
var errOtherResult = errors.New("it is done already, with another result")

// RedisStore remembers in Redis: one hash for each operation. Make one with NewRedis. It is
// safe for concurrent use, holds nothing that must be freed, and never closes the client.
type RedisStore struct {
	client redis.UniversalClient
	prefix string
	keep   int64 // ms; 0: for ever
}

var _ Store = (*RedisStore)(nil)

// RedisOption changes what NewRedis makes.
type RedisOption interface{ applyRedis(*RedisStore) error }

type redisOption func(*RedisStore) error

func (f redisOption) applyRedis(s *RedisStore) error { return f(s) }

// WithKeep sets how long results are kept, 0 for ever. The default is 7 days. It must be
// longer than any repetition can take to come: after it, the id runs again. What is in
// progress or unknown is kept for ever.
func WithKeep(d time.Duration) RedisOption {
	return redisOption(func(s *RedisStore) error {
		if d != 0 && d < time.Millisecond {
			return fmt.Errorf("once: keep %v: must be 0 or at least %v", d, time.Millisecond)
		}
		s.keep = d.Milliseconds()
		return nil
	})
}

// WithPrefix puts prefix before every id, to make its key. The default is "once:".
func WithPrefix(prefix string) RedisOption {
	return redisOption(func(s *RedisStore) error { s.prefix = prefix; return nil })
}

// NewRedis returns a Store over client: a server, Sentinel, Cluster or Ring. Its errors are
// for bad arguments. Give the server noeviction, and a disk: see the package comment.
func NewRedis(client redis.UniversalClient, opts ...RedisOption) (*RedisStore, error) {
	if isNil(client) {
		return nil, errors.New("once: nil client")
	}
	s := &RedisStore{client: client, prefix: defaultPrefix, keep: defaultKeep.Milliseconds()}
	for _, o := range opts {
		if o == nil {
			return nil, errors.New("once: nil option")
		}
		if err := o.applyRedis(s); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Begin is that of Store. A copy that the client sends again finds its own claim.
func (s *RedisStore) Begin(ctx context.Context, id, run string) (Record, error) {
	answer, err := beginScript.Run(ctx, s.client, []string{s.prefix + id}, run).Slice()
	if err != nil {
		return Record{}, err
	}
	var text [4]string
	ok := len(answer) == len(text)
	for i := 0; ok && i < len(text); i++ {
		text[i], ok = answer[i].(string)
	}
	seconds, err := strconv.ParseInt(text[2], 10, 64)
	if !ok || err != nil {
		return Record{}, fmt.Errorf("the key %q holds no record", s.prefix+id)
	}
	return Record{State(text[0]), text[1], []byte(text[3]), time.Unix(seconds, 0)}, nil
}

// End is that of Store.
func (s *RedisStore) End(ctx context.Context, id, run string, state State, payload []byte) error {
	n, err := endScript.Run(ctx, s.client, []string{s.prefix + id}, run, string(state), payload, s.keep).Int()
	if err == nil && n == 0 {
		err = ErrLost
	}
	return err
}

// Abandon is that of Store.
func (s *RedisStore) Abandon(ctx context.Context, id, run string) error {
	return abandonScript.Run(ctx, s.client, []string{s.prefix + id}, run).Err()
}

// Resolve is that of Store. It is sent once: go-redis's MaxRetries does not apply.
func (s *RedisStore) Resolve(ctx context.Context, id string, result []byte) error {
	n, err := resolveScript.RunSingle(ctx, s.client, []string{s.prefix + id}, result, s.keep).Int()
	if err == nil && n == 0 {
		err = errOtherResult
	}
	return err
}

// Forget is that of Store. It is sent once: a late copy would delete what has begun since.
func (s *RedisStore) Forget(ctx context.Context, id string) error {
	return s.client.Process(ctx, script.Single{Cmd: redis.NewCmd(ctx, "del", s.prefix+id)})
}
