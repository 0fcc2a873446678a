package oip

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"slices"
	"strconv"
	"strings"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/passthrough"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

const (
	// ServiceName is the protocol's service.
	ServiceName = "inference.GRPCInferenceService"

	// onlyVersion is the version of every model.
	onlyVersion = "1"
	serverName  = "stagemesh"
	platform    = "stagemesh_pipeline"
	// maxInFlight is how many requests of one stream are in flight at a time.
	maxInFlight = 64
)

// Models are the pipelines, aliases and registered models. Errors have a *fault.Fault in their chain.
type Models interface {
	// Ready returns nil when the gateway, named "", or a model can be used.
	Ready(ctx context.Context, name string) error
	// Model returns the model's known inputs and outputs, or UNKNOWN_PIPELINE.
	Model(name string) (Model, error)
	// Index returns the models that are registered, sorted, if onlyReady is true those that are
	// loaded.
	Index(onlyReady bool) (iter.Seq[Indexed], error)
	// Load loads a model, and returns when it is loaded or why it cannot be.
	Load(ctx context.Context, name string) error
	// Unload has all hosts unload a model.
	Unload(ctx context.Context, name string) error
	// Statistics returns figures of a model's requests, under the name given; for "" of all models with
	// requests.
	Statistics(ctx context.Context, name string) ([]call.Statistics, error)
	// Version is the server's.
	Version() string
}

// Model has a pipeline's inputs and outputs; unknown ones are empty.
type Model struct {
	// Inputs have the names that callers give them.
	Inputs, Outputs []*stagev1.PartSpec
	// Keep are the names of inputs that callers may add for later steps, Kept the known ones among
	// them. IsOpen is true where they may add any: a block comes first, whose steps may take them.
	Keep   []string
	Kept   []*stagev1.PartSpec
	IsOpen bool
	// MaxRows is how many rows a request may have; 0 where it has no axis for them. Streams is true
	// if it is answered in chunks.
	MaxRows uint32
	Streams bool
}

// input returns the input of that name: nil where the inputs are not known, and for one that a
// later step takes. Any other name is INVALID_INPUT.
func (m Model) input(i int, name string) (*stagev1.PartSpec, error) {
	if spec := specOf(name, m.Inputs, m.Kept); spec != nil {
		return spec, nil
	}
	if len(m.Inputs) == 0 || m.IsOpen || slices.Contains(m.Keep, name) {
		return nil, nil
	}
	names := make([]string, len(m.Inputs))
	for i, spec := range m.Inputs {
		names[i] = spec.GetName()
	}
	return nil, fault.InField(fault.InvalidInput, payload.Path("inputs", i, name), "the model has no input of this name; it takes %s", strings.Join(append(names, m.Keep...), ", "))
}

// specOf returns the spec of that name, nil if there is none.
func specOf(name string, of ...[]*stagev1.PartSpec) *stagev1.PartSpec {
	for _, specs := range of {
		for _, spec := range specs {
			if spec.GetName() == name {
				return spec
			}
		}
	}
	return nil
}

// Indexed is a model in the index of the repository.
type Indexed struct{ Name, State, Reason string }

// The states of a model in the index. One whose replicas unload is Unavailable already.
const (
	Ready       = "READY"
	Loading     = "LOADING"
	Unavailable = "UNAVAILABLE"
)

// service implements GRPCInferenceService.
type service struct {
	caller call.Caller
	models Models
	// maxPayload bounds the memory of a request's decoded inputs, in bytes.
	maxPayload int
}

// New returns the RPC service.
func New(caller call.Caller, models Models, s transport.Settings) *transport.Service {
	descriptor := oipv2.File_oip_v2_inference_proto.Services().ByName("GRPCInferenceService")
	out, svc := transport.NewService(descriptor, s), &service{caller: caller, models: models, maxPayload: s.MaxPayload}
	transport.Unary(out, "ServerLive", svc.serverLive)
	transport.Unary(out, "ServerReady", svc.serverReady)
	transport.Unary(out, "ModelReady", svc.modelReady)
	transport.Unary(out, "ServerMetadata", svc.serverMetadata)
	transport.Unary(out, "ModelMetadata", svc.modelMetadata)
	transport.Unary(out, "ModelConfig", svc.modelConfig)
	transport.Unary(out, "ModelStatistics", svc.modelStatistics)
	transport.Unary(out, "ModelInfer", svc.modelInfer)
	transport.Unary(out, "RepositoryIndex", svc.repositoryIndex)
	transport.Unary(out, "RepositoryModelLoad", svc.repositoryModelLoad)
	transport.Unary(out, "RepositoryModelUnload", svc.repositoryModelUnload)
	transport.BidiStream(out, "ModelStreamInfer", transport.InFlight[*oipv2.ModelInferRequest]{Limit: maxInFlight, Sequence: sequenceOf}, svc.modelStreamInfer)
	return out
}

