package holdfast

import (
	"context"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/keyspace"
	"github.com/holdfast-go/holdfast/internal/refusal"
	"github.com/holdfast-go/holdfast/internal/script"
	"github.com/holdfast-go/holdfast/lua"
)

var (
	detachScript = script.New(lua.Detach)
	attachScript = script.New(lua.Attach)
)

var _ detacher = (*redisStore)(nil)

func (s *redisStore) detach(ctx context.Context, l Lease) error {
	return s.verdict(detachScript.Run(ctx, s.client, []string{l.Key}, l.Owner, clock.Millis(l.TTL)))
}

func (s *redisStore) attach(ctx context.Context, r Request, owner string) (Grant, error) {
	keys := []string{r.Key}
	if r.Fencing {
		fence, ok := keyspace.Companion(r.Key, "fence")
		if !ok {
			return Grant{}, refusal.Final(invalid("key %q has no room for a counter", r.Key))
		}
		keys = append(keys, fence)
	}
	grant, _, err := s.take(r, attachScript.Run(ctx, s.client, keys, owner, r.Owner, clock.Millis(r.TTL)))
	return grant, err
}
