// Package sqlfence checks fencing tokens in the transactions of a database: PostgreSQL,
// MySQL and MariaDB (InnoDB), and SQLite. It has no driver in it: open the database with
// the one that you use.
//
//	f, err := sqlfence.New(sqlfence.PostgreSQL)
//	...
//	err = f.Create(ctx, db) // or put f.Schema() into your migrations
//	...
//	tx, err := db.BeginTx(ctx, nil)
//	...
//	err = f.Raise(ctx, tx, "order:1", lock.Token(), fencing.By(lock.Owner()))
//	// read and write in tx as you like, then:
//	err = tx.Commit()
//
// [Fence.Raise] is one statement, which locks the row with the resource's mark, the highest
// token seen, and raises it. The lock is held until the transaction ends. So of two holders
// the second waits for the end of the first, and whoever is older is refused: all that the
// transaction writes is fenced, in whatever tables. Whoever writes without Raise is not
// checked at all, and a rollback to a savepoint from before Raise takes it back.
//
// Make Raise the first statement of the transaction, before all reads. A transaction that
// has read before may hold a snapshot from before an older holder's last write, and would
// undo that. Where reads and writes are different transactions, call [Fence.Enter] before
// the first read.
//
// A holder that stops in an open transaction keeps newer ones waiting, as with any row
// lock. Bound it by the context of BeginTx, and on the server, for when the process is
// gone: idle_in_transaction_session_timeout at PostgreSQL, wait_timeout at MySQL.
//
// # Errors
//
// A refused token is a [*fencing.StaleError]; roll the transaction back. Every other error is
// the driver's, wrapped, and never matches fencing.ErrStale: it says nothing about the token.
// These are usual, and mean that the transaction is to be run again from its beginning:
//
//   - PostgreSQL at REPEATABLE READ and SERIALIZABLE: a serialization failure (40001),
//     nearly always when two holders meet. At READ COMMITTED, its default, Raise waits
//     instead, and is as safe.
//   - MySQL and MariaDB at every level: a deadlock (1213) or a lock wait timeout (1205).
//     They are rare when the mark is there already and Raise comes first. MariaDB with
//     innodb_snapshot_isolation, too: the record has changed (1020).
//   - SQLite: busy (5). Open transactions by BEGIN IMMEDIATE, in most drivers the setting
//     _txlock=immediate, else one that reads first cannot begin to write once somebody
//     else has written; and set busy_timeout, else it does not wait at all.
//
// # Names
//
// Names of resources and owners are compared byte for byte. In all dialects they are at
// most 255 bytes of valid UTF-8 without NUL; what is not is refused by an error.
//
// Marks stay for good. Delete one only when no holder of an old token can be left. A
// database that is restored from a backup has older marks, as it has older data.
package sqlfence
