// Package call is a gateway's one request path: admit, resolve, check, register,
// publish, await, settle. Every front calls it, and nothing else of a gateway
// publishes requests.
//
//	s, err := call.New(settings)
//	err = s.Start(bus)              // receive replies and cancel messages
//	response, err := s.Infer(ctx, request)
//	response, err = s.Result(ctx, requestID, wait)
//	err = s.Cancel(ctx, requestID)
//	err = s.Stop(ctx)               // reject new requests, wait for those in flight
//
// Every error is a *fault.Fault whose metadata carry the request ID, as soon as
// there is one. Package admission lists the reasons to reject a request. A call ends
// at its deadline at the latest, whatever happens to the mesh; only a stream's emit
// can hold it longer. The unread chunks of a stream are bounded, and a call that
// leaves more unread ends with SLOW_READER. Service is safe for concurrent use.
//
// # Durable requests
//
// A request of durability file waits in file queues, so it survives a broker that
// loses its memory, and its result is stored before it is sent. Its call waits like
// any other. It answers with the stored result in three cases: another execution's
// result was stored first; the reply was lost with a connection (the call looks
// after each reconnect); or the deadline has come, which the call then outlasts by
// half a second at most. Once queued, a durable request outlives its caller. A
// caller that leaves, or whose gateway stops, gets the result by Result, from any
// gateway, until its retention has passed. The first request that needs the stream
// of results makes it, and checks it on each connection. A gateway that only serves
// memory requests without keys makes none.
//
// # Idempotency keys
//
// Of the calls with one key, of one tenant and pipeline and through any gateway, the
// first runs its request. The others follow it until their own deadlines, or get its
// stored result, with its request ID. With another payload they are
// IDEMPOTENCY_MISMATCH. A request with a key outlives its caller, and its result is
// stored whatever its durability; its call looks for it as durable calls do. The key
// is free again where the first request ends by a retryable fault, CANCELLED or its
// deadline, or where its gateway dies with it and its deadline passes. Then the next
// call with the key runs its request, and so does one of the followers. A request
// that is rejected before it is queued leaves its key free. A follower counts as a
// request in flight; all that follow one request here share one subscription. A call
// is OVERLOADED where there is no space for its key.
//
// # Cancelling
//
// Cancel cancels any request by its ID. A memory request without a key is also
// cancelled when its caller leaves or reads too slowly, or when its stream has a
// gap. Its item is withdrawn from the queue of its first step, and a cancel message
// tells hosts to drop the item where they have it in flight or get it later. The
// caller does not wait for that. Cancelling is best effort: an item that waits for
// its first step never runs; further on, only hosts that receive the message stop.
// Where the result is stored, the stored result is CANCELLED then, unless another
// was stored before. Deadlines cancel nothing, for hosts drop expired items by
// themselves. The cancel message also reaches the gateway where the request waits,
// so any gateway takes a Cancel. Requests have no owner in this version: anybody who
// knows an ID may fetch its result and cancel it.
package call
