package envelope

import (
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Result is a request's terminal answer as it is stored.
type Result struct {
	// Reply is terminal, and the answer itself.
	Reply    *Reply
	Tenant   string
	Pipeline pipeline.Name
	// AdmittedAt is on the gateway's clock, FinishedAt on the host's.
	AdmittedAt, FinishedAt time.Time
}

// Result returns what is stored of a terminal reply to e.
func (e *Envelope) Result(r *Reply, finished time.Time) *Result {
	return &Result{Reply: r, Tenant: e.Tenant, Pipeline: e.Pipeline, AdmittedAt: e.AdmittedAt, FinishedAt: finished}
}

// Encode returns the result's bytes.
func (r *Result) Encode() ([]byte, error) {
	return proto.Marshal(&meshv1.Result{
		Reply:      r.Reply.toProto(),
		Tenant:     r.Tenant,
		Pipeline:   string(r.Pipeline),
		AdmittedAt: timestamppb.New(r.AdmittedAt),
		FinishedAt: timestamppb.New(r.FinishedAt),
	})
}

// DecodeResult reads a result from bytes that anybody may have stored.
func DecodeResult(data []byte) (*Result, error) {
	var in meshv1.Result
	if err := proto.Unmarshal(data, &in); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	out, err := resultFromProto(&in)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return out, nil
}

func resultFromProto(in *meshv1.Result) (*Result, error) {
	reply, err := replyFromProto(in.GetReply())
	if err != nil {
		return nil, err
	}
	switch {
	case !reply.Terminal() || reply.Stored:
		return nil, errors.New("the reply is no answer")
	case in.GetAdmittedAt().CheckValid() != nil:
		return nil, fmt.Errorf("admission: %w", in.GetAdmittedAt().CheckValid())
	case in.GetFinishedAt().CheckValid() != nil:
		return nil, fmt.Errorf("finish: %w", in.GetFinishedAt().CheckValid())
	}
	return &Result{
		Reply:      reply,
		Tenant:     in.GetTenant(),
		Pipeline:   pipeline.Name(in.GetPipeline()),
		AdmittedAt: in.GetAdmittedAt().AsTime(),
		FinishedAt: in.GetFinishedAt().AsTime(),
	}, nil
}
