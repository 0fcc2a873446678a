package gateway

import (
	"cmp"
	"context"
	"maps"
	"sync"

	"google.golang.org/protobuf/proto"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/openapi"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/process"
)

// reference is the OpenAPI document of the public port. The first request for it
// builds it, and so does the first one after pipelines, stages or queues have changed. One
// caller builds it, and the others wait.
type reference struct {
	gateway *Gateway
	models  *models

	mu       sync.Mutex
	document *openapi.Document
	// changed, specs and jobs are the document's sources.
	changed <-chan struct{}
	specs   map[string]*stagev1.Spec
	jobs    bool
}

var _ openapi.Source = (*reference)(nil)

// Document implements openapi.Source.
func (r *reference) Document(context.Context) (*openapi.Document, error) {
	if err := r.gateway.pipelinesKnown(); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	changed, specs, jobs := r.gateway.pipelines.Changed(), r.models.stageSpecs(), r.gateway.jobs.ServesJobs()
	if r.document != nil && changed == r.changed && jobs == r.jobs && maps.EqualFunc(specs, r.specs, equalSpecs) {
		return r.document, nil
	}
	text, err := openapi.Build(r.gateway.description(specs))
	if err != nil {
		return nil, err
	}
	r.document, r.changed, r.specs, r.jobs = openapi.NewDocument(text), changed, specs, jobs
	return r.document, nil
}

func equalSpecs(a, b *stagev1.Spec) bool { return a == b || proto.Equal(a, b) }

// pipelinesKnown returns nil once the gateway knows its pipelines.
func (g *Gateway) pipelinesKnown() error {
	if why := g.pipelines.Ready(); why != nil {
		return discovery.NotLoaded("pipelines", why)
	}
	return nil
}

// description returns the sources of the public port's document.
func (g *Gateway) description(specs map[string]*stagev1.Spec) openapi.Settings {
	out := openapi.Settings{
		Mesh: string(g.settings.Call.Mesh), Version: process.Version(), Tokens: g.settings.Access.TokenFile != "", NoStages: !g.settings.hasImplicit(),
		Port: g.portSettings(),
	}
	out.Jobs = g.jobs.ServesJobs()
	out.Batches = out.Jobs && g.jobs.ServesBatches()
	stages := stagesOf(specs)
	out.OpenAI = len(g.settings.OpenAI.Names()) > 0
	for _, e := range g.pipelines.List() {
		p := e.Pipeline
		out.Pipelines = append(out.Pipelines, openapi.Pipeline{
			Pipeline: p, Timeout: cmp.Or(p.Timeout, g.settings.Timeout, call.DefaultTimeout),
			Specs: specs, Inputs: pipelines.Inputs(p, stages),
		})
		if p.HasBlocks() {
			out.Pipelines[len(out.Pipelines)-1].Outputs = pipelines.Outputs(p, stages)
		}
	}
	return out
}
