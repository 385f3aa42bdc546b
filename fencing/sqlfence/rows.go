package sqlfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/holdfast-go/holdfast/fencing"
)

// ErrNoRow says that there is no row with this id.
var ErrNoRow = errors.New("sqlfence: no such row")

// Querier is a *sql.DB, *sql.Tx or *sql.Conn.
type Querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// Rows is a table whose rows have their marks themselves, in a column of type BIGINT, where
// NULL counts as 0. All names must be of letters, digits and _; they are used as written, in quotes. It is safe
// for concurrent use.
type Rows struct {
	Dialect Dialect
	Table   string // "name" or "schema.name"
	ID      string // the column of the primary key
	Token   string // the column of the mark
	Once    bool   // an equal token is stale too: each grant writes a row at most once
}

// updateTries bounds what is tried when the row changes between update and look.
const updateTries = 3

// Update changes one row and raises its mark, in one statement: UPDATE table SET set, token
// WHERE id AND the token is not stale. Placeholders in set are those of the database: ? for
// MySQL and SQLite, $1, $2 and so on for PostgreSQL, for args in their order.
//
// It returns nil, a *fencing.StaleError, ErrNoRow, fencing.ErrNoToken, or what the database
// has failed with. With an empty set it enters: it raises the mark and changes nothing
// else. Do that before you read the row.
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
	look := "SELECT COALESCE(" + r.Dialect.quote(r.Token) + ", 0) FROM " + r.Dialect.quote(r.Table) +
		" WHERE " + r.Dialect.quote(r.ID) + " = " + r.Dialect.arg(1) + r.Dialect.current()
	for range updateTries {
		result, err := q.ExecContext(ctx, update, args...)
		if err != nil {
			return fmt.Errorf("sqlfence: update %s: %w", resource, err)
		}
		if n, err := result.RowsAffected(); err != nil || n > 0 {
			return err
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
		case seen == token && r.Dialect == MySQL:
			return nil // it counts only rows that change, and this has these values already
		}
	}
	return fmt.Errorf("sqlfence: update %s: the row comes and goes", resource)
}

func (r Rows) check(token fencing.Token) error {
	if token <= 0 {
		return fencing.ErrNoToken
	}
	if !table.MatchString(r.Table) {
		return fmt.Errorf("sqlfence: %q is not the name of a table", r.Table)
	}
	for _, name := range []string{r.ID, r.Token} {
		if !identifier.MatchString(name) {
			return fmt.Errorf("sqlfence: %q is not the name of a column", name)
		}
	}
	return r.Dialect.check()
}

// statement is the UPDATE, behind n arguments of the caller's.
func (r Rows) statement(set string, n int) string {
	if set != "" {
		set += ", "
	}
	less := " <= "
	if r.Once {
		less = " < "
	}
	d, column := r.Dialect, r.Dialect.quote(r.Token)
	a, b, c := d.arg(n+1), d.arg(n+2), "?"
	if d == PostgreSQL {
		c = a
	}
	return "UPDATE " + d.quote(r.Table) + " SET " + set + column + " = " + a + " WHERE " + d.quote(r.ID) + " = " + b +
		" AND COALESCE(" + column + ", 0)" + less + c
}
