package stagehost

import "time"

// Grace periods of a host; internal/item/limits.go has the grace periods of items.
const (
	// unhealthyGrace is how long a runner may be unable to run anything before its
	// host leaves the stage to others. A process that is back in a moment is worth the
	// wait: where this host is the only one, requests are rejected meanwhile.
	unhealthyGrace = 2 * time.Second

	// Bounds on the parts of a stop beside the drain timeout: runStopWait for batches that
	// were cancelled, runLeaveWait for all other goroutines.
	runStopWait  = 4 * time.Second
	runLeaveWait = time.Second
	// exhaustedTimeout bounds the work on one item that the broker gave up on.
	exhaustedTimeout = 5 * time.Second
)

// Bounds of direct calls.
const (
	// maxDirectCalls bounds the direct calls in flight, maxDirectBytes a message of one,
	// maxDirectMemory what all of them hold, and maxConnections who makes them.
	maxDirectCalls  = 16
	maxDirectBytes  = 16 << 20
	maxDirectMemory = 256 << 20
	maxConnections  = 1024
)

// Periods of reconcile.
const (
	reconcileEvery = 2 * time.Second
	reconcileRetry = 100 * time.Millisecond
	// missingPause is how long after the loss of a queue the host creates it again.
	missingPause = 200 * time.Millisecond
	// ensureAllEvery is how often the host ensures all streams and queues, whatever it
	// knows to exist.
	ensureAllEvery = time.Minute
)
