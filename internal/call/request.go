package call

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/passthrough"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// CheckRequest checks all of a request to a pipeline that needs no other part of the mesh.
func (s *Service) CheckRequest(r *request.Request, p *pipeline.Pipeline) *fault.Fault {
	_, f := s.check("", r, p, time.Now())
	return f
}

// check checks all of a request that needs no other part of the mesh, and returns
// its envelope, which has no execution yet.
func (s *Service) check(id pipeline.RequestID, r *request.Request, p *pipeline.Pipeline, begin time.Time) (*envelope.Envelope, *fault.Fault) {
	if f := s.checkInputs(r.Inputs, r.Passthrough); f != nil {
		return nil, f
	}
	if f := s.checkOptions(r); f != nil {
		return nil, f
	}
	options := pipeline.Options{Parameters: r.Parameters, Steps: r.Steps}
	route, err := p.Route(options)
	if err != nil {
		return nil, fault.Newf(fault.InvalidRequest, "%w", err)
	}
	if len(r.Parameters)+len(r.Steps) > 0 && s.settings.Specs != nil {
		if f := pipelines.CheckParameters(p, options, s.settings.Specs()); f != nil {
			return nil, f
		}
	}
	if r.Timeout < 0 {
		return nil, fault.InField(fault.InvalidRequest, "timeout", "%s is negative", r.Timeout)
	}
	limit := s.limitOf(p)
	durability, f := durabilityOf(r, p)
	if f != nil {
		return nil, f
	}
	return &envelope.Envelope{
		Mesh:           s.settings.Mesh,
		RequestID:      id,
		Gateway:        s.settings.Gateway,
		Pipeline:       p.Name,
		Route:          route,
		Deadline:       begin.Add(min(cmp.Or(r.Timeout, limit), limit)),
		AdmittedAt:     begin,
		Durability:     durability,
		Priority:       r.Priority,
		IdempotencyKey: r.IdempotencyKey,
		StoreResult:    r.StoreResult,
		Metadata:       r.Metadata,
		Parts:          r.Inputs,
	}, nil
}

// limitOf is the longest that a request of the pipeline may take.
func (s *Service) limitOf(p *pipeline.Pipeline) time.Duration {
	return min(cmp.Or(p.Timeout, s.settings.Timeout), s.settings.MaxTimeout)
}

// TimeoutOf returns how long a request may take; MaxTimeout if its pipeline is unknown.
func (s *Service) TimeoutOf(r *request.Request) time.Duration {
	limit := s.settings.MaxTimeout
	if p, f := s.Resolve(r.Pipeline, r.ByModel); f == nil {
		limit = s.limitOf(&p)
	}
	return min(cmp.Or(max(0, r.Timeout), limit), limit)
}

// MaxPayload bounds the inputs of a request, in bytes; 0 means what the broker takes.
func (s *Service) MaxPayload() int { return s.settings.MaxPayload }

// checkInputs rejects what hosts cannot read: they drop such an item without a
// reply.
func (s *Service) checkInputs(inputs []payload.Part, isPassthrough bool) *fault.Fault {
	if len(inputs) == 0 {
		return fault.InField(fault.InvalidRequest, "inputs", "at least one is required")
	}
	if size, limit := payload.Size(inputs), s.settings.MaxPayload; limit > 0 && size > limit {
		return fault.Newf(fault.PayloadTooLarge, "the inputs are %d bytes, gateway.max_payload is %d", size, limit)
	}
	for i, part := range inputs {
		if _, ok := part.Parameters[passthrough.Method]; ok && !isPassthrough {
			return fault.InField(fault.InvalidRequest, payload.Path("inputs", i, part.Name), "parameter %s is the gateway's own", passthrough.Method)
		}
	}
	if err := payload.Validate("inputs", inputs); err != nil {
		return fault.From(err)
	}
	for i, part := range inputs {
		if part.Tensor != nil || !payload.IsJSON(part.Blob.ContentType) {
			continue
		}
		if at, number := payload.LargeNumber(part.Blob.Data); number != nil {
			return fault.InField(fault.InvalidInput, payload.Path("inputs", i, part.Name), "the number %.40s at byte %d is beyond FP64", number, at)
		}
	}
	return nil
}

func (s *Service) checkOptions(r *request.Request) *fault.Fault {
	if len(r.IdempotencyKey) > request.MaxIdempotencyKey {
		return fault.Newf(fault.InvalidRequest, "idempotency_key: %d bytes, at most %d are allowed", len(r.IdempotencyKey), request.MaxIdempotencyKey)
	}
	if len(r.Outputs) > payload.MaxParts {
		return fault.Newf(fault.InvalidRequest, "outputs: %d names, at most %d are allowed", len(r.Outputs), payload.MaxParts)
	}
	for i, name := range r.Outputs { // each name is a copy of its output in the response
		if slices.Contains(r.Outputs[:i], name) {
			return fault.InField(fault.InvalidRequest, "outputs", "%.*q is named twice", fault.MaxQuoted, name)
		}
	}
	for name, step := range r.Steps {
		if err := step.Model.Validate(); err != nil {
			field := fmt.Sprintf("steps.%.*s.model", fault.MaxQuoted, name)
			return fault.InField(fault.InvalidRequest, field, "%w", err)
		}
	}
	for key := range r.Metadata {
		if !slices.Contains(s.settings.Metadata, key) {
			return fault.InField(fault.InvalidRequest, fmt.Sprintf("metadata.%.*s", fault.MaxQuoted, key), "is not in gateway.metadata")
		}
	}
	return nil
}

// durabilityOf is the request's, else the pipeline's, else memory.
func durabilityOf(r *request.Request, p *pipeline.Pipeline) (pipeline.Durability, *fault.Fault) {
	d := cmp.Or(r.Durability, p.Durability, pipeline.Memory)
	if d != pipeline.Memory && d != pipeline.File {
		return "", fault.Newf(fault.NotSupported, "durability %.*q is not served by this version; use memory or file", fault.MaxQuoted, d)
	}
	return d, nil
}
