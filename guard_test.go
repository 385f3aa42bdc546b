package holdfast

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The house rules, as tests.
const (
	module = "github.com/holdfast-go/holdfast"

	maxFileLines   = 400
	maxFuncLines   = 60
	maxLuaLines    = 20 // of code
	maxLuaQueue    = 60 // of what takes its place in a queue, which must be one step
	maxLuaHeader   = 6
	maxExported    = 72 // names of the root package, methods not counted
	leastDocLength = 20 // of a package comment
)

// ownHelpers are for tests: library code must not import them.
var ownHelpers = []string{
	module + "/internal/redistest", module + "/internal/leaktest", module + "/internal/faultproxy",
}

// source is one Go file.
type source struct {
	path string // from the root of the repository, with slashes
	text string
	fset *token.FileSet
	file *ast.File
}

func (s *source) line(p token.Pos) int { return s.fset.Position(p).Line }

// sources parses the Go files under dir, of nested modules too, that keep accepts.
func sources(t *testing.T, dir string, keep func(path string) bool) (all []*source) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); path != dir && (strings.HasPrefix(name, ".") || name == "testdata" || name == "vendor") {
				return filepath.SkipDir
			}
			return nil
		}
		path = filepath.ToSlash(path)
		if !strings.HasSuffix(path, ".go") || !keep(path) {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		fset := token.NewFileSet()
		file, err := parser.ParseFile(fset, path, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		all = append(all, &source{path, string(text), fset, file})
		return nil
	})
	require.NoError(t, err)
	require.NotEmpty(t, all)
	return all
}

func isTest(path string) bool { return strings.HasSuffix(path, "_test.go") }
func isCode(path string) bool { return !isTest(path) }
func inRoot(path string) bool { return !strings.Contains(path, "/") }

func isRootCode(path string) bool { return inRoot(path) && isCode(path) }

// The root package stands on the standard library, go-redis, uuid and its own
// packages; and these on no more.
func TestImports(t *testing.T) {
	allowed := []string{"github.com/redis/go-redis/v9", "github.com/google/uuid"}
	done := map[string]bool{}
	var visit func(dir string)
	visit = func(dir string) {
		if done[dir] {
			return
		}
		done[dir] = true
		inDir := func(path string) bool { return isCode(path) && filepath.Dir(path) == filepath.Clean(dir) }
		for _, s := range sources(t, dir, inDir) {
			for _, spec := range s.file.Imports {
				path, err := strconv.Unquote(spec.Path.Value)
				require.NoError(t, err)
				first, _, _ := strings.Cut(path, "/")
				own := strings.TrimPrefix(path, module+"/")
				switch {
				case !strings.Contains(first, "."), slices.Contains(allowed, path): // the standard library
				case own == path || slices.Contains(ownHelpers, path):
					t.Errorf("%s imports %s", s.path, path)
				default:
					visit(own)
				}
			}
		}
	}
	visit(".")
	require.Greater(t, len(done), 3)
}

func TestEveryPackageHasComment(t *testing.T) {
	comments := map[string]int{}
	for _, s := range sources(t, ".", isCode) {
		dir := filepath.Dir(s.path)
		comments[dir] += 0
		if text := s.file.Doc.Text(); text != "" {
			comments[dir]++
			require.Greater(t, len(text), leastDocLength, s.path)
			if name := s.file.Name.Name; name != "main" {
				require.True(t, strings.HasPrefix(text, "Package "+name+" "), s.path)
			}
		}
	}
	for dir, n := range comments {
		require.Equal(t, 1, n, "package comments of %s", dir)
	}
}

func TestExportedNamesAreDocumented(t *testing.T) {
	for _, s := range sources(t, ".", isCode) {
		for _, d := range s.file.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Name.IsExported() && exportedReceiver(d) && d.Doc.Text() == "" && !isPlainMethod(d.Name.Name) {
					t.Errorf("%s:%d: %s has no comment", s.path, s.line(d.Pos()), d.Name)
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					for _, name := range undocumented(d, spec) {
						t.Errorf("%s:%d: %s has no comment", s.path, s.line(spec.Pos()), name)
					}
				}
			}
		}
	}
}

