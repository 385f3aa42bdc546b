//go:build unix

package sqltest

import (
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/fencing/sqlfence"
)

// together runs f in many goroutines at once, and returns their errors.
func together(f func(i int) error) []error {
	var wg sync.WaitGroup
	errs := make([]error, writers)
	for i := range errs {
		wg.Go(func() { errs[i] = f(i) }) // ends with f
	}
	wg.Wait()
	return errs
}

// enter enters until that is decided.
func (e *env) enter(resource string, token fencing.Token, rules ...fencing.Rule) error {
	for {
		err := e.fence.Enter(e.Context(), e.db, resource, token, rules...)
		if err == nil || !again(err) {
			return err
		}
	}
}

// Of many who meet with the same token at a resource that is new, exactly one passes with
// Once, and one owner without. Of many tokens the highest passes.
func TestFirstMeeting(t *testing.T) {
	each(t, func(e *env) {
		for round := range 5 {
			passed := 0
			for _, err := range together(func(int) error {
				return e.enter(fmt.Sprint("once", round), 1, fencing.Once())
			}) {
				if err == nil {
					passed++
				} else {
					require.ErrorIs(e, err, fencing.ErrStale)
				}
			}
			require.Equal(e, 1, passed, "once")

			owners := map[int]bool{}
			for i, err := range together(func(i int) error {
				return e.enter(fmt.Sprint("owner", round), 1, fencing.By(fmt.Sprint(i%4)))
			}) {
				if err == nil {
					owners[i%4] = true
				} else {
					require.ErrorIs(e, err, fencing.ErrStale)
				}
			}
			require.Len(e, owners, 1, "owners")

			name := fmt.Sprint("tokens", round)
			errs := together(func(i int) error { return e.enter(name, fencing.Token(i+1)) })
			require.NoError(e, errs[writers-1])
			mark, err := e.fence.Marks(e.db).Load(e.Context(), name)
			require.NoError(e, err)
			require.EqualValues(e, writers, mark.Token)

			// Neighbours do not disturb each other.
			require.NoError(e, errors.Join(together(func(i int) error {
				return e.enter(fmt.Sprint("own", round, "-", i), 1)
			})...))
		}
	})
}

// Enter waits for others also where the level of the connection would fail it instead.
func TestEnterAtAnyDefault(t *testing.T) {
	run(t, servers.postgres, sqlfence.PostgreSQL, " options='-c default_transaction_isolation=serializable'", func(e *env) {
		require.NoError(e, e.fence.Enter(e.Context(), e.db, "r", 1))
		source := e.fence.Source(e.db)
		for i, err := range together(func(i int) error {
			_, err := source.Next(e.Context(), "r")
			return errors.Join(err, e.fence.Enter(e.Context(), e.db, "r", fencing.Token(i%2+1)))
		}) {
			if i%2 == 1 || err != nil && !errors.Is(err, fencing.ErrStale) {
				require.NoError(e, err)
			}
		}
	})
}

// What a newer holder reads after Raise, in the same transaction, has all that older ones
// have written: at every level, when Raise comes first.
func TestRaiseBeforeReading(t *testing.T) {
	each(t, func(e *env) { e.readers("") })
	t.Run("mariadb snapshot isolation", func(t *testing.T) {
		run(t, servers.mariadb, sqlfence.MySQL, "", func(e *env) {
			if e.int("SELECT COUNT(*) FROM information_schema.SYSTEM_VARIABLES WHERE VARIABLE_NAME = 'INNODB_SNAPSHOT_ISOLATION'") == 0 {
				return // an older MariaDB, which has no such mode to be safe in
			}
			e.db = open(t, servers.mariadb, sqlfence.MySQL, "&innodb_snapshot_isolation=ON")
			e.readers("_snapshot")
		})
	})
}

