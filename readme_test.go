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

// What the scripts call is in the README's ACL line.
func TestReadmeNamesAllCommands(t *testing.T) {
	var line string
	for l := range strings.Lines(readme(t)) {
		if strings.HasPrefix(l, "ACL SETUSER ") {
			line = l
		}
	}
	require.NotEmpty(t, line)
	rights := strings.Fields(line)
	for _, command := range append(scriptCommands(t), "set", "eval", "evalsha", "wait") {
		require.True(t, slices.Contains(rights, "+"+command), "+%s is not in %q", command, line)
	}
}

// Every option and every error is in the README.
func TestReadmeIsComplete(t *testing.T) {
	text := readme(t)
	for _, s := range sources(t, ".", isRootCode) {
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
