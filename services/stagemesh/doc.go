// Package stagemesh is the command of that name: up, infer, result, cancel, dead,
// config check and version. Every verb but up speaks to a mesh through its public API, as any
// client does.
package stagemesh
