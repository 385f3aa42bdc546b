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
