package archtest

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path"
	"path/filepath"
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
	files, err := filepath.Glob(filepath.Join(repository, folder, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		hidden := internalImports(parsed)
		for _, d := range parsed.Decls {
			for name, of := range exported(d) {
				out = append(out, path.Join(path.Base(modulePath), folder)+"."+name+hidden.in(of))
			}
		}
	}
	return out
}

// exported returns the exported names of a declaration, each with what of it others see.
func exported(d ast.Decl) map[string]ast.Node {
	out := map[string]ast.Node{}
	switch d := d.(type) {
	case *ast.FuncDecl:
		name := d.Name.Name
		if d.Recv != nil {
			receiver := strings.TrimLeft(fmt.Sprint(baseType(d.Recv.List[0].Type)), "*")
			if !ast.IsExported(receiver) {
				return nil
			}
			name = receiver + "." + name
		}
		if d.Name.IsExported() {
			out[name] = d.Type
		}
	case *ast.GenDecl:
		for _, spec := range d.Specs {
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				if spec.Name.IsExported() {
					out[spec.Name.Name] = nil
					if !spec.Assign.IsValid() { // an alias makes the type public
						out[spec.Name.Name] = spec.Type
					}
				}
			case *ast.ValueSpec:
				for _, name := range spec.Names {
					if name.IsExported() {
						out[name.Name] = spec.Type
					}
				}
			}
		}
	}
	return out
}

// baseType returns the type of a receiver, without its pointer and type parameters.
func baseType(e ast.Expr) ast.Expr {
	switch e := e.(type) {
	case *ast.StarExpr:
		return baseType(e.X)
	case *ast.IndexExpr:
		return baseType(e.X)
	case *ast.IndexListExpr:
		return baseType(e.X)
	}
	return e
}

// importedInternal are the internal packages that a file imports, by the name that it uses.
type importedInternal map[string]bool

func internalImports(f *ast.File) importedInternal {
	out := importedInternal{}
	for _, i := range f.Imports {
		of := strings.Trim(i.Path.Value, `"`)
		if !slices.Contains(strings.Split(of, "/"), "internal") {
			continue
		}
		if i.Name != nil {
			out[i.Name.Name] = true
		} else {
			out[path.Base(of)] = true
		}
	}
	return out
}

// in returns the types of internal packages that a node names, as the end of a line. Unexported
// fields do not count.
func (m importedInternal) in(node ast.Node) string {
	if node == nil {
		return ""
	}
	var found []string
	ast.Inspect(node, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.Field:
			return len(n.Names) == 0 || slices.ContainsFunc(n.Names, (*ast.Ident).IsExported) || !isStruct(node)
		case *ast.SelectorExpr:
			if id, ok := n.X.(*ast.Ident); ok && m[id.Name] {
				found = append(found, id.Name+"."+n.Sel.Name)
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

func isStruct(n ast.Node) bool {
	_, ok := n.(*ast.StructType)
	return ok
}
