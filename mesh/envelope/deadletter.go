package envelope

import (
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// DeadLetter is a message that the mesh gave up on.
type DeadLetter struct {
	Mesh pipeline.MeshName
	// Stage in whose queue it was; Host gave up on it.
	Stage      pipeline.StageName
	Host       pipeline.HostID
	Durability pipeline.Durability
	Priority   int32
	// Fault says why.
	Fault *fault.Fault
	// Item is the message as it was in the queue: an encoded envelope, or bytes
	// that are none.
	Item []byte
	// Deliveries counts those to any host.
	Deliveries int
	// Runs are the runs that are known to have begun, the first one first.
	Runs                   []RunRecord
	QueuedAt, DeadLetteredAt time.Time
}

// RunRecord says that a host began to run an item.
type RunRecord struct {
	Host pipeline.HostID
	At   time.Time
}

// maxStarts bounds the starts that are read.
const maxStarts = 1000

// Encode returns the letter's bytes.
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
	}
	out.Runs = runsToProto(d.Runs)
	return proto.Marshal(out)
}

// DecodeDeadLetter reads a letter from bytes that anybody may have stored. Its
// item is not looked at.
func DecodeDeadLetter(data []byte) (*DeadLetter, error) {
	var in meshv1.DeadLetter
	if err := proto.Unmarshal(data, &in); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	out, err := deadLetterFromProto(&in)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return out, nil
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
		return nil, fmt.Errorf("died at: %w", in.GetDeadLetteredAt().CheckValid())
	}
	starts, err := runsFromProto(in.GetRuns())
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
		Runs:         starts,
		QueuedAt:       in.GetQueuedAt().AsTime(),
		DeadLetteredAt: in.GetDeadLetteredAt().AsTime(),
	}, nil
}

// maxDeliveries fits an int everywhere; a queue counts far less.
const maxDeliveries = 1 << 30

// EncodeRunRecords returns the bytes of a record of starts.
func EncodeRunRecords(starts []RunRecord) ([]byte, error) {
	return proto.Marshal(&meshv1.RunRecords{Runs: runsToProto(starts)})
}

// DecodeRunRecords reads a record of starts from bytes that anybody may have stored.
func DecodeRunRecords(data []byte) ([]RunRecord, error) {
	var in meshv1.RunRecords
	if err := proto.Unmarshal(data, &in); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	out, err := runsFromProto(in.GetRuns())
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return out, nil
}

func runsToProto(starts []RunRecord) []*meshv1.RunRecord {
	var out []*meshv1.RunRecord
	for _, s := range starts {
		out = append(out, &meshv1.RunRecord{Host: string(s.Host), StartedAt: timestamppb.New(s.At)})
	}
	return out
}

func runsFromProto(in []*meshv1.RunRecord) ([]RunRecord, error) {
	if len(in) > maxStarts {
		return nil, fmt.Errorf("%d starts, at most %d are taken", len(in), maxStarts)
	}
	var out []RunRecord
	for _, s := range in {
		if err := s.GetStartedAt().CheckValid(); err != nil {
			return nil, fmt.Errorf("start: %w", err)
		}
		out = append(out, RunRecord{Host: pipeline.HostID(s.GetHost()), At: s.GetStartedAt().AsTime()})
	}
	return out, nil
}
