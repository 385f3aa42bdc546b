//go:build unix

package sqltest

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5/pgconn"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	"modernc.org/sqlite"

	"github.com/holdfast-go/holdfast/fencing/sqlfence"
	"github.com/holdfast-go/holdfast/internal/leaktest"
)

// These tests run on real servers, and so in real time: they pause, but measure no time.

const (
	// required is set to 1 where servers must be there: make test installs them all.
	required = "HOLDFAST_REQUIRE_REDIS"

	writers = 16
	limit   = time.Minute // for a test that hangs
)

var servers struct {
	postgres, mariadb running
}

// running is a server that was started, or why there is none. Tests only read it.
type running struct {
	*server
	dsn string
	err error
}

func TestMain(m *testing.M) {
	var wg sync.WaitGroup
	wg.Go(func() { servers.postgres.start(startPostgres) }) // ends when it answers
	wg.Go(func() { servers.mariadb.start(startMariaDB) })   // ends when it answers
	wg.Wait()
	code := m.Run()
	if err := errors.Join(servers.postgres.end(), servers.mariadb.end()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func (r *running) start(f func() (*server, string, error)) { r.server, r.dsn, r.err = f() }

func (r *running) end() error {
	if r.server == nil {
		return nil
	}
	return r.close()
}

// env is a database with a fence whose tables nobody else uses.
type env struct {
	*testing.T
	dialect sqlfence.Dialect
	db      *sql.DB
	fence   *sqlfence.Fence
	suffix  string // for tables of the test's own
}

// each runs f on every database, and in every way to talk to it that makes a difference.
func each(t *testing.T, f func(e *env)) {
	t.Helper()
	t.Run("sqlite", func(t *testing.T) { run(t, running{}, sqlfence.SQLite, "", f) })
	eachServer(t, f)
}

// eachServer leaves out SQLite, where one transaction that writes keeps all others from
// beginning, and waits outside of its context.
func eachServer(t *testing.T, f func(e *env)) {
	t.Helper()
	t.Run("postgres", func(t *testing.T) { run(t, servers.postgres, sqlfence.PostgreSQL, "", f) })
	t.Run("postgres simple protocol", func(t *testing.T) {
		run(t, servers.postgres, sqlfence.PostgreSQL, " default_query_exec_mode=simple_protocol", f)
	})
	t.Run("mariadb", func(t *testing.T) { run(t, servers.mariadb, sqlfence.MySQL, "", f) })
	t.Run("mariadb found rows", func(t *testing.T) {
		run(t, servers.mariadb, sqlfence.MySQL, "&clientFoundRows=true&interpolateParams=true", f)
	})
}

var names atomic.Int64

func run(t *testing.T, r running, d sqlfence.Dialect, params string, f func(e *env)) {
	t.Helper()
	leaktest.Check(t)
	e := &env{T: t, dialect: d, db: open(t, r, d, params), suffix: fmt.Sprintf("_%d", names.Add(1))}
	var err error
	e.fence, err = sqlfence.New(d, sqlfence.WithTable("marks"+e.suffix), sqlfence.WithTokenTable("tokens"+e.suffix))
	require.NoError(t, err)
	require.NoError(t, e.fence.Create(t.Context(), e.db))
	f(e)
}

func open(t *testing.T, r running, d sqlfence.Dialect, params string) *sql.DB {
	t.Helper()
	driver, dsn := "sqlite", ""
	switch d {
	case sqlfence.PostgreSQL:
		driver, dsn = "pgx", r.dsn+params
	case sqlfence.MySQL:
		driver, dsn = "mysql", r.dsn+params
	case sqlfence.SQLite:
		dsn = "file:" + filepath.Join(t.TempDir(), "db") +
			"?_txlock=immediate&_pragma=busy_timeout(20000)&_pragma=journal_mode(WAL)&_pragma=synchronous(OFF)"
	}
	if errors.Is(r.err, errMissing) && os.Getenv(required) != "1" {
		t.Skip("no server to test on: ", r.err)
	}
	require.NoError(t, r.err)
	db, err := sql.Open(driver, dsn)
	require.NoError(t, err)
	db.SetMaxOpenConns(writers + 4)
	db.SetMaxIdleConns(writers + 4)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	return db
}

// create makes a table of the test's own, and returns its name.
func (e *env) create(name, columns string) string {
	e.Helper()
	name += e.suffix
	serial := map[sqlfence.Dialect]string{
		sqlfence.PostgreSQL: "BIGSERIAL PRIMARY KEY",
		sqlfence.MySQL:      "BIGINT AUTO_INCREMENT PRIMARY KEY",
		sqlfence.SQLite:     "INTEGER PRIMARY KEY AUTOINCREMENT",
	}[e.dialect]
	e.exec("CREATE TABLE " + name + " (" + strings.ReplaceAll(columns, "SERIAL", serial) + ")")
	return name
}

func (e *env) exec(statement string, args ...any) {
	e.Helper()
	_, err := e.db.ExecContext(e.Context(), e.sql(statement), args...)
	require.NoError(e, err)
}

func (e *env) int(statement string, args ...any) (n int64) {
	e.Helper()
	require.NoError(e, e.db.QueryRowContext(e.Context(), e.sql(statement), args...).Scan(&n))
	return n
}

// sql writes the placeholders of a statement, ?, as the database has them.
func (e *env) sql(statement string) string {
	for n := 1; e.dialect == sqlfence.PostgreSQL && strings.Contains(statement, "?"); n++ {
		statement = strings.Replace(statement, "?", "$"+strconv.Itoa(n), 1)
	}
	return statement
}

// transact runs fn in a transaction until it is not one that is to be run again.
func (e *env) transact(ctx context.Context, level sql.IsolationLevel, fn func(tx *sql.Tx) error) error {
	for {
		err := e.once(ctx, level, fn)
		if err == nil || !again(err) || ctx.Err() != nil {
			return err
		}
		pause(ctx, 3)
	}
}

func (e *env) once(ctx context.Context, level sql.IsolationLevel, fn func(tx *sql.Tx) error) error {
	tx, err := e.db.BeginTx(ctx, &sql.TxOptions{Isolation: level})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if err := fn(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// again reports whether an error means to run the transaction again, as the package
// comment of sqlfence has it.
func again(err error) bool {
	var (
		pg *pgconn.PgError
		my *mysql.MySQLError
		li *sqlite.Error
	)
	switch {
	case errors.As(err, &pg):
		return pg.Code == "40001" || pg.Code == "40P01"
	case errors.As(err, &my):
		return my.Number == 1213 || my.Number == 1205 || my.Number == 1020
	case errors.As(err, &li):
		return li.Code()&0xff == 5
	}
	return false
}

// levels are the isolation levels of the database.
func (e *env) levels() []sql.IsolationLevel {
	if e.dialect == sqlfence.SQLite {
		return []sql.IsolationLevel{sql.LevelDefault}
	}
	return []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable}
}

// pause waits for up to most milliseconds, often for none.
func pause(ctx context.Context, most int) {
	if rand.IntN(3) == 0 {
		return
	}
	select {
	case <-time.After(time.Duration(rand.IntN(most*1000)) * time.Microsecond):
	case <-ctx.Done():
	}
}

// bounded returns a context by which a test that hangs fails.
func (e *env) bounded() context.Context {
	ctx, cancel := context.WithTimeout(e.Context(), limit)
	e.Cleanup(cancel)
	return ctx
}
