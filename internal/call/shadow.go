package call

import (
	"bytes"
	"context"
	"encoding/binary"
	"math"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/route"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// maxShadows is how many shadow requests run at a time, and maxShadowBytes bounds their inputs and
// answers. More are dropped.
const (
	maxShadows     = 128
	maxShadowBytes = 64 << 20
)

// startShadow runs an answered request again, on the shadow's model, and counts how the answers
// compare. It has places and memory of its own, and a low priority.
func (s *Service) startShadow(x *call, of *route.Shadow, answer *request.Response) {
	if x.emit != nil && x.progress.seq > 1 {
		return // the answer went to the caller in chunks
	}
	again, steps := *x.request.Request, map[pipeline.StepName]pipeline.StepOptions{}
	for name, step := range again.Steps {
		steps[name] = pipeline.StepOptions{Parameters: step.Parameters}
	}
	stepModels := map[pipeline.StepName]payload.ModelRef{}
	for _, hop := range x.env.Route { // another request may get other models of an alias
		stepModels[hop.Step] = hop.Model
	}
	stepModels[of.Step] = payload.ModelRef{Model: string(of.Model)}
	again.Steps, again.Timeout = steps, x.env.Deadline.Sub(x.env.AdmittedAt)
	again.IdempotencyKey, again.Durability, again.Priority = "", pipeline.Memory, -1
	again.ID, again.StoreResult, again.LossyChunks = "", false, false // an attempt of a job has them
	tenant, size, result := x.env.Tenant, int64(payload.Size(again.Inputs)+2*payload.Size(answer.Outputs)), "dropped"
	if s.shadowBytes.Reserve(tenant, size) == nil {
		if s.shadows.start(func(ctx context.Context) {
			defer func() { s.metrics.shadow(of, result) }()
			defer s.shadowBytes.Release(tenant, size)
			got, f := s.infer(budget.WithTenant(ctx, tenant), incoming{Request: &again, shadowModels: stepModels}, nil, time.Now(), untraced, envelope.Trace{})
			switch {
			case ctx.Err() != nil, f != nil && fault.Classify(f.Reason).NotRun():
			case f != nil:
				result = "failed"
			case sameOutputs(answer.Outputs, got.Outputs):
				result = "equal"
			default:
				result = "different"
			}
		}) == nil {
			return
		}
		s.shadowBytes.Release(tenant, size)
	}
	s.metrics.shadow(of, result)
}

// replaceModels prepares the pipeline of a shadow request, which the limit of callers' requests does
// not count.
func (r incoming) replaceModels(p *pipeline.Pipeline) {
	p.Steps, p.MaxInFlight = slices.Clone(p.Steps), 0
	for i := range p.Steps {
		p.Steps[i].Model = r.shadowModels[p.Steps[i].Name]
	}
}

func (m *metrics) shadow(of *route.Shadow, result string) {
	m.shadows.Add(context.Background(), 1, metric.WithAttributeSet(attribute.NewSet(attribute.String("stage", string(of.Stage)), attribute.String("result", result))))
}

// sameOutputs reports whether answers have the same outputs, in any order: names, types, shapes
// and bytes, but floating-point numbers need only be close.
func sameOutputs(want, got []payload.Part) bool {
	return len(want) == len(got) && !slices.ContainsFunc(want, func(a payload.Part) bool {
		b, ok := payload.Find(got, a.Name)
		switch {
		case !ok || (a.Tensor == nil) != (b.Tensor == nil):
			return true
		case a.Tensor == nil:
			return a.Blob.ContentType != b.Blob.ContentType || !bytes.Equal(a.Blob.Data, b.Blob.Data)
		}
		return a.Tensor.Datatype != b.Tensor.Datatype || !slices.Equal(a.Tensor.Shape, b.Tensor.Shape) || !isClose(a.Tensor.Datatype, a.Tensor.Raw, b.Tensor.Raw)
	})
}

// tolerances equal those in torch.testing.assert_close. A model gives other last bits in a batch of
// another size.
var tolerances = map[tensor.Datatype]struct {
	relative, absolute float64
	at                 func(raw []byte) float64
}{
	tensor.FP16: {1e-3, 1e-5, func(raw []byte) float64 {
		bits := uint32(binary.LittleEndian.Uint16(raw))
		wide := bits&0x8000<<16 | bits&0x7fff<<13
		if bits&0x7c00 == 0x7c00 { // infinite, or not a number
			return float64(math.Float32frombits(wide | 0x7f800000))
		}
		return float64(math.Float32frombits(wide)) * 0x1p112 // the difference of the exponents' biases
	}},
	tensor.BF16: {1.6e-2, 1e-5, func(raw []byte) float64 {
		return float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(raw)) << 16))
	}},
	tensor.FP32: {1.3e-6, 1e-5, func(raw []byte) float64 { return float64(math.Float32frombits(binary.LittleEndian.Uint32(raw))) }},
	tensor.FP64: {1e-7, 1e-7, func(raw []byte) float64 { return math.Float64frombits(binary.LittleEndian.Uint64(raw)) }},
}

// isClose compares the elements of two tensors of one shape.
func isClose(of tensor.Datatype, want, got []byte) bool {
	t, isFloat := tolerances[of]
	if bytes.Equal(want, got) || !isFloat {
		return bytes.Equal(want, got)
	}
	for i := 0; i < len(want); i += of.Size() {
		a, b := t.at(want[i:]), t.at(got[i:])
		if a != b && !(math.IsNaN(a) && math.IsNaN(b)) && !(math.Abs(a-b) <= t.absolute+t.relative*math.Abs(a) && !math.IsInf(a, 0)) {
			return false
		}
	}
	return true
}
