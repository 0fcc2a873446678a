package store

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Graph is a durable request to a pipeline with blocks: what a gateway needs to run it from its
// beginning. Its record is a message in the stream of results, which each gateway that takes the request
// over replaces by compare-and-set, and which goes once the request has its result.
type Graph struct {
	// Request has the steps as they were resolved, the gateway that runs it, and an execution that is
	// new for each gateway.
	Request    *envelope.Envelope
	Pipeline   *pipeline.Pipeline
	Parameters payload.Parameters
	// IsComplete makes an answer that would be partial a failure.
	IsComplete bool
}

// ErrGraphTaken means that another gateway has replaced or deleted the record.
var ErrGraphTaken = errors.New("another gateway has taken the request over")

// Encode returns the record's bytes.
func (g *Graph) Encode() ([]byte, error) {
	request, err := g.Request.Encode()
	if err != nil {
		return nil, err
	}
	return proto.Marshal(&meshv1.GraphRecord{Request: request, Pipeline: g.Pipeline.ToProto(), Parameters: g.Parameters.ToProto(), Complete: g.IsComplete})
}

func decodeGraph(data []byte) (*Graph, error) {
	in := new(meshv1.GraphRecord)
	if err := proto.Unmarshal(data, in); err != nil {
		return nil, err
	}
	request, err := envelope.Decode(in.GetRequest())
	if err != nil {
		return nil, err
	}
	p, err := pipeline.FromProto(in.GetPipeline())
	if err != nil {
		return nil, err
	}
	parameters, err := payload.ParametersFromProto(in.GetParameters())
	return &Graph{Request: request, Pipeline: &p, Parameters: parameters, IsComplete: in.GetComplete()}, err
}

// PutGraph makes g the record of its request in place of the one at number after, 0 for none, and
// returns its number: ErrGraphTaken if the record is another one. A record whose acknowledgement is lost is
// looked up until the context ends. While the broker is disconnected it fails at once.
func (s *Results) PutGraph(ctx context.Context, g *Graph, after uint64) (uint64, error) {
	m, err := s.bus.Record(s.bus.Graph(g.Request.RequestID), s.config.Name, after, g)
	m.Header, m.Missing = bus.TenantHeader(g.Request.Tenant), bus.ErrNoResults
	if limit := s.maxMessage(); err == nil && int64(len(m.Data)) > limit {
		err = fmt.Errorf("%w: %d bytes, the limit of a durable request with blocks is %d (results.max_bytes)", bus.ErrTooLarge, len(m.Data), limit)
	}
	for isAgain := false; err == nil; isAgain = true {
		receipt, failure := s.bus.PublishAndWait(ctx, m)
		switch {
		case failure == nil && !receipt.Duplicate:
			return receipt.Seq, nil
		case failure == nil && isAgain: // an earlier try may have stored it
			found, seq, unread := s.Graph(ctx, g.Request.RequestID)
			switch {
			case unread != nil:
				if process.Sleep(ctx, keyRetryPause) != nil {
					err = unread
				}
			case found.Request.ExecutionID == g.Request.ExecutionID:
				return seq, nil
			default:
				return 0, s.wrap(ErrGraphTaken)
			}
		case failure == nil:
			return 0, s.wrap(ErrGraphTaken)
		case errors.Is(failure, bus.ErrUnknown), isAgain && errors.Is(failure, bus.ErrDisconnected):
			if process.Sleep(ctx, keyRetryPause) != nil {
				err = failure
			}
		default:
			err = failure
		}
	}
	return 0, s.wrap(err)
}

// Graph returns the record of a request and its number: ErrNoResult if it has none.
func (s *Results) Graph(ctx context.Context, request pipeline.RequestID) (*Graph, uint64, error) {
	msg, err := s.bus.Last(ctx, s.config.Name, s.bus.Graph(request))
	switch {
	case errors.Is(err, bus.ErrNoQueue), err == nil && msg == nil:
		return nil, 0, ErrNoResult
	case err != nil:
		return nil, 0, s.wrap(err)
	}
	g, err := decodeGraph(msg.Data)
	if err == nil && g.Request.RequestID != request {
		err = errors.New("it is another request's")
	}
	if err != nil {
		err = fmt.Errorf("%w: %w", envelope.ErrMalformed, err)
		s.bus.ReportUnreadable("graph", msg.Subject, msg.Seq, "it stays until its retention has passed", err)
	}
	return g, msg.Seq, err
}

// Graphs returns the requests that have a record.
func (s *Results) Graphs(ctx context.Context) (out []pipeline.RequestID, err error) {
	subjects, err := s.bus.SubjectsOf(ctx, s.config.Name, s.bus.Graphs())
	if errors.Is(err, bus.ErrNoQueue) {
		return nil, nil
	}
	for _, subject := range subjects {
		out = append(out, pipeline.RequestID(strings.TrimPrefix(subject, s.bus.Graph(""))))
	}
	return out, s.wrap(err)
}

// DeleteGraph deletes the record at a number, and reports whether it was still there.
func (s *Results) DeleteGraph(ctx context.Context, seq uint64) (bool, error) {
	isDeleted, err := s.bus.Delete(ctx, s.config.Name, seq)
	return isDeleted, s.wrap(err)
}
