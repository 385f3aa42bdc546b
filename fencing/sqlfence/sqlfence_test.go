package sqlfence_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/fencing/sqlfence"
	"github.com/holdfast-go/holdfast/internal/leaktest"
)

// What needs a database is tested in internal/sqltest, a module of its own with the drivers.

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestSchema(t *testing.T) {
	for d, want := range map[sqlfence.Dialect]string{
		sqlfence.PostgreSQL: `CREATE TABLE IF NOT EXISTS "fencing_marks" (
  resource TEXT COLLATE "C" NOT NULL PRIMARY KEY,
  token BIGINT NOT NULL,
  owner TEXT COLLATE "C" NOT NULL
);

CREATE TABLE IF NOT EXISTS "fencing_tokens" (
  resource TEXT COLLATE "C" NOT NULL PRIMARY KEY,
  token BIGINT NOT NULL
);
`,
		sqlfence.MySQL: "CREATE TABLE IF NOT EXISTS `fencing_marks` (\n" +
			"  resource VARBINARY(255) NOT NULL PRIMARY KEY,\n" +
			"  token BIGINT NOT NULL,\n" +
			"  owner VARBINARY(255) NOT NULL\n" +
			") ENGINE=InnoDB;\n\n" +
			"CREATE TABLE IF NOT EXISTS `fencing_tokens` (\n" +
			"  resource VARBINARY(255) NOT NULL PRIMARY KEY,\n" +
			"  token BIGINT NOT NULL\n" +
			") ENGINE=InnoDB;\n",
		sqlfence.SQLite: "CREATE TABLE IF NOT EXISTS `fencing_marks` (\n" +
			"  resource TEXT COLLATE BINARY NOT NULL PRIMARY KEY,\n" +
			"  token BIGINT NOT NULL,\n" +
			"  owner TEXT COLLATE BINARY NOT NULL\n" +
			");\n\n" +
			"CREATE TABLE IF NOT EXISTS `fencing_tokens` (\n" +
			"  resource TEXT COLLATE BINARY NOT NULL PRIMARY KEY,\n" +
			"  token BIGINT NOT NULL\n" +
			");\n",
	} {
		f, err := sqlfence.New(d)
		require.NoError(t, err)
		require.Equal(t, want, f.Schema(), d)
	}
	f, err := sqlfence.New(sqlfence.PostgreSQL, sqlfence.WithTable("app.Marks"), sqlfence.WithTokenTable("app.tokens"))
	require.NoError(t, err)
	require.Contains(t, f.Schema(), `"app"."Marks" (`)
	require.Contains(t, f.Schema(), `"app"."tokens" (`)
}

func TestOptions(t *testing.T) {
	for _, name := range []string{
		"", ".", "a.", ".a", "a.b.c", "a b", "a-b", "1a", "a;", `a"`, "a`", "a'", "ä", "a\n", "a\x00", "a. b",
		strings.Repeat("a", 64), "a." + strings.Repeat("b", 64),
	} {
		_, err := sqlfence.New(sqlfence.SQLite, sqlfence.WithTable(name))
		require.ErrorContains(t, err, "WithTable", "%q", name)
		_, err = sqlfence.New(sqlfence.SQLite, sqlfence.WithTokenTable(name))
		require.ErrorContains(t, err, "WithTokenTable", "%q", name)
	}
	for _, name := range []string{"a", "_", "A1_b", "main.a", strings.Repeat("a", 63)} {
		_, err := sqlfence.New(sqlfence.SQLite, sqlfence.WithTable(name))
		require.NoError(t, err, "%q", name)
	}
	_, err := sqlfence.New(sqlfence.MySQL, nil)
	require.ErrorContains(t, err, "nil option")
	_, err = sqlfence.New(sqlfence.MySQL, sqlfence.WithTable("FENCING_tokens"))
	require.ErrorContains(t, err, "share the table")
}

func TestDialects(t *testing.T) {
	for d, name := range map[sqlfence.Dialect]string{
		sqlfence.PostgreSQL: "PostgreSQL", sqlfence.MySQL: "MySQL", sqlfence.SQLite: "SQLite",
		0: "Dialect(0)", -1: "Dialect(-1)", 4: "Dialect(4)",
	} {
		require.Equal(t, name, d.String())
		_, err := sqlfence.New(d)
		if strings.Contains(name, "(") {
			require.ErrorContains(t, err, name)
		} else {
			require.NoError(t, err)
		}
	}
}

// The zero Fence, and a claim that is none, are refused before a database is asked.
func TestRefusedBefore(t *testing.T) {
	var zero sqlfence.Fence
	ctx := t.Context()
	require.ErrorContains(t, zero.Create(ctx, nil), "dialect")
	require.ErrorContains(t, zero.Enter(ctx, nil, "r", 1), "dialect")
	require.ErrorContains(t, zero.Raise(ctx, nil, "r", 1), "dialect")
	_, err := zero.Marks(nil).Load(ctx, "r")
	require.ErrorContains(t, err, "dialect")
	_, err = zero.Marks(nil).Raise(ctx, "r", fencing.Check{Claim: fencing.Claim{Token: 1}})
	require.ErrorContains(t, err, "dialect")
	_, err = zero.Source(nil).Next(ctx, "r")
	require.ErrorContains(t, err, "dialect")

	f, err := sqlfence.New(sqlfence.SQLite)
	require.NoError(t, err)
	rows := sqlfence.Rows{Dialect: sqlfence.SQLite, Table: "t", ID: "id", Token: "token"}
	for _, token := range []fencing.Token{0, -1} {
		require.ErrorIs(t, f.Enter(ctx, nil, "r", token), fencing.ErrNoToken)
		require.ErrorIs(t, f.Raise(ctx, nil, "r", token), fencing.ErrNoToken)
		_, err = f.Marks(nil).Raise(ctx, "r", fencing.Check{Claim: fencing.Claim{Token: token}})
		require.ErrorIs(t, err, fencing.ErrNoToken)
		require.ErrorIs(t, rows.Update(ctx, nil, 1, token, ""), fencing.ErrNoToken)
	}
	for _, name := range []string{strings.Repeat("x", 256), "\x00", "\xff"} {
		require.ErrorContains(t, f.Raise(ctx, nil, name, 1), "resource")
		require.ErrorContains(t, f.Raise(ctx, nil, "r", 1, fencing.By(name)), "owner")
	}
}

// Marks and Source are what the packages that take them ask for.
func TestInterfaces(t *testing.T) {
	f, err := sqlfence.New(sqlfence.MySQL)
	require.NoError(t, err)
	_, err = fencing.NewGate(fencing.WithMarks(f.Marks(nil)))
	require.NoError(t, err)
	var source fencing.Source = f.Source(nil)
	require.NotNil(t, source)
}
