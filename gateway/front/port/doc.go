// Package port is what every port of the gateway has around its services: a
// server with its bounds, the probes /livez and /readyz, gRPC health and
// reflection, and what pages of other origins may do.
//
//	mux := http.NewServeMux()
//	port.MountHealth(mux, health, services...)
//	port.MountReflection(mux, services...)
//	handler, err := port.CrossOrigin(port.Guard{Tokens: tokens}.Before(mux), port.Origins{})
//	server := port.NewServer(handler, logger)
//	go server.Serve(listener) // and stop it with server.Shutdown
//
// # Health
//
// One function answers all probes. It is asked for "", the gateway as a whole,
// by /readyz, by the health of "" and by that of the RPC services; and for
// anything else by its name. /livez is 200 for as long as anything answers. Of
// gRPC health there is Check; Watch is UNIMPLEMENTED.
//
// # Browsers
//
// Pages of other origins may call only where Origins lists theirs. That is more
// than CORS headers: a browser sends simple requests, such as a form's, before
// it looks at the answer, so a cross-origin call of an origin that is not
// listed is refused with PERMISSION_DENIED and never reaches a service. Programs
// send no Origin and are not affected.
//
// # Who may call
//
// A Guard with Tokens lets those call who know one of them, as "Authorization:
// Bearer TOKEN"; others get UNAUTHENTICATED, an RPC in the protocol that it speaks and
// what else there is in the form of its path, as Forms have it. /livez, /readyz and gRPC
// health need none, for probes have none; nor does what the guard has as Open.
//
// # Concurrency
//
// Handlers are safe for concurrent use; nothing here starts a goroutine. The
// promises are held by the tests of gateway/front/web.
package port
