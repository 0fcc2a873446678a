// Package archtest holds the architecture of the repository as tests, so that
// it is the build that says when a change crosses a border.
//
//   - table_test.go is the table: which package may import which of ours, and
//     the few places where a module of others may appear. Change it there, with
//     ARCHITECTURE.md, when the architecture changes.
//   - rules_test.go applies a table to packages and knows nothing of the tree.
//   - tree_test.go reads the packages of the modules in go.work. It parses the
//     import clauses of all files, whatever their build constraints, and needs
//     no file to compile. It runs no command: go test then knows which files
//     the result depends on, and never answers from its cache when one changed.
//   - modules_test.go compares the requirements in go.mod with the table of
//     dependencies in docs/dependencies.md.
//   - docs_test.go looks for the files and folders that pages name.
//
// There is nothing to import: the package has tests only.
package archtest
