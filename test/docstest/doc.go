// Package docstest holds the Markdown files of the repository against what they
// speak of, so that a change that makes one untrue is seen by the build.
//
//   - links_test.go: every relative link leads to a file, and to a heading in
//     it where it names one.
//   - names_test.go: every file and every test that ARCHITECTURE.md names is
//     there, its table of packages is the tree's, and docs/operations.md has
//     every metric.
//   - code_test.go: every Go block is code of a test in this repository.
//   - clients_test.go and runners_test.go are that code: examples that run
//     against a mesh of their own.
//
// internal/meshfile does the same for configuration files. There is nothing to
// import: the package has tests only.
package docstest
