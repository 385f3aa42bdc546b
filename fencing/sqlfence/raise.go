package sqlfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/holdfast-go/holdfast/fencing"
)

// Raise lets a token through, in the transaction of the caller, and refuses from its commit
// on every lower one: nil, or a [*fencing.StaleError], fencing.ErrNoToken, an error about a
// name, or the driver's, wrapped. What it decides is what [fencing.Check.Admit] says.
//
// It waits while another transaction has the same resource, and others wait for tx from then
// on. Nothing has entered until tx is committed. Call it before anything else in tx; see the
// package comment for that, and for which errors mean to run the transaction again.
func (f *Fence) Raise(ctx context.Context, tx *sql.Tx, resource string, token fencing.Token, rules ...fencing.Rule) error {
	c, err := fencing.NewCheck(token, rules...)
	if err != nil {
		return err
	}
	_, err = f.raise(ctx, tx, resource, c)
	return err
}

// Enter does what [Fence.Raise] does in a transaction of its own. Call it before you read what
// you will change. If its commit fails, the mark may have been raised nevertheless.
func (f *Fence) Enter(ctx context.Context, db *sql.DB, resource string, token fencing.Token, rules ...fencing.Rule) error {
	c, err := fencing.NewCheck(token, rules...)
	if err != nil {
		return err
	}
	if err := f.dialect.check(); err != nil {
		return err
	}
	return f.transact(ctx, db, "enter", func(tx *sql.Tx) error {
		_, err := f.raise(ctx, tx, resource, c)
		return err
	})
}

// Marks returns the marks as a store for [fencing.Gate] and others, which share them with Raise
// and Enter. It is safe for concurrent use, also by several processes, and is no longer of
// use when db is closed. Its errors are those of Enter.
func (f *Fence) Marks(db *sql.DB) fencing.Marks { return marks{f, db} }

type marks struct {
	f  *Fence
	db *sql.DB
}

func (m marks) Load(ctx context.Context, resource string) (fencing.Claim, error) {
	if err := errors.Join(m.f.dialect.check(), checkName("resource", resource)); err != nil {
		return fencing.Claim{}, err
	}
	claim, err := m.f.load(ctx, m.db, resource, "")
	if errors.Is(err, sql.ErrNoRows) {
		return fencing.Claim{}, nil
	}
	return claim, err
}

func (m marks) Raise(ctx context.Context, resource string, c fencing.Check) (mark fencing.Claim, err error) {
	if c.Token <= 0 {
		return fencing.Claim{}, fencing.ErrNoToken
	}
	if err := m.f.dialect.check(); err != nil {
		return fencing.Claim{}, err
	}
	err = m.f.transact(ctx, m.db, "raise", func(tx *sql.Tx) (err error) {
		mark, err = m.f.raise(ctx, tx, resource, c)
		if err == nil && c.Owner == "" { // the stored one stays with an equal token
			mark, err = m.f.load(ctx, tx, resource, m.f.dialect.current())
		}
		return err
	})
	if err != nil && !errors.Is(err, fencing.ErrStale) {
		mark = fencing.Claim{}
	}
	return mark, err
}

// raise decides and raises the mark. It returns the claim, or a *StaleError and the mark.
func (f *Fence) raise(ctx context.Context, tx *sql.Tx, resource string, c fencing.Check) (fencing.Claim, error) {
	if err := errors.Join(f.dialect.check(), checkName("resource", resource), checkName("owner", c.Owner)); err != nil {
		return fencing.Claim{}, err
	}
	statement, args := f.upsert(resource, c)
	res, err := tx.ExecContext(ctx, statement, args...)
	if err != nil {
		return fencing.Claim{}, fmt.Errorf("sqlfence: raise the mark of %q: %w", resource, err)
	}
	ok, err := f.dialect.admitted(ctx, tx, res, c.Token)
	if err != nil {
		return fencing.Claim{}, fmt.Errorf("sqlfence: raise the mark of %q: %w", resource, err)
	}
	if ok {
		return c.Claim, nil
	}
	mark, err := f.load(ctx, tx, resource, f.dialect.current())
	if err != nil {
		return fencing.Claim{}, err
	}
	return mark, &fencing.StaleError{Resource: resource, Token: c.Token, Seen: mark.Token}
}

