// Package web puts every front of the gateway on one port: the RPC service in
// Connect, gRPC and gRPC-Web, plain HTTP under /v1/, gRPC health and
// reflection, and the probes /livez and /readyz.
//
//	handler, err := web.Handler(web.Settings{Caller: service, Health: health})
//	server := web.NewServer(handler, logger)
//	go server.Serve(listener) // and stop it with server.Shutdown
//
// # Health
//
// One function answers all probes. It is asked for "", the gateway as a whole,
// by /readyz, by the health of "" and by that of the RPC services; and for
// anything else by its name, which is a pipeline's. It returns nil for what
// serves, a NOT_FOUND fault for what it does not know, and any other error for
// what does not serve now, with the reason. /livez is 200 for as long as
// anything answers. Of gRPC health there is Check; Watch is UNIMPLEMENTED.
//
// # Browsers
//
// Pages of other origins may call only where Origins lists theirs. That is more
// than CORS headers: a browser sends simple requests, such as a form's, before
// it looks at the answer, so a cross-origin call of an origin that is not
// listed is refused with PERMISSION_DENIED and never reaches the Caller.
// Programs send no Origin and are not affected.
//
// # Concurrency
//
// Handlers are safe for concurrent use; nothing here starts a goroutine. Faults
// are as in gateway/front/rpc and gateway/front/failure.
package web
