//go:build unix

package sqltest

import (
	"context"
	"database/sql"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/fencing/sqlfence"
)

// Triggers, such as those that keep a log, change nothing: what is written is told, once. (MariaDB
// does not send LAST_INSERT_ID with its answers then.)
func TestTriggers(t *testing.T) {
	eachServer(t, func(e *env) {
		rows := sqlfence.Rows{Dialect: e.dialect, Table: e.create("goods", "id INT PRIMARY KEY, n INT, u INT, token BIGINT"), ID: "id", Token: "token"}
		e.exec("INSERT INTO " + rows.Table + " VALUES (1, 0, 0, NULL)")
		for _, table := range []string{rows.Table, "marks" + e.suffix, "tokens" + e.suffix} {
			column := map[bool]string{true: "u", false: "token"}[table == rows.Table]
			if e.dialect == sqlfence.PostgreSQL {
				e.exec("CREATE FUNCTION touch_" + table + "() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW." + column + " = NEW." + column + "; RETURN NEW; END $$")
				e.exec("CREATE TRIGGER touch BEFORE UPDATE ON " + table + " FOR EACH ROW EXECUTE FUNCTION touch_" + table + "()")
				continue
			}
			e.exec("CREATE TRIGGER touch_" + table + " BEFORE UPDATE ON " + table + " FOR EACH ROW SET NEW." + column + " = NEW." + column)
		}
		ctx := e.Context()
		for _, token := range []fencing.Token{60, 60, 61} {
			require.NoError(e, rows.Update(ctx, e.db, 1, token, "n = n + 1"))
			require.NoError(e, rows.Update(ctx, e.db, 1, token, "n = n"))
		}
		require.EqualValues(e, 3, e.int("SELECT n FROM "+rows.Table))
		require.ErrorIs(e, rows.Update(ctx, e.db, 1, 60, "n = n + 1"), fencing.ErrStale)
		require.EqualValues(e, 3, e.int("SELECT n FROM "+rows.Table))
		require.ErrorIs(e, rows.Update(ctx, e.db, 2, 62, "n = n + 1"), sqlfence.ErrNoRow)

		for _, token := range []fencing.Token{1, 2, 2, 3} {
			require.NoError(e, e.fence.Enter(ctx, e.db, "o", token, fencing.By("a")))
		}
		require.ErrorIs(e, e.fence.Enter(ctx, e.db, "o", 2), fencing.ErrStale)
		require.ErrorIs(e, e.fence.Enter(ctx, e.db, "o", 3, fencing.By("b")), fencing.ErrStale)
		source := e.fence.Source(e.db)
		for want := range fencing.Token(3) {
			got, err := source.Next(ctx, "k")
			require.NoError(e, err)
			require.Equal(e, want+1, got)
		}
	})
}

// between runs a function after the first statement that changes something.
type between struct {
	*sql.DB
	then func()
}

func (b *between) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	res, err := b.DB.ExecContext(ctx, query, args...)
	if b.then != nil {
		b.then()
		b.then = nil
	}
	return res, err
}

// Update says that it has written only if it has: also when somebody inserts the row, with
// the same token, between its statement and the look at why that has found nothing.
func TestRowsInsertedMeanwhile(t *testing.T) {
	each(t, func(e *env) {
		row := e.create("things", "id BIGINT PRIMARY KEY, n BIGINT, token BIGINT")
		rows := sqlfence.Rows{Dialect: e.dialect, Table: row, ID: "id", Token: "token"}
		for id, token := range []any{5, 4, nil} {
			q := &between{e.db, func() {
				e.exec("INSERT INTO "+row+" (id, n, token) VALUES (?, 1, ?)", id, token)
			}}
			require.NoError(e, rows.Update(e.Context(), q, id, 5, e.sql("n = ?"), 2))
			require.EqualValues(e, 2, e.int("SELECT n FROM "+row+" WHERE id = ?", id), "token %v", token)
		}
		q := &between{e.db, func() { e.exec("INSERT INTO " + row + " (id, n, token) VALUES (9, 1, 6)") }}
		require.ErrorIs(e, rows.Update(e.Context(), q, 9, 5, e.sql("n = ?"), 2), fencing.ErrStale)
		rows.Once = true
		q = &between{e.db, func() { e.exec("INSERT INTO " + row + " (id, n, token) VALUES (10, 1, 5)") }}
		require.ErrorIs(e, rows.Update(e.Context(), q, 10, 5, e.sql("n = ?"), 2), fencing.ErrStale)
	})
}
