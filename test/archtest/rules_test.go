package archtest

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// modulePath prefixes every package of the product.
const modulePath = "github.com/stagemesh/stagemesh"

// rules say what packages may import.
type rules struct {
	rows      []row
	externals []external
	// impure are the packages of the standard library that no pure row, and none of
	// pureFiles, imports.
	impure    []string
	pureFiles []string
}

// row says which packages of the product some packages may import.
type row struct {
	packages  []string
	mayImport []string
	// inTests are what only the tests of these packages may import besides.
	inTests []string
	// standardLibraryOnly forbids the packages of others and test helpers, in tests too.
	standardLibraryOnly bool
	// pure forbids what rules.impure lists, except in tests.
	pure bool
}

// external says where packages from outside the product may appear.
type external struct {
	packages    []string
	mayAppearIn []string
	andInTests  bool
}

// sourcePackage is a folder of Go files; its path is relative to modulePath.
type sourcePackage struct {
	path    string
	imports []importClause
}

// importClause is one import of one file.
type importClause struct {
	file string // relative to the package
	path string // as written
	test bool   // the file is a _test.go file
}

// violations returns a sentence for everything that breaks the rules.
func (r rules) violations(packages []sourcePackage) []string {
	var found []string
	for _, pkg := range packages {
		rows := r.rowsOf(pkg.path)
		if len(rows) != 1 {
			found = append(found, fmt.Sprintf("%s matches %d rows of the import table in test/archtest, not one: the table or the package is wrong", pkg.path, len(rows)))
			continue
		}
		for _, clause := range pkg.imports {
			if reason := r.refusal(pkg.path, rows[0], clause); reason != "" {
				found = append(found, fmt.Sprintf("%s imports %s: %s", path.Join(pkg.path, clause.file), clause.path, reason))
			}
		}
	}
	slices.Sort(found)
	return found
}

func (r rules) rowsOf(pkg string) []row {
	var rows []row
	for _, row := range r.rows {
		if matchesAny(row.packages, pkg) {
			rows = append(rows, row)
		}
	}
	return rows
}

// refusal says why the package may not have the import; empty if it may.
func (r rules) refusal(pkg string, row row, clause importClause) string {
	inTest := clause.test || isTestHelper(pkg)
	if ours, ok := productPackage(clause.path); ok {
		return refusalOfOurs(pkg, row, ours, inTest)
	}
	if row.standardLibraryOnly && !isStandardLibrary(clause.path) {
		return "this package uses the standard library only"
	}
	pure := row.pure || slices.Contains(r.pureFiles, path.Join(pkg, clause.file))
	if pure && !inTest && matchesAny(r.impure, clause.path) {
		return "this code is pure: it decides, and others wait, lock and talk"
	}
	for _, external := range r.externals {
		if matchesAny(external.packages, clause.path) && !external.allows(pkg, inTest) {
			return external.refusal()
		}
	}
	return ""
}

func refusalOfOurs(pkg string, row row, imported string, inTest bool) string {
	switch {
	case isTestHelper(imported) && !row.standardLibraryOnly:
		if inTest {
			return ""
		}
		return "it is there for tests only"
	case imported == pkg || matchesAny(row.mayImport, imported) || inTest && matchesAny(row.inTests, imported):
		return ""
	case len(row.mayImport) == 0:
		return "this package imports no other of ours"
	default:
		return "of ours this package may import " + strings.Join(row.mayImport, ", ") + " only"
	}
}

func (e external) allows(pkg string, inTest bool) bool {
	return inTest && e.andInTests || matchesAny(e.mayAppearIn, pkg)
}

func (e external) refusal() string {
	places := slices.Clone(e.mayAppearIn)
	if e.andInTests {
		places = append(places, "tests")
	}
	return "it appears only in " + strings.Join(places, ", ")
}

// isTestHelper reports whether the package exists to be imported by tests:
// its name, or the name of a folder around it, ends in "test", as fronttest does, or is
// "testbed".
func isTestHelper(pkg string) bool {
	return slices.ContainsFunc(strings.Split(pkg, "/"), func(name string) bool {
		return strings.HasSuffix(name, "test") || name == "testbed"
	})
}

// productPackage returns the path of an import relative to modulePath, and
// whether it is of the product at all.
func productPackage(imported string) (string, bool) {
	if imported == modulePath {
		return ".", true
	}
	return strings.CutPrefix(imported, modulePath+"/")
}

// isStandardLibrary relies on the convention that the first element of all
// other import paths is a domain name.
func isStandardLibrary(imported string) bool {
	first, _, _ := strings.Cut(imported, "/")
	return !strings.Contains(first, ".")
}

func matchesAny(patterns []string, pkg string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool { return matches(pattern, pkg) })
}

func matches(pattern, pkg string) bool {
	if pattern == "..." {
		return true
	}
	if parent, ok := strings.CutSuffix(pattern, "/..."); ok {
		return pkg == parent || strings.HasPrefix(pkg, parent+"/")
	}
	// Only a malformed pattern is an error, and then it should match nothing.
	ok, err := path.Match(pattern, pkg)
	return ok && err == nil
}
