package once

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/fencing/sqlfence"
	"github.com/holdfast-go/holdfast/internal/sqldb"
)

// SQLStore remembers in a table of a database: PostgreSQL, MySQL and MariaDB (InnoDB), or
// SQLite. Make one with NewSQL. It is safe for concurrent use, also by several processes, holds
// nothing that must be freed, and never closes the database. Each method is one transaction
// of its own. Results stay until Purge or Forget.
type SQLStore struct {
	db      *sql.DB
	dialect sqldb.Dialect
	table   string // quoted
}

var _ Store = (*SQLStore)(nil)

// SQLOption changes what NewSQL makes.
type SQLOption interface{ applySQL(*sqlSettings) error }

type sqlSettings struct{ table string }

type sqlOption func(*sqlSettings) error

func (f sqlOption) applySQL(s *sqlSettings) error { return f(s) }

// WithTable names the table, in place of "once_operations": an identifier of letters, digits
// and _, which may follow a schema or database and a dot. It is used exactly as written, in
// quotes.
func WithTable(name string) SQLOption {
	return sqlOption(func(s *sqlSettings) error {
		if !sqldb.IsTable(name) {
			return fmt.Errorf("once: %q is not the name of a table", name)
		}
		s.table = name
		return nil
	})
}

// NewSQL returns a Store over db, which the caller has opened with a driver for the dialect.
// For SQLite set busy_timeout, or two who meet get errors; for go-sql-driver/mysql readTimeout,
// because a COMMIT that hangs heeds no context. Its errors are for bad arguments.
// Make the table with Create, or with Schema in your migrations.
func NewSQL(db *sql.DB, dialect sqlfence.Dialect, opts ...SQLOption) (*SQLStore, error) {
	if db == nil {
		return nil, errors.New("once: nil database")
	}
	d := sqldb.Dialect(dialect)
	if !d.Known() {
		return nil, fmt.Errorf("once: no such dialect: %v", dialect)
	}
	settings := sqlSettings{"once_operations"}
	for _, o := range opts {
		if o == nil {
			return nil, errors.New("once: nil option")
		}
		if err := o.applySQL(&settings); err != nil {
			return nil, err
		}
	}
	return &SQLStore{db, d, d.Quote(settings.table)}, nil
}

// Schema returns the statement that creates the table, if it is not there, with a semicolon
// at its end.
func (s *SQLStore) Schema() string { return s.create() + ";\n" }

func (s *SQLStore) create() string {
	text := s.dialect.Text()
	blob := map[sqldb.Dialect]string{sqldb.PostgreSQL: "BYTEA", sqldb.MySQL: "MEDIUMBLOB", sqldb.SQLite: "BLOB"}[s.dialect]
	return "CREATE TABLE IF NOT EXISTS " + s.table + " (\n" +
		"  id " + text + " NOT NULL PRIMARY KEY,\n" +
		"  state VARCHAR(7) NOT NULL,\n" +
		"  run " + text + " NOT NULL,\n" +
		"  since BIGINT NOT NULL,\n" + // in s since 1970
		"  payload " + blob + " NOT NULL\n)" + s.dialect.Engine()
}

// Create creates the table, if it is not there. Several processes may do so at once. Its
// errors are the driver's, wrapped.
func (s *SQLStore) Create(ctx context.Context) error {
	if err := s.dialect.Create(ctx, s.db, s.create()); err != nil {
		return fmt.Errorf("once: create the table: %w", err)
	}
	return nil
}

// now is the clock of the database, in s.
func (s *SQLStore) now() string {
	switch s.dialect {
	case sqldb.PostgreSQL:
		return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS BIGINT)"
	case sqldb.MySQL:
		return "UNIX_TIMESTAMP()"
	}
	return "CAST(strftime('%s', 'now') AS INTEGER)"
}

// statement writes the placeholders of a statement, ?, as the database has them, and the
// words TABLE and NOW.
func (s *SQLStore) statement(text string) string {
	text = strings.NewReplacer("TABLE", s.table, "NOW", s.now()).Replace(text)
	var b strings.Builder
	for n := 1; ; n++ {
		before, after, found := strings.Cut(text, "?")
		b.WriteString(before)
		if !found {
			return b.String()
		}
		b.WriteString(s.dialect.Arg(n))
		text = after
	}
}

func (s *SQLStore) exec(ctx context.Context, tx *sql.Tx, text string, args ...any) (sql.Result, error) {
	return tx.ExecContext(ctx, s.statement(text), args...)
}

// load returns the record of an id, or sql.ErrNoRows.
func (s *SQLStore) load(ctx context.Context, tx *sql.Tx, id string) (r Record, err error) {
	var since int64
	err = tx.QueryRowContext(ctx, s.statement("SELECT state, run, since, payload FROM TABLE WHERE id = ?"), id).
		Scan(&r.State, &r.Run, &since, &r.Payload)
	r.Since = time.Unix(since, 0)
	return r, err
}

