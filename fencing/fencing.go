// Package fencing has fencing tokens, numbers that grow with every grant of a lock, and
// the checks that refuse stale ones where it counts: at the resource.
//
// A lock alone cannot stop a process that was paused between its last check and its
// write. A resource that refuses a token lower than the highest it has seen can. The idea
// is from Martin Kleppmann, "How to do distributed locking" (2016), section "Making the
// lock safe with fencing"; Chubby calls the same thing a sequencer (Burrows, OSDI 2006,
// section 2.4).
//
// Tokens come from [holdfast.WithFencing]. A check belongs in the same atomic step as the
// write that it guards, so take the one that is made for your resource: [Gate] for the
// memory of one process, [Write] for stores with conditional writes, and the packages
// below this one for the rest.
//
// Enter before you read. A resource that learns of a new token only from the new holder's
// first write lets an old holder write after the new one has read: what the new one then
// writes undoes that, or builds upon what is gone. So the first thing that a holder does
// is to enter, with its token, and only then to read what it will change.
//
// Tokens order grants, not effects: where a write passes through a queue, check it again
// at the end of that.
//
// [holdfast.WithFencing]: https://pkg.go.dev/github.com/holdfast-go/holdfast#WithFencing
package fencing

import "context"

// Token is a fencing token. Without a source of its own the first grant of a key has token
// 1; each later grant has a greater one. 0 means that there is none.
type Token int64

// Claim is a token and who drew it. The zero value claims nothing.
type Claim struct {
	Token Token
	Owner string // the owner value of the grant, as Lock.Owner; "": not known
}

type contextKey struct{}

// NewContext returns a child of ctx that carries t. The context of a lock that
// was taken with holdfast.WithFencing carries its token already.
func NewContext(ctx context.Context, t Token) context.Context {
	return WithClaim(ctx, Claim{Token: t})
}

// FromContext returns the token that ctx carries, and whether it carries one. With
// nested locks it is that of the innermost lock taken with fencing, which need not
// be the innermost lock: ask Lock.Token when it matters which.
func FromContext(ctx context.Context) (Token, bool) {
	c, ok := ClaimFrom(ctx)
	return c.Token, ok
}

// WithClaim returns a child of ctx that carries c: a token like NewContext, and the owner
// who drew it. The context of a lock carries both.
func WithClaim(ctx context.Context, c Claim) context.Context {
	return context.WithValue(ctx, contextKey{}, c)
}

// ClaimFrom returns the claim that ctx carries, and whether it carries one.
func ClaimFrom(ctx context.Context) (Claim, bool) {
	c, ok := ctx.Value(contextKey{}).(Claim)
	return c, ok
}
