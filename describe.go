package holdfast

import (
	"context"
	"encoding/json"
	"maps"
	"os"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/script"
	"github.com/holdfast-go/holdfast/lua"
)

const (
	mostLabels   = 4 << 10 // bytes of all labels together, as JSON
	describeTime = 2 * time.Second
)

// WithInspect tells inspectors more of a lock: since when it is held, on which host and by which
// process. That is kept in a hash beside the lock, with its TTL, which costs one script after the
// grant and one more with each renewal. See LockInfo. Only one Redis has room for it; other stores,
// and keys whose braces leave none, take no notice.
func WithInspect() Option {
	return optionFunc(func(c *config) error {
		c.inspect = true
		return c.describe()
	})
}

// WithLabels is WithInspect with labels of your own, such as the number of a request; a nil map is
// none. They are shown to whoever may read the server: put no secrets there. Together they have at
// most 4 KiB as JSON. The map is copied.
func WithLabels(labels map[string]string) Option {
	labels = maps.Clone(labels)
	return optionFunc(func(c *config) error {
		c.inspect, c.labels = true, labels
		return c.describe()
	})
}

// about is what is told of a lock besides its value.
type about struct {
	Host   string            `json:"host"`
	PID    int               `json:"pid"`
	Labels map[string]string `json:"labels,omitempty"`
}

// describe makes the text that is written for each lock.
func (c *config) describe() error {
	host, _ := os.Hostname() // "" if it has none
	text, err := json.Marshal(about{host, os.Getpid(), c.labels})
	if err != nil {
		return invalid("WithLabels: %v", err)
	}
	if len(text) > mostLabels {
		return invalid("WithLabels: %d bytes, at most %d", len(text), mostLabels)
	}
	c.about = string(text)
	return nil
}

// describer is what a Store offers that can tell more of locks.
type describer interface {
	describe(ctx context.Context, all []description)
}

// description is what is told of one lock.
type description struct {
	key, owner, about string
	since             time.Time
}

// describe tells more of those locks whose settings want it. What cannot be told is left out:
// nothing but the picture of an inspector depends on it.
func (l *Locker) describe(locks ...*Lock) {
	s, ok := l.store.Store.(describer)
	if !ok {
		return
	}
	var all []description
	for _, k := range locks {
		if k.config.inspect && k.ctx.Err() == nil {
			all = append(all, description{k.full, k.owner, k.config.about, k.since.Wall()})
		}
	}
	if len(all) == 0 {
		return
	}
	l.group.Start(func() { // ends with describeTime, or the client's own timeouts
		ctx, cancel := context.WithTimeout(l.base, describeTime)
		defer cancel()
		_ = contain(func() { s.describe(ctx, all) })
	})
}

var describeScript = script.New(lua.Describe)

var _ describer = (*redisStore)(nil)

// aboutOf is the key of a lock's description.
func aboutOf(key string) (string, bool) { return keyspace.Companion(key, "about") }

func (s *redisStore) describe(ctx context.Context, all []description) {
	pipe := s.client.Pipeline()
	for _, d := range all {
		if key, ok := aboutOf(d.key); ok {
			// By text: a pipeline could not send what the server has forgotten once more.
			describeScript.ByText(ctx, pipe, []string{d.key, key}, d.owner, d.about, d.since.UnixMilli())
		}
	}
	_, _ = pipe.Exec(ctx)
}

// readAbout puts a description into what is told of a lock, if it is that of its owner.
func (i *LockInfo) readAbout(fields *redis.MapStringStringCmd) {
	told := fields.Val()
	var a about
	if i.Owner == "" || told["owner"] != i.Owner || json.Unmarshal([]byte(told["about"]), &a) != nil {
		return
	}
	i.Host, i.PID, i.Labels = a.Host, a.PID, a.Labels
	if ms, err := strconv.ParseInt(told["since"], 10, 64); err == nil {
		i.Since = time.UnixMilli(ms)
	}
}
