package call

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// plan checks everything that can be told of a request alone and returns its
// envelope, which still lacks an execution.
func (s *Service) plan(id pipeline.RequestID, r *Request, begin time.Time) (*envelope.Envelope, *fault.Fault) {
	p, f := s.settings.Catalog.Resolve(r.Pipeline)
	if f != nil {
		return nil, f
	}
	if f := s.checkSizes(r); f != nil {
		return nil, f
	}
	route, err := p.Route(options(r))
	if err != nil {
		return nil, fault.Newf(fault.InvalidRequest, "%w", err)
	}
	timeout, f := s.timeout(r, p)
	if f != nil {
		return nil, f
	}
	durability, f := durabilityOf(r, p)
	if f != nil {
		return nil, f
	}
	if f := s.checkMetadata(r.Metadata); f != nil {
		return nil, f
	}
	env := &envelope.Envelope{
		Mesh:           s.settings.Mesh,
		Tenant:         r.Tenant,
		RequestID:      id,
		Gateway:        s.settings.Gateway,
		Pipeline:       p.Name,
		Route:          route,
		Deadline:       begin.Add(timeout),
		AdmittedAt:     begin,
		Durability:     durability,
		Priority:       r.Priority,
		IdempotencyKey: r.IdempotencyKey,
		Trace:          r.Trace,
		Metadata:       r.Metadata,
		Parts:          r.Inputs,
	}
	return env, nil
}

// maxKey bounds an idempotency key, in bytes.
const maxKey = 255

func (s *Service) checkSizes(r *Request) *fault.Fault {
	if len(r.Inputs) == 0 {
		return fault.New(fault.InvalidRequest, "inputs: there are none; send at least one").WithViolation("inputs", "empty")
	}
	if limit := s.settings.MaxPayload; limit > 0 && payload.Size(r.Inputs) > limit {
		return fault.Newf(fault.PayloadTooLarge, "the inputs are %d bytes, gateway.max_payload is %d", payload.Size(r.Inputs), limit)
	}
	if len(r.IdempotencyKey) > maxKey {
		return fault.Newf(fault.InvalidRequest, "idempotency_key: %d bytes, at most %d are taken", len(r.IdempotencyKey), maxKey)
	}
	return nil
}

// timeout is the pipeline's, or a shorter one if the request says so.
func (s *Service) timeout(r *Request, p pipeline.Pipeline) (time.Duration, *fault.Fault) {
	if r.Timeout < 0 {
		return 0, fault.Newf(fault.InvalidRequest, "timeout: %s is negative", r.Timeout).WithViolation("timeout", "negative")
	}
	limit := p.Timeout
	if limit == 0 {
		limit = s.settings.Timeout
	}
	limit = min(limit, s.settings.MaxTimeout)
	if r.Timeout == 0 {
		return limit, nil
	}
	return min(r.Timeout, limit), nil
}

func durabilityOf(r *Request, p pipeline.Pipeline) (pipeline.Durability, *fault.Fault) {
	d := r.Durability
	if d == pipeline.DurabilityUnset {
		d = p.Durability
	}
	switch d {
	case pipeline.DurabilityUnset, pipeline.Memory:
		return pipeline.Memory, nil
	}
	return "", fault.Newf(fault.NotSupported, "durability %s is not served by this version; use memory", d)
}

func (s *Service) checkMetadata(metadata map[string]string) *fault.Fault {
	for key := range metadata {
		if !slices.Contains(s.settings.Metadata, key) {
			return fault.Newf(fault.InvalidRequest, "metadata: key %q is not one that gateway.metadata allows", key).WithViolation("metadata."+key, "not allowed")
		}
	}
	return nil
}

func options(r *Request) pipeline.Options {
	o := pipeline.Options{Parameters: r.Parameters}
	if len(r.Steps) > 0 {
		o.Steps = make(map[pipeline.StepName]pipeline.StepOptions, len(r.Steps))
	}
	for name, step := range r.Steps {
		o.Steps[pipeline.StepName(name)] = pipeline.StepOptions{Model: step.Model, Parameters: step.Parameters}
	}
	return o
}

// log says at debug level how a request failed, and louder where the mesh is at
// fault.
func (s *Service) log(id pipeline.RequestID, r *Request, f *fault.Fault) {
	level := slog.LevelDebug
	if f.Reason == fault.Internal {
		level = slog.LevelError
	}
	s.settings.Logger.Log(context.Background(), level, "request failed", "request_id", id, "pipeline", r.Pipeline,
		"reason", f.Reason, "error", f, "cause", f.Unwrap(), "traceparent", r.Trace["traceparent"])
}
