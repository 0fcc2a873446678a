// Package librarytest tests the library as a program uses it: meshes within this process, and a
// module outside the repository that gets it.
package librarytest
