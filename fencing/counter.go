package fencing

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/keyspace"
)

// Counter draws tokens from a counter in Redis by INCR, without a lock. Make one with
// NewCounter. It is safe for concurrent use, holds nothing that must be freed, and never
// closes the client.
//
// Take care: such a token orders those who draw, and says nothing of who may write. A process
// that was paused, and draws after that, has a fresh number; so under a lock, take the token
// of the grant itself, from holdfast.WithFencing. And the counter is one key: a failover, an
// eviction or a FLUSHALL that loses it makes it begin again with 1. All tokens are refused
// then until they have passed the highest that the resource has seen.
type Counter struct{ client redis.UniversalClient }

var _ Source = (*Counter)(nil)

// NewCounter returns a Counter over client: a server, Sentinel, Cluster or Ring. Its errors
// are for bad arguments.
func NewCounter(client redis.UniversalClient) (*Counter, error) {
	if v := reflect.ValueOf(client); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return nil, errors.New("fencing: nil client")
	}
	return &Counter{client}, nil
}

// Next returns a token for key, greater than all before. The first is 1. The counter is the
// key "{order:1}:fence" for "order:1", without TTL: the same as that of the locks with
// holdfast.WithFencing that have this key on the server, with the prefix of their Locker, so that
// no number is given twice. It has nothing to do with the tokens of a majority, or of a
// Source; and do not mix it with ClockFloor, whose counter ends.
//
// After an error a number may have been drawn; nobody gets that. The errors are about the key,
// or those of the client and the server, wrapped.
func (c *Counter) Next(ctx context.Context, key string) (Token, error) {
	if key == "" {
		return 0, errors.New("fencing: empty key")
	}
	counter, ok := keyspace.Companion(key, "fence")
	if !ok {
		return 0, fmt.Errorf("fencing: key %q has no place for a counter in its cluster slot", key)
	}
	if err := ctx.Err(); err != nil { // go-redis sends all the same
		return 0, fmt.Errorf("fencing: next token for %q: %w", key, errors.Join(err, context.Cause(ctx)))
	}
	n, err := c.client.Incr(ctx, counter).Result()
	if err == nil && n <= 0 {
		err = fmt.Errorf("the counter has given %d", n)
	}
	if err != nil {
		return 0, fmt.Errorf("fencing: next token for %q: %w", key, err)
	}
	return Token(n), nil
}
