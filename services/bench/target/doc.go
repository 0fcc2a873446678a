// Package target asks a mesh in one of its protocols, for the loads of
// services/bench/load.
//
//	t, err := target.New(target.Settings{Protocol: target.GRPC, Address: "http://127.0.0.1:8080", Pipeline: "digits", Inputs: inputs})
//	defer t.Close()
//	err = t.Do(ctx, &answer)
//
// Whatever does not differ between requests is made once: a request costs the client
// library that its callers would use, and little beside. GRPC and OIP share HTTP/2
// connections; Connect and HTTP have one connection of HTTP/1.1 for each request in
// flight, and keep it. Connections are never compressed. With Settings.Traced a request
// has a traceparent besides, which costs it a header and a tenth of a microsecond.
//
// Inputs go in turn. Answers are read to their end and thrown away, but for the
// timeline: the answer's own on GRPC and Connect, Server-Timing on HTTP and OIP, which
// does not tell deliveries, and has microseconds.
//
// A failure is a *load.Failure with the mesh's reason, or the protocol's code where
// there is none. A Target is safe for concurrent use, and none of its requests
// outlives Settings.Timeout, or Patience, by more than ten seconds.
package target
