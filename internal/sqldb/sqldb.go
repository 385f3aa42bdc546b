// Package sqldb has what the packages with tables of their own share: how the databases differ
// in quotes, placeholders, texts and transactions.
package sqldb

import (
	"context"
	"database/sql"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// Dialect is the kind of a database, with the numbers of sqlfence.Dialect.
type Dialect int

// The dialects.
const (
	PostgreSQL Dialect = iota + 1
	MySQL
	SQLite
)

// Known reports whether there is such a dialect.
func (d Dialect) Known() bool { return d >= PostgreSQL && d <= SQLite }

// Identifiers are plain ones, so that quotes around them are all that they need. 63 bytes
// is what PostgreSQL keeps of a longer one, without a word.
var (
	identifier = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,62}$`)
	table      = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?$`)
)

// IsIdentifier reports whether name can be that of a column.
func IsIdentifier(name string) bool { return identifier.MatchString(name) }

// IsTable reports whether name can be that of a table, also a qualified one.
func IsTable(name string) bool { return table.MatchString(name) }

// Quote quotes an identifier, also a qualified one.
func (d Dialect) Quote(name string) string {
	// SQLite takes a name in double quotes that it does not know for a text.
	q := "`"
	if d == PostgreSQL {
		q = `"`
	}
	return q + strings.ReplaceAll(name, ".", q+"."+q) + q
}

// Arg returns the placeholder of the nth argument, from 1, where they come in order.
func (d Dialect) Arg(n int) string {
	if d == PostgreSQL {
		return "$" + strconv.Itoa(n)
	}
	return "?"
}

// Text returns the type of a column whose texts, of at most 255 bytes, are compared byte for
// byte.
func (d Dialect) Text() string {
	switch d {
	case PostgreSQL:
		return `TEXT COLLATE "C"`
	case SQLite:
		return "TEXT COLLATE BINARY"
	}
	// Of MySQL's own texts even utf8mb4_bin takes no notice of spaces at the end.
	return "VARBINARY(255)"
}

// Engine returns what follows the columns of a new table.
func (d Dialect) Engine() string {
	if d == MySQL {
		return " ENGINE=InnoDB"
	}
	return ""
}

// short returns the options of a transaction of one statement. PostgreSQL would fail it at a
// higher level, when it had to wait; the others never do, and MySQL cannot log READ COMMITTED
// in every setup.
func (d Dialect) short() *sql.TxOptions {
	if d == PostgreSQL {
		return &sql.TxOptions{Isolation: sql.LevelReadCommitted}
	}
	return nil
}

// Transact runs fn in a transaction of its own, and commits that unless fn returns an error,
// which it returns as it is.
func (d Dialect) Transact(ctx context.Context, db *sql.DB, fn func(tx *sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, d.short())
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // after a commit it does nothing
	if err := fn(tx); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// createLock is the advisory lock of PostgreSQL under which tables are created: "holdfast".
const createLock = 0x686f6c6466617374

// Create runs statements that create what is not there. Several processes may do so at once.
func (d Dialect) Create(ctx context.Context, db *sql.DB, statements ...string) error {
	return d.Transact(ctx, db, func(tx *sql.Tx) error {
		if d == PostgreSQL { // where IF NOT EXISTS alone fails when two meet
			if _, err := tx.ExecContext(ctx, fmt.Sprintf("SELECT pg_advisory_xact_lock(%d)", createLock)); err != nil {
				return err
			}
		}
		for _, s := range statements {
			if _, err := tx.ExecContext(ctx, s); err != nil {
				return err
			}
		}
		return nil
	})
}
