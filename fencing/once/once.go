package once

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
)

const (
	// MaxID is how long an id may be, in bytes.
	MaxID = 255
	// MaxResult is how long a result may be to be remembered, in bytes. Keep small ones:
	// the number of a booking rather than its document.
	MaxResult = 1 << 20

	maxReason    = 1 << 10
	defaultGrace = 5 * time.Second
	firstPause   = 50 * time.Millisecond
)

// Runner runs operations. Make one with New. It is safe for concurrent use, and holds
// nothing that must be freed.
type Runner struct {
	store Store
	grace time.Duration
}

// Option changes what New makes.
type Option interface{ apply(*Runner) error }

type optionFunc func(*Runner) error

func (f optionFunc) apply(r *Runner) error { return f(r) }

// WithGrace sets for how long, at most, Run tries to tell the store how the function has
// ended, also when its context has ended. The default is 5 s. It must be above 0.
func WithGrace(d time.Duration) Option {
	return optionFunc(func(r *Runner) error {
		if d <= 0 {
			return fmt.Errorf("once: grace %v: must be above 0", d)
		}
		r.grace = d
		return nil
	})
}

// New returns a Runner that remembers in store. Its errors are for bad arguments.
func New(store Store, opts ...Option) (*Runner, error) {
	if isNil(store) {
		return nil, errors.New("once: nil store")
	}
	r := &Runner{store: store, grace: defaultGrace}
	for _, o := range opts {
		if o == nil {
			return nil, errors.New("once: nil option")
		}
		if err := o.apply(r); err != nil {
			return nil, err
		}
	}
	return r, nil
}

func isNil(x any) bool {
	v := reflect.ValueOf(x)
	return !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil()
}

func printable(id string) bool { return utf8.ValidString(id) && !strings.ContainsRune(id, 0) }

// Run calls fn, unless an operation of this id has been begun before, by anybody. It
// returns the result of fn, or that of the first call. The id must name one effect, with
// all that makes it another one: UTF-8 without zero bytes, at most MaxID bytes. A result
// that is nil is the same as an empty one.
//
// fn gets ctx, and should heed it. What it returns counts so:
//
//   - no error: the operation is done, and the result is remembered, if it has no more
//     than MaxResult bytes
//   - NotDone(err): nothing has happened. The claim is given back; the error matches
//     ErrNotDone and err
//   - any other error, or a panic: the outcome is unknown, and stays so. The error is an
//     *UnknownError; a panic goes on
//
// Other errors: ErrInProgress and *UnknownError for what another call has begun, fn was
// not called then; ErrNotRemembered, the only one that comes with a result; those of the
// store and of ctx, which say that fn was not called and match ErrNotDone. After an error
// of the store the id may have been claimed all the same, and then is ErrInProgress until
// somebody calls Forget; Run has tried to give it back.
func (r *Runner) Run(
	ctx context.Context, id string, fn func(ctx context.Context) ([]byte, error),
) ([]byte, error) {
	if fn == nil {
		return nil, errors.New("once: nil function")
	}
	if err := checkID(id); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, uncalled(id, context.Cause(ctx))
	}
	run := uuid.NewString()
	record, err := r.store.Begin(ctx, id, run)
	if err == nil && record.Run != run {
		return first(id, record)
	}
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		err = uncalled(id, err)
		// It may be claimed, and fn was not called. One try: the caller waits for this.
		after, cancel := r.after(ctx)
		defer cancel()
		_ = r.store.Abandon(after, id, run)
		return nil, err
	}
	return r.call(ctx, id, run, fn)
}

// uncalled is the error of a Run that did not call its function.
func uncalled(id string, err error) error {
	return fmt.Errorf("%w: %q: %w", ErrNotDone, id, err)
}

