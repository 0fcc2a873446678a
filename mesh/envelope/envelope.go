package envelope

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Envelope is one item on a stage's subject.
type Envelope struct {
	Mesh        pipeline.MeshName
	Tenant      string
	RequestID   pipeline.RequestID
	ExecutionID pipeline.ExecutionID
	// Generation is bumped by every deliberate republish.
	Generation uint32
	// Attempt counts runs of this step that are known to have started.
	Attempt  uint32
	Gateway  pipeline.GatewayID
	Pipeline pipeline.Name

	// Route has at least one hop; Position is an index in it.
	Route    []pipeline.Hop
	Position int

	Deadline       time.Time
	AdmittedAt     time.Time
	Durability     pipeline.Durability
	Priority       int32
	IdempotencyKey string
	// TakesChunks says that whoever waits takes chunks ahead of the answer.
	TakesChunks bool

	// Trace is the W3C trace context.
	Trace    map[string]string
	Metadata map[string]string

	// Parts are what the previous step put out, or the request's inputs.
	Parts []payload.Part
	// Kept are parts that the pipeline keeps for later steps.
	Kept    []payload.Part
	Timings []StepTiming
}

// Hop returns the step that the item waits for.
func (e *Envelope) Hop() pipeline.Hop { return e.Route[e.Position] }

// Last reports whether the item waits for the last step.
func (e *Envelope) Last() bool { return e.Position == len(e.Route)-1 }

// Class returns the priority class that the item travels in.
func (e *Envelope) Class() pipeline.Class { return pipeline.ClassOf(e.Priority) }

// Timeout is how long the request has, from its admission to its deadline.
func (e *Envelope) Timeout() time.Duration { return e.Deadline.Sub(e.AdmittedAt) }

// StoresAnswer reports whether the request's answer is stored before it is told:
// that of a durable request, and of one whose idempotency key others may come
// with.
func (e *Envelope) StoresAnswer() bool {
	return e.Durability == pipeline.File || e.IdempotencyKey != ""
}

// MsgID is the id by which the broker tells a duplicate: the same for every
// publish of one result, another for a new execution or a deliberate republish.
func (e *Envelope) MsgID() string {
	id := make([]byte, 0, len(e.ExecutionID)+24)
	id = append(id, e.ExecutionID...)
	id = append(id, '/')
	id = strconv.AppendInt(id, int64(e.Position), 10)
	id = append(id, '/')
	id = strconv.AppendUint(id, uint64(e.Generation), 10)
	return string(id)
}

// Next returns the envelope for the next step: outputs become its parts, and
// what the pipeline keeps of this step's inputs and outputs stays at hand.
func (e *Envelope) Next(inputs, outputs []payload.Part, timing StepTiming) *Envelope {
	next := *e
	next.Position++
	next.Generation, next.Attempt = 0, 0
	next.Parts = outputs
	next.Kept = keep(e.Hop().Keep, e.Kept, inputs, outputs)
	next.Timings = append(e.Timings[:len(e.Timings):len(e.Timings)], timing)
	return &next
}

// keep returns the named parts, each once; for one name the last layer that has
// it wins.
func keep(names []string, layers ...[]payload.Part) []payload.Part {
	var out []payload.Part
	for at, name := range names {
		if slices.Contains(names[:at], name) {
			continue
		}
		for i := len(layers) - 1; i >= 0; i-- {
			if part, ok := payload.Find(layers[i], name); ok {
				out = append(out, part)
				break
			}
		}
	}
	return out
}

// checkIDs makes sure that ids may stand in a subject and a message id.
func checkIDs(request, execution string) error {
	if err := checkID(request); err != nil {
		return fmt.Errorf("request id: %w", err)
	}
	if err := checkID(execution); err != nil {
		return fmt.Errorf("execution id: %w", err)
	}
	return nil
}

const canonicalID = 36

// checkID takes a UUID in its usual form and none of the others.
func checkID(id string) error {
	if len(id) != canonicalID {
		return fmt.Errorf("a UUID of %d bytes", len(id))
	}
	return uuid.Validate(id)
}
