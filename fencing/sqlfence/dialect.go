package sqlfence

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/internal/sqldb"
)

// Dialect is the kind of a database. The zero value is none, and refused.
type Dialect int

const (
	PostgreSQL = Dialect(sqldb.PostgreSQL) // from 9.5 on
	MySQL      = Dialect(sqldb.MySQL)      // and MariaDB; tables of InnoDB
	SQLite     = Dialect(sqldb.SQLite)     // from 3.35 on
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

func (d Dialect) check() error {
	if !d.db().Known() {
		return fmt.Errorf("sqlfence: no such dialect: %v", d)
	}
	return nil
}

// db returns what packages with tables share.
func (d Dialect) db() sqldb.Dialect { return sqldb.Dialect(d) }

// current makes a read see what is there now: at REPEATABLE READ a plain one of MySQL sees
// an old snapshot, while its writes do not. PostgreSQL fails the write then.
func (d Dialect) current() string {
	if d == MySQL {
		return " FOR UPDATE"
	}
	return ""
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
