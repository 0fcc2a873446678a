package gateway

import (
	"cmp"
	"context"
	"maps"
	"time"

	"google.golang.org/protobuf/proto"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/openapi"
	"github.com/stagemesh/stagemesh/gateway/pipelines"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/process"
)

// reference is the document that describes the public port. It is made when it is
// asked for, and again when pipelines or stages have changed: one caller makes it, and
// the others wait for it.
type reference struct {
	gateway *Gateway
	models  *models
	// busy has the caller who looks or makes; what is below is that one's.
	busy chan struct{}

	document *openapi.Document
	// What the document was made of: changed is closed when the pipelines are no longer
	// those, and looked is when the specs were last found to be these.
	changed <-chan struct{}
	specs   map[string]*stagev1.Spec
	looked  time.Time
}

var _ openapi.Source = (*reference)(nil)

func newReference(g *Gateway, known *models) *reference {
	return &reference{gateway: g, models: known, busy: make(chan struct{}, 1)}
}

// Document implements openapi.Source.
func (r *reference) Document(ctx context.Context) (*openapi.Document, error) {
	if err := r.gateway.pipelinesKnown(); err != nil {
		return nil, err
	}
	select {
	case r.busy <- struct{}{}:
		defer func() { <-r.busy }()
	case <-ctx.Done():
		return nil, fault.New(fault.Cancelled, "the caller went away").Caused(ctx.Err())
	}
	if r.current(time.Now()) {
		return r.document, nil
	}
	changed, specs := r.gateway.pipelines.Changed(), r.models.known()
	text, err := openapi.Build(r.gateway.described(specs))
	if err != nil {
		return nil, err
	}
	r.document, r.changed, r.specs, r.looked = openapi.NewDocument(text), changed, specs, time.Now()
	return r.document, nil
}

// current reports whether the document is still what it would be. Specs are looked at
// as often as they are asked for.
func (r *reference) current(now time.Time) bool {
	if r.document == nil {
		return false
	}
	select {
	case <-r.changed:
		return false
	default:
	}
	if now.Sub(r.looked) < specsAge {
		return true
	}
	if !maps.EqualFunc(r.specs, r.models.known(), func(a, b *stagev1.Spec) bool { return proto.Equal(a, b) }) {
		return false
	}
	r.looked = now
	return true
}

// pipelinesKnown returns nil where it is known which pipelines there are.
func (g *Gateway) pipelinesKnown() error {
	if why := g.pipelines.Ready(); why != nil {
		return pipelines.NotLoaded(why)
	}
	return nil
}

// described is what there is to say of the public port.
func (g *Gateway) described(specs map[string]*stagev1.Spec) openapi.Settings {
	out := openapi.Settings{
		Mesh: string(g.settings.Call.Mesh), Version: process.Version(), Tokens: g.settings.Access.TokenFile != "",
		MaxPayload: g.settings.MaxPayload, MaxBody: g.settings.MaxBody,
	}
	for _, e := range g.pipelines.List() {
		p := e.Pipeline
		out.Pipelines = append(out.Pipelines, openapi.Pipeline{
			Pipeline: p, Timeout: cmp.Or(p.Timeout, g.settings.Timeout, call.DefaultTimeout),
			First: specs[string(p.Steps[0].Stage)], Last: specs[string(p.Steps[len(p.Steps)-1].Stage)],
		})
	}
	return out
}
