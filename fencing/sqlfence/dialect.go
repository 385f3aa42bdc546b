package sqlfence

import (
	"database/sql"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Dialect is the kind of a database. The zero value is none, and refused.
type Dialect int

const (
	PostgreSQL Dialect = iota + 1 // from 9.5 on
	MySQL                         // and MariaDB; tables of InnoDB
	SQLite                        // from 3.35 on
)

// String returns the name of the dialect.
func (d Dialect) String() string {
	switch d {
	case PostgreSQL:
		return "PostgreSQL"
	case MySQL:
		return "MySQL"
	case SQLite:
		return "SQLite"
	}
	return "Dialect(" + strconv.Itoa(int(d)) + ")"
}

// mostBytes is the length of a name of a resource or an owner: what an index of every
// MySQL takes.
const mostBytes = 255

// identifiers are plain ones, so that quotes around them are all that they need. 63 bytes
// is what PostgreSQL keeps of a longer one, without a word.
var (
	identifier = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,62}$`)
	table      = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?$`)
)

func (d Dialect) check() error {
	if d < PostgreSQL || d > SQLite {
		return fmt.Errorf("sqlfence: no such dialect: %v", d)
	}
	return nil
}

// quote quotes an identifier, also a qualified one.
func (d Dialect) quote(name string) string {
	// SQLite takes a name in double quotes that it does not know for a text.
	q := "`"
	if d == PostgreSQL {
		q = `"`
	}
	return q + strings.ReplaceAll(name, ".", q+"."+q) + q
}

// arg returns the placeholder of the nth argument, from 1, where they come in order.
func (d Dialect) arg(n int) string {
	if d == PostgreSQL {
		return "$" + strconv.Itoa(n)
	}
	return "?"
}

// current makes a read see what is there now: at REPEATABLE READ a plain one of MySQL sees
// an old snapshot, while its writes do not. PostgreSQL fails the write then.
func (d Dialect) current() string {
	if d == MySQL {
		return " FOR UPDATE"
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

// checkName refuses what some database could not keep, or not compare, byte for byte.
func checkName(what, s string) error {
	switch {
	case len(s) > mostBytes:
		return fmt.Errorf("sqlfence: %s of %d bytes: at most %d", what, len(s), mostBytes)
	case !utf8.ValidString(s):
		return fmt.Errorf("sqlfence: %s %q is not valid UTF-8", what, s)
	case strings.IndexByte(s, 0) >= 0:
		return fmt.Errorf("sqlfence: %s %q contains NUL", what, s)
	}
	return nil
}
