package target

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/url"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/services/bench/load"
)

// maxAnswer bounds an answer, in bytes.
const maxAnswer = 128 << 20

// model asks by the Open Inference Protocol over gRPC.
type model struct {
	conn     *grpc.ClientConn
	client   oipv2.GRPCInferenceServiceClient
	requests []*oipv2.ModelInferRequest
	token    string
	traced   bool
}

func newModel(s Settings) (*model, error) {
	u, err := url.Parse(s.Address)
	if err != nil {
		return nil, fmt.Errorf("address: %w", err)
	}
	secure, port := insecure.NewCredentials(), "80"
	if u.Scheme == "https" {
		secure, port = credentials.NewTLS(s.TLS.Clone()), "443"
	}
	if u.Port() != "" {
		port = u.Port()
	}
	conn, err := grpc.NewClient(net.JoinHostPort(u.Hostname(), port),
		grpc.WithTransportCredentials(secure), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)))
	if err != nil {
		return nil, fmt.Errorf("address: %w", err)
	}
	out := &model{conn: conn, client: oipv2.NewGRPCInferenceServiceClient(conn), token: s.Token, traced: s.Traced}
	for _, inputs := range s.Inputs {
		out.requests = append(out.requests, s.modelRequest(inputs))
	}
	return out, nil
}

// timeoutParameter is in microseconds, as Triton has it.
const timeoutParameter = "timeout"

func (s Settings) modelRequest(inputs []*inferencev1.Part) *oipv2.ModelInferRequest {
	out := &oipv2.ModelInferRequest{ModelName: s.Pipeline}
	if s.Timeout > 0 {
		us := max(1, s.Timeout.Microseconds())
		out.Parameters = map[string]*oipv2.InferParameter{timeoutParameter: {ParameterChoice: &oipv2.InferParameter_Int64Param{Int64Param: us}}}
	}
	for _, part := range inputs {
		in, raw := modelInput(part)
		out.Inputs, out.RawInputContents = append(out.Inputs, in), append(out.RawInputContents, raw)
	}
	return out
}

// modelInput returns a part as the protocol has it: a blob is a tensor of one element.
func modelInput(part *inferencev1.Part) (*oipv2.ModelInferRequest_InferInputTensor, []byte) {
	if t := part.GetTensor(); t != nil {
		return &oipv2.ModelInferRequest_InferInputTensor{Name: part.GetName(), Datatype: t.GetDatatype(), Shape: t.GetShape()}, t.GetRaw()
	}
	blob := part.GetBlob()
	raw := binary.LittleEndian.AppendUint32(make([]byte, 0, 4+len(blob.GetData())), uint32(len(blob.GetData())))
	return &oipv2.ModelInferRequest_InferInputTensor{
		Name: part.GetName(), Datatype: string(tensor.Bytes), Shape: []int64{1},
		Parameters: map[string]*oipv2.InferParameter{"content_type": {ParameterChoice: &oipv2.InferParameter_StringParam{StringParam: blob.GetContentType()}}},
	}, append(raw, blob.GetData()...)
}

// traceParentKey is transport.HeaderTraceParent as gRPC's metadata has it.
const traceParentKey = "traceparent"

func (m *model) close() { _ = m.conn.Close() }

func (m *model) ask(ctx context.Context, i int, into *load.Answer) error {
	if m.token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+m.token)
	}
	if m.traced {
		ctx = metadata.AppendToOutgoingContext(ctx, traceParentKey, traceParent())
	}
	var trailer metadata.MD
	if _, err := m.client.ModelInfer(ctx, m.requests[i], grpc.Trailer(&trailer)); err != nil {
		return statusFailure(err)
	}
	if timing := trailer.Get(strings.ToLower(transport.HeaderServerTiming)); len(timing) > 0 {
		parseTiming(timing[0], into)
	}
	return nil
}
