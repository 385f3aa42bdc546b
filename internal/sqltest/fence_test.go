//go:build unix

package sqltest

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/fencing/sqlfence"
)

// ways are the ways to ask a fence.
var ways = []struct {
	name string
	ask  func(e *env, resource string, token fencing.Token, rules ...fencing.Rule) error
}{
	{"Raise", func(e *env, resource string, token fencing.Token, rules ...fencing.Rule) error {
		return e.once(e.Context(), sql.LevelDefault, func(tx *sql.Tx) error {
			return e.fence.Raise(e.Context(), tx, resource, token, rules...)
		})
	}},
	{"Enter", func(e *env, resource string, token fencing.Token, rules ...fencing.Rule) error {
		return e.fence.Enter(e.Context(), e.db, resource, token, rules...)
	}},
	{"Marks", func(e *env, resource string, token fencing.Token, rules ...fencing.Rule) error {
		c, err := fencing.NewCheck(token, rules...)
		if err != nil {
			return err
		}
		_, err = e.fence.Marks(e.db).Raise(e.Context(), resource, c)
		return err
	}},
}

func TestAnswers(t *testing.T) {
	once, a, b := fencing.Once(), fencing.By("a"), fencing.By("b")
	const greatest = 1<<63 - 1
	each(t, func(e *env) {
		for _, w := range ways {
			for _, c := range []struct {
				name  string
				token fencing.Token
				rules []fencing.Rule
				err   error
				mark  fencing.Claim // after it
			}{
				{"zero", 0, nil, fencing.ErrNoToken, fencing.Claim{}},
				{"negative", -1, []fencing.Rule{a}, fencing.ErrNoToken, fencing.Claim{}},
				{"first", 5, nil, nil, fencing.Claim{Token: 5}},
				{"the same again", 5, nil, nil, fencing.Claim{Token: 5}},
				{"lower", 4, nil, fencing.ErrStale, fencing.Claim{Token: 5}},
				{"lower, of an owner", 4, []fencing.Rule{a}, fencing.ErrStale, fencing.Claim{Token: 5}},
				{"used up", 5, []fencing.Rule{once}, fencing.ErrStale, fencing.Claim{Token: 5}},
				{"an owner says who it was", 5, []fencing.Rule{a}, nil, fencing.Claim{Token: 5, Owner: "a"}},
				{"the same owner again", 5, []fencing.Rule{a}, nil, fencing.Claim{Token: 5, Owner: "a"}},
				{"the number was given twice", 5, []fencing.Rule{b}, fencing.ErrStale, fencing.Claim{Token: 5, Owner: "a"}},
				{"another case", 5, []fencing.Rule{fencing.By("A")}, fencing.ErrStale, fencing.Claim{Token: 5, Owner: "a"}},
				{"a space behind", 5, []fencing.Rule{fencing.By("a ")}, fencing.ErrStale, fencing.Claim{Token: 5, Owner: "a"}},
				{"only a space", 5, []fencing.Rule{fencing.By(" ")}, fencing.ErrStale, fencing.Claim{Token: 5, Owner: "a"}},
				{"the owner stays", 5, nil, nil, fencing.Claim{Token: 5, Owner: "a"}},
				{"higher", 6, []fencing.Rule{b, once}, nil, fencing.Claim{Token: 6, Owner: "b"}},
				{"once only", 6, []fencing.Rule{b, once}, fencing.ErrStale, fencing.Claim{Token: 6, Owner: "b"}},
				{"nobody says who", 7, nil, nil, fencing.Claim{Token: 7}},
				{"a space is an owner", 7, []fencing.Rule{fencing.By(" ")}, nil, fencing.Claim{Token: 7, Owner: " "}},
				{"and refuses others", 7, []fencing.Rule{a}, fencing.ErrStale, fencing.Claim{Token: 7, Owner: " "}},
				{"the greatest", greatest, nil, nil, fencing.Claim{Token: greatest}},
				{"the greatest again", greatest, []fencing.Rule{a}, nil, fencing.Claim{Token: greatest, Owner: "a"}},
				{"the greatest, used up", greatest, []fencing.Rule{a, once}, fencing.ErrStale, fencing.Claim{Token: greatest, Owner: "a"}},
				{"below the greatest", greatest - 1, nil, fencing.ErrStale, fencing.Claim{Token: greatest, Owner: "a"}},
			} {
				what := w.name + ": " + c.name
				err := w.ask(e, w.name, c.token, c.rules...)
				mark, lerr := e.fence.Marks(e.db).Load(e.Context(), w.name)
				require.NoError(e, lerr, what)
				require.Equal(e, c.mark, mark, what)
				if c.err == nil {
					require.NoError(e, err, what)
					continue
				}
				require.ErrorIs(e, err, c.err, what)
				var stale *fencing.StaleError
				if errors.As(err, &stale) {
					require.Equal(e, fencing.StaleError{Resource: w.name, Token: c.token, Seen: mark.Token}, *stale, what)
				}
			}
		}
	})
}

