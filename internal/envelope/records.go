package envelope

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/wire"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Result is a request's final reply as it is stored.
type Result struct {
	// Reply is the final reply.
	Reply    *Reply
	Tenant   string
	Pipeline pipeline.Name
	// AdmittedAt is on the gateway's clock, FinishedAt on the host's.
	AdmittedAt, FinishedAt time.Time
}

// Result returns the result to store for a final reply to e.
func (e *Envelope) Result(r *Reply, finished time.Time) *Result {
	return &Result{Reply: r, Tenant: e.Tenant, Pipeline: e.Pipeline, AdmittedAt: e.AdmittedAt, FinishedAt: finished}
}

// Report returns what the result says of its request.
func (r *Result) Report() *meshv1.RequestReport {
	e := Envelope{
		RequestID: r.Reply.RequestID, Pipeline: r.Pipeline, Tenant: r.Tenant, AdmittedAt: r.AdmittedAt, Timings: r.Reply.Timings,
	}
	out := e.Report(meshv1.RequestSource_REQUEST_SOURCE_STORED_RESULT)
	out.Stored, out.Total = true, durationpb.New(max(0, r.FinishedAt.Sub(r.AdmittedAt))) // of two clocks
	if r.Reply.Fault != nil {
		out.Fault = r.Reply.Fault.ToProto()
	}
	return out
}

// Report returns what the envelope says of its request, but for the trace: a call that has
// not sent it yet may set that.
func (e *Envelope) Report(source meshv1.RequestSource) *meshv1.RequestReport {
	out := &meshv1.RequestReport{
		RequestId: string(e.RequestID), Source: source, Pipeline: string(e.Pipeline), Tenant: e.Tenant, Gateway: string(e.Gateway),
		Durability: e.Durability.ToProto(), IdempotencyKey: e.IdempotencyKey,
	}
	if at := timestamppb.New(e.AdmittedAt); at.IsValid() { // nobody has checked an item's
		out.AdmittedAt = at
	}
	if !e.Deadline.IsZero() {
		out.Deadline = timestamppb.New(e.Deadline)
	}
	for i := range e.Timings {
		out.Steps = append(out.Steps, &meshv1.ReportedStep{Timing: e.Timings[i].ToProto()})
	}
	for i := range e.Route {
		out.Stages = append(out.Stages, string(e.Route[i].Stage))
	}
	return out
}

// Encode returns the result's bytes.
func (r *Result) Encode() ([]byte, error) {
	c := wire.Writer(r.Reply.wireSize() + aboutIdentity + len(r.Tenant))
	w := resultCoder{
		Result: r, reply: encoderOf(r.Reply),
		admittedAt: wire.Timestamp(r.AdmittedAt), finishedAt: wire.Timestamp(r.FinishedAt),
	}
	w.code(&c)
	return c.Done()
}

// DecodeResult reads a result from bytes of any sender. Its payload shares their
// memory, so the caller must not change them.
func DecodeResult(data []byte) (*Result, error) {
	r := resultCoder{Result: new(Result), reply: replyCoder{Reply: new(Reply)}}
	c := wire.Reader(data)
	for c.Next() {
		r.code(&c)
	}
	err := c.Err()
	if err == nil {
		err = r.finish()
	}
	if err != nil {
		return nil, malformed(err)
	}
	return r.Result, nil
}

// resultCoder codes a result, with what is written otherwise than it is held.
type resultCoder struct {
	*Result
	reply                  replyCoder
	admittedAt, finishedAt wire.Time
}

// code codes the fields of result.proto's Result.
func (r *resultCoder) code(c *wire.Coder) {
	for m := c.Message(1, payload.Size(r.reply.Parts)); m.More(); {
		r.reply.code(c)
	}
	c.Text(2, &r.Tenant)
	c.Text(3, (*string)(&r.Pipeline))
	c.Time(4, &r.admittedAt)
	c.Time(5, &r.finishedAt)
}

// finish completes a decoded result and validates it.
func (r *resultCoder) finish() error {
	if err := r.reply.finish(); err != nil {
		return err
	}
	r.Reply = r.reply.Reply
	if !r.Reply.Terminal() || r.Reply.Stored {
		return errors.New("the reply is not an answer")
	}
	if err := r.admittedAt.CheckTimestamp(); err != nil {
		return fmt.Errorf("admission: %w", err)
	}
	if err := r.finishedAt.CheckTimestamp(); err != nil {
		return fmt.Errorf("finish: %w", err)
	}
	r.AdmittedAt, r.FinishedAt = r.admittedAt.AsTime(), r.finishedAt.AsTime()
	return nil
}

// Claim is the record of the request that has, or had, an idempotency key.
type Claim struct {
	Mesh pipeline.MeshName
	// Tenant and Pipeline belong to the key.
	Tenant   string
	Pipeline pipeline.Name
	// RequestID is the request that has the key, or had it last.
	RequestID pipeline.RequestID
	// Digest is computed over the request's payload and options.
	Digest Digest
	// AdmittedAt and Deadline of the request are on its gateway's clock. A released
	// claim has none, so that its record is smaller than the one it replaces, and fits
	// into a full stream.
	AdmittedAt, Deadline time.Time
	// Durability is the request's.
	Durability pipeline.Durability
	// Released means that the key is free again.
	Released bool
}

