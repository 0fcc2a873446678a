package stagehost

import "time"

// Limits on retries, redeliveries, crashes and grace periods, each with its
// reason. Operators may change the limits whose defaults are exported in
// settings.go: CrashLimit (2 runs), AckWait (2.5 s), StartTimeout, DrainTimeout
// and those of a stream.
const (
	// maxBrokerDeliveries is the broker's own limit, for items whose hosts all crash
	// before they can decide. Items on file have none: they would stay in their queue
	// for ever.
	maxBrokerDeliveries = 20
	// maxDeliveries is a little below, so that a host decides and replies. Beyond the
	// broker's limit an item stays in its queue unseen until it expires.
	maxDeliveries = maxBrokerDeliveries - 2
	// maxCrashPause bounds how long an item that has crashed a process alone leaves idle
	// slots to others.
	maxCrashPause = 2 * time.Second
	// maxFailedStarts bounds how often an item may be in a batch that never starts. A
	// start fails because of the worker, not the item, so the limit is generous.
	maxFailedStarts = 8

	// maxExposed bounds an exception's text for its caller, maxExposedTrace its traceback, in
	// bytes: both travel in the trailers of gRPC, for which clients accept 8 KiB.
	maxExposed      = 1 << 10
	maxExposedTrace = 3 << 10

	// extendsPerAckWait leaves room for two extensions to be lost.
	extendsPerAckWait = 3

	// retryMin and retryMax are the pauses between sends of one message; they double.
	retryMin = 5 * time.Millisecond
	retryMax = 500 * time.Millisecond
	// missingGrace is how long a gateway or a queue may be missing: as long as either
	// takes to come back after the broker does.
	missingGrace = 3 * time.Second
	// failingShare bounds the items that wait for one destination that does not take
	// them, so that it does not hold up all others: one in four.
	failingShare = 4
	// returnMin and returnMax are the delays until a durable item beyond that share is
	// redelivered; they double.
	returnMin = time.Second
	returnMax = 30 * time.Second

	// runRecordTimeout is how long a run waits for its record: longer than brokers take to
	// elect a leader. endRecordTimeout is shorter, as a drain waits for it.
	runRecordTimeout = 10 * time.Second
	endRecordTimeout = 2 * time.Second
	// malformedRetry is the delay of a nak for bytes whose dead letter could not be
	// stored.
	malformedRetry = time.Second
	// exhaustedTimeout bounds the work on one item that the broker gave up on.
	exhaustedTimeout = 5 * time.Second

	// unhealthyGrace is how long a runner may be unable to run anything before its
	// host leaves the stage to others. A process that is back in a moment is worth the
	// wait: where this host is the only one, requests are rejected meanwhile.
	unhealthyGrace = 2 * time.Second

	// Bounds on the parts of a stop beside the drain timeout: pullDrainTimeout for
	// items on their way, runStopWait for batches that were cancelled, runLeaveWait
	// for all other goroutines.
	pullDrainTimeout = 3 * time.Second
	runStopWait      = 4 * time.Second
	runLeaveWait     = time.Second
)

// Bounds on memory and on the work of one turn.
const (
	// maxDirectCalls bounds the direct calls in flight, maxDirectBytes a message of one,
	// maxDirectMemory what all of them hold, and maxConnections who makes them.
	maxDirectCalls  = 16
	maxDirectBytes  = 16 << 20
	maxDirectMemory = 256 << 20
	maxConnections  = 1024
	// maxCancelled bounds the cancelled requests that the host remembers, with a known
	// and with an unknown deadline each, and the cancel messages that wait for the loop.
	maxCancelled = 1 << 16
	// eventsPerTurn bounds the events applied before batches are formed, so that items
	// that arrive together can run together and nothing waits for long.
	eventsPerTurn = 256
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
	// knownWait is how long the host waits for the registry of models before it reports that.
	knownWait = 2 * time.Second
)
