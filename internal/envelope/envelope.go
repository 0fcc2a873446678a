// Package envelope is the message on a stage's subject and the reply to it:
// identity, route, deadline, trace, timeline, payload. Encode writes them;
// Decode reads bytes from anywhere and checks everything that the mesh relies
// on: its result is well formed, though perhaps not honest.
//
// The bytes encode the messages in envelope.proto. Envelopes, replies and
// results are coded directly by internal/wire, because every request pays for them at
// every hop; rare messages, such as claims, dead letters and the faults in
// replies, use the generated code. Tests compare the two ways. Both accept fields
// in any order, the last of a repeated scalar, and messages in parts that protobuf
// merges.
//
// Envelopes and replies are plain values. The payload of a decoded envelope, reply
// or result shares the memory of the input, which must not be written to after
// that. The NATS client allocates new memory for each message, so the bus does
// that. All else is copied. The texts of one message share memory, so use
// strings.Clone on a name that outlives its message.
package envelope

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/wire"
	"github.com/stagemesh/stagemesh/mesh/fault"
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
	Gateway    pipeline.GatewayID
	Pipeline   pipeline.Name

	// Route has at least one hop; Position is an index in it.
	Route    []pipeline.Hop
	Position int
	// Path is where the step stands in the blocks of its pipeline; empty without blocks.
	Path string

	Deadline       time.Time
	AdmittedAt     time.Time
	Durability     pipeline.Durability
	Priority       int32
	IdempotencyKey string
	// StoreResult asks for what StoresResult reports, also without a key.
	StoreResult bool
	// TakesChunks is true where the caller takes chunks before the final reply.
	TakesChunks bool

	Trace    Trace
	Metadata map[string]string

	// Parts are the outputs of the previous step, or the request's inputs.
	Parts []payload.Part
	// Kept are parts that the pipeline keeps for later steps.
	Kept    []payload.Part
	Timings []StepTiming

	// LocalAttempts counts the hosts of the stage that got the item in memory before it was
	// published; LocalCrash is true where a process crashed there that ran it.
	LocalAttempts uint32
	LocalCrash    bool
	// Local is the gateway that waits for the reply, of an item in its process that was never
	// published; nil for others. It is not encoded. Hosts and gateway share the memory of such an
	// item, so nobody changes it.
	Local LocalGateway
}

// Trace is a W3C trace context: what the headers traceparent and tracestate hold.
type Trace struct{ Parent, State string }

// sampledFlag is the lowest bit of the flags, which are the last of the 55 characters that
// every version of traceparent begins with.
const (
	sampledFlag = 1
	flagsEnd    = 55
)

// Sampled reports whether the trace is recorded.
func (t Trace) Sampled() bool {
	if len(t.Parent) < flagsEnd {
		return false
	}
	flags, err := strconv.ParseUint(t.Parent[flagsEnd-2:flagsEnd], 16, 8)
	return err == nil && flags&sampledFlag != 0
}

// ID returns the trace ID, 32 hexadecimal digits, or "" where there is none.
func (t Trace) ID() string {
	const begin, end = 3, 35
	if len(t.Parent) < flagsEnd {
		return ""
	}
	return t.Parent[begin:end]
}

// Headers returns the trace context by the names of its headers; nil where there is none.
func (t Trace) Headers() map[string]string {
	switch {
	case t.Parent == "":
		return nil
	case t.State == "":
		return map[string]string{"traceparent": t.Parent}
	}
	return map[string]string{"traceparent": t.Parent, "tracestate": t.State}
}

// codeTrace codes field 17 as a map from the headers' names.
func codeTrace(c *wire.Coder, t *Trace) {
	if c.Writing() {
		entries := [...]struct{ key, value string }{{"traceparent", t.Parent}, {"tracestate", t.State}}
		for i := range entries {
			if e := &entries[i]; e.value != "" {
				c.TextEntry(17, &e.key, &e.value)
			}
		}
		return
	}
	if !c.IsMessage(17) {
		return
	}
	var key, value string
	c.TextEntry(17, &key, &value)
	switch key {
	case "traceparent":
		t.Parent = value
	case "tracestate":
		t.State = value
	}
}

