package sqlfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/holdfast-go/holdfast/fencing"
)

// Source returns a source of tokens from the database, for holdfast.WithFencing: a row for
// each key in the table "fencing_tokens" (see [WithTokenTable]), which begins with 1 and goes up
// by one with each token. It is as lasting as the database, and is not lost with Redis. It is
// safe for concurrent use, also by several processes, and no longer of use when db is closed.
//
// Each token is a small transaction. A key must be a name as in the package comment. The
// errors are about that, or the driver's, wrapped; a token that was drawn by then is
// never given again.
//
// A lock that had its tokens from elsewhere must go on above them: before its first grant
// from here, insert its row with the highest token so far.
func (f *Fence) Source(db *sql.DB) fencing.Source { return source{f, db} }

type source struct {
	f  *Fence
	db *sql.DB
}

// Next returns only what is committed: a token that was rolled back would be given twice.
func (s source) Next(ctx context.Context, key string) (token fencing.Token, err error) {
	if err := errors.Join(s.f.dialect.check(), checkName("key", key)); err != nil {
		return 0, err
	}
	err = s.f.transact(ctx, s.db, "next token", func(tx *sql.Tx) error {
		token, err = s.f.next(ctx, tx, key)
		if err == nil && token <= 0 {
			err = fmt.Errorf("the table has given %d", token)
		}
		if err != nil {
			return fmt.Errorf("sqlfence: next token for %q: %w", key, err)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return token, nil
}

func (f *Fence) next(ctx context.Context, q *sql.Tx, key string) (token fencing.Token, err error) {
	if f.dialect != MySQL {
		err = q.QueryRowContext(ctx, "INSERT INTO "+f.tokens+" AS t (resource, token) VALUES ("+f.dialect.db().Arg(1)+", 1)"+
			" ON CONFLICT (resource) DO UPDATE SET token = t.token + 1 RETURNING token", key).Scan(&token)
		return token, err
	}
	res, err := q.ExecContext(ctx, "INSERT INTO "+f.tokens+" (resource, token) VALUES (?, LAST_INSERT_ID(1))"+
		" ON DUPLICATE KEY UPDATE token = LAST_INSERT_ID(token + 1)", key)
	if err != nil {
		return 0, err
	}
	id, err := lastID(ctx, q, res)
	return fencing.Token(id), err
}