// first returns what there is of the first call for an id.
func first(id string, record Record) ([]byte, error) {
	switch record.State {
	case Done:
		return record.Payload, nil
	case Unknown:
		return nil, &UnknownError{ID: id, Since: record.Since, Reason: string(record.Payload)}
	case Running:
		return nil, fmt.Errorf("%w: %q%s", ErrInProgress, id, since(record.Since))
	}
	return nil, fmt.Errorf("once: %q has the state %q", id, record.State)
}

func (r *Runner) call(
	ctx context.Context, id, run string, fn func(ctx context.Context) ([]byte, error),
) ([]byte, error) {
	end := func(state State, payload []byte) error {
		return r.remember(ctx, func(ctx context.Context) error { return r.store.End(ctx, id, run, state, payload) })
	}
	returned := false
	defer func() {
		if !returned { // it panics, or ends its goroutine; both go on after this
			_ = end(Unknown, []byte("the function did not return: it has panicked"))
		}
	}()
	result, err := fn(ctx)
	returned = true
	if err == nil {
		return result, succeeded(id, result, end)
	}
	// By type: the error of a Run inside fn says nothing of the rest of fn.
	if nothing, ok := err.(*notDone); ok { //nolint:errorlint
		err = r.remember(ctx, func(ctx context.Context) error { return r.store.Abandon(ctx, id, run) })
		if err != nil {
			return nil, fmt.Errorf("once: %q: %w; giving the claim back: %w", id, nothing, err)
		}
		return nil, fmt.Errorf("once: %q: %w", id, nothing)
	}
	unknown := &UnknownError{ID: id, Reason: reason(err), Err: err}
	if lost := end(Unknown, []byte(unknown.Reason)); lost != nil {
		unknown.Err = errors.Join(err, lost) // others see ErrInProgress
	}
	return nil, unknown
}

// succeeded remembers a result.
func succeeded(id string, result []byte, end func(State, []byte) error) error {
	if len(result) > MaxResult {
		err := fmt.Errorf("%w: %q: it has %d bytes, more than %d", ErrNotRemembered, id, len(result), MaxResult)
		_ = end(Unknown, []byte("it has succeeded, with a result too long to be remembered"))
		return err
	}
	if err := end(Done, result); err != nil {
		return fmt.Errorf("%w: %q: %w", ErrNotRemembered, id, err)
	}
	return nil
}

// reason returns the text of err, of a length that can be stored.
func reason(err error) string {
	text := err.Error()
	if len(text) > maxReason {
		text = text[:maxReason]
	}
	return strings.ToValidUTF8(text, "?")
}

// after returns a context that outlives ctx by the grace.
func (r *Runner) after(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), r.grace)
}

// remember tells the store something, again until it has heard or the grace is over: what
// it does not hear, a person will have to find out.
func (r *Runner) remember(ctx context.Context, tell func(context.Context) error) error {
	ctx, cancel := r.after(ctx)
	defer cancel()
	for pause := firstPause; ; pause *= 2 {
		err := tell(ctx)
		if err == nil || errors.Is(err, ErrLost) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
	}
}

// Resolve stores the result of an operation by hand, whatever its state; but another
// result stays, which is an error. It is for who has looked at the third party and found
// that the effect has happened. A run that is still at work gets ErrNotRemembered.
func (r *Runner) Resolve(ctx context.Context, id string, result []byte) error {
	if err := checkID(id); err != nil {
		return err
	}
	if len(result) > MaxResult {
		return fmt.Errorf("once: resolve %q: result of %d bytes, more than %d", id, len(result), MaxResult)
	}
	if err := r.store.Resolve(ctx, id, result); err != nil {
		return fmt.Errorf("once: resolve %q: %w", id, err)
	}
	return nil
}

// Forget lets an operation run again, whatever its state. It is for who has looked at the
// third party and found that the effect has not happened, and that no process is at work
// on it any more.
func (r *Runner) Forget(ctx context.Context, id string) error {
	if err := checkID(id); err != nil {
		return err
	}
	if err := r.store.Forget(ctx, id); err != nil {
		return fmt.Errorf("once: forget %q: %w", id, err)
	}
	return nil
}