// Digest is a digest of a request's payload.
type Digest [sha256.Size]byte

// Encode returns the claim's bytes.
func (c *Claim) Encode() ([]byte, error) {
	out := &meshv1.IdempotencyRecord{
		Mesh:       string(c.Mesh),
		Tenant:     c.Tenant,
		Pipeline:   string(c.Pipeline),
		RequestId:  string(c.RequestID),
		Digest:     c.Digest[:],
		Durability: c.Durability.ToProto(),
		State:      meshv1.IdempotencyState_IDEMPOTENCY_STATE_RELEASED,
	}
	if !c.Released {
		out.State = meshv1.IdempotencyState_IDEMPOTENCY_STATE_HELD
		out.AdmittedAt, out.Deadline = timestamppb.New(c.AdmittedAt), timestamppb.New(c.Deadline)
	}
	return proto.Marshal(out)
}

// DecodeClaim reads a claim from bytes of any sender.
func DecodeClaim(data []byte) (*Claim, error) {
	return decodeRecord(data, new(meshv1.IdempotencyRecord), claimFromProto)
}

// decodeRecord reads a record by its generated message.
func decodeRecord[M proto.Message, R any](data []byte, in M, convert func(M) (R, error)) (out R, err error) {
	if err = proto.Unmarshal(data, in); err == nil {
		out, err = convert(in)
	}
	return out, malformed(err)
}

func claimFromProto(in *meshv1.IdempotencyRecord) (*Claim, error) {
	durability, err := pipeline.DurabilityFromProto(in.GetDurability())
	if err != nil {
		return nil, err
	}
	if err := checkID(in.GetRequestId()); err != nil {
		return nil, fmt.Errorf("request id: %w", err)
	}
	if len(in.GetDigest()) != len(Digest{}) {
		return nil, fmt.Errorf("a digest of %d bytes", len(in.GetDigest()))
	}
	out := &Claim{
		Mesh:       pipeline.MeshName(in.GetMesh()),
		Tenant:     in.GetTenant(),
		Pipeline:   pipeline.Name(in.GetPipeline()),
		RequestID:  pipeline.RequestID(in.GetRequestId()),
		Digest:     Digest(in.GetDigest()),
		Durability: durability,
	}
	switch in.GetState() {
	case meshv1.IdempotencyState_IDEMPOTENCY_STATE_RELEASED:
		out.Released = true
		return out, nil
	case meshv1.IdempotencyState_IDEMPOTENCY_STATE_HELD:
	default:
		return nil, errors.New("neither held nor released")
	}
	if err := in.GetAdmittedAt().CheckValid(); err != nil {
		return nil, fmt.Errorf("admission: %w", err)
	}
	if err := in.GetDeadline().CheckValid(); err != nil {
		return nil, fmt.Errorf("deadline: %w", err)
	}
	out.AdmittedAt, out.Deadline = in.GetAdmittedAt().AsTime(), in.GetDeadline().AsTime()
	return out, nil
}

// DeadLetter is a message that the mesh gave up on.
type DeadLetter struct {
	Mesh pipeline.MeshName
	// Stage of the queue; Host that gave up on it.
	Stage      pipeline.StageName
	Host       pipeline.HostID
	Durability pipeline.Durability
	Priority   int32
	// Fault is the cause.
	Fault *fault.Fault
	// Item is the message as it was in the queue: an encoded envelope or job, or
	// malformed bytes.
	Item []byte
	// Deliveries counts deliveries to any host, or attempts of a job.
	Deliveries int
	// Queue of jobs that the message was in, instead of a stage's; ID of the job and who
	// submitted it, where the message is one.
	Queue       pipeline.QueueName
	Job, Tenant string
	// Runs are the recorded runs, the first one first.
	Runs                     []RunRecord
	QueuedAt, DeadLetteredAt time.Time
}

// RunRecord records that a host began to run an item alone.
type RunRecord struct {
	Host pipeline.HostID
	At   time.Time
	// Died is true once the process of the run has died and the host lives.
	Died bool
	// Exit is how it ended, in words; empty where that is not known.
	Exit string
}

// maxRuns bounds the run records that are read.
const maxRuns = 1000

// Encode returns the dead letter's bytes.
func (d *DeadLetter) Encode() ([]byte, error) {
	out := &meshv1.DeadLetter{
		Mesh:           string(d.Mesh),
		Stage:          string(d.Stage),
		Durability:     d.Durability.ToProto(),
		Priority:       d.Priority,
		Host:           string(d.Host),
		Fault:          faultToProto(d.Fault),
		Item:           d.Item,
		Deliveries:     uint64(max(0, d.Deliveries)),
		QueuedAt:       timestamppb.New(d.QueuedAt),
		DeadLetteredAt: timestamppb.New(d.DeadLetteredAt),
		Runs:           runsToProto(d.Runs),
		Queue:          string(d.Queue),
		Job:            d.Job,
		Tenant:         d.Tenant,
	}
	return proto.Marshal(out)
}

