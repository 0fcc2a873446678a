package stagehost

import (
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/ledger"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/schema"
)

// item is one request on this host. Whoever makes it fills it; from the event
// that posts it on it belongs to the loop, but for the fields of a run, which
// belong to the batch's sink until its outcome is posted.
type item struct {
	id  ledger.ID
	env *envelope.Envelope
	// inputs fit the runner's spec.
	inputs schema.Fitted
	key    batch.Key
	bytes  int
	// arrived is when the host got it; queueWait how long it waited before.
	arrived   time.Time
	queueWait time.Duration

	// delivery settles an item that was pulled.
	delivery bus.Delivery
	// direct answers an item that came past the queue, else it is nil.
	direct *directCall

	// timing of the run that the item is or was part of.
	timing envelope.StepTiming
	// run is the batch that the item runs in; cancelled is closed when nobody
	// wants it any more. The loop's.
	run       *run
	cancelled chan struct{}
	// startsLost counts batches that never started.
	startsLost int
	// deaths are the runs of the item alone whose process ended; lonely says that
	// it is run alone because one did.
	deaths []envelope.RunRecord
	lonely bool
	// beside says that the process ended in which it ran beside other streams.
	beside bool
	// outbox is what the item became, one message after the other: the next
	// step's item, or the caller's answer, which may be stored first. tries are
	// those to send the first of them.
	outbox []outgoing
	// answered says that the outbox is an answer, stored that it is kept.
	answered, stored bool
	tries            int
	firstTry         time.Time
	retryAt          time.Time
	// missingSince is since when the gateway or queue is known to be missing.
	missingSince time.Time
	// failing names the destination where a try has failed; empty for none.
	failing string
	// chunks counts the messages of a streamed answer so far.
	chunks uint64
}

func (it *item) suspect() bool { return it.delivery.Deliveries > 1 }

// durable reports whether the request waits on file, and leaves a letter where it
// is given up on. The answers of others may be stored too, see StoresAnswer.
func (it *item) durable() bool { return it.env.Durability == pipeline.File }

// storing reports whether something is to be stored before it is told.
func (it *item) storing() bool { return len(it.outbox) > 1 }

// outgoing is a message of what an item became.
type outgoing struct {
	bus.Message
	to destination
}

// destination is who gets a message.
type destination uint8

const (
	toNext destination = iota
	toGateway
	toResults
	toDead
)

func (it *item) expired(now time.Time) bool { return !now.Before(it.env.Deadline) }

// entry is the item as the batcher sees it.
func (it *item) entry() batch.Item {
	return batch.Item{
		ID:       batch.ID(it.id),
		Key:      it.key,
		Rows:     it.inputs.Rows,
		Bytes:    it.bytes,
		Arrival:  it.arrived,
		Deadline: it.env.Deadline,
		Class:    it.env.Class(),
		Alone:    it.suspect() || it.direct != nil,
	}
}

// input is the item as the runner sees it.
func (it *item) input() runner.Item {
	return runner.Item{
		RequestID:  string(it.env.RequestID),
		Inputs:     it.inputs.Inputs,
		Rows:       it.inputs.Rows,
		Parameters: it.env.Hop().Parameters,
		Metadata:   it.env.Metadata,
		Deadline:   it.env.Deadline,
		Cancelled:  it.cancelled,
	}
}

// timingOf starts the timeline's entry for this step.
func (it *item) timingOf(host pipeline.HostID) envelope.StepTiming {
	hop := it.env.Hop()
	return envelope.StepTiming{
		Step:      hop.Step,
		Stage:     hop.Stage,
		Host:      host,
		Attempt:   uint32(max(1, it.delivery.Deliveries)),
		QueueWait: it.queueWait,
	}
}

// answer is the reply that ends the item's request.
func (it *item) answer() *envelope.Reply {
	reply := it.env.Answer()
	reply.Timings = append(reply.Timings[:len(reply.Timings):len(reply.Timings)], it.timing)
	reply.Attempt = it.timing.Attempt
	reply.Seq = it.chunks + 1
	return reply
}

// became is what an item turned into: an output for the next step or the
// caller, or a fault.
type became struct {
	parts    []payload.Part
	metadata map[string]string
	fault    *fault.Fault
}
