package gateway

import (
	"cmp"
	"context"
	"maps"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/oip"
	"github.com/stagemesh/stagemesh/gateway/openapi"
	"github.com/stagemesh/stagemesh/gateway/pipelines"
	"github.com/stagemesh/stagemesh/mesh/process"
)

// reference is the OpenAPI document of the public port. The first request for it
// builds it, and so does the first one after pipelines or stages have changed. One
// caller builds it, and the others wait.
type reference struct {
	gateway *Gateway
	models  *models

	mu       sync.Mutex
	document *openapi.Document
	// changed and specs are the document's sources.
	changed <-chan struct{}
	specs   map[string]*stagev1.Spec
}

var _ openapi.Source = (*reference)(nil)

// Document implements openapi.Source.
func (r *reference) Document(context.Context) (*openapi.Document, error) {
	if err := r.gateway.pipelinesKnown(); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	changed, specs := r.gateway.pipelines.Changed(), r.models.stageSpecs()
	if r.document != nil && changed == r.changed && maps.EqualFunc(specs, r.specs, equalSpecs) {
		return r.document, nil
	}
	text, err := openapi.Build(r.gateway.description(specs))
	if err != nil {
		return nil, err
	}
	r.document, r.changed, r.specs = openapi.NewDocument(text), changed, specs
	return r.document, nil
}

func equalSpecs(a, b *stagev1.Spec) bool { return a == b || proto.Equal(a, b) }

// pipelinesKnown returns nil once the gateway knows its pipelines.
func (g *Gateway) pipelinesKnown() error {
	if why := g.pipelines.Ready(); why != nil {
		return pipelines.NotLoaded(why)
	}
	return nil
}

// description returns the sources of the public port's document.
func (g *Gateway) description(specs map[string]*stagev1.Spec) openapi.Settings {
	out := openapi.Settings{
		Mesh: string(g.settings.Call.Mesh), Version: process.Version(), Tokens: g.settings.Access.TokenFile != "", NoStages: !g.settings.servesStages(),
		MaxPayload: g.settings.MaxPayload, MaxBody: admission.MaxBody(g.settings.MaxPayload),
	}
	for _, e := range g.pipelines.List() {
		p := e.Pipeline
		out.Pipelines = append(out.Pipelines, openapi.Pipeline{
			Pipeline: p, Timeout: cmp.Or(p.Timeout, g.settings.Timeout, call.DefaultTimeout),
			Specs: specs,
		})
	}
	return out
}

// specsAge is how long the specs that hosts report are used.
const specsAge = time.Second

// models are the gateway's pipelines as models of the Open Inference Protocol.
type models struct {
	gateway *Gateway

	mu sync.Mutex
	// specs are the stages' inputs and outputs, as their hosts reported them by
	// readAt.
	specs  map[string]*stagev1.Spec
	readAt time.Time
}

var _ oip.Models = (*models)(nil)

// Version implements oip.Models.
func (m *models) Version() string { return process.Version() }

// Ready implements oip.Models.
func (m *models) Ready(ctx context.Context, name string) error { return m.gateway.health(ctx, name) }

// Model implements oip.Models.
func (m *models) Model(name string) (oip.Model, error) {
	p, f := m.gateway.pipelines.Resolve(name)
	if f != nil {
		return oip.Model{}, f
	}
	first, last := string(p.Steps[0].Stage), string(p.Steps[len(p.Steps)-1].Stage)
	specs := m.stageSpecs()
	return oip.Model{Inputs: specs[first].GetInputs(), Outputs: specs[last].GetOutputs()}, nil
}

// stageSpecs returns the inputs and outputs of stages, by stage name.
func (m *models) stageSpecs() map[string]*stagev1.Spec {
	if m.gateway.membership == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if now := time.Now(); now.Sub(m.readAt) >= specsAge {
		m.specs, m.readAt = map[string]*stagev1.Spec{}, now
		for _, s := range discovery.Stages(m.gateway.membership.Hosts()) {
			m.specs[s.Name] = s.Spec
		}
	}
	return m.specs
}
