package holdfast

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/script"
	"github.com/holdfast-go/holdfast/lua"
)

var noteScript = script.New(lua.Note)

var _ waitGraph = (*redisStore)(nil)

// waitsOf is the key of a lock's waits: a hash of waits by id. Each is in the slot of
// its lock, and is read and written by itself, so any cluster will do.
func waitsOf(key string) (string, bool) { return keyspace.Companion(key, "waits") }

func (s *redisStore) now(ctx context.Context) (time.Time, error) {
	t, err := s.client.Time(ctx).Result()
	return t, s.wrap(err, true)
}

func (s *redisStore) note(ctx context.Context, id string, records []waitRecord, ttl time.Duration) error {
	for _, r := range records {
		waits, ok := waitsOf(r.Key)
		if !ok {
			continue // a key without room for companions: nobody sees this wait there
		}
		r.Verb, r.Channel = s.ears.channel(r.For)
		text, err := json.Marshal(r)
		if err != nil {
			return err
		}
		if err := noteScript.Run(ctx, s.client, []string{waits}, id, text, clock.Millis(ttl)).Err(); err != nil {
			return s.wrap(err, true)
		}
	}
	return nil
}

func (s *redisStore) unnote(ctx context.Context, id string, records []waitRecord) error {
	var errs []error
	for _, r := range records {
		if waits, ok := waitsOf(r.Key); ok {
			errs = append(errs, s.wrap(s.client.HDel(ctx, waits, id).Err(), true))
		}
	}
	return errors.Join(errs...)
}

func (s *redisStore) look(ctx context.Context, key string) (string, []waitRecord, error) {
	owner, err := s.client.Get(ctx, key).Result()
	if errors.Is(err, redis.Nil) {
		return "", nil, nil
	}
	waits, ok := waitsOf(key)
	if err != nil || !ok {
		return owner, nil, s.wrap(err, true)
	}
	all, err := s.client.HGetAll(ctx, waits).Result()
	if err != nil {
		return "", nil, s.wrap(err, true)
	}
	var records []waitRecord
	for _, text := range all {
		var r waitRecord
		if json.Unmarshal([]byte(text), &r) == nil { // else it is of another version
			records = append(records, r)
		}
	}
	return owner, records, nil
}

// brokenText is the message to the Locker of a lock that was broken. It does not believe it,
// but asks.
func brokenText(owner string) string { return fmt.Sprintf("%d 0 %s", brokenCall, owner) }

func (s *redisStore) tellBroken(ctx context.Context, r waitRecord) error {
	switch {
	case r.Channel == "":
		return nil // it hears of it with its next renewal
	case r.Verb == "SPUBLISH":
		return s.wrap(s.client.SPublish(ctx, r.Channel, brokenText(r.Owner)).Err(), true)
	}
	return s.wrap(s.client.Publish(ctx, r.Channel, brokenText(r.Owner)).Err(), true)
}
