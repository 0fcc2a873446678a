package worker

import (
	"time"

	"github.com/stagemesh/stagemesh/stagehost/runner/worker/supervise"
)

// Limits are the bounds, grace times, pauses and retries of the workers that settings may
// change. Each field has its default and the reason for it.
type Limits = supervise.Limits

// DefaultStreams is the default of Settings.Slots for a worker that answers in chunks: a
// stream mostly waits for its next chunk, so many share a worker.
const DefaultStreams = 64

// Bounds that no setting changes.
const (
	// maxSlots and maxRanks refuse numbers that are written by mistake.
	maxSlots = 1 << 10
	maxRanks = 1 << 10
	// maxMessage bounds a worker's text for a caller, in bytes: it travels in headers.
	maxMessage = 2 << 10
	// warmUpItems bounds the items of a warm-up batch: their header has to fit.
	warmUpItems = 1 << 12
	// maxZeros bounds a tensor of zeros for a warm-up, in bytes.
	maxZeros = 256 << 20
	// cancelCheck is how long a batch runs, at most, before the runner watches its items
	// for cancellation: to watch many channels takes longer than short batches do.
	cancelCheck = 2 * time.Millisecond
	// startLogInterval is how often the log has what a start waits for.
	startLogInterval = 10 * time.Second
	// eventBuffer is how many events may wait for a worker's loop.
	eventBuffer = 64
	// readBuffer is the size of a connection's read buffer, in bytes: it saves reads of
	// small frames.
	readBuffer = 64 << 10
)
