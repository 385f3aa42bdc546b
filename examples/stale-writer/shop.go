//go:build unix

package main

import (
	"context"
	"database/sql"

	_ "github.com/jackc/pgx/v5/stdlib" // for DATABASE_URL
	_ "modernc.org/sqlite"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/fencing/sqlfence"
)

// resource is what the tokens are checked for.
const resource = "inventory"

// shop is the inventory.
type shop struct {
	db    *sql.DB
	fence *sqlfence.Fence
	file  string
}

// openShop opens the database of url, or SQLite on a file.
func openShop(url, file string) (*shop, error) {
	driver, source, dialect := "pgx", url, sqlfence.PostgreSQL
	if url == "" {
		driver, source, dialect = "sqlite", "file:"+file+"?_txlock=immediate&_pragma=busy_timeout(10000)", sqlfence.SQLite
	}
	fence, err := sqlfence.New(dialect)
	if err != nil {
		return nil, err
	}
	db, err := sql.Open(driver, source)
	if err != nil {
		return nil, err
	}
	return &shop{db, fence, file}, nil
}

// reset puts one item into the shop.
func (s *shop) reset(ctx context.Context) error {
	if err := s.fence.Create(ctx, s.db); err != nil {
		return err
	}
	for _, text := range []string{
		"CREATE TABLE IF NOT EXISTS inventory (stock BIGINT NOT NULL)",
		"DELETE FROM inventory",
		"DELETE FROM fencing_marks WHERE resource = '" + resource + "'", // of a run with another Redis
		"INSERT INTO inventory (stock) VALUES (1)",
	} {
		if _, err := s.db.ExecContext(ctx, text); err != nil {
			return err
		}
	}
	return nil
}

// enter makes the database refuse all older tokens.
func (s *shop) enter(ctx context.Context, c fencing.Claim) error {
	return s.fence.Enter(ctx, s.db, resource, c.Token, fencing.By(c.Owner))
}

// take takes one item out of stock, if the claim is not stale. Without a token it does what
// its caller has found right to do some time ago.
func (s *shop) take(ctx context.Context, c fencing.Claim) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // after a commit it does nothing
	if c.Token != 0 {
		if err := s.fence.Raise(ctx, tx, resource, c.Token, fencing.By(c.Owner)); err != nil {
			return err
		}
	}
	if _, err := tx.ExecContext(ctx, "UPDATE inventory SET stock = stock - 1"); err != nil {
		return err
	}
	return tx.Commit()
}

func (s *shop) stock(ctx context.Context) (n int, err error) {
	err = s.db.QueryRowContext(ctx, "SELECT stock FROM inventory").Scan(&n)
	return n, err
}