func (s *service) serverLive(context.Context, *transport.Call, *oipv2.ServerLiveRequest) (*oipv2.ServerLiveResponse, error) {
	return &oipv2.ServerLiveResponse{Live: true}, nil
}

func (s *service) serverReady(ctx context.Context, _ *transport.Call, _ *oipv2.ServerReadyRequest) (*oipv2.ServerReadyResponse, error) {
	return &oipv2.ServerReadyResponse{Ready: s.models.Ready(ctx, "") == nil}, nil
}

// modelReady reports whether a model can be used. An unknown model is an error: clients
// distinguish it from one that is not ready.
func (s *service) modelReady(ctx context.Context, _ *transport.Call, in *oipv2.ModelReadyRequest) (*oipv2.ModelReadyResponse, error) {
	if err := checkVersion(in.GetName(), in.GetVersion()); err != nil {
		return nil, err
	}
	err := s.models.Ready(ctx, in.GetName())
	if isUnknown(err) {
		return nil, err
	}
	return &oipv2.ModelReadyResponse{Ready: err == nil}, nil
}

func (s *service) serverMetadata(context.Context, *transport.Call, *oipv2.ServerMetadataRequest) (*oipv2.ServerMetadataResponse, error) {
	return &oipv2.ServerMetadataResponse{Name: serverName, Version: s.models.Version(), Extensions: extensions()}, nil
}

func (s *service) modelMetadata(_ context.Context, c *transport.Call, in *oipv2.ModelMetadataRequest) (*oipv2.ModelMetadataResponse, error) {
	name, err := target(c, &in.Name)
	if err != nil {
		return nil, err
	}
	model, err := s.model(name, in.GetVersion())
	if err != nil {
		return nil, err
	}
	return &oipv2.ModelMetadataResponse{
		Name: in.GetName(), Versions: []string{onlyVersion}, Platform: platform,
		Inputs: tensorMetadata(model.Inputs), Outputs: tensorMetadata(model.Outputs),
	}, nil
}

func (s *service) model(name, version string) (Model, error) {
	if err := checkVersion(name, version); err != nil {
		return Model{}, err
	}
	return s.models.Model(name)
}

// checkVersion rejects versions that no model has.
func checkVersion(name, version string) error {
	if version == "" || version == onlyVersion {
		return nil
	}
	return fault.Newf(fault.NotFound, "model %.*q has no version %.*q; its only one is %s", fault.MaxQuoted, name, fault.MaxQuoted, version, onlyVersion)
}

// isUnknown reports whether the error is that there is no such model.
func isUnknown(err error) bool {
	f, ok := errors.AsType[*fault.Fault](err)
	return ok && slices.Contains([]fault.Reason{fault.UnknownPipeline, fault.UnknownModel, fault.NotFound}, f.Reason)
}

type metadata = oipv2.ModelMetadataResponse_TensorMetadata

func tensorMetadata(parts []*stagev1.PartSpec) []*metadata {
	out := make([]*metadata, len(parts))
	for i, part := range parts {
		// A blob is one element of bytes.
		out[i] = &metadata{Name: part.GetName(), Datatype: string(tensor.Bytes), Shape: []int64{1}}
		if t := part.GetTensor(); t != nil {
			out[i].Datatype, out[i].Shape = t.GetDatatype(), t.GetShape()
		}
	}
	return out
}

func (s *service) modelInfer(ctx context.Context, c *transport.Call, in *oipv2.ModelInferRequest) (*oipv2.ModelInferResponse, error) {
	memory := budget.Of(ctx, s.maxPayload)
	defer memory.Close()
	r, err := s.request(ctx, c, in, memory)
	if err != nil {
		return nil, err
	}
	out, err := s.caller.Infer(ctx, r)
	if err != nil {
		return nil, err
	}
	c.SetHeader(transport.HeaderRequestID, out.RequestID)
	transport.SetNotes(out.Metadata, c.SetHeader)
	c.SetTrailer(transport.HeaderServerTiming, transport.ServerTiming(out.Timeline.Total, out.Timeline.Steps, out.Timeline.Branches))
	return response(in, out.Outputs), nil
}

// request converts a request for a known model.
func (s *service) request(ctx context.Context, c *transport.Call, in *oipv2.ModelInferRequest, memory *budget.Account) (*request.Request, error) {
	name, err := target(c, &in.ModelName)
	if err != nil {
		return nil, err
	}
	model, err := s.model(name, in.GetModelVersion())
	if err != nil {
		return nil, err
	}
	out, err := toRequest(ctx, in, model, memory)
	if err != nil {
		return nil, err
	}
	out.Pipeline, out.Trace, out.Origin = name, c.Trace, c.Origin
	return out, nil
}

