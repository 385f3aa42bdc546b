package fencing

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"slices"
	"time"
)

// ErrConflict is what [Versioned.WriteIf] returns when the object has another version.
var ErrConflict = errors.New("fencing: the object has changed")

// ErrFormat is what a Versioned store may return for something under the name that is not an
// object of its own, or damaged.
var ErrFormat = errors.New("fencing: not an object of this package, or a damaged one")

// Object is what a store with conditional writes keeps under a name.
type Object struct {
	Data    []byte
	Claim   Claim  // the mark: the highest claim that it has seen
	Stamp   string // of the write that made it, by which that is known again
	Version string // given by the store; "": there is no object
}

// Versioned is a store with conditional writes: object storage, a key-value store with
// versions, files. It must be safe for concurrent use, also by other processes.
type Versioned interface {
	// Read returns the object of a name, the zero Object if there is none.
	Read(ctx context.Context, name string) (Object, error)

	// WriteIf stores o with its Claim and Stamp, if the version in the store is still
	// o.Version, which "" says of no object. Otherwise it stores nothing and returns an
	// error that matches [ErrConflict]. Any other error leaves it open what happened.
	WriteIf(ctx context.Context, name string, o Object) error
}

// How long Write waits after a conflict: as backoff with full jitter (Brooker,
// "Exponential Backoff And Jitter", 2015).
const (
	firstConflict = 5 * time.Millisecond
	mostConflict  = 500 * time.Millisecond
)

// Enter makes an object refuse every token lower than this from now on, and leaves its data
// as they are. Call it before you read what you will change. An object that does not exist
// is made, with no data.
//
// Its errors are those of [Write].
func Enter(ctx context.Context, store Versioned, name string, token Token, rules ...Rule) error {
	return update(ctx, store, name, token, rules, nil)
}

// Write replaces the data of an object by what change makes of them, unless the object has
// seen a newer token. Data and mark are one conditional write; after a conflict it reads
// again, asks again whether the token is stale, and calls change again, until ctx ends. So
// change must have no effect but its result; nil says that there were no data. Its error
// is returned as it is, and nothing is written.
//
// The other errors are [*StaleError], ErrNoToken, the end of ctx, and those of the store.
// After one of a write it is open whether that took place: call Read and look, rather than
// make the same change twice. A write whose answer was lost, and which the store's client
// sent again, is known by its stamp and not made twice, unless somebody has written since.
func Write(ctx context.Context, store Versioned, name string, token Token,
	change func(data []byte) ([]byte, error), rules ...Rule) error {
	if change == nil {
		return errors.New("fencing: nil change")
	}
	return update(ctx, store, name, token, rules, change)
}

func update(ctx context.Context, store Versioned, name string, token Token, rules []Rule,
	change func(data []byte) ([]byte, error)) error {
	c, err := NewCheck(token, rules...)
	if err != nil {
		return err
	}
	if store == nil {
		return errors.New("fencing: nil store")
	}
	var tried []string // stamps of this call
	for n := 0; ; n++ {
		o, err := store.Read(ctx, name)
		if err != nil {
			return fmt.Errorf("fencing: read %q: %w", name, err)
		}
		if slices.Contains(tried, o.Stamp) {
			return nil // the conflict was with ourselves
		}
		mark, err := c.Admit(name, o.Claim)
		if err != nil {
			return err
		}
		switch {
		case change != nil:
			if o.Data, err = change(o.Data); err != nil {
				return err
			}
		case o.Version != "" && mark == o.Claim:
			return nil // entered before
		}
		o.Claim, o.Stamp = mark, rand.Text()
		err = store.WriteIf(ctx, name, o)
		if err == nil {
			return nil
		}
		if !errors.Is(err, ErrConflict) {
			return fmt.Errorf("fencing: write %q: %w", name, err)
		}
		tried = append(tried, o.Stamp)
		if err := pauseAfter(ctx, n); err != nil {
			return fmt.Errorf("fencing: write %q: %w", name, errors.Join(err, ErrConflict))
		}
	}
}

func pauseAfter(ctx context.Context, n int) error {
	most := min(firstConflict<<min(n, 10), mostConflict)
	timer := time.NewTimer(mathrand.N(most) + 1)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
