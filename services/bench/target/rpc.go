package target

import (
	"context"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/services/bench/load"
)

// rpc asks by gRPC or Connect.
type rpc struct {
	settings  Settings
	transport *http.Transport
	client    inferencev1connect.InferenceServiceClient
	requests  []*inferencev1.InferRequest
}

func newRPC(s Settings) *rpc {
	out := &rpc{settings: s, transport: s.transport(s.Protocol == GRPC)}
	var options []connect.ClientOption
	if s.Protocol == GRPC {
		options = append(options, connect.WithGRPC())
	}
	out.client = inferencev1connect.NewInferenceServiceClient(direct(out.transport), s.Address, options...)
	for _, inputs := range s.Inputs {
		out.requests = append(out.requests, s.request(inputs))
	}
	return out
}

func (s Settings) request(inputs []*inferencev1.Part) *inferencev1.InferRequest {
	out := &inferencev1.InferRequest{Pipeline: s.Pipeline, Inputs: inputs, Durability: s.Durability.ToProto(), Priority: s.Priority}
	if s.Timeout > 0 {
		out.Timeout = durationpb.New(s.Timeout)
	}
	return out
}

func (c *rpc) close() { c.transport.CloseIdleConnections() }

// wrapped returns a request to send.
func (c *rpc) wrapped(i int) *connect.Request[inferencev1.InferRequest] {
	out := connect.NewRequest(c.requests[i])
	if c.settings.Token != "" {
		out.Header().Set("Authorization", "Bearer "+c.settings.Token)
	}
	if c.settings.Traced {
		out.Header().Set(transport.HeaderTraceParent, traceParent())
	}
	return out
}

func (c *rpc) ask(ctx context.Context, i int, into *load.Answer) error {
	if c.settings.Streams {
		return c.stream(ctx, i, into)
	}
	answer, err := c.client.Infer(ctx, c.wrapped(i))
	if err != nil {
		return rpcFailure(err)
	}
	fill(into, answer.Msg.GetTimeline())
	return nil
}

func (c *rpc) stream(ctx context.Context, i int, into *load.Answer) error {
	begin := time.Now()
	answer, err := c.client.InferStream(ctx, c.wrapped(i))
	if err != nil {
		return rpcFailure(err)
	}
	defer answer.Close() //nolint:errcheck // what was to come has come
	for answer.Receive() {
		if answer.Msg().GetChunk() != nil {
			into.Chunks = append(into.Chunks, time.Since(begin))
		}
		fill(into, answer.Msg().GetFinal().GetTimeline())
	}
	if err := answer.Err(); err != nil {
		return rpcFailure(err)
	}
	return nil
}

// fill copies a timeline, where there is one.
func fill(into *load.Answer, t *inferencev1.Timeline) {
	if t == nil {
		return
	}
	into.Total = t.GetTotal().AsDuration()
	for _, s := range t.GetSteps() {
		into.Steps = append(into.Steps, load.Step{
			Name: s.GetStep(), Queue: s.GetQueueWait().AsDuration(), Batch: s.GetBatchWait().AsDuration(), Run: s.GetRun().AsDuration(),
			BatchSize: s.GetBatchSize(), Dispatch: s.GetDispatchReason(), Attempt: s.GetAttempt(),
		})
	}
}