// target returns the name that a message means: its own, or the model or alias in a header,
// as ModelMesh has it. A message without a name gets that one, for its answer.
func target(c *transport.Call, name *string) (string, error) {
	models, aliases := c.Header(passthrough.ModelHeader), c.Header(passthrough.AliasHeader)
	named := append(models[:len(models):len(models)], aliases...)
	switch {
	case len(named) == 0:
		return *name, nil
	case len(named) > 1:
		return "", fault.Newf(fault.InvalidRequest, "%d models are named by %s and %s; name one", len(named), passthrough.ModelHeader, passthrough.AliasHeader)
	}
	*name = cmp.Or(*name, named[0])
	if len(aliases) > 0 {
		return request.AliasPrefix + named[0], nil
	}
	return request.ModelPrefix + named[0], nil
}

const (
	// emptyFinalParameter asks for a last message after chunks, without outputs.
	emptyFinalParameter = "triton_enable_empty_final_response"
	// finalParameter is true in the last message of a request.
	finalParameter = "triton_final_response"
	// sequenceParameter names the sequence of a request, a whole number or text. 0 and "" are none.
	sequenceParameter = "sequence_id"
)

// sequence is a sequence of requests for one model.
type sequence struct{ model, id string }

// sequenceOf returns the sequence of a request, or nil.
func sequenceOf(in *oipv2.ModelInferRequest) any {
	model, p := in.GetModelName(), in.GetParameters()[sequenceParameter]
	switch {
	case p.GetStringParam() != "":
		return sequence{model, p.GetStringParam()}
	case p.GetInt64Param() != 0:
		return sequence{model, strconv.FormatInt(p.GetInt64Param(), 10)}
	case p.GetUint64Param() != 0:
		return sequence{model, strconv.FormatUint(p.GetUint64Param(), 10)}
	}
	return nil
}

// modelStreamInfer answers one request of a stream. A failed request is a response. An
// error means that the response cannot be sent.
func (s *service) modelStreamInfer(ctx context.Context, c *transport.Call, in *oipv2.ModelInferRequest, send func(*oipv2.ModelStreamInferResponse) error) error {
	out := &stream{request: in, send: send}
	memory := budget.Of(ctx, s.maxPayload)
	defer memory.Close()
	r, err := s.request(ctx, c, in, memory)
	if err != nil {
		return out.sendFailure(err)
	}
	final, err := s.caller.Stream(ctx, r, out.sendChunk)
	switch {
	case out.err != nil:
		return out.err
	case err != nil:
		return out.sendFailure(cancelCause(ctx, err))
	}
	return out.sendFinal(final)
}

// cancelCause returns the cause of the stream's failure if that cancelled the request,
// and err otherwise.
func cancelCause(ctx context.Context, err error) error {
	cause, ok := errors.AsType[*fault.Fault](context.Cause(ctx))
	if ok && fault.From(err).Reason == fault.Cancelled {
		return cause
	}
	return err
}

// stream is the response to one request of a stream.
type stream struct {
	request *oipv2.ModelInferRequest
	send    func(*oipv2.ModelStreamInferResponse) error
	// hasChunks is true once a chunk was sent, and err is the error of a failed send.
	hasChunks bool
	err       error
}

func (s *stream) sendChunk(c request.Chunk) error {
	if c.Activating != nil {
		return nil // the protocol has no message for it
	}
	s.hasChunks = true
	s.err = s.sendResponse(response(s.request, c.Outputs), false)
	return s.err
}

// sendFinal sends the response where it had no chunks, since clients assemble chunks
// themselves. After chunks, a caller that asked for it gets a last message without outputs.
func (s *stream) sendFinal(r *request.Response) error {
	if !s.hasChunks {
		return s.sendResponse(response(s.request, r.Outputs), true)
	}
	if s.request.GetParameters()[emptyFinalParameter].GetBoolParam() {
		return s.sendResponse(response(s.request, nil), true)
	}
	return nil
}

func (s *stream) sendResponse(r *oipv2.ModelInferResponse, final bool) error {
	r.Parameters = finalParameters(final)
	return s.send(&oipv2.ModelStreamInferResponse{InferResponse: r})
}

// sendFailure sends the error of a failed request, with the request's own ID.
func (s *stream) sendFailure(err error) error {
	return s.send(&oipv2.ModelStreamInferResponse{
		ErrorMessage:  strings.ToValidUTF8(errorText(err), "\uFFFD"),
		InferResponse: &oipv2.ModelInferResponse{Id: s.request.GetId(), Parameters: finalParameters(true)},
	})
}

func finalParameters(final bool) map[string]*oipv2.InferParameter {
	return map[string]*oipv2.InferParameter{finalParameter: {ParameterChoice: &oipv2.InferParameter_BoolParam{BoolParam: final}}}
}

// errorText formats a fault for a protocol that has text only.
func errorText(err error) string {
	f := fault.From(err)
	return string(f.Reason) + ": " + f.Message
}
