package redisfence

import (
	"context"
	_ "embed" // for the scripts
	"errors"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/script"
)

var (
	//go:embed lua/admit.lua
	admitLua string
	//go:embed lua/enter.lua
	enterLua string
	//go:embed lua/load.lua
	loadLua string
	//go:embed lua/set.lua
	setLua string
	//go:embed lua/hset.lua
	hsetLua string
	//go:embed lua/append.lua
	appendLua string
	//go:embed lua/del.lua
	delLua string

	enterScript  = script.New(admitLua + enterLua)
	loadScript   = script.New(loadLua)
	setScript    = script.New(admitLua + setLua)
	hsetScript   = script.New(admitLua + hsetLua)
	appendScript = script.New(admitLua + appendLua)
	delScript    = script.New(admitLua + delLua)
)

// run runs a script of the package, and reads its answer. repeat lets the client send it
// again by its own rules.
func (f *Fence) run(
	ctx context.Context, s *script.Script, resource string, repeat bool, keys []string, args ...any,
) (ok bool, mark fencing.Claim, err error) {
	if err := ctx.Err(); err != nil {
		return false, mark, fmt.Errorf("redisfence: %q: %w", resource, errors.Join(err, context.Cause(ctx)))
	}
	var cmd *redis.Cmd
	if repeat {
		cmd = s.Run(ctx, f.client, keys, args...)
	} else {
		cmd = s.RunSingle(ctx, f.client, keys, args...)
	}
	answer, err := cmd.Slice()
	if err == nil {
		ok, mark, err = parse(answer)
	}
	if err != nil {
		return false, fencing.Claim{}, fmt.Errorf("redisfence: %q: %w", resource, err)
	}
	return ok, mark, nil
}

// parse reads {1 or 0, token, owner}.
func parse(answer []any) (ok bool, mark fencing.Claim, err error) {
	if len(answer) == 3 {
		admitted, isInt := answer[0].(int64)
		token, isText := answer[1].(string)
		owner, isOwner := answer[2].(string)
		n, err := strconv.ParseInt(token, 10, 64)
		if isInt && isText && isOwner && err == nil && n >= 0 {
			return admitted == 1, fencing.Claim{Token: fencing.Token(n), Owner: owner}, nil
		}
	}
	return false, mark, fmt.Errorf("the mark holds no token: the server answered %q", answer)
}
