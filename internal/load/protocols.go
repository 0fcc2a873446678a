package load

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime/multipart"
	"net"
	"net/http"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// rpcWire uses gRPC or Connect.
type rpcWire struct {
	settings ClientSettings
	http     *http.Client
	client   inferencev1connect.InferenceServiceClient
	requests []*inferencev1.InferRequest
}

func newRPCWire(s ClientSettings) *rpcWire {
	out := &rpcWire{settings: s, http: s.httpClient(s.Protocol == GRPC)}
	var options []connect.ClientOption
	if s.Protocol == GRPC {
		options = append(options, connect.WithGRPC())
	}
	out.client = inferencev1connect.NewInferenceServiceClient(out.http, s.Address, options...)
	for _, inputs := range s.Inputs {
		r := &inferencev1.InferRequest{Pipeline: s.Pipeline, Inputs: payload.ToProto(inputs), Durability: s.Durability.ToProto(), Priority: s.Priority}
		if s.Timeout > 0 {
			r.Timeout = durationpb.New(s.Timeout)
		}
		out.requests = append(out.requests, r)
	}
	return out
}

func (w *rpcWire) close() { w.http.CloseIdleConnections() }

func (w *rpcWire) send(ctx context.Context, i int, into *Answer) error {
	request := connect.NewRequest(w.requests[i])
	if w.settings.Token != "" {
		request.Header().Set("Authorization", "Bearer "+w.settings.Token)
	}
	if w.settings.Traced {
		request.Header().Set(transport.HeaderTraceParent, traceParent())
	}
	if w.settings.Streams {
		return w.stream(ctx, request, into)
	}
	answer, err := w.client.Infer(ctx, request)
	if err != nil {
		return connectError(err)
	}
	fill(into, answer.Msg.GetTimeline())
	return nil
}

func (w *rpcWire) stream(ctx context.Context, request *connect.Request[inferencev1.InferRequest], into *Answer) error {
	begin := time.Now()
	answer, err := w.client.InferStream(ctx, request)
	if err != nil {
		return connectError(err)
	}
	defer answer.Close() //nolint:errcheck // everything has been received
	for answer.Receive() {
		if answer.Msg().GetChunk() != nil { // what comes while it waits for a host is none
			into.Chunks = append(into.Chunks, time.Since(begin))
		}
		fill(into, answer.Msg().GetFinal().GetTimeline())
	}
	if err := answer.Err(); err != nil {
		return connectError(err)
	}
	return nil
}

// fill copies a timeline, if there is one.
func fill(into *Answer, t *inferencev1.Timeline) {
	if t == nil {
		return
	}
	into.Total = t.GetTotal().AsDuration()
	for _, s := range t.GetSteps() {
		into.Steps = append(into.Steps, StepTiming{
			Name: s.GetStep(), Queue: s.GetQueueWait().AsDuration(), Batch: s.GetBatchWait().AsDuration(), Run: s.GetRun().AsDuration(),
			BatchSize: s.GetBatchSize(), Dispatch: s.GetDispatchReason(), Attempt: s.GetAttempt(),
		})
	}
}

// oipWire uses the Open Inference Protocol over gRPC.
type oipWire struct {
	conn     *grpc.ClientConn
	client   oipv2.GRPCInferenceServiceClient
	requests []*oipv2.ModelInferRequest
	naming   sync.Once
	token    string
	traced   bool
}

// maxAnswer bounds an answer, in bytes.
const maxAnswer = 128 << 20

func newOIPWire(s ClientSettings) (*oipWire, error) {
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
	out := &oipWire{conn: conn, client: oipv2.NewGRPCInferenceServiceClient(conn), token: s.Token, traced: s.Traced}
	for _, inputs := range s.Inputs {
		out.requests = append(out.requests, s.modelInferRequest(inputs))
	}
	return out, nil
}

