// Package stagemesh is the command of that name: up, infer, get result, cancel,
// status, pipelines, dead-letters, bench, config check and version. Every verb but up,
// and bench with --mesh, uses the public API of a mesh as any client does.
package cli
