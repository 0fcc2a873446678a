// Package admission decides which requests a gateway takes.
//
// A gateway rejects a request for one of these reasons before it queues it, in
// this order:
//
//	reason               decided by                       when
//	OVERLOADED           internal/budget                  its body or its decoded inputs exceed what
//	                                                      gateway.max_in_flight_bytes leaves
//	PAYLOAD_TOO_LARGE    internal/budget                  they exceed what one request may have of it
//	INVALID_REQUEST      the codecs of the fronts         its elements would take more memory than a body may
//	                                                      have bytes
//	SHUTTING_DOWN        Limiter                          the gateway is stopping
//	OVERLOADED           Limiter                          gateway.max_in_flight requests are in flight, or too
//	                                                      many of one tenant; so for a pipeline's max_in_flight
//	UNKNOWN_PIPELINE,    the catalog                      the gateway serves no such pipeline, or knows
//	REGISTRY_UNAVAILABLE                                  none yet
//	OVERLOADED           Limiter                          the pipeline's max_in_flight requests are in flight
//	INVALID_REQUEST,     internal/call, check              its inputs or options are not valid
//	PAYLOAD_TOO_LARGE,
//	INVALID_INPUT,
//	NOT_SUPPORTED
//	IDEMPOTENCY_MISMATCH internal/call, idempotency        a request with another payload has its key
//	BROKER_UNAVAILABLE   Availability                     the broker is not connected
//	NO_CAPACITY          Availability                     a stage on the route has no host
//	NOT_SUPPORTED        Availability                     a stage has no queue of the request's durability
//	QUEUE_FULL           Availability                     a queue on the route has no space for its class,
//	                                                      or its tenant has too much of it
//	OVERLOADED           Availability                     the work ahead of it takes longer than its time
//	STORE_FULL           internal/call, storewatch.go      the broker stores nothing in files
//	BROKER_UNAVAILABLE   internal/call, stored results     the broker cannot store its result or its key
//	OVERLOADED           internal/call, idempotency        idempotency.max_bytes of keys are stored
//	QUEUE_FULL,          the broker, on publish           the first queue is full, missing, or takes no
//	STORE_FULL,                                           message of that size, or the disk is full
//	NO_CAPACITY,
//	PAYLOAD_TOO_LARGE
//
// A request that waits for capacity is not rejected with QUEUE_FULL, or with
// OVERLOADED for the work ahead of it, before its deadline. Every rejection that
// may succeed later says when to come back.
//
// All types are safe for concurrent use. The estimator in estimate.go is pure: it
// has no goroutine, lock or clock.
package admission

import (
	"math/rand/v2"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// The least and the most that a rejected caller is asked to wait.
const (
	minRetry = 100 * time.Millisecond
	maxRetry = 30 * time.Second
)

// spread returns when a caller that is rejected for that long comes back: up to a
// quarter later, so that rejected callers do not come back all at once. An unknown
// time is 0.
func spread(after time.Duration) time.Duration {
	if after <= 0 {
		after = budget.RetryAfter
	}
	after = min(max(after, minRetry), maxRetry)
	return after + rand.N(after/4)
}

// Stopping is the fault of a gateway that takes no more requests.
func Stopping() *fault.Fault {
	return fault.New(fault.ShuttingDown, "the gateway is stopping").WithRetryAfter(budget.RetryAfter)
}

func at(f *fault.Fault, hop *pipeline.Hop) *fault.Fault {
	return f.At(string(hop.Stage), string(hop.Step), "")
}