// DecodeDeadLetter reads a dead letter from bytes of any sender. It does not
// decode the item.
func DecodeDeadLetter(data []byte) (*DeadLetter, error) {
	return decodeRecord(data, new(meshv1.DeadLetter), deadLetterFromProto)
}

func deadLetterFromProto(in *meshv1.DeadLetter) (*DeadLetter, error) {
	durability, err := pipeline.DurabilityFromProto(in.GetDurability())
	if err != nil {
		return nil, err
	}
	switch {
	case in.GetFault() == nil:
		return nil, errors.New("no fault")
	case in.GetQueuedAt().CheckValid() != nil:
		return nil, fmt.Errorf("queued at: %w", in.GetQueuedAt().CheckValid())
	case in.GetDeadLetteredAt().CheckValid() != nil:
		return nil, fmt.Errorf("dead-lettered at: %w", in.GetDeadLetteredAt().CheckValid())
	}
	runs, err := runsFromProto(in.GetRuns())
	if err != nil {
		return nil, err
	}
	return &DeadLetter{
		Mesh:           pipeline.MeshName(in.GetMesh()),
		Stage:          pipeline.StageName(in.GetStage()),
		Host:           pipeline.HostID(in.GetHost()),
		Durability:     durability,
		Priority:       in.GetPriority(),
		Fault:          fault.FromProto(in.GetFault()),
		Item:           in.GetItem(),
		Deliveries:     int(min(in.GetDeliveries(), maxDeliveries)),
		Runs:           runs,
		QueuedAt:       in.GetQueuedAt().AsTime(),
		DeadLetteredAt: in.GetDeadLetteredAt().AsTime(),
		Queue:          pipeline.QueueName(in.GetQueue()),
		Job:            in.GetJob(),
		Tenant:         in.GetTenant(),
	}, nil
}

// maxDeliveries fits an int on every platform; a queue counts far less.
const maxDeliveries = 1 << 30

// EncodeRunRecords returns the bytes of run records.
func EncodeRunRecords(runs []RunRecord) ([]byte, error) {
	return proto.Marshal(&meshv1.RunRecords{Runs: runsToProto(runs)})
}

// DecodeRunRecords reads run records from bytes of any sender.
func DecodeRunRecords(data []byte) ([]RunRecord, error) {
	return decodeRecord(data, new(meshv1.RunRecords), func(in *meshv1.RunRecords) ([]RunRecord, error) {
		return runsFromProto(in.GetRuns())
	})
}

func runsToProto(runs []RunRecord) []*meshv1.RunRecord {
	var out []*meshv1.RunRecord
	for _, s := range runs {
		out = append(out, &meshv1.RunRecord{Host: string(s.Host), StartedAt: timestamppb.New(s.At), Died: s.Died, Exit: s.Exit})
	}
	return out
}

func runsFromProto(in []*meshv1.RunRecord) ([]RunRecord, error) {
	if len(in) > maxRuns {
		return nil, fmt.Errorf("%d run records, at most %d are accepted", len(in), maxRuns)
	}
	var out []RunRecord
	for _, s := range in {
		if err := s.GetStartedAt().CheckValid(); err != nil {
			return nil, fmt.Errorf("start: %w", err)
		}
		out = append(out, RunRecord{Host: pipeline.HostID(s.GetHost()), At: s.GetStartedAt().AsTime(), Died: s.GetDied(), Exit: s.GetExit()})
	}
	return out, nil
}

// Cancel is the message that a request is cancelled.
type Cancel struct {
	Mesh pipeline.MeshName
	// Tenant is the request's: one of another tenant is left alone.
	Tenant    string
	RequestID pipeline.RequestID
	// Deadline of the request: no item of it is left after that. It is zero where the
	// sender does not know the request.
	Deadline time.Time
}

// Encode returns the message's bytes.
func (c *Cancel) Encode() ([]byte, error) {
	return proto.Marshal(&meshv1.Cancel{
		Mesh: string(c.Mesh), Tenant: c.Tenant, RequestId: string(c.RequestID), Deadline: timestamppb.New(c.Deadline),
	})
}

// DecodeCancel reads a cancel message from bytes of any sender.
func DecodeCancel(data []byte) (*Cancel, error) {
	return decodeRecord(data, new(meshv1.Cancel), func(in *meshv1.Cancel) (*Cancel, error) {
		if err := checkID(in.GetRequestId()); err != nil {
			return nil, fmt.Errorf("request id: %w", err)
		}
		if err := in.GetDeadline().CheckValid(); err != nil {
			return nil, fmt.Errorf("deadline: %w", err)
		}
		if t := in.GetTenant(); t != "" {
			if err := pipeline.ValidName("tenant", t); err != nil {
				return nil, err
			}
		}
		return &Cancel{
			Mesh:      pipeline.MeshName(in.GetMesh()),
			Tenant:    in.GetTenant(),
			RequestID: pipeline.RequestID(in.GetRequestId()),
			Deadline:  in.GetDeadline().AsTime(),
		}, nil
	})
}
