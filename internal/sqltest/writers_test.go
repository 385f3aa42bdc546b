//go:build unix

package sqltest

import (
	"database/sql"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/fencing/sqlfence"
)

// Writers with random pauses, each with a token of its own: the final row belongs to the
// highest, and no lower token is committed after a higher one.
func TestWriters(t *testing.T) {
	each(t, func(e *env) {
		for _, level := range e.levels() {
			e.Run(level.String(), func(t *testing.T) {
				w := *e
				w.T, w.suffix = t, e.suffix+"_"+string(rune('a'+int(level)))
				w.writers(level)
			})
		}
	})
}

func (e *env) writers(level sql.IsolationLevel) {
	log := e.create("log", "id SERIAL, token BIGINT NOT NULL")
	row := e.create("stock", "id BIGINT PRIMARY KEY, writes BIGINT NOT NULL, token BIGINT NOT NULL")
	e.exec("INSERT INTO " + row + " (id, writes, token) VALUES (1, 0, 0)")
	resource := row
	var wg sync.WaitGroup
	var mu sync.Mutex
	done := 0
	for i := range writers {
		wg.Go(func() { // ends after its writes
			token, ctx := fencing.Token(i+1), e.Context()
			for range 3 {
				pause(ctx, 20)
				err := e.transact(ctx, level, func(tx *sql.Tx) error {
					if err := e.fence.Raise(ctx, tx, resource, token); err != nil {
						return err
					}
					var n int64
					if err := tx.QueryRowContext(ctx, "SELECT writes FROM "+row+" WHERE id = 1").Scan(&n); err != nil {
						return err
					}
					pause(ctx, 3)
					if _, err := tx.ExecContext(ctx, e.sql("INSERT INTO "+log+" (token) VALUES (?)"), int64(token)); err != nil {
						return err
					}
					_, err := tx.ExecContext(ctx, e.sql("UPDATE "+row+" SET writes = ?, token = ? WHERE id = 1"), n+1, int64(token))
					return err
				})
				mu.Lock()
				switch {
				case err == nil:
					done++
				case !errors.Is(err, fencing.ErrStale):
					e.Error(err)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	require.EqualValues(e, writers, e.int("SELECT token FROM "+row))
	require.EqualValues(e, done, e.int("SELECT writes FROM "+row), "no update is lost")
	require.EqualValues(e, done, e.int("SELECT COUNT(*) FROM "+log))
	require.Zero(e, e.int("SELECT COUNT(*) FROM "+log+" a JOIN "+log+" b ON a.id < b.id AND a.token > b.token"))
}

// Whoever does not enter before it reads loses an update; with Enter the late write of the
// old holder is refused.
func TestLostUpdate(t *testing.T) {
	each(t, func(e *env) {
		row := e.create("stock", "id BIGINT PRIMARY KEY, n BIGINT NOT NULL, token BIGINT")
		rows := sqlfence.Rows{Dialect: e.dialect, Table: row, ID: "id", Token: "token"}
		set := e.sql("n = ?")
		for id, enters := range []bool{false, true} {
			e.exec("INSERT INTO "+row+" (id, n) VALUES (?, 10)", id)
			require.NoError(e, rows.Update(e.Context(), e.db, id, 1, set, 10))
			if enters {
				require.NoError(e, rows.Update(e.Context(), e.db, id, 2, ""))
			}
			read := e.int("SELECT n FROM "+row+" WHERE id = ?", id)
			late := rows.Update(e.Context(), e.db, id, 1, set, 9) // the old holder sells one
			require.NoError(e, rows.Update(e.Context(), e.db, id, 2, set, read-1))
			require.EqualValues(e, 9, e.int("SELECT n FROM "+row+" WHERE id = ?", id))
			if enters {
				require.ErrorIs(e, late, fencing.ErrStale, "one was sold")
			} else {
				require.NoError(e, late, "two were sold, and one is missing")
			}
		}
	})
}

// A row tells stale tokens from rows that are not there, also where the driver counts only
// rows that change.
func TestRows(t *testing.T) {
	each(t, func(e *env) {
		row := e.create("things", "id VARCHAR(40) PRIMARY KEY, n BIGINT, token BIGINT")
		rows := sqlfence.Rows{Dialect: e.dialect, Table: row, ID: "id", Token: "token"}
		ctx, set := e.Context(), e.sql("n = ?")
		e.exec("INSERT INTO " + row + " (id) VALUES ('a')")
		for range 2 { // with NULL, and with nothing to change
			require.NoError(e, rows.Update(ctx, e.db, "a", 5, set, 1))
		}
		err := rows.Update(ctx, e.db, "a", 4, set, 2)
		var stale *fencing.StaleError
		require.ErrorAs(e, err, &stale)
		require.EqualValues(e, 4, stale.Token)
		require.EqualValues(e, 5, stale.Seen)
		err = rows.Update(ctx, e.db, "b", 9, set, 2)
		require.ErrorIs(e, err, sqlfence.ErrNoRow)
		require.NotErrorIs(e, err, fencing.ErrStale)
		require.ErrorIs(e, rows.Update(ctx, e.db, "a", 0, set, 2), fencing.ErrNoToken)

		rows.Once = true
		require.ErrorIs(e, rows.Update(ctx, e.db, "a", 5, set, 2), fencing.ErrStale)
		require.EqualValues(e, 1, e.int("SELECT n FROM "+row))
		require.NoError(e, e.once(ctx, sql.LevelDefault, func(tx *sql.Tx) error {
			return rows.Update(ctx, tx, "a", 6, set, 2)
		}))
		require.EqualValues(e, 2, e.int("SELECT n FROM "+row))

		err = rows.Update(ctx, e.db, "a", 7, "no_such = 1")
		require.Error(e, err)
		require.NotErrorIs(e, err, fencing.ErrStale)
		for _, bad := range []sqlfence.Rows{
			{Table: row, ID: "id", Token: "token"},
			{Dialect: e.dialect, ID: "id", Token: "token"},
			{Dialect: e.dialect, Table: row, ID: "id", Token: "token = 1; --"},
			{Dialect: e.dialect, Table: row, ID: "1=1 OR id", Token: "token"},
		} {
			require.Error(e, bad.Update(ctx, e.db, "a", 8, set, 3))
		}
		require.EqualValues(e, 2, e.int("SELECT n FROM "+row))
	})
}

// Tokens of the source are unique, grow, and each key has its own.
func TestSource(t *testing.T) {
	each(t, func(e *env) {
		source := e.fence.Source(e.db)
		var wg sync.WaitGroup
		var mu sync.Mutex
		seen := map[fencing.Token]bool{}
		for range writers {
			wg.Go(func() { // ends after its tokens
				last := fencing.Token(0)
				for range 10 {
					token, err := source.Next(e.Context(), "k")
					if err != nil || token <= last {
						e.Error(last, token, err)
						return
					}
					last = token
					mu.Lock()
					if seen[token] {
						e.Error("twice: ", token)
					}
					seen[token] = true
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		require.Len(e, seen, 10*writers)
		token, err := source.Next(e.Context(), "K")
		require.NoError(e, err)
		require.EqualValues(e, 1, token)
		_, err = source.Next(e.Context(), "a\x00")
		require.Error(e, err)
	})
}
