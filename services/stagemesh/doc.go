// Package stagemesh is the command of that name: up, infer, result, cancel, dead,
// bench, config check and version. Every verb but up, and bench where it
// starts a mesh, speaks to a mesh through its public API, as any
// client does.
package stagemesh
