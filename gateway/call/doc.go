// Package call is a gateway's one request path: admit, resolve, check, register,
// publish, await. Every front calls it and nothing else reaches the bus.
//
//	s := call.New(settings)
//	err := s.Start(bus)            // receive replies
//	answer, err := s.Infer(ctx, request)
//	s.Stop(ctx)                    // let nobody in, wait for those inside
//
// Every error is a *fault.Fault whose metadata carry the request id, as soon as
// there is one. A call ends at its deadline at the latest, however the mesh
// fares; only a stream's emit can hold it longer. What a stream has not read is
// bounded, and a call that leaves more unread ends with SLOW_READER. Service is
// safe for concurrent use.
package call
