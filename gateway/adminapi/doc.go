// Package adminapi serves stagemesh.admin.v1 to operators, over Connect, gRPC
// and gRPC-Web, on a port of its own: the dead letters of the mesh.
//
//	handler := adminapi.Handler(adminapi.Settings{Letters: store, Health: health, Tokens: tokens})
//	server := port.NewServer(handler, logger)
//
// # Who may call
//
// With Tokens every call needs one; see gateway/front/port. Without any the port is
// for this machine alone: the caller has to name it by a loopback address, so that
// a page which has its own name resolve to 127.0.0.1 gets nowhere, and the address
// to listen on must not be Exposed. Pages of other origins may never call.
//
// # Failures
//
// Faults are as on the public port; see gateway/front/procedure and
// docs/faults.md. What the letters do not say themselves is said here: NOT_FOUND,
// NOT_REPLAYABLE, and OVERLOADED where too many ask at once.
//
// # Concurrency
//
// The handler is safe for concurrent use and starts no goroutine. At most eight
// calls about letters are served at a time, each for at most half a minute: a page
// of them may be 32 MiB.
//
// To test with it, serve the handler from an httptest server, with a
// mesh/store store on a real broker or a fake of Letters.
package adminapi
