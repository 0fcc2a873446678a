package call

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// plan checks everything that can be told of a request and its pipeline alone
// and returns its envelope, which still lacks an execution.
func (s *Service) plan(id pipeline.RequestID, r *Request, p pipeline.Pipeline, begin time.Time) (*envelope.Envelope, *fault.Fault) {
	if f := s.checkInputs(r.Inputs); f != nil {
		return nil, f
	}
	if f := s.checkOptions(r); f != nil {
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

// MaxIdempotencyKey bounds an idempotency key, in bytes.
const MaxIdempotencyKey = 256

// shown is how much of a text that a caller made up is repeated to it, in runes.
const shown = 80

// checkInputs refuses what hosts would: an item that they cannot read is
// dropped without an answer.
func (s *Service) checkInputs(inputs []payload.Part) *fault.Fault {
	if len(inputs) == 0 {
		return fault.New(fault.InvalidRequest, "inputs: there are none; send at least one").WithViolation("inputs", "empty")
	}
	if size, limit := payload.Size(inputs), s.settings.MaxPayload; limit > 0 && size > limit {
		return fault.Newf(fault.PayloadTooLarge, "the inputs are %d bytes, gateway.max_payload is %d", size, limit)
	}
	if err := payload.Validate("inputs", inputs); err != nil {
		return fault.From(err)
	}
	return nil
}

func (s *Service) checkOptions(r *Request) *fault.Fault {
	if len(r.IdempotencyKey) > MaxIdempotencyKey {
		return fault.Newf(fault.InvalidRequest, "idempotency_key: %d bytes, at most %d are taken", len(r.IdempotencyKey), MaxIdempotencyKey)
	}
	if f := checkOutputs(r.Outputs); f != nil {
		return f
	}
	if f := checkModels(r.Steps); f != nil {
		return f
	}
	return s.checkMetadata(r.Metadata)
}

// checkOutputs bounds what an answer can be asked to hold: each name is a copy
// of its output.
func checkOutputs(names []string) *fault.Fault {
	if len(names) > payload.MaxParts {
		return fault.Newf(fault.InvalidRequest, "outputs: %d names, at most %d are taken", len(names), payload.MaxParts)
	}
	for i, name := range names {
		if slices.Contains(names[:i], name) {
			return fault.Newf(fault.InvalidRequest, "outputs: %.*q is there twice", shown, name).WithViolation("outputs", "%.*q is there twice", shown, name)
		}
	}
	return nil
}

func checkModels(steps map[string]StepOptions) *fault.Fault {
	for name, step := range steps {
		if err := step.Model.Validate(); err != nil {
			field := fmt.Sprintf("steps.%.*s.model", shown, name)
			return fault.Newf(fault.InvalidRequest, "%s: %w", field, err).WithViolation(field, "%s", err)
		}
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

// durabilityOf is the request's, or else the pipeline's, or else memory.
func durabilityOf(r *Request, p pipeline.Pipeline) (pipeline.Durability, *fault.Fault) {
	d := r.Durability
	if d == pipeline.DurabilityUnset {
		d = p.Durability
	}
	switch d {
	case pipeline.DurabilityUnset:
		return pipeline.Memory, nil
	case pipeline.Memory, pipeline.File:
		return d, nil
	}
	return "", fault.Newf(fault.NotSupported, "durability %.*q is not served by this version; use memory or file", shown, d)
}

// waitsForRoom is the request's wish, or else the pipeline's.
func waitsForRoom(r *Request, p pipeline.Pipeline) bool {
	if r.WaitForCapacity != nil {
		return *r.WaitForCapacity
	}
	return p.WaitForCapacity
}

func (s *Service) checkMetadata(metadata map[string]string) *fault.Fault {
	for key := range metadata {
		if !slices.Contains(s.settings.Metadata, key) {
			return fault.Newf(fault.InvalidRequest, "metadata: key %.*q is not one that gateway.metadata allows", shown, key).
				WithViolation(fmt.Sprintf("metadata.%.*s", shown, key), "not allowed")
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
	s.settings.Logger.Log(context.Background(), level, "request failed", "request_id", id, "pipeline", fmt.Sprintf("%.*s", shown, r.Pipeline),
		"reason", f.Reason, "error", f, "cause", f.Unwrap(), "traceparent", r.Trace["traceparent"])
}
