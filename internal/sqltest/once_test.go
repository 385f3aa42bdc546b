//go:build unix

package sqltest

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing/once"
	"github.com/holdfast-go/holdfast/fencing/once/oncetest"
	"github.com/holdfast-go/holdfast/fencing/sqlfence"
)

func (e *env) onceStore() *once.SQLStore {
	e.Helper()
	s, err := once.NewSQL(e.db, e.dialect, once.WithTable("once"+e.suffix))
	require.NoError(e, err)
	require.NoError(e, s.Create(e.Context()))
	require.NoError(e, s.Create(e.Context()), "again")
	return s
}

func TestOnceStore(t *testing.T) {
	each(t, func(e *env) { oncetest.Run(e.T, e.onceStore()) })
}

// Many who run one operation at once call its function once, and those who come after have
// its result.
func TestOnceRun(t *testing.T) {
	each(t, func(e *env) {
		r, err := once.New(e.onceStore())
		require.NoError(e, err)
		ctx := e.bounded()
		for round := range 10 {
			id := fmt.Sprint("charge", round)
			var calls atomic.Int64
			run := func(int) error {
				for {
					got, err := r.Run(ctx, id, func(context.Context) ([]byte, error) {
						return []byte("receipt"), charge(&calls)
					})
					switch {
					case err == nil && string(got) == "receipt":
						return nil
					case err == nil:
						return fmt.Errorf("the result is %q", got)
					case errors.Is(err, once.ErrInProgress), errors.Is(err, once.ErrNotDone) && ctx.Err() == nil:
						pause(ctx, 2)
					default:
						return err
					}
				}
			}
			require.NoError(e, errors.Join(together(run)...))
			require.EqualValues(e, 1, calls.Load())
		}
	})
}

func charge(calls *atomic.Int64) error {
	calls.Add(1)
	return nil
}

// Of many who end, give back, forget and claim at once none gets an error but that of its
// database, and what is left is a record of one of them, or none.
func TestOnceCrowd(t *testing.T) {
	each(t, func(e *env) {
		s, ctx := e.onceStore(), e.bounded()
		errs := together(func(i int) error {
			run := fmt.Sprint("run", i)
			for range 20 {
				r, err := s.Begin(ctx, "id", run)
				if err == nil && r.Run == run {
					switch i % 3 {
					case 0:
						err = s.Abandon(ctx, "id", run)
					case 1:
						err = s.Forget(ctx, "id")
					default:
						if err = s.End(ctx, "id", run, once.Done, []byte(run)); err == nil {
							err = s.Forget(ctx, "id")
						}
					}
				}
				if err != nil && !again(err) && !errors.Is(err, once.ErrLost) {
					return err
				}
			}
			return nil
		})
		require.NoError(e, errors.Join(errs...))
		r, err := s.Begin(ctx, "id", "last")
		require.NoError(e, err)
		require.Contains(e, []once.State{once.Running, once.Done}, r.State)
	})
}

func TestOncePurge(t *testing.T) {
	each(t, func(e *env) {
		s, ctx := e.onceStore(), e.Context()
		for id, state := range map[string]once.State{"old": once.Done, "new": once.Done, "unknown": once.Unknown} {
			_, err := s.Begin(ctx, id, "run")
			require.NoError(e, err)
			require.NoError(e, s.End(ctx, id, "run", state, []byte("x")))
		}
		_, err := s.Begin(ctx, "running", "run")
		require.NoError(e, err)
		r, err := s.Begin(ctx, "new", "other")
		require.NoError(e, err)
		require.WithinDuration(e, time.Now(), r.Since, time.Minute)
		e.exec("UPDATE once"+e.suffix+" SET since = since - 7200 WHERE id <> ?", "new")
		n, err := s.Purge(ctx, time.Hour)
		require.NoError(e, err)
		require.EqualValues(e, 1, n, "only the old result")
		require.EqualValues(e, 3, e.int("SELECT COUNT(*) FROM once"+e.suffix))
		_, err = s.Purge(ctx, -1)
		require.Error(e, err)
		for _, age := range []time.Duration{math.MaxInt64, math.MaxInt64 - time.Second, 1} {
			_, err = s.Purge(ctx, age)
			require.NoError(e, err)
		}
		require.EqualValues(e, 3, e.int("SELECT COUNT(*) FROM once"+e.suffix))
	})
}