func (s ClientSettings) modelInferRequest(inputs []payload.Part) *oipv2.ModelInferRequest {
	out := &oipv2.ModelInferRequest{ModelName: s.Pipeline}
	if s.Timeout > 0 {
		// In microseconds, as Triton has it.
		us := max(1, s.Timeout.Microseconds())
		out.Parameters = map[string]*oipv2.InferParameter{"timeout": {ParameterChoice: &oipv2.InferParameter_Int64Param{Int64Param: us}}}
	}
	for _, part := range inputs {
		in := &oipv2.ModelInferRequest_InferInputTensor{Name: part.Name}
		raw := part.Blob.Data
		if t := part.Tensor; t != nil {
			in.Datatype, in.Shape, raw = string(t.Datatype), t.Shape, t.Raw
		} else {
			// A blob is a tensor of one element, which begins with its length.
			in.Datatype, in.Shape = string(tensor.Bytes), []int64{1}
			in.Parameters = map[string]*oipv2.InferParameter{"content_type": {ParameterChoice: &oipv2.InferParameter_StringParam{StringParam: part.Blob.ContentType}}}
			raw = append(binary.LittleEndian.AppendUint32(nil, uint32(len(raw))), raw...)
		}
		out.Inputs, out.RawInputContents = append(out.Inputs, in), append(out.RawInputContents, raw)
	}
	return out
}

// nameInputs gives single inputs without a name the one that the model declares first. Where it
// declares none, any name will do.
func (w *oipWire) nameInputs(ctx context.Context) {
	var unnamed []*oipv2.ModelInferRequest_InferInputTensor
	for _, r := range w.requests {
		if in := r.GetInputs(); len(in) == 1 && in[0].GetName() == "" {
			unnamed = append(unnamed, in[0])
		}
	}
	if unnamed == nil {
		return
	}
	declared, err := w.client.ModelMetadata(ctx, &oipv2.ModelMetadataRequest{Name: w.requests[0].GetModelName()})
	if err != nil || len(declared.GetInputs()) == 0 {
		return // on an error the request fails, too
	}
	for _, in := range unnamed {
		in.Name = declared.GetInputs()[0].GetName()
	}
}

func (w *oipWire) close() { _ = w.conn.Close() }

func (w *oipWire) send(ctx context.Context, i int, into *Answer) error {
	if w.token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+w.token)
	}
	w.naming.Do(func() { w.nameInputs(ctx) })
	if w.traced {
		// Metadata keys are in lower case.
		ctx = metadata.AppendToOutgoingContext(ctx, "traceparent", traceParent())
	}
	var trailer metadata.MD
	if _, err := w.client.ModelInfer(ctx, w.requests[i], grpc.Trailer(&trailer)); err != nil {
		return grpcError(err)
	}
	if timing := trailer.Get(strings.ToLower(transport.HeaderServerTiming)); len(timing) > 0 {
		parseTiming(timing[0], into)
	}
	return nil
}

// httpWire uses plain HTTP.
type httpWire struct {
	client   *http.Client
	url      *url.URL
	requests []httpRequest
	traced   bool
}

type httpRequest struct {
	header http.Header
	body   []byte
}

func newHTTPWire(s ClientSettings) (*httpWire, error) {
	u, err := url.Parse(s.Address)
	if err != nil {
		return nil, fmt.Errorf("address: %w", err)
	}
	u.Path = strings.TrimRight(u.Path, "/") + "/v1/pipelines/" + s.Pipeline + ":infer"
	out := &httpWire{client: s.httpClient(false), url: u, traced: s.Traced}
	for _, inputs := range s.Inputs {
		contentType, body, err := httpBody(inputs)
		if err != nil {
			return nil, err
		}
		h := http.Header{"Content-Type": {contentType}}
		if s.Timeout > 0 {
			h.Set(transport.HeaderTimeout, s.Timeout.String())
		}
		if s.Priority != 0 {
			h.Set(transport.HeaderPriority, strconv.Itoa(int(s.Priority)))
		}
		if s.Durability != "" {
			h.Set(transport.HeaderDurability, string(s.Durability))
		}
		if s.Token != "" {
			h.Set("Authorization", "Bearer "+s.Token)
		}
		out.requests = append(out.requests, httpRequest{h, body})
	}
	return out, nil
}

