package sqlfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/sqldb"
)

// ErrNoRow is what [Rows.Update] returns when there is no row with the id. Insert it, or
// treat it as deleted.
var ErrNoRow = errors.New("sqlfence: no such row")

// Querier runs statements: a *sql.DB, *sql.Tx or *sql.Conn.
type Querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

var (
	_ Querier = (*sql.DB)(nil)
	_ Querier = (*sql.Tx)(nil)
	_ Querier = (*sql.Conn)(nil)
)

// Rows is a table of yours whose rows have their marks themselves, in a column for the token:
// then a write and its check are one statement, which needs neither a transaction nor the
// tables of a [Fence]. All names must be of letters, digits and _; they are used as written,
// in quotes. It is safe for concurrent use as long as nobody changes it.
type Rows struct {
	Dialect Dialect
	Table   string // "name" or "schema.name"
	ID      string // the column of the primary key
	Token   string // the column of the mark, BIGINT; NULL counts as 0
	Once    bool   // an equal token is stale too: each grant writes a row at most once
}

// updateTries bounds what is tried when the row changes between update and look.
const updateTries = 3

// Update changes one row and raises its mark, in one statement: UPDATE table SET set, token
// WHERE id AND the token is not stale. Placeholders in set are those of the database: ? for
// MySQL and SQLite, $1, $2 and so on for PostgreSQL, for args in their order. It is SQL as it
// stands, so never make it from input.
//
// It returns nil if the row was written. Otherwise nothing was, and the error is a
// [*fencing.StaleError], or matches ErrNoRow, or is fencing.ErrNoToken, one about a field of
// r, or the driver's, wrapped. With an empty set it enters: it raises the mark and changes
// nothing else. Do that before you read the row.
//
// Why nothing was written is found out by a second read. Outside of a transaction that
// comes a moment later: Seen may be newer than what has refused the token.
//
// A row keeps no owner: tokens that a lost counter gives twice are not told apart.
func (r Rows) Update(ctx context.Context, q Querier, id any, token fencing.Token, set string, args ...any) error {
	if err := r.check(token); err != nil {
		return err
	}
	resource := fmt.Sprintf("%s %v", r.Table, id)
	update := r.statement(set, len(args))
	if r.Dialect == PostgreSQL {
		args = append(args[:len(args):len(args)], int64(token), id)
	} else {
		args = append(args[:len(args):len(args)], int64(token), id, int64(token))
	}
	look := "SELECT COALESCE(" + r.Dialect.db().Quote(r.Token) + ", 0) FROM " + r.Dialect.db().Quote(r.Table) +
		" WHERE " + r.Dialect.db().Quote(r.ID) + " = " + r.Dialect.db().Arg(1) + r.Dialect.current()
	for range updateTries {
		result, err := q.ExecContext(ctx, update, args...)
		if err != nil {
			return fmt.Errorf("sqlfence: update %s: %w", resource, err)
		}
		wrote, err := r.wrote(result, token)
		if err != nil {
			return fmt.Errorf("sqlfence: update %s: %w", resource, err)
		}
		if wrote {
			return nil
		}
		var seen fencing.Token
		err = q.QueryRowContext(ctx, look, id).Scan(&seen)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			return fmt.Errorf("%w: %s", ErrNoRow, resource)
		case err != nil:
			return fmt.Errorf("sqlfence: update %s: %w", resource, err)
		case seen > token || seen == token && r.Once:
			return &fencing.StaleError{Resource: resource, Token: token, Seen: seen}
		}
		// It was inserted after the update: once more.
	}
	if r.Dialect == MySQL {
		return nil // it has this token, and nothing was to be changed
	}
	return fmt.Errorf("sqlfence: update %s: the row is there, and is not written", resource)
}

// wrote tells whether an update has written the row. MySQL counts a row that stays as it was
// only with a setting of the connection (clientFoundRows); then the id tells, but not where the
// table has a trigger. A row without either has not changed, so it does no harm to write again.
func (r Rows) wrote(result sql.Result, token fencing.Token) (bool, error) {
	n, err := result.RowsAffected()
	if err != nil || n > 0 || r.Dialect != MySQL {
		return n > 0, err
	}
	id, err := result.LastInsertId()
	return id == int64(token), err
}

func (r Rows) check(token fencing.Token) error {
	if token <= 0 {
		return fencing.ErrNoToken
	}
	if !sqldb.IsTable(r.Table) {
		return fmt.Errorf("sqlfence: %q is not the name of a table", r.Table)
	}
	for _, name := range []string{r.ID, r.Token} {
		if !sqldb.IsIdentifier(name) {
			return fmt.Errorf("sqlfence: %q is not the name of a column", name)
		}
	}
	return r.Dialect.check()
}

// statement is the UPDATE, behind n arguments of the caller's.
func (r Rows) statement(set string, n int) string {
	if set != "" {
		set += "\n, " // on a line of its own, as set may end in a comment
	}
	less := " <= "
	if r.Once {
		less = " < "
	}
	d, column := r.Dialect, r.Dialect.db().Quote(r.Token)
	a, b, c := d.db().Arg(n+1), d.db().Arg(n+2), "?"
	value := a
	switch d {
	case PostgreSQL:
		c = a
	case MySQL: // which answers by that, see upsertMySQL: a row that stays the same may not count
		value = "LAST_INSERT_ID(?)"
	}
	return "UPDATE " + d.db().Quote(r.Table) + " SET " + set + column + " = " + value + " WHERE " + d.db().Quote(r.ID) + " = " + b +
		" AND COALESCE(" + column + ", 0)" + less + c
}
