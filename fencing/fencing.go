// Package fencing carries fencing tokens: numbers that grow with every grant
// of a lock. A lock alone cannot stop a process that was paused between its
// last check and its write. A resource that refuses a token lower than the
// highest it has seen can.
//
// The idea is from Martin Kleppmann, "How to do distributed locking" (2016),
// section "Making the lock safe with fencing"; Chubby calls the same thing a
// sequencer (Burrows, OSDI 2006, section 2.4).
package fencing

import "context"

// Token is a fencing token. The first grant of a key has token 1; each later
// grant has a greater one. 0 means that there is none.
type Token int64

type contextKey struct{}

// NewContext returns a child of ctx that carries t. The context of a lock that
// was taken with holdfast.WithFencing carries its token already.
func NewContext(ctx context.Context, t Token) context.Context {
	return context.WithValue(ctx, contextKey{}, t)
}

// FromContext returns the token that ctx carries, and whether it carries one. With
// nested locks it is that of the innermost lock taken with fencing, which need not
// be the innermost lock: ask Lock.Token when it matters which.
func FromContext(ctx context.Context) (Token, bool) {
	t, ok := ctx.Value(contextKey{}).(Token)
	return t, ok
}
