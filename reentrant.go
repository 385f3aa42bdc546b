package holdfast

import (
	"context"
	"errors"

	"github.com/holdfast-go/holdfast/fencing"
)

// Reentrant lets a flow take a lock that it holds already, where it would get ErrDeadlock: the
// nested Lock stands on the same grant, with the same token, owner value and validity, and
// nothing is sent for it. The key is given up by the last Release of all, in whatever order they
// come; a loss ends all of them. Its other settings, such as the TTL, are those of the grant.
//
// A flow is all that runs under contexts derived from Lock.Context: so goroutines that a holder
// starts do not exclude each other any more, if they ask for the lock with such a context.
func Reentrant() Option {
	return optionFunc(func(c *config) error { c.reentrant = true; return nil })
}

// nest returns a Lock on the grant of outer, which the flow of ctx holds; nil: that is being given
// up, and cannot be taken again.
func (l *Locker) nest(ctx context.Context, outer *Lock, cfg *config) (*Lock, error) {
	root := outer
	if outer.root != nil {
		root = outer.root
	}
	if (cfg.fencing || cfg.source != nil) && root.token == 0 {
		return nil, invalid("Reentrant: %q is held by the same flow, without a token", root.key)
	}
	k := &Lock{
		l: root.l, root: root, config: root.config, key: root.key, full: root.full, owner: root.owner,
		token: root.token, since: root.since,
	}
	root.l.mu.Lock()
	live := root.stage == live && (!root.parted || root.nested > 0)
	if live {
		root.nested++
	}
	root.l.mu.Unlock()
	if !live {
		return nil, nil
	}
	parent := ctx
	if k.token != 0 { // a lock in between may have put another one there
		parent = fencing.WithClaim(ctx, fencing.Claim{Token: k.token, Owner: k.owner})
	}
	k.ctx.k = k
	k.ctx.Context, k.cancel = context.WithCancelCause(parent)
	// ctx may have been cut off from the grant's context, which ends this one all the same.
	k.unhook = context.AfterFunc(&root.ctx, func() { k.cancel(context.Cause(&root.ctx)) })
	return k, nil
}

// releaseNested is Release of a nested Lock.
func (k *Lock) releaseNested() error {
	root := k.root
	lost := root.ownLoss() // before the last one gives it up
	root.l.mu.Lock()
	parted := k.parted
	k.parted = true
	if !parted {
		root.nested--
	}
	last := root.parted && root.nested == 0
	root.l.mu.Unlock()
	if parted {
		return ErrNotHeld
	}
	k.unhook()
	k.cancel(ErrReleased)
	if last {
		return root.Release()
	}
	return lost
}

// ownLoss returns why the grant of k, which is not nested, was lost; nil: it was not, or
// nobody knows yet.
func (k *Lock) ownLoss() error {
	var lost *LostError
	if errors.As(k.Err(), &lost) && lost.Key == k.key {
		return lost
	}
	return nil
}
