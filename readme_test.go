package holdfast

import (
	"go/ast"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func readme(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("README.md")
	require.NoError(t, err)
	return string(text)
}

// The README shows the body of the package's Example, which runs.
func TestReadmeShowsTheExample(t *testing.T) {
	block := regexp.MustCompile("(?s)```go\n(.*?)```").FindStringSubmatch(readme(t))
	require.NotNil(t, block)
	require.Equal(t, exampleBody(t, "Example"), block[1])
}

// exampleBody returns the text of a function in example_test.go, without its
// indentation and its expected output.
func exampleBody(t *testing.T, name string) string {
	t.Helper()
	s := sources(t, ".", func(path string) bool { return path == "example_test.go" })[0]
	for _, d := range s.file.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Name.Name != name {
			continue
		}
		body := s.text[s.fset.Position(f.Body.Lbrace).Offset+2 : s.fset.Position(f.Body.Rbrace).Offset]
		body, _, ok = strings.Cut(body, "\t// Output:")
		require.True(t, ok, "%s has no output", name)
		var out strings.Builder
		for line := range strings.Lines(body) {
			out.WriteString(strings.TrimPrefix(line, "\t"))
		}
		return out.String()
	}
	t.Fatalf("there is no function %s", name)
	return ""
}

// What the scripts call is in the README's ACL lines: of one Redis, and of a majority.
func TestReadmeNamesAllCommands(t *testing.T) {
	majority := []string{"accept", "extend", "floor", "giveup", "keep", "renew", "acquire"}
	isMajority := func(name string) bool { return slices.Contains(majority, name) }
	isSingle := func(name string) bool { return !slices.Contains(majority[:5], name) || name == "extend" }
	for user, commands := range map[string][]string{
		"locks":    append(scriptCommands(t, isSingle), "set", "eval", "evalsha", "wait", "subscribe"),
		"majority": append(scriptCommands(t, isMajority), "eval", "evalsha", "info", "subscribe", "unsubscribe", "script|load"),
	} {
		line := regexp.MustCompile("(?m)^ACL SETUSER " + user + " .*$").FindString(readme(t))
		require.NotEmpty(t, line, user)
		rights := strings.Fields(line)
		for _, command := range commands {
			if user == "majority" && command == "incr" {
				continue // of a fenced lock on one Redis
			}
			require.Contains(t, rights, "+"+command, "of %s", user)
		}
	}
}

// Every option and every error is in the README.
func TestReadmeIsComplete(t *testing.T) {
	text := readme(t)
	isPublic := func(path string) bool { return isRootCode(path) || strings.HasPrefix(path, "redlock/") && isCode(path) }
	for _, s := range sources(t, ".", isPublic) {
		for _, d := range s.file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "With") {
				require.Contains(t, text, "`"+f.Name.Name+"(")
			}
		}
	}
	for name := range sentinels {
		require.Contains(t, text, "`"+name+"`")
	}
}