// LocalGateway is a gateway in the process of a host. Its methods do not block.
type LocalGateway interface {
	// Deliver takes a reply, which nobody changes after that.
	Deliver(r *Reply) meshv1.ReplyDisposition
	// Queued records that the item was published after all: for the step at that position,
	// in whose queue it is at the sequence number.
	Queued(id pipeline.ExecutionID, position int, seq uint64)
}

// Hop returns the step that the item waits for.
func (e *Envelope) Hop() *pipeline.Hop { return &e.Route[e.Position] }

// Last reports whether the item waits for the last step.
func (e *Envelope) Last() bool { return e.Position == len(e.Route)-1 }

// Class returns the priority class that the item travels in.
func (e *Envelope) Class() pipeline.Class { return pipeline.ClassOf(e.Priority) }

// Timeout is the time from the request's admission to its deadline.
func (e *Envelope) Timeout() time.Duration { return e.Deadline.Sub(e.AdmittedAt) }

// TimeoutText is the timeout for messages: milliseconds, and less only if it is shorter.
func (e *Envelope) TimeoutText() string {
	d := e.Timeout()
	if d >= time.Millisecond {
		d = d.Round(time.Millisecond)
	}
	return d.String()
}

// StateText returns what an item of a host waits for, or that a worker runs it.
func StateText(state string, hasRun bool) string {
	switch {
	case state == "running":
		return "a worker runs it"
	case state == "sending" || hasRun:
		return "its output waits for the queue of the next stage"
	case state == "queued":
		return "it waits in the queue of the stage"
	}
	return "it " + state
}

// DeadlineFault is the fault of a request whose deadline has passed while it was in that state at the step.
func (e *Envelope) DeadlineFault(step, stage, state string) *fault.Fault {
	return fault.Newf(fault.DeadlineExceeded, "no answer within %s: at step %s, stage %s, %s", e.TimeoutText(), step, stage, state)
}

// StoresResult reports whether the request's result is stored before the reply:
// the result of a durable request, of an attempt of a job, and of one with an idempotency key,
// which other calls may share.
func (e *Envelope) StoresResult() bool {
	return e.Durability == pipeline.File || e.IdempotencyKey != "" || e.StoreResult
}

// MsgID is the broker's deduplication id: the same for every publish of one
// result, another for a new execution or a deliberate republish.
func (e *Envelope) MsgID() string {
	id := make([]byte, 0, len(e.ExecutionID)+24)
	id = append(id, e.ExecutionID...)
	id = append(id, '/')
	id = strconv.AppendInt(id, int64(e.Position), 10)
	id = append(id, '/')
	id = strconv.AppendUint(id, uint64(e.Generation), 10)
	return string(id)
}

// Next returns the envelope for the next step: outputs become its parts, and it
// keeps the inputs and outputs of this step that later steps need.
func (e *Envelope) Next(inputs, outputs []payload.Part, timing StepTiming) *Envelope {
	next := *e
	next.Position++
	next.Generation, next.LocalAttempts, next.LocalCrash = 0, 0, false
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

// checkIDs checks that ids may be part of a subject and a message id.
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

// checkID accepts a UUID in its usual form only.
func checkID(id string) error {
	if len(id) != canonicalID {
		return fmt.Errorf("a UUID of %d bytes", len(id))
	}
	return uuid.Validate(id)
}

// What things take on the wire, in bytes, where their texts are of ordinary length:
// so much room is made for them.
const (
	aboutIdentity = 256 // an envelope's or reply's ids, names and times
	aboutHop      = 64
	aboutTiming   = 160
	aboutEntry    = 96
)

// Encode returns the envelope's bytes.
func (e *Envelope) Encode() ([]byte, error) {
	size := aboutIdentity + len(e.Tenant) + len(e.IdempotencyKey) + len(e.Trace.Parent) + len(e.Trace.State) + aboutEntry*len(e.Metadata)
	for i := range e.Route {
		hop := &e.Route[i]
		size += aboutHop + hop.Parameters.WireSize() + aboutEntry*(len(hop.Inputs)+len(hop.Keep)+len(hop.Visited))
	}
	c := wire.Writer(size + payload.WireSize(e.Parts) + payload.WireSize(e.Kept) + aboutTiming*len(e.Timings))
	w := envelopeCoder{
		Envelope: e, position: uint32(e.Position), durability: e.Durability.ToProto(),
		deadline: wire.Timestamp(e.Deadline), admittedAt: wire.Timestamp(e.AdmittedAt),
	}
	w.code(&c)
	return c.Done()
}

// ErrMalformed is wrapped by every error of the Decode functions.
var ErrMalformed = errors.New("malformed message")

func malformed(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrMalformed, err)
}

