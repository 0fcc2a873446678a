package archtest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// repository is the root of the tree, seen from the folder of this package.
const repository = "../.."

// readPackages returns the packages of the given modules (folders relative to
// the root) with the imports of all their files, whatever their build
// constraints. Modules that are not given are left out.
func readPackages(root string, modules []string) ([]sourcePackage, error) {
	var packages []sourcePackage
	tree := os.DirFS(root)
	err := fs.WalkDir(tree, ".", func(folder string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return err
		}
		if skipped(tree, folder, modules) {
			return fs.SkipDir
		}
		imports, err := readImports(root, folder)
		if err != nil || imports == nil {
			return err
		}
		packages = append(packages, sourcePackage{path: folder, imports: imports})
		return nil
	})
	return packages, err
}

// skipped reports whether a folder holds no package of the given modules, in
// the way of the go command.
func skipped(tree fs.FS, folder string, modules []string) bool {
	if folder == "." {
		return false
	}
	switch name := path.Base(folder); {
	case strings.HasPrefix(name, "."), strings.HasPrefix(name, "_"), name == "testdata", name == "node_modules":
		return true
	}
	for _, module := range modules {
		if path.Clean(module) == folder {
			return false
		}
	}
	_, err := fs.Stat(tree, path.Join(folder, "go.mod"))
	return err == nil
}

// readImports returns the imports of a folder's Go files: nil if there is no
// such file, not nil if there are files without imports.
func readImports(root, folder string) ([]importClause, error) {
	files, err := parseFiles(root, folder, parser.ImportsOnly)
	if err != nil || len(files) == 0 {
		return nil, err
	}
	imports := []importClause{}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		for _, spec := range files[name].Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return nil, fmt.Errorf("%s: import %s: %w", filepath.Join(folder, name), spec.Path.Value, err)
			}
			imports = append(imports, importClause{file: name, path: imported, test: strings.HasSuffix(name, "_test.go")})
		}
	}
	return imports, nil
}

// parseFiles returns the Go files of a folder by name.
func parseFiles(root, folder string, mode parser.Mode) (map[string]*ast.File, error) {
	files, err := filepath.Glob(filepath.Join(root, folder, "*.go"))
	if err != nil {
		return nil, err
	}
	out := map[string]*ast.File{}
	for _, file := range files {
		// Read here, because go test watches what a test opens and a parser
		// that opens the file itself might not always.
		source, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if out[filepath.Base(file)], err = parser.ParseFile(token.NewFileSet(), file, source, mode); err != nil {
			return nil, err
		}
	}
	return out, nil
}