// load returns the mark of a resource, or an error with sql.ErrNoRows in its chain.
func (f *Fence) load(ctx context.Context, q Querier, resource, lock string) (claim fencing.Claim, err error) {
	row := q.QueryRowContext(ctx, "SELECT token, owner FROM "+f.marks+" WHERE resource = "+f.dialect.db().Arg(1)+lock, resource)
	if err := row.Scan(&claim.Token, &claim.Owner); err != nil {
		return fencing.Claim{}, fmt.Errorf("sqlfence: load the mark of %q: %w", resource, err)
	}
	return claim, nil
}

// upsert returns the statement that inserts the mark, or locks and raises it if the check
// admits it. Which rules there are is written into the statement, so that no database compares
// an owner with "" in its own way.
func (f *Fence) upsert(resource string, c fencing.Check) (statement string, args []any) {
	token := int64(c.Token)
	if f.dialect == MySQL {
		return f.upsertMySQL(resource, c)
	}
	admits, owner := "m.token <= EXCLUDED.token", "EXCLUDED.owner"
	switch {
	case c.Once:
		admits = "m.token < EXCLUDED.token"
	case c.Owner == "":
		owner = "CASE WHEN m.token = EXCLUDED.token THEN m.owner ELSE EXCLUDED.owner END"
	default:
		admits = "m.token < EXCLUDED.token OR m.token = EXCLUDED.token AND m.owner IN ('', EXCLUDED.owner)"
	}
	d := f.dialect.db()
	return "INSERT INTO " + f.marks + " AS m (resource, token, owner) VALUES (" + d.Arg(1) + ", " + d.Arg(2) + ", " + d.Arg(3) + ")" +
		" ON CONFLICT (resource) DO UPDATE SET token = EXCLUDED.token, owner = " + owner +
		" WHERE " + admits, []any{resource, token, c.Owner}
}

// upsertMySQL has no WHERE to use, and how many rows were affected depends on a setting of the
// connection (clientFoundRows). So the statement answers by LAST_INSERT_ID, which the server
// sends with its result: the token if it was admitted, else 0. Assignments are done in
// order: the owner's still sees the old token. The greater token is right in both cases.
func (f *Fence) upsertMySQL(resource string, c fencing.Check) (statement string, args []any) {
	token := int64(c.Token)
	args = []any{resource, token, c.Owner, token}
	stale, owner := "token > ?", "?"
	switch {
	case c.Once:
		stale = "token >= ?"
	case c.Owner != "":
		stale = "token > ? OR (token = ? AND owner <> '' AND owner <> ?)"
		args = append(args, token, c.Owner)
	}
	args = append(args, token)
	if c.Owner == "" {
		owner = "IF(token = ?, owner, '')"
		args = append(args, token)
	} else {
		args = append(args, c.Owner)
	}
	return "INSERT INTO " + f.marks + " (resource, token, owner) VALUES (?, LAST_INSERT_ID(?), ?)" +
		" ON DUPLICATE KEY UPDATE owner = IF(LAST_INSERT_ID(IF(" + stale + ", 0, ?)) = 0, owner, " + owner + ")," +
		" token = GREATEST(token, ?)", append(args, token)
}

// admitted tells whether an upsert has let the token through.
func (d Dialect) admitted(ctx context.Context, tx *sql.Tx, res sql.Result, token fencing.Token) (bool, error) {
	if d != MySQL {
		n, err := res.RowsAffected()
		return n > 0, err
	}
	id, err := lastID(ctx, tx, res)
	if err == nil && id != 0 && id != int64(token) {
		err = fmt.Errorf("the server answers %d instead of 0 or %d", id, token)
	}
	return id != 0, err
}

// lastID returns what a statement of MySQL has put into LAST_INSERT_ID. When the table has a
// trigger, MariaDB does not send it with the result.
func lastID(ctx context.Context, tx *sql.Tx, res sql.Result) (id int64, err error) {
	if id, err = res.LastInsertId(); err != nil || id != 0 {
		return id, err
	}
	err = tx.QueryRowContext(ctx, "SELECT LAST_INSERT_ID()").Scan(&id)
	return id, err
}