// httpBody returns inputs as plain HTTP has them: one blob as it is, several as a form,
// tensors as JSON.
func httpBody(inputs []payload.Part) (contentType string, body []byte, err error) {
	tensors := 0
	for _, part := range inputs {
		if part.Tensor != nil {
			tensors++
		}
	}
	switch {
	case tensors == len(inputs):
		body, err = jsonBody(inputs)
		return "application/json", body, err
	case tensors > 0:
		return "", nil, fmt.Errorf("payload: tensors beside bytes: %w by http: use grpc or connect", errUnsupported)
	case len(inputs) == 1 && inputs[0].Name == "":
		return inputs[0].Blob.ContentType, inputs[0].Blob.Data, nil
	}
	var out bytes.Buffer
	form := multipart.NewWriter(&out)
	for _, part := range inputs {
		w, err := form.CreatePart(textproto.MIMEHeader{
			"Content-Disposition": {fmt.Sprintf("form-data; name=%q", part.Name)},
			"Content-Type":        {part.Blob.ContentType},
		})
		if err != nil {
			return "", nil, err
		}
		if _, err := w.Write(part.Blob.Data); err != nil {
			return "", nil, err
		}
	}
	err = form.Close()
	return form.FormDataContentType(), out.Bytes(), err
}

// jsonBody returns tensors in the JSON of the Open Inference Protocol.
func jsonBody(inputs []payload.Part) ([]byte, error) {
	out := []byte(`{"inputs":[`)
	for i, part := range inputs {
		if i > 0 {
			out = append(out, ',')
		}
		var err error
		if out, err = oipjson.AppendTensor(out, part); err != nil {
			return nil, fmt.Errorf("payload: %s has no JSON form: use grpc, connect or oip", part.Tensor.Datatype)
		}
	}
	return append(out, "]}"...), nil
}

func (w *httpWire) close() { w.client.CloseIdleConnections() }

func (w *httpWire) send(ctx context.Context, i int, into *Answer) error {
	of := w.requests[i]
	h := of.header
	if w.traced {
		h = maps.Clone(h)
		h.Set(transport.HeaderTraceParent, traceParent())
	}
	body := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(of.body)), nil }
	first, _ := body() // never fails
	request := (&http.Request{
		Method: http.MethodPost, URL: w.url, Header: h, Host: w.url.Host,
		ProtoMajor: 1, ProtoMinor: 1, ContentLength: int64(len(of.body)), Body: first, GetBody: body,
	}).WithContext(ctx)
	response, err := w.client.Do(request)
	if err != nil {
		return transportError(err)
	}
	defer response.Body.Close() //nolint:errcheck // it was only read
	if response.StatusCode != http.StatusOK {
		return httpError(response)
	}
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return transportError(err)
	}
	parseTiming(response.Header.Get(transport.HeaderServerTiming), into)
	return nil
}

// maxErrorBody bounds how much of an error response is read, in bytes.
const maxErrorBody = 1 << 20

// httpError classifies a response with another status than 200.
func httpError(response *http.Response) error {
	text, err := io.ReadAll(io.LimitReader(response.Body, maxErrorBody))
	if err != nil {
		return transportError(err)
	}
	var body struct {
		Error struct{ Reason, Message string }
	}
	if json.Unmarshal(text, &body) != nil || body.Error.Reason == "" {
		return requestError("HTTP_"+strconv.Itoa(response.StatusCode), errors.New(response.Status+": "+strings.TrimSpace(string(text))))
	}
	return requestError(body.Error.Reason, errors.New(body.Error.Reason+": "+body.Error.Message))
}