// Random checks get the answers of Check.Admit, and leave its marks.
func TestAdmitsLikeCheck(t *testing.T) {
	owners := []string{"", "a", "b"}
	each(t, func(e *env) {
		seen := map[string]fencing.Claim{}
		marks := e.fence.Marks(e.db)
		for i := range 250 {
			resource := fmt.Sprint("r", rand.IntN(3))
			c := fencing.Check{
				Claim: fencing.Claim{Token: fencing.Token(i/20 + rand.IntN(4)), Owner: owners[rand.IntN(3)]},
				Once:  rand.IntN(4) == 0,
			}
			want, wantErr := c.Admit(resource, seen[resource])
			what := fmt.Sprintf("step %d: %s: %+v on %+v", i, resource, c, seen[resource])
			if rand.IntN(2) == 0 {
				got, err := marks.Raise(e.Context(), resource, c)
				require.Equal(e, wantErr, err, what)
				if !errors.Is(err, fencing.ErrNoToken) {
					require.Equal(e, want, got, what)
				}
			} else {
				rules := []fencing.Rule{fencing.By(c.Owner)}
				if c.Once {
					rules = append(rules, fencing.Once())
				}
				require.Equal(e, wantErr, ways[rand.IntN(2)].ask(e, resource, c.Token, rules...), what)
			}
			if want.Token != 0 {
				seen[resource] = want
			}
			got, err := marks.Load(e.Context(), resource)
			require.NoError(e, err, what)
			require.Equal(e, seen[resource], got, what)
		}
	})
}

// nasty are names that are all different, and that some database takes for others.
func nasty() []string {
	return []string{
		"", " ", "  ", "a", "A", "a ", "a  ", " a", "a\t", "ä", "Ä", "a\u0308", "ß", "ss", "ı", "i", "I", "İ",
		"'", "''", `"`, "`", `\`, `\\`, `\'`, "%", "_", "?", "$1", ":a", "--", "'; DROP TABLE marks; --", "a\nb", "a\rb",
		"\u200b", "\ufeff", "日本", "🔒", "🔓", "👩\u200d🚀", "\U0010ffff", "\x7f", "\x01",
		strings.Repeat("x", 255), strings.Repeat("x", 254), strings.Repeat("x", 254) + " ", strings.Repeat("é", 127),
	}
}

func TestNames(t *testing.T) {
	each(t, func(e *env) {
		marks, source := e.fence.Marks(e.db), e.fence.Source(e.db)
		for i, name := range nasty() {
			mark, err := marks.Load(e.Context(), name)
			require.NoError(e, err, "%q", name)
			require.Zero(e, mark, "%q is taken for another", name)
			require.NoError(e, e.fence.Enter(e.Context(), e.db, name, fencing.Token(i+1), fencing.By(name)), "%q", name)
			token, err := source.Next(e.Context(), name)
			require.NoError(e, err, "%q", name)
			require.Equal(e, fencing.Token(1), token, "%q is taken for another", name)
		}
		for i, name := range nasty() {
			mark, err := marks.Load(e.Context(), name)
			require.NoError(e, err)
			require.Equal(e, fencing.Claim{Token: fencing.Token(i + 1), Owner: name}, mark)
		}
		for _, name := range []string{strings.Repeat("x", 256), "a\x00b", "\x00", "\xff", "a\xc3"} {
			for _, w := range ways {
				err := w.ask(e, name, 1)
				require.ErrorContains(e, err, "sqlfence: resource", "%s %q", w.name, name)
				require.NotErrorIs(e, err, fencing.ErrStale)
				require.ErrorContains(e, w.ask(e, "r", 1, fencing.By(name)), "sqlfence: owner", "%s %q", w.name, name)
			}
			_, err := marks.Load(e.Context(), name)
			require.ErrorContains(e, err, "sqlfence: resource", "%q", name)
			_, err = source.Next(e.Context(), name)
			require.ErrorContains(e, err, "sqlfence: key", "%q", name)
		}
	})
}

// A database that cannot answer says nothing about a token.
func TestFailures(t *testing.T) {
	each(t, func(e *env) {
		require.NoError(e, e.fence.Enter(e.Context(), e.db, "r", 5))
		whole, wholeDB := e.fence, e.db
		ask := func(what string, target error) {
			for _, w := range ways {
				err := w.ask(e, "r", 4)
				require.Error(e, err, "%s: %s", w.name, what)
				require.NotErrorIs(e, err, fencing.ErrStale, "%s: %s", w.name, what)
				if target != nil {
					require.ErrorIs(e, err, target, "%s: %s", w.name, what)
				}
			}
			_, err := e.fence.Marks(e.db).Load(e.Context(), "r")
			require.Error(e, err, what)
			_, err = e.fence.Source(e.db).Next(e.Context(), "r")
			require.Error(e, err, what)
			require.NotErrorIs(e, err, fencing.ErrStale, what)
		}
		var err error
		e.fence, err = sqlfence.New(e.dialect, sqlfence.WithTable("no_marks"), sqlfence.WithTokenTable("no_tokens"))
		require.NoError(e, err)
		ask("missing table", nil)
		e.fence = whole

		ctx, cancel := context.WithCancel(e.Context())
		cancel()
		err = e.fence.Enter(ctx, e.db, "r", 4)
		require.ErrorIs(e, err, context.Canceled)
		require.NotErrorIs(e, err, fencing.ErrStale)
		_, err = e.fence.Source(e.db).Next(ctx, "r")
		require.ErrorIs(e, err, context.Canceled)

		e.db, err = sql.Open(driverOf(e.dialect), "")
		require.NoError(e, err)
		require.NoError(e, e.db.Close())
		ask("closed", nil)
		require.Error(e, e.fence.Create(e.Context(), e.db))
		e.db = wholeDB

		tx, err := e.db.BeginTx(e.Context(), nil)
		require.NoError(e, err)
		require.NoError(e, tx.Rollback())
		require.ErrorIs(e, e.fence.Raise(e.Context(), tx, "r", 4), sql.ErrTxDone)
	})
}

