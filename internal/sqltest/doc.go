// Package sqltest tests package sqlfence on real databases: PostgreSQL and MariaDB, which
// it starts itself, and SQLite. It is a module of its own for the drivers.
package sqltest