// isPlainMethod reports whether a method says by its name alone what it does.
func isPlainMethod(name string) bool {
	return slices.Contains([]string{"Error", "Unwrap", "String", "Len", "Less", "Swap", "Push", "Pop"}, name)
}

// exportedReceiver reports whether d is a function, or a method of an exported type.
func exportedReceiver(d *ast.FuncDecl) bool {
	if d.Recv == nil {
		return true
	}
	typ := d.Recv.List[0].Type
	for {
		switch x := typ.(type) {
		case *ast.StarExpr:
			typ = x.X
		case *ast.IndexExpr:
			typ = x.X
		case *ast.IndexListExpr:
			typ = x.X
		case *ast.Ident:
			return x.IsExported()
		default:
			return true
		}
	}
}

// undocumented returns the exported names of spec that have no comment: neither
// their own, before or behind them, nor that of their group.
func undocumented(d *ast.GenDecl, spec ast.Spec) (names []string) {
	group := d.Doc.Text() != ""
	switch s := spec.(type) {
	case *ast.TypeSpec:
		if s.Name.IsExported() && s.Doc.Text() == "" && !group {
			names = append(names, s.Name.Name)
		}
	case *ast.ValueSpec:
		for _, n := range s.Names {
			if n.IsExported() && s.Doc.Text() == "" && s.Comment.Text() == "" && !group {
				names = append(names, n.Name)
			}
		}
	}
	return names
}

func TestSizes(t *testing.T) {
	exported := 0
	for _, s := range sources(t, ".", isCode) {
		if n := strings.Count(s.text, "\n"); n > maxFileLines {
			t.Errorf("%s has %d lines: at most %d", s.path, n, maxFileLines)
		}
		for _, d := range s.file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			if n := s.line(f.End()) - s.line(f.Pos()) + 1; n > maxFuncLines {
				t.Errorf("%s:%d: %s has %d lines: at most %d", s.path, s.line(f.Pos()), f.Name, n, maxFuncLines)
			}
		}
		if inRoot(s.path) {
			exported += countExported(s.file)
		}
	}
	require.LessOrEqual(t, exported, maxExported, "exported names of the root package")
}

func countExported(f *ast.File) (n int) {
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil && d.Name.IsExported() {
				n++
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch s := spec.(type) {
				case *ast.TypeSpec:
					if s.Name.IsExported() {
						n++
					}
				case *ast.ValueSpec:
					for _, name := range s.Names {
						if name.IsExported() {
							n++
						}
					}
				}
			}
		}
	}
	return n
}

// Each goroutine has a comment, on its line or the one before, that says who ends
// it. A method Go of a WaitGroup, and Start of a group, count as go statements.
func TestGoroutinesSayWhoEndsThem(t *testing.T) {
	starts := 0
	for _, s := range sources(t, ".", isRootCode) {
		commented := map[int]bool{}
		for _, group := range s.file.Comments {
			for _, c := range group.List {
				commented[s.line(c.Pos())] = true
			}
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			if n == nil || !startsGoroutine(n) {
				return true
			}
			starts++
			if line := s.line(n.Pos()); !commented[line] && !commented[line-1] {
				t.Errorf("%s:%d: who ends this goroutine?", s.path, line)
			}
			return true
		})
	}
	require.NotZero(t, starts)
}

func startsGoroutine(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.GoStmt:
		return true
	case *ast.CallExpr:
		sel, ok := n.Fun.(*ast.SelectorExpr)
		return ok && (sel.Sel.Name == "Go" || sel.Sel.Name == "Start")
	}
	return false
}

// Tests do not wait in real time, except for real servers and sockets: who sleeps
// does so in a bubble, or says in the file on what time it runs.
func TestSleepsAreVirtual(t *testing.T) {
	sleeps := regexp.MustCompile(`\btime\.Sleep\(`)
	for _, s := range sources(t, ".", isTest) {
		if s.path == "guard_test.go" || !sleeps.MatchString(s.text) {
			continue
		}
		virtual := slices.ContainsFunc(
			[]string{`"testing/synctest"`, `/internal/redistest"`, "bubble(t", "virtual time", "package faultproxy"},
			func(mark string) bool { return strings.Contains(s.text, mark) })
		if !virtual {
			t.Errorf("%s sleeps in real time", s.path)
		}
	}
}