// Decode reads an envelope from bytes of any sender. Its payload shares their
// memory, so the caller must not change them.
func Decode(data []byte) (*Envelope, error) {
	r := envelopeCoder{Envelope: new(Envelope)}
	c := wire.Reader(data)
	for c.Next() {
		r.code(&c)
		checkReserved(&c)
	}
	err := c.Err()
	if err == nil {
		err = r.finish()
	}
	if err != nil {
		return nil, malformed(err)
	}
	return r.Envelope, nil
}

// envelopeCoder codes an envelope, with what is written otherwise than it is held.
type envelopeCoder struct {
	*Envelope
	position             uint32
	durability           inferencev1.Durability
	deadline, admittedAt wire.Time
}

// code codes the fields of envelope.proto's Envelope.
func (e *envelopeCoder) code(c *wire.Coder) {
	c.Text(1, (*string)(&e.Mesh))
	c.Text(2, &e.Tenant)
	c.Text(3, (*string)(&e.RequestID))
	c.Text(4, (*string)(&e.ExecutionID))
	wire.Varint(c, 5, &e.Generation)
	c.Text(7, (*string)(&e.Gateway))
	c.Text(8, (*string)(&e.Pipeline))
	for i, end := wire.Elements(c, 9, &e.Route, pipeline.MaxSteps); i < end; i++ {
		for m := c.Message(9, 0); m.More(); {
			codeHop(c, &e.Route[i])
		}
	}
	wire.Varint(c, 10, &e.position)
	if !c.Writing() || e.Path != "" {
		c.Text(11, &e.Path)
	}
	c.Time(12, &e.deadline)
	c.Time(13, &e.admittedAt)
	wire.Varint(c, 14, &e.durability)
	wire.Varint(c, 15, &e.Priority)
	c.Text(16, &e.IdempotencyKey)
	codeTrace(c, &e.Trace)
	c.TextMap(18, &e.Metadata)
	payload.Code(c, 19, "parts", &e.Parts)
	payload.Code(c, 20, "kept", &e.Kept)
	codeTimings(c, 21, &e.Timings)
	c.Bool(25, &e.TakesChunks)
	wire.Varint(c, 26, &e.LocalAttempts)
	c.Bool(27, &e.LocalCrash)
	c.Bool(28, &e.StoreResult)
}

// checkReserved rejects a reserved field that is malformed; no sender writes one yet.
func checkReserved(c *wire.Coder) {
	switch c.Number() {
	case 22:
		c.Check(22, func(b []byte) error { return proto.Unmarshal(b, new(inferencev1.Ref)) })
	case 23:
		c.Check(23, func(b []byte) error { return proto.Unmarshal(b, new(meshv1.StreamPosition)) })
	case 24:
		c.Check(24, func(b []byte) error { return proto.Unmarshal(b, new(meshv1.GrpcCall)) })
	}
}

// codeHop codes the fields of envelope.proto's Step.
func codeHop(c *wire.Coder, hop *pipeline.Hop) {
	c.Text(1, (*string)(&hop.Step))
	c.Text(2, (*string)(&hop.Stage))
	payload.CodeModel(c, 3, &hop.Model)
	payload.CodeParameters(c, 4, &hop.Parameters)
	c.TextMap(5, &hop.Inputs)
	c.Texts(6, &hop.Keep, payload.MaxParts)
	c.Text(7, (*string)(&hop.Host))
	c.Texts(8, &hop.Visited, pipeline.MaxVisited)
}