func driverOf(d sqlfence.Dialect) string {
	return map[sqlfence.Dialect]string{sqlfence.PostgreSQL: "pgx", sqlfence.MySQL: "mysql", sqlfence.SQLite: "sqlite"}[d]
}

// A wait for another holder's lock ends with its context, and is no answer about the token.
func TestWaitEnds(t *testing.T) {
	eachServer(t, func(e *env) {
		tx, err := e.db.BeginTx(e.Context(), nil)
		require.NoError(e, err)
		require.NoError(e, e.fence.Raise(e.Context(), tx, "r", 5))
		ctx, cancel := context.WithCancel(e.Context())
		result := make(chan error)
		go func() { result <- e.fence.Enter(ctx, e.db, "r", 4) }() // ends with ctx
		pause(ctx, 50)
		cancel()
		err = <-result
		require.Error(e, err)
		require.NotErrorIs(e, err, fencing.ErrStale)
		require.NoError(e, tx.Commit())
		require.ErrorIs(e, e.fence.Enter(e.Context(), e.db, "r", 4), fencing.ErrStale)
	})
}

// What is rolled back has not entered.
func TestRollback(t *testing.T) {
	each(t, func(e *env) {
		for _, before := range []fencing.Token{0, 3} {
			resource := fmt.Sprint("r", before)
			if before > 0 {
				require.NoError(e, e.fence.Enter(e.Context(), e.db, resource, before))
			}
			tx, err := e.db.BeginTx(e.Context(), nil)
			require.NoError(e, err)
			require.NoError(e, e.fence.Raise(e.Context(), tx, resource, 9))
			require.ErrorIs(e, e.fence.Raise(e.Context(), tx, resource, 8), fencing.ErrStale, "the transaction sees it")
			require.NoError(e, tx.Rollback())
			require.NoError(e, e.fence.Enter(e.Context(), e.db, resource, 4))
		}
	})
}

// Marks outlive a Gate, and are shared with Enter.
func TestGateRestart(t *testing.T) {
	each(t, func(e *env) {
		gate := func() *fencing.Gate {
			g, err := fencing.NewGate(fencing.WithMarks(e.fence.Marks(e.db)))
			require.NoError(e, err)
			return g
		}
		require.NoError(e, gate().Enter(e.Context(), "r", 7, fencing.By("a")))
		require.ErrorIs(e, gate().Enter(e.Context(), "r", 6), fencing.ErrStale)
		require.ErrorIs(e, gate().Enter(e.Context(), "r", 7, fencing.By("b")), fencing.ErrStale)
		require.NoError(e, gate().Enter(e.Context(), "r", 7, fencing.By("a")))
		require.ErrorIs(e, e.fence.Enter(e.Context(), e.db, "r", 6), fencing.ErrStale)
		require.NoError(e, e.fence.Enter(e.Context(), e.db, "r", 8))
		require.ErrorIs(e, gate().Enter(e.Context(), "r", 7, fencing.By("a")), fencing.ErrStale)
	})
}

// Create may run in many processes at once, and again.
func TestCreate(t *testing.T) {
	each(t, func(e *env) {
		f, err := sqlfence.New(e.dialect, sqlfence.WithTable("Mixed_marks"+e.suffix), sqlfence.WithTokenTable("order_"+e.suffix))
		require.NoError(e, err)
		var wg sync.WaitGroup
		errs := make([]error, 8)
		for i := range errs {
			wg.Go(func() { errs[i] = f.Create(e.Context(), e.db) }) // ends by itself
		}
		wg.Wait()
		require.NoError(e, errors.Join(errs...))
		require.NoError(e, f.Enter(e.Context(), e.db, "r", 1))
		require.NoError(e, f.Create(e.Context(), e.db))
		require.NoError(e, f.Enter(e.Context(), e.db, "r", 1))

		// Schema is the same, as statements.
		for s := range strings.SplitSeq(e.fence.Schema(), ";") {
			if s = strings.TrimSpace(s); s != "" {
				e.exec(s)
			}
		}
	})
}
