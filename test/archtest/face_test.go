package archtest

import (
	"flag"
	"go/ast"
	"go/parser"
	"go/types"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write "+faceFile)

// faceFile has the public names of the library: what users' programs may import and VERSIONING
// promises. A line that names a type of an internal package says so.
const faceFile = "testdata/face.txt"

// privateTrees are not the library: the contract, the program, tests, and what runs it.
var privateTrees = list("proto/...", "services/...", "test/...", "examples/...", "bench/...", "deploy/...", "sdk/python")

func TestPublicNamesAreListed(t *testing.T) {
	t.Parallel()
	var lines []string
	for _, p := range productPackages(t) {
		if matchesAny(privateTrees, p.path) || slices.Contains(strings.Split(p.path, "/"), "internal") {
			continue
		}
		lines = append(lines, publicNames(t, p.path)...)
	}
	slices.Sort(lines)
	got := strings.Join(lines, "\n") + "\n"
	if *update {
		if err := os.WriteFile(faceFile, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := read(t, "test/archtest/"+faceFile)
	for _, line := range lines {
		if !strings.Contains("\n"+want, "\n"+line+"\n") {
			t.Errorf("%s is a new public name: make it internal, or add it to %s (-update) on purpose", line, faceFile)
		}
	}
	if got != want && !t.Failed() {
		t.Errorf("%s has names that are gone; run the test with -update", faceFile)
	}
}

// publicNames returns the exported names of a package: constants, variables, types, functions, and
// methods of exported types.
func publicNames(t *testing.T, folder string) (out []string) {
	t.Helper()
	files, err := parseFiles(repository, folder, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	for name, file := range files {
		if strings.HasSuffix(name, "_test.go") || !ast.FileExports(file) {
			continue
		}
		internal := internalImports(file)
		for _, d := range file.Decls {
			for name, seen := range declaredNames(d) {
				out = append(out, path.Join(path.Base(modulePath), folder)+"."+name+internal.namedIn(seen))
			}
		}
	}
	return out
}

// declaredNames returns the names of a declaration, each with what others see of it. Of an alias
// that is nothing: it makes the type public.
func declaredNames(d ast.Decl) map[string]ast.Node {
	out := map[string]ast.Node{}
	switch d := d.(type) {
	case *ast.FuncDecl:
		name := d.Name.Name
		if d.Recv != nil {
			receiver, _, _ := strings.Cut(strings.TrimPrefix(types.ExprString(d.Recv.List[0].Type), "*"), "[")
			if !ast.IsExported(receiver) {
				return nil
			}
			name = receiver + "." + name
		}
		out[name] = d.Type
	case *ast.GenDecl:
		for _, spec := range d.Specs {
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				out[spec.Name.Name] = nil
				if !spec.Assign.IsValid() {
					out[spec.Name.Name] = spec.Type
				}
			case *ast.ValueSpec:
				for _, name := range spec.Names {
					out[name.Name] = spec.Type
				}
			}
		}
	}
	return out
}

// internalPackages are the internal packages that a file imports, by the name that it uses.
type internalPackages map[string]bool

func internalImports(f *ast.File) internalPackages {
	out := internalPackages{}
	for _, i := range f.Imports {
		imported := strings.Trim(i.Path.Value, `"`)
		if !slices.Contains(strings.Split(imported, "/"), "internal") {
			continue
		}
		if i.Name != nil {
			out[i.Name.Name] = true
		} else {
			out[path.Base(imported)] = true
		}
	}
	return out
}

// namedIn returns the types of the packages that a node names, as the end of a line.
func (p internalPackages) namedIn(node ast.Node) string {
	if node == nil {
		return ""
	}
	var found []string
	ast.Inspect(node, func(n ast.Node) bool {
		if s, ok := n.(*ast.SelectorExpr); ok {
			if id, ok := s.X.(*ast.Ident); ok && p[id.Name] {
				found = append(found, id.Name+"."+s.Sel.Name)
			}
		}
		return true
	})
	if found == nil {
		return ""
	}
	slices.Sort(found)
	return " names internal " + strings.Join(slices.Compact(found), ", ")
}