// finish completes a decoded envelope and validates it.
func (e *envelopeCoder) finish() (err error) {
	if err := pipeline.ValidName("mesh", string(e.Mesh)); err != nil {
		return err
	}
	if err := pipeline.ValidName("gateway", string(e.Gateway)); err != nil {
		return err
	}
	if err := checkIDs(string(e.RequestID), string(e.ExecutionID)); err != nil {
		return err
	}
	if err := e.deadline.CheckTimestamp(); err != nil {
		return fmt.Errorf("deadline: %w", err)
	}
	e.Deadline, e.AdmittedAt = e.deadline.AsTime(), e.admittedAt.AsTime()
	if e.Durability, err = pipeline.DurabilityFromProto(e.durability); err != nil {
		return err
	}
	if len(e.Route) == 0 || len(e.Route) > pipeline.MaxSteps {
		return fmt.Errorf("a route of %d steps", len(e.Route))
	}
	for i := range e.Route {
		if err := checkHop(&e.Route[i]); err != nil {
			return fmt.Errorf("route[%d]: %w", i, err)
		}
	}
	if int64(e.position) >= int64(len(e.Route)) {
		return fmt.Errorf("position %d in a route of %d", e.position, len(e.Route))
	}
	e.Position = int(e.position)
	if err := validParts("parts", &e.Parts); err != nil {
		return err
	}
	if err := validParts("kept", &e.Kept); err != nil {
		return err
	}
	// The step that the item waits for adds one.
	return checkTimings(&e.Timings, pipeline.MaxSteps-1)
}

func checkHop(hop *pipeline.Hop) error {
	if err := pipeline.ValidName("step", string(hop.Step)); err != nil {
		return err
	}
	if err := pipeline.ValidName("stage", string(hop.Stage)); err != nil {
		return err
	}
	if hop.Host != "" {
		if err := pipeline.ValidName("host", string(hop.Host)); err != nil {
			return err
		}
	}
	if len(hop.Keep) > payload.MaxParts {
		return fmt.Errorf("keeps %d parts, at most %d are allowed", len(hop.Keep), payload.MaxParts)
	}
	if len(hop.Visited) > pipeline.MaxVisited {
		return fmt.Errorf("visited %d hosts, at most %d are allowed", len(hop.Visited), pipeline.MaxVisited)
	}
	return hop.Parameters.Validate()
}

// StepTiming is the timeline entry of one step.
type StepTiming struct {
	Step  pipeline.StepName
	Stage pipeline.StageName
	// Path is where the step stands in the blocks of its pipeline; empty without blocks.
	Path string
	Host pipeline.HostID
	// Attempt counts deliveries of the item to hosts of the stage, this one included.
	Attempt uint32
	// Arrival is from the request's admission to the item's arrival at the host. Their clocks may
	// differ.
	Arrival time.Duration
	// QueueWait is from the broker's receipt of the item to its delivery.
	QueueWait time.Duration
	// BatchWait is from the item's arrival at the host until its dispatch.
	BatchWait time.Duration
	// ModelWait is the part of BatchWait before the item's model was loaded.
	ModelWait time.Duration
	// Run is the runner's time for the whole batch.
	Run time.Duration
	// BatchSize counts items, BatchRows rows, Rows this item's rows.
	BatchSize, BatchRows, Rows uint32
	// Dispatch is why the batch was dispatched.
	Dispatch string
	// Local is true where the host got the item in memory.
	Local bool
}

// WithoutIndices returns a path of a step without the indices of items.
func WithoutIndices(path string) string {
	if strings.IndexByte(path, '[') < 0 {
		return path
	}
	var out strings.Builder
	for rest := path; ; {
		before, after, isItem := strings.Cut(rest, "[")
		out.WriteString(before)
		if !isItem {
			return out.String()
		}
		_, rest, _ = strings.Cut(after, "]")
	}
}

// ToProto converts the timing to its protobuf message.
func (t StepTiming) ToProto() *inferencev1.StepTiming {
	return &inferencev1.StepTiming{
		Step:           string(t.Step),
		Stage:          string(t.Stage),
		Host:           string(t.Host),
		Attempt:        t.Attempt,
		QueueWait:      durationpb.New(t.QueueWait),
		BatchWait:      durationpb.New(t.BatchWait),
		Run:            durationpb.New(t.Run),
		BatchSize:      t.BatchSize,
		BatchRows:      t.BatchRows,
		Rows:           t.Rows,
		DispatchReason: t.Dispatch,
		Local:          t.Local,
		Arrival:        durationpb.New(t.Arrival),
		ModelWait:      t.modelWait(),
		Path:           t.Path,
	}
}