// A call whose context ends while it waits for a lock of the database leaves nothing that
// happens later.
func TestOnceContextEnds(t *testing.T) {
	eachServer(t, func(e *env) {
		s := e.onceStore()
		_, err := s.Begin(e.Context(), "id", "a")
		require.NoError(e, err)
		tx, err := e.db.BeginTx(e.Context(), nil)
		require.NoError(e, err)
		_, err = tx.ExecContext(e.Context(), e.sql("UPDATE once"+e.suffix+" SET since = since WHERE run = ?"), "a")
		require.NoError(e, err)
		for name, call := range map[string]func(context.Context) error{
			"forget":  func(ctx context.Context) error { return s.Forget(ctx, "id") },
			"abandon": func(ctx context.Context) error { return s.Abandon(ctx, "id", "a") },
			"resolve": func(ctx context.Context) error { return s.Resolve(ctx, "id", []byte("x")) },
			"end":     func(ctx context.Context) error { return s.End(ctx, "id", "a", once.Done, nil) },
		} {
			ctx, cancel := context.WithTimeout(e.Context(), 100*time.Millisecond)
			require.Error(e, call(ctx), name)
			cancel()
		}
		require.NoError(e, tx.Rollback())
		r, err := s.Begin(e.Context(), "id", "b")
		require.NoError(e, err)
		require.Equal(e, once.Running, r.State)
		require.Equal(e, "a", r.Run)
	})
}

// A Run whose context ends at any moment, also while its claim is being committed, gives the
// claim back: the id can be run again.
func TestOnceEndedRuns(t *testing.T) {
	each(t, func(e *env) {
		s := e.onceStore()
		r, err := once.New(s)
		require.NoError(e, err)
		const runs = 300
		called := make([]bool, runs)
		require.NoError(e, errors.Join(together(func(i int) error {
			for n := i; n < runs; n += writers {
				ctx, cancel := context.WithTimeout(e.Context(), time.Duration(rand.IntN(3000))*time.Microsecond)
				_, _ = r.Run(ctx, fmt.Sprint(n), func(context.Context) ([]byte, error) {
					called[n] = true
					return nil, nil
				})
				cancel()
			}
			return nil
		})...))
		for n := range called {
			if !called[n] {
				_, err := r.Run(e.bounded(), fmt.Sprint(n), func(context.Context) ([]byte, error) { return nil, nil })
				require.NoError(e, err, n)
			}
		}
	})
}

// A database whose transactions are stricter by default changes nothing.
func TestOnceAtAnyDefault(t *testing.T) {
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			run(t, servers.postgres, sqlfence.PostgreSQL, " default_transaction_isolation='"+level+"'", func(e *env) {
				s := e.onceStore()
				require.NoError(e, errors.Join(together(func(i int) error {
					_, err := s.Begin(e.Context(), "id", fmt.Sprint(i))
					return err
				})...))
				oncetest.Run(e.T, s)
			})
		})
	}
}

func TestOnceArguments(t *testing.T) {
	db, err := sql.Open("sqlite", ":memory:")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	for _, f := range []func() (*once.SQLStore, error){
		func() (*once.SQLStore, error) { return once.NewSQL(nil, sqlfence.SQLite) },
		func() (*once.SQLStore, error) { return once.NewSQL(db, 0) },
		func() (*once.SQLStore, error) { return once.NewSQL(db, 4) },
		func() (*once.SQLStore, error) { return once.NewSQL(db, sqlfence.SQLite, nil) },
		func() (*once.SQLStore, error) { return once.NewSQL(db, sqlfence.SQLite, once.WithTable("a; b")) },
	} {
		_, err := f()
		require.Error(t, err)
	}
	s, err := once.NewSQL(db, sqlfence.SQLite)
	require.NoError(t, err)
	require.Contains(t, s.Schema(), "CREATE TABLE IF NOT EXISTS `once_operations`")
	_, err = s.Begin(t.Context(), "id", "run") // there is no table
	require.Error(t, err)
	_, err = s.Purge(t.Context(), 0)
	require.ErrorContains(t, err, "once: purge")
}