func (e *env) readers(suffix string) {
	row := e.create("counter"+suffix, "id BIGINT PRIMARY KEY, n BIGINT NOT NULL")
	for i, level := range e.levels() {
		e.exec("INSERT INTO "+row+" (id, n) VALUES (?, 0)", i)
		ctx := e.bounded()
		change := func(tx *sql.Tx) error {
			var n int64
			if err := tx.QueryRowContext(ctx, e.sql("SELECT n FROM "+row+" WHERE id = ?"), i).Scan(&n); err != nil {
				return err
			}
			_, err := tx.ExecContext(ctx, e.sql("UPDATE "+row+" SET n = ? WHERE id = ?"), n+1, i)
			return err
		}
		var done int64
		for _, err := range together(func(int) error { // all with one token: only the row lock orders them
			return e.transact(ctx, level, func(tx *sql.Tx) error {
				if err := e.fence.Raise(ctx, tx, fmt.Sprint(row, i), 1); err != nil {
					return err
				}
				return change(tx)
			})
		}) {
			require.NoError(e, err, level)
			done++
		}
		require.Equal(e, done, e.int("SELECT n FROM "+row+" WHERE id = ?", i), level)
	}
}

// A holder reads in one transaction and writes in another. If it enters only with its write,
// an old one may write in between, and that is lost; if it enters first, the old one is
// refused.
func TestEnterBeforeReading(t *testing.T) {
	each(t, func(e *env) {
		row := e.create("stock", "id BIGINT PRIMARY KEY, n BIGINT NOT NULL")
		write := func(id int, token fencing.Token, n int64) error {
			return e.transact(e.Context(), sql.LevelDefault, func(tx *sql.Tx) error {
				if err := e.fence.Raise(e.Context(), tx, fmt.Sprint(row, id), token); err != nil {
					return err
				}
				_, err := tx.ExecContext(e.Context(), e.sql("UPDATE "+row+" SET n = ? WHERE id = ?"), n, id)
				return err
			})
		}
		for id, enters := range []bool{false, true} {
			e.exec("INSERT INTO "+row+" (id, n) VALUES (?, 10)", id)
			old := e.int("SELECT n FROM "+row+" WHERE id = ?", id)
			if enters {
				require.NoError(e, e.fence.Enter(e.Context(), e.db, fmt.Sprint(row, id), 2))
			}
			read := e.int("SELECT n FROM "+row+" WHERE id = ?", id)
			late := write(id, 1, old-1) // the old holder sells one, late
			require.NoError(e, write(id, 2, read-1))
			require.EqualValues(e, 9, e.int("SELECT n FROM "+row+" WHERE id = ?", id))
			if enters {
				require.ErrorIs(e, late, fencing.ErrStale, "one was sold")
			} else {
				require.NoError(e, late, "two were sold, and one is missing")
			}
		}
	})
}

// An old transaction that has read before it raises cannot overwrite what came after: at the
// higher levels it fails, or is refused, but is not told that it is stale by mistake.
func TestSnapshotFromBefore(t *testing.T) {
	eachServer(t, func(e *env) {
		require.NoError(e, e.fence.Enter(e.Context(), e.db, "r", 1))
		for _, c := range []struct {
			level sql.IsolationLevel
			own   fencing.Token
			other fencing.Token
		}{
			{sql.LevelReadCommitted, 3, 2}, {sql.LevelReadCommitted, 4, 5},
			{sql.LevelRepeatableRead, 7, 6}, {sql.LevelRepeatableRead, 8, 9},
		} {
			what := fmt.Sprint(c)
			err := e.once(e.Context(), c.level, func(tx *sql.Tx) error {
				var n int64
				if err := tx.QueryRowContext(e.Context(), "SELECT COUNT(*) FROM marks"+e.suffix).Scan(&n); err != nil {
					return err
				}
				require.NoError(e, e.fence.Enter(e.Context(), e.db, "r", c.other), what)
				return e.fence.Raise(e.Context(), tx, "r", c.own)
			})
			var stale *fencing.StaleError
			switch {
			case c.level == sql.LevelRepeatableRead && e.dialect == sqlfence.PostgreSQL:
				require.True(e, again(err), "%s: %v", what, err)
				require.NotErrorIs(e, err, fencing.ErrStale, what)
			case c.own > c.other:
				require.NoError(e, err, what)
			default:
				require.ErrorAs(e, err, &stale, what)
				require.Equal(e, c.other, stale.Seen, "%s: what is there now, not in the snapshot", what)
			}
		}
	})
}
