// Package call is a gateway's one request path: admit, resolve, check, register,
// publish, await. Every front calls it and nothing else reaches the bus.
//
//	s := call.New(settings)
//	err := s.Start(bus)            // receive replies and notices
//	answer, err := s.Infer(ctx, request)
//	answer, err = s.Result(ctx, requestID, wait)
//	err = s.Cancel(ctx, requestID)
//	s.Stop(ctx)                    // let nobody in, wait for those inside
//
// Every error is a *fault.Fault whose metadata carry the request id, as soon as
// there is one. A call ends at its deadline at the latest, however the mesh
// fares; only a stream's emit can hold it longer. What a stream has not read is
// bounded, and a call that leaves more unread ends with SLOW_READER. Service is
// safe for concurrent use.
//
// # Durable requests
//
// A request of durability file waits in file queues, so a broker that loses its
// memory does not end it, and its answer is stored before it is sent. Its call
// waits like any other, and answers with what is stored where another
// execution's answer was stored first, where the reply was lost with a
// connection (it looks after each reconnect), and at the deadline, which it
// then outlasts by half a second at most. Once queued, a durable request
// outlives its caller: who goes away, or waits through a gateway that ends, gets
// the answer by Result, from any gateway, until the retention has passed. The
// stream of results is made for the first request that needs it, and looked after
// on each connection; a gateway that only serves memory requests without keys
// makes none.
//
// # Idempotency keys
//
// Of the calls with one key, of one tenant and pipeline and through any gateway,
// one is made. The others wait for it until their own deadlines, or get its stored
// answer, with its request id; with another payload they are
// IDEMPOTENCY_MISMATCH. A request with a key outlives its caller, and its answer
// is stored whatever its durability; what durable calls do to find it, its call
// does too. Where it ends by a retryable fault, CANCELLED or its deadline, or its
// gateway dies with it and its deadline passes, the next call with the key is
// made, and so is one of those that wait. One that is refused before it is queued
// leaves the key free. A call that waits holds a place among the requests in
// flight; all that wait here for one request share one subscription. A call is
// OVERLOADED where there is no room for its key.
//
// # Calling off
//
// A memory request without a key whose caller goes away, or reads too slowly, or whose stream
// has a gap is called off, and so is any request that Cancel names: its item is
// withdrawn from the queue of its first step, and a notice tells hosts to drop
// what they have in hand or get later. The caller does not wait for that. It is
// best effort. What still waited for its first step never runs; further on,
// only hosts that hear the notice stop. Of a request whose answer is stored that
// answer is CANCELLED then, unless another was stored before. Deadlines are
// no reason to call off, for hosts drop by themselves what is past its own.
// Cancel reaches the gateway where the request waits by the same notice, so it
// may be asked of any. Requests have no owner in this version: who knows an id
// may fetch its result and call it off.
package call
