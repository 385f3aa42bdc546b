package sqlfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"github.com/holdfast-go/holdfast/internal/sqldb"
)

// Fence checks tokens against marks in a table. It has no connection of its own: each
// method is given one. It is safe for concurrent use, also by several processes, and needs
// no closing. Make it with [New]: the methods of the zero value return errors.
type Fence struct {
	dialect Dialect
	marks   string // quoted
	tokens  string // quoted
}

type settings struct{ marks, tokens string }

// Option is a setting of a Fence.
type Option func(*settings) error

// WithTable names the table of the marks, in place of "fencing_marks": an identifier of
// letters, digits and _, which may follow a schema or database and a dot. It is used
// exactly as written, in quotes, so PostgreSQL does not make it lower case.
func WithTable(name string) Option {
	return func(s *settings) error {
		s.marks = name
		return checkTable("WithTable", name)
	}
}

// WithTokenTable names the table of [Fence.Source], in place of "fencing_tokens", by the
// same rules as WithTable.
func WithTokenTable(name string) Option {
	return func(s *settings) error {
		s.tokens = name
		return checkTable("WithTokenTable", name)
	}
}

func checkTable(what, name string) error {
	if !sqldb.IsTable(name) {
		return fmt.Errorf("sqlfence: %s: %q is not the name of a table", what, name)
	}
	return nil
}

// New makes a Fence. Its errors are those of arguments that make no sense.
func New(d Dialect, opts ...Option) (*Fence, error) {
	if err := d.check(); err != nil {
		return nil, err
	}
	s := settings{"fencing_marks", "fencing_tokens"}
	for _, o := range opts {
		if o == nil {
			return nil, errors.New("sqlfence: nil option")
		}
		if err := o(&s); err != nil {
			return nil, err
		}
	}
	if strings.EqualFold(s.marks, s.tokens) {
		return nil, fmt.Errorf("sqlfence: marks and tokens share the table %q", s.marks)
	}
	return &Fence{d, d.db().Quote(s.marks), d.db().Quote(s.tokens)}, nil
}

// Schema returns the statements that create the tables, if they are not there, each with a
// semicolon at its end: for your migrations.
func (f *Fence) Schema() string { return strings.Join(f.statements(), ";\n\n") + ";\n" }

func (f *Fence) statements() []string {
	text, end := f.dialect.db().Text(), f.dialect.db().Engine()
	create := func(table, more string) string {
		return "CREATE TABLE IF NOT EXISTS " + table + " (\n" +
			"  resource " + text + " NOT NULL PRIMARY KEY,\n" +
			"  token BIGINT NOT NULL" + more + "\n)" + end
	}
	return []string{
		create(f.marks, ",\n  owner "+text+" NOT NULL"),
		create(f.tokens, ""),
	}
}

// Create creates the tables of [Fence.Schema], if they are not there. Several processes may
// do so at once. Its errors are the driver's.
func (f *Fence) Create(ctx context.Context, db *sql.DB) error {
	if err := f.dialect.check(); err != nil {
		return err
	}
	if err := f.dialect.db().Create(ctx, db, f.statements()...); err != nil {
		return fmt.Errorf("sqlfence: create tables: %w", err)
	}
	return nil
}

// transact runs fn in a transaction of its own, and commits that unless fn returns an error.
func (f *Fence) transact(ctx context.Context, db *sql.DB, what string, fn func(tx *sql.Tx) error) error {
	var own error
	err := f.dialect.db().Transact(ctx, db, func(tx *sql.Tx) error {
		own = fn(tx)
		return own
	})
	if err != nil && own == nil {
		return fmt.Errorf("sqlfence: %s: %w", what, err)
	}
	return err
}