// insert claims an id, or makes another record for it, unless it has one. That is locked then:
// nobody deletes it before the transaction has read it.
func (s *SQLStore) insert(ctx context.Context, tx *sql.Tx, id string, state State, run string, payload []byte) error {
	text := "INSERT INTO TABLE (id, state, run, since, payload) VALUES (?, ?, ?, NOW, ?)"
	if s.dialect == sqldb.MySQL {
		text += " ON DUPLICATE KEY UPDATE id = id"
	} else {
		text += " ON CONFLICT (id) DO UPDATE SET id = EXCLUDED.id"
	}
	_, err := s.exec(ctx, tx, text, id, string(state), run, payload)
	return err
}

// record makes a change in a transaction, and returns the record after it. The read is a
// current one: it comes at READ COMMITTED, or as the first of its transaction.
func (s *SQLStore) record(ctx context.Context, id string, change func(tx *sql.Tx) error) (r Record, err error) {
	err = s.dialect.Transact(ctx, s.db, func(tx *sql.Tx) error {
		if err := change(tx); err != nil {
			return err
		}
		r, err = s.load(ctx, tx, id)
		return err
	})
	if err != nil {
		return Record{}, err
	}
	return r, nil
}

// put is a change that puts a record in place of one for which a condition holds, or of none.
func (s *SQLStore) put(ctx context.Context, id string, state State, run string, payload []byte, condition string, args ...any) (Record, error) {
	if payload == nil {
		payload = []byte{} // not NULL
	}
	given := append([]any{string(state), run, payload, id}, args...)
	return s.record(ctx, id, func(tx *sql.Tx) error {
		if err := s.insert(ctx, tx, id, state, run, payload); err != nil {
			return err
		}
		_, err := s.exec(ctx, tx, "UPDATE TABLE SET state = ?, run = ?, since = NOW, payload = ?"+
			" WHERE id = ? AND "+condition, given...)
		return err
	})
}

// Begin is that of Store.
func (s *SQLStore) Begin(ctx context.Context, id, run string) (Record, error) {
	return s.record(ctx, id, func(tx *sql.Tx) error {
		return s.insert(ctx, tx, id, Running, run, []byte{})
	})
}

// End is that of Store.
func (s *SQLStore) End(ctx context.Context, id, run string, state State, payload []byte) error {
	r, err := s.put(ctx, id, state, run, payload, "run = ? AND state = 'running'", run)
	if err == nil && (r.Run != run || r.State != state) {
		err = ErrLost
	}
	return err
}

// Abandon is that of Store.
func (s *SQLStore) Abandon(ctx context.Context, id, run string) error {
	return s.remove(ctx, id, run, "id = ? AND run = ? AND state = 'running'", id, run)
}

// Resolve is that of Store.
func (s *SQLStore) Resolve(ctx context.Context, id string, result []byte) error {
	r, err := s.put(ctx, id, Done, "", result, "state <> 'done'")
	if err == nil && (r.State != Done || !bytes.Equal(r.Payload, result)) {
		err = errOtherResult
	}
	return err
}

// Forget is that of Store. If its context ends, the record may go a moment later, but never
// one that was begun since.
func (s *SQLStore) Forget(ctx context.Context, id string) error {
	return s.remove(ctx, id, "", "id = ?", id)
}

// remove deletes a record, after it has waited for one that is just being made: a Begin whose
// context has ended may still be committed, and a DELETE alone would neither see it nor wait.
func (s *SQLStore) remove(ctx context.Context, id, run, condition string, args ...any) error {
	return s.dialect.Transact(ctx, s.db, func(tx *sql.Tx) error {
		if err := s.insert(ctx, tx, id, Running, run, []byte{}); err != nil {
			return err
		}
		_, err := s.exec(ctx, tx, "DELETE FROM TABLE WHERE "+condition, args...)
		return err
	})
}

// Purge deletes the results that are older than age, by the clock of the database, and returns
// how many. After that their ids run again, so age must be longer than any repetition can
// take to come. What is in progress or unknown stays. It reads the whole table, unless you make
// an index on since. Its errors are the driver's, wrapped.
func (s *SQLStore) Purge(ctx context.Context, age time.Duration) (n int64, err error) {
	if age < 0 {
		return 0, fmt.Errorf("once: purge: age %v: must not be below 0", age)
	}
	seconds := int64(age / time.Second)
	if age%time.Second != 0 {
		seconds++
	}
	// In a transaction: a statement alone could still run after the call has ended.
	err = s.dialect.Transact(ctx, s.db, func(tx *sql.Tx) error {
		result, err := s.exec(ctx, tx, "DELETE FROM TABLE WHERE state = 'done' AND since < NOW - "+strconv.FormatInt(seconds, 10))
		if err == nil {
			n, err = result.RowsAffected()
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("once: purge: %w", err)
	}
	return n, nil
}
