package redisfence

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/script"
)

// markSuffix ends the names of marks, but for those of keys that are all tag.
const markSuffix = "mark"

// Fence writes to Redis under the guard of tokens. Make one with New. It is safe for
// concurrent use, holds nothing that must be freed, and never closes the client. Its
// calls end with ctx as far as the client heeds that: go-redis applies a deadline to its
// sockets only with ContextTimeoutEnabled, else its own timeouts count.
//
// All methods but Load take a token, above 0 or it is fencing.ErrNoToken, and rules for
// it. Their errors are those of the package comment.
type Fence struct {
	client redis.UniversalClient
	prefix string
}

var _ fencing.Marks = (*Fence)(nil)

// Option changes what New makes.
type Option interface{ apply(*Fence) }

type optionFunc func(*Fence)

func (f optionFunc) apply(x *Fence) { f(x) }

// WithPrefix puts prefix before every key, of values and so of marks. The default is none.
func WithPrefix(prefix string) Option {
	return optionFunc(func(f *Fence) { f.prefix = prefix })
}

// New returns a Fence over client: a server, Sentinel, Cluster or Ring. Its only errors
// are for a nil client and a nil option.
func New(client redis.UniversalClient, opts ...Option) (*Fence, error) {
	if v := reflect.ValueOf(client); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return nil, errors.New("redisfence: nil client")
	}
	f := &Fence{client: client}
	for _, o := range opts {
		if o == nil {
			return nil, errors.New("redisfence: nil option")
		}
		o.apply(f)
	}
	return f, nil
}

// Enter raises the mark of key to token, and writes nothing else: from now on older
// holders are refused. Do it before the first read. A holder may enter again with the same
// token, unless fencing.Once is a rule.
func (f *Fence) Enter(ctx context.Context, key string, token fencing.Token, rules ...fencing.Rule) error {
	check, err := fencing.NewCheck(token, rules...)
	if err != nil {
		return err
	}
	_, err = f.Raise(ctx, key, check)
	return err
}

// Set sets key to value, whatever type it had, as SET does. The value is what go-redis
// takes for an argument: a string, bytes, a number, an encoding.BinaryMarshaler.
//
// A ttl of 0 means that the value does not expire, redis.KeepTTL that it keeps what time
// it has left. Others are rounded up to milliseconds; one below 1 ms is an error.
func (f *Fence) Set(
	ctx context.Context, key string, value any, ttl time.Duration, token fencing.Token, rules ...fencing.Rule,
) error {
	ms, err := milliseconds(ttl)
	if err != nil {
		return err
	}
	return f.write(ctx, setScript, key, token, rules, value, ms)
}

// HSet sets one field of the hash key to value, as HSET does.
func (f *Fence) HSet(
	ctx context.Context, key, field string, value any, token fencing.Token, rules ...fencing.Rule,
) error {
	return f.write(ctx, hsetScript, key, token, rules, field, value)
}

// Append appends value to the string key, as APPEND does. After an error without an
// answer of the server it may be there, or come yet: read before you append again.
func (f *Fence) Append(
	ctx context.Context, key string, value any, token fencing.Token, rules ...fencing.Rule,
) error {
	return f.write(ctx, appendScript, key, token, rules, value)
}

// Del deletes key. Its mark stays, so that no older holder writes it again. It is no error
// if there is no such key.
func (f *Fence) Del(ctx context.Context, key string, token fencing.Token, rules ...fencing.Rule) error {
	return f.write(ctx, delScript, key, token, rules)
}

// Load returns the mark of a key, the zero Claim if it has none. It is asked of the
// primary.
func (f *Fence) Load(ctx context.Context, resource string) (fencing.Claim, error) {
	mark, _, err := f.keys(resource)
	if err != nil {
		return fencing.Claim{}, err
	}
	_, claim, err := f.run(ctx, loadScript, resource, true, []string{mark})
	return claim, err
}

// Raise is Enter for those who have a check. It returns the mark as it is then; with a
// *fencing.StaleError, as it was.
func (f *Fence) Raise(ctx context.Context, resource string, c fencing.Check) (fencing.Claim, error) {
	if c.Token <= 0 {
		return fencing.Claim{}, fencing.ErrNoToken
	}
	mark, _, err := f.keys(resource)
	if err != nil {
		return fencing.Claim{}, err
	}
	return f.admit(ctx, enterScript, resource, c, !c.Once, []string{mark})
}

func (f *Fence) write(
	ctx context.Context, s *script.Script, key string, token fencing.Token, rules []fencing.Rule, args ...any,
) error {
	check, err := fencing.NewCheck(token, rules...)
	if err != nil {
		return err
	}
	mark, full, err := f.keys(key)
	if err != nil {
		return err
	}
	_, err = f.admit(ctx, s, key, check, false, []string{mark, full}, args...)
	return err
}

// admit runs a script that begins with admit.lua.
func (f *Fence) admit(
	ctx context.Context, s *script.Script, resource string, c fencing.Check, repeat bool, keys []string, args ...any,
) (fencing.Claim, error) {
	once := "0"
	if c.Once {
		once = "1"
	}
	all := append([]any{strconv.FormatInt(int64(c.Token), 10), c.Owner, once}, args...)
	ok, mark, err := f.run(ctx, s, resource, repeat, keys, all...)
	if err == nil && !ok {
		err = &fencing.StaleError{Resource: resource, Token: c.Token, Seen: mark.Token}
	}
	return mark, err
}

// keys returns the mark of key, and key itself, as they are on the server.
func (f *Fence) keys(key string) (mark, full string, err error) {
	full = f.prefix + key
	tag := keyspace.Tag(full)
	suffix := markSuffix
	if len(tag) != len(full) {
		// A value there would be the mark of another key, and Set overwrites all.
		if strings.HasSuffix(full, ":"+markSuffix) || strings.HasSuffix(full, ":"+markSuffix+"{}") {
			return "", "", fmt.Errorf("redisfence: key %q has the name of a mark", full)
		}
		if len(tag) == len(full)-2 {
			suffix += "{}" // else it shared the mark of the key within the braces
		}
	}
	mark, ok := keyspace.Companion(full, suffix)
	if !ok {
		return "", "", fmt.Errorf("redisfence: key %q cannot have a mark in its cluster slot", full)
	}
	return mark, full, nil
}

// milliseconds returns ttl as set.lua takes it.
func milliseconds(ttl time.Duration) (int64, error) {
	switch {
	case ttl == redis.KeepTTL:
		return -1, nil
	case ttl == 0:
		return 0, nil
	case ttl < time.Millisecond:
		return 0, fmt.Errorf("redisfence: TTL %v: must be 0, redis.KeepTTL, or at least %v", ttl, time.Millisecond)
	}
	ms := int64(ttl / time.Millisecond)
	if ttl%time.Millisecond > 0 {
		ms++
	}
	return ms, nil
}
