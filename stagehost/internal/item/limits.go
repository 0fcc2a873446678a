package item

import "time"

// Limits on retries, redeliveries, crashes and grace periods, each with its
// reason. Operators may change the limits whose defaults package stagehost exports:
// CrashLimit (2 runs), AckWait (2.5 s), StartTimeout, DrainTimeout and the limits
// of streams.
const (
	// MaxBrokerDeliveries is the broker's own limit, for items whose hosts all crash
	// before they can decide. Items on file have none: they would stay in their queue
	// for ever.
	MaxBrokerDeliveries = 20
	// maxDeliveries is a little below, so that a host decides and replies. Beyond the
	// broker's limit an item stays in its queue unseen until it expires.
	maxDeliveries = MaxBrokerDeliveries - 2
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
	// returnMin and returnMax are the first delays until a durable item beyond that share is
	// redelivered; they double.
	returnMin = time.Second
	returnMax = 30 * time.Second

	// runRecordTimeout is how long a run waits for its record: longer than brokers take to
	// elect a leader. endRecordTimeout is shorter, as a drain waits for it.
	runRecordTimeout = 10 * time.Second
	endRecordTimeout = 2 * time.Second
	// PullDrainTimeout bounds the wait for items on their way from a queue that is pulled no more.
	PullDrainTimeout = 3 * time.Second
	// malformedRetry is the delay of a nak for bytes whose dead letter could not be
	// stored.
	malformedRetry = time.Second
)

// Bounds on memory and on the work of one turn.
const (
	// maxCancelled bounds the cancelled requests that the host remembers, with a known
	// and with an unknown deadline each, and the cancel messages that wait for the loop.
	maxCancelled = 1 << 16
	// eventsPerTurn bounds the events applied before batches are formed, so that items
	// that arrive together can run together and nothing waits for long.
	eventsPerTurn = 256
)