var (
	luaIndex = regexp.MustCompile(`\b(?:KEYS|ARGV)\[[^\]]+\]`)
	luaSpace = strings.NewReplacer(" ", "", "*", "")
)

// luaIndexes returns the keys and arguments that text names, sorted: "ARGV[2i-1]".
func luaIndexes(text string) []string {
	var found []string
	for _, x := range luaIndex.FindAllString(text, -1) {
		found = append(found, luaSpace.Replace(x))
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// Each script begins with its contract: keys, arguments with units, answers.
func TestScripts(t *testing.T) {
	paths, err := filepath.Glob("lua/*.lua")
	require.NoError(t, err)
	below, err := filepath.Glob("fencing/*/lua/*.lua")
	require.NoError(t, err)
	require.NotEmpty(t, paths)
	require.NotEmpty(t, below)
	paths = append(paths, below...)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		lines := strings.Split(strings.TrimSpace(string(text)), "\n")
		n := slices.IndexFunc(lines, func(l string) bool { return !strings.HasPrefix(l, "--") })
		require.Positive(t, n, "%s has no header", path)
		header, code := strings.Join(lines[:n], "\n"), strings.Join(lines[n:], "\n")
		require.LessOrEqual(t, n, maxLuaHeader, "header of %s", path)
		most := maxLuaLines
		if name := filepath.Base(path); name == "queue.lua" || name == "wait.lua" {
			most = maxLuaQueue
		}
		require.LessOrEqual(t, len(lines)-n, most, "code of %s", path)
		require.Contains(t, header, "Returns", path)
		require.Equal(t, luaIndexes(code), luaIndexes(header), "keys and arguments of %s", path)
		if strings.Contains(code, "PX") || strings.Contains(code, "PEXPIRE") {
			require.Contains(t, header, " ms", "units of %s", path)
		}
		// All keys come from KEYS, or a cluster cannot route the script.
		for _, call := range regexp.MustCompile(`redis\.p?call\('\w+', *([^,)]+)`).FindAllStringSubmatch(code, -1) {
			if strings.Contains(call[0], "'PUBSUB'") || strings.Contains(call[0], "'PUBLISH'") {
				continue // channels are no keys
			}
			// K, Q, W and F are what wait.lua and release.lua put KEYS into, M the mark of admit.lua.
			ok := strings.HasPrefix(call[1], "KEYS[") || slices.Contains([]string{"K", "Q", "W", "F", "M"}, call[1])
			require.True(t, ok, "%s: %s", path, call[0])
		}
	}
}

// scriptCommands returns the commands that scripts call, in lower case.
func scriptCommands(t *testing.T, wanted func(name string) bool) []string {
	t.Helper()
	paths, err := filepath.Glob("lua/*.lua")
	require.NoError(t, err)
	var commands []string
	for _, path := range paths {
		if !wanted(strings.TrimSuffix(filepath.Base(path), ".lua")) {
			continue
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, call := range regexp.MustCompile(`redis\.p?call\('(\w+)'`).FindAllStringSubmatch(string(text), -1) {
			commands = append(commands, strings.ToLower(call[1]))
		}
	}
	slices.Sort(commands)
	return slices.Compact(commands)
}

// Library packages have no init, read no environment, and do not log by package log.
func TestNoHiddenInputs(t *testing.T) {
	forbidden := regexp.MustCompile(`\bos\.(Getenv|LookupEnv|Environ|Exit)\(|\blog\.(Print|Fatal|Panic)|\bfmt\.Print`)
	for _, s := range sources(t, ".", isCode) {
		if s.file.Name.Name == "main" || strings.HasPrefix(s.path, "internal/redistest/") ||
			strings.HasPrefix(s.path, "internal/leaktest/") {
			continue
		}
		if found := forbidden.FindString(s.text); found != "" {
			t.Errorf("%s: %s", s.path, found)
		}
		for _, d := range s.file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && f.Name.Name == "init" {
				t.Errorf("%s has an init", s.path)
			}
		}
	}
}
