// Package adminapi serves stagemesh.admin.v1 to operators, over Connect, gRPC and
// gRPC-Web, on a port of its own: the mesh's hosts and stages, its pipelines and its
// dead letters.
//
//	handler := adminapi.Handler(adminapi.Settings{DeadLetters: store, Health: health, Tokens: tokens})
//	server := port.NewServer(handler, logger)
//
// # Who may call
//
// With Tokens every call needs one; see gateway/front/port. Without any the port is for
// this machine alone. Then callers have to name it by a loopback address, which stops
// pages whose own name resolves to 127.0.0.1, and the listening address must not be
// Exposed. Pages of other origins may never call.
//
// # Failures
//
// Faults are as on the public port; see gateway/front/procedure and docs/faults.md. This
// package adds NOT_FOUND, NOT_REPLAYABLE, and OVERLOADED for too many concurrent calls.
//
// # Concurrency
//
// The handler is safe for concurrent use and starts no goroutine. Each service runs at
// most eight calls at a time, each for at most half a minute: a page of dead letters may
// be 32 MiB.
//
// To test with it, serve the handler from an httptest server, with a mesh/store store on
// a real broker or a fake of DeadLetters.
package adminapi
