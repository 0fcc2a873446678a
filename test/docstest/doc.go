// Package docstest holds the Markdown files of the repository against what they
// speak of, so that a change that makes one untrue is seen by the build.
//
//   - links_test.go: every relative link leads to a file, and to a heading in
//     it where it names one.
//   - names_test.go: every file and every test that ARCHITECTURE.md names is
//     there, its table of packages is the tree's, and docs/operations.md has
//     every metric.
//   - code_test.go: every Go block is code of a test in this repository.
//   - run_test.go: every other block of docs/*.md and the READMEs of the root and
//     of sdk/typescript runs as it stands, in the order of its page. Mesh files pass
//     `config check`, parts of one in a frame around them. Scripts and commands run
//     on a mesh, and exit with 0. Outputs are like what a command before them has
//     printed. rules_test.go lists exceptions: a mesh other than digits, text that
//     must be printed, or the reason why a block does not run.
//   - clients_test.go and runners_test.go are code of pages: examples that run
//     against a mesh of their own.
//
// There is nothing to import: the package has tests only.
package docstest
