// Package stagemesh is the command of that name: up, infer, config check and
// version. Every verb but up speaks to a mesh through its public API, as any
// client does.
package stagemesh