// TimingFromProto converts a timing from its protobuf message.
func TimingFromProto(t *inferencev1.StepTiming) StepTiming {
	return StepTiming{
		Step:      pipeline.StepName(t.GetStep()),
		Stage:     pipeline.StageName(t.GetStage()),
		Host:      pipeline.HostID(t.GetHost()),
		Attempt:   t.GetAttempt(),
		Arrival:   t.GetArrival().AsDuration(),
		QueueWait: t.GetQueueWait().AsDuration(),
		BatchWait: t.GetBatchWait().AsDuration(),
		ModelWait: t.GetModelWait().AsDuration(),
		Run:       t.GetRun().AsDuration(),
		BatchSize: t.GetBatchSize(),
		BatchRows: t.GetBatchRows(),
		Rows:      t.GetRows(),
		Dispatch:  t.GetDispatchReason(),
		Local:     t.GetLocal(),
		Path:      t.GetPath(),
	}
}

// modelWait returns nil where the item did not wait for a model.
func (t StepTiming) modelWait() *durationpb.Duration {
	if t.ModelWait == 0 {
		return nil
	}
	return durationpb.New(t.ModelWait)
}

// Branch is what became of a block of a request's pipeline, or of a branch of one.
type Branch struct {
	// Path is where it stands, without the indices of items. Block is the kind of a block; empty for
	// a branch.
	Path, Block string
	Status      string
	// Why is the value that decided, or the reason of its fault.
	Why string
	// Began is from the request's admission.
	Began, Took time.Duration
	// Count is how many there were in the items of a map; else 0.
	Count uint32
	// Items counts the items of a map, of which Failed failed; ItemP50 and ItemMax are how long they took.
	Items, Failed    uint32
	ItemP50, ItemMax time.Duration
}

// ToProto converts the branch to its protobuf message.
func (b Branch) ToProto() *inferencev1.BranchTiming {
	out := &inferencev1.BranchTiming{
		Path: b.Path, Block: b.Block, Status: b.Status, Why: b.Why, Began: durationpb.New(b.Began), Took: durationpb.New(b.Took),
		Count: b.Count, Items: b.Items, Failed: b.Failed,
	}
	if b.Items > 0 {
		out.ItemP50, out.ItemMax = durationpb.New(b.ItemP50), durationpb.New(b.ItemMax)
	}
	return out
}

// BranchFromProto converts a branch from its protobuf message.
func BranchFromProto(b *inferencev1.BranchTiming) Branch {
	return Branch{
		Path: b.GetPath(), Block: b.GetBlock(), Status: b.GetStatus(), Why: b.GetWhy(), Began: b.GetBegan().AsDuration(), Took: b.GetTook().AsDuration(),
		Count: b.GetCount(), Items: b.GetItems(), Failed: b.GetFailed(), ItemP50: b.GetItemP50().AsDuration(), ItemMax: b.GetItemMax().AsDuration(),
	}
}

// codeTimings codes field n as a list of inference.proto's StepTiming.
func codeTimings(c *wire.Coder, n uint32, timings *[]StepTiming) {
	for i, end := wire.Elements(c, n, timings, pipeline.MaxSteps); i < end; i++ {
		t := &(*timings)[i]
		for m := c.Message(n, 0); m.More(); {
			c.Text(1, (*string)(&t.Step))
			c.Text(2, (*string)(&t.Stage))
			c.Text(3, (*string)(&t.Host))
			wire.Varint(c, 4, &t.Attempt)
			c.Duration(5, &t.QueueWait)
			c.Duration(6, &t.BatchWait)
			c.Duration(7, &t.Run)
			wire.Varint(c, 8, &t.BatchSize)
			wire.Varint(c, 9, &t.BatchRows)
			c.Text(10, &t.Dispatch)
			c.Bool(11, &t.Local)
			c.Duration(12, &t.Arrival)
			if !c.Writing() || t.ModelWait != 0 {
				c.Duration(13, &t.ModelWait)
			}
			wire.Varint(c, 14, &t.Rows)
			if !c.Writing() || t.Path != "" {
				c.Text(15, &t.Path)
			}
		}
	}
}

// checkTimings checks a decoded list of timings, and makes it one that is not nil.
func checkTimings(timings *[]StepTiming, most int) error {
	if len(*timings) > most {
		return fmt.Errorf("timings of %d steps, at most %d are allowed", len(*timings), most)
	}
	if *timings == nil {
		*timings = []StepTiming{}
	}
	return nil
}
