// Package port builds the HTTP handlers of the gateway's ports: the public port with every
// front on it, and what every port has around its services.
//
//	handler, err := port.PublicHandler(port.PublicSettings{Caller: service, Health: health})
//	server := port.NewServer(handler, logger)
//	go server.Serve(listener) // and stop it with server.Shutdown
//
// The public port serves the inference service over Connect, gRPC and gRPC-Web, plain HTTP
// under /v1/, the Open Inference Protocol over gRPC and under /v2, the OpenAPI document and
// the page that shows it.
//
// # Health
//
// One function answers all probes. It gets "", the gateway as a whole, from /readyz, from
// gRPC health of "" and of the RPC services; and any other name, of a pipeline, as it is.
// /livez is always 200. gRPC health has Check; Watch is UNIMPLEMENTED.
//
// # Browsers
//
// Pages of other origins may call only where Origins lists theirs. That is more than CORS
// headers: a browser sends simple requests, such as a form's, before it looks at the
// response, so a cross-origin request of an origin that is not listed is rejected with
// PERMISSION_DENIED and reaches no service. Programs send no Origin and are not affected.
//
// # Authentication
//
// A Guard with Tokens admits callers that send one of them as "Authorization: Bearer TOKEN";
// others get UNAUTHENTICATED: an RPC in its protocol, other requests in the form of their
// path. Probes and gRPC health need no token, nor do the Guard's Open paths. The page of the
// OpenAPI document is open, the document is not.
//
// # Concurrency
//
// Handlers are safe for concurrent use and start no goroutine but those of streams. After
// Stopping is closed, streams of many requests take no more and end when the requests in
// flight are answered.
package port
