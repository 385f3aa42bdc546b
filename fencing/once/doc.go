// Package once runs a function at most once for each operation id, and remembers its
// result, so that a repetition gets the first result. It is for effects that no fencing
// token can guard: the API of a third party that cannot check one.
//
//	result, err := runner.Run(ctx, "charge:order-17", func(ctx context.Context) ([]byte, error) {
//		return bank.Charge(ctx, order17) // at most once, whoever calls
//	})
//
// An id is claimed in a [Store] before the function is called, and the result is stored
// after it. No claim ends by itself: who cannot know whether the effect has happened must
// not try again.
//
// # What it does not give
//
// It is not exactly once, which nobody can give from outside. A process that dies between
// the effect and the memory of it leaves a claim, and a function that fails leaves
// [ErrUnknown]. From then on every call for this id is refused, until a person or a
// program has looked at the third party, and said so by [Runner.Resolve] or
// [Runner.Forget].
//
// It is as good as its memory. Results in Redis are kept for a time, see [WithKeep]; a
// repetition after that runs again. A failover of Redis may lose the last claims, FLUSHALL
// and eviction by allkeys-* lose any, and then it runs again too. A database that has
// committed to disk does better, see [NewSQL]; one that is restored from a backup has lost
// what came after that.
//
// Where the third party takes an idempotency key of its own, that is stronger: pass the id
// on to it, and keep this package for the result.
package once
