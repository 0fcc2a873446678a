package gateway

import (
	"context"
	"sync"
	"time"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/gateway/front/oip"
	"github.com/stagemesh/stagemesh/mesh/process"
)

// specsAge is for how long what hosts say of their stages is taken to be so.
const specsAge = time.Second

// models are the gateway's pipelines, as the Open Inference Protocol has them.
type models struct {
	gateway *Gateway

	mu sync.Mutex
	// specs are what stages take and give, as their hosts said at asked.
	specs map[string]*stagev1.Spec
	asked time.Time
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
	specs := m.known()
	return oip.Model{Inputs: specs[first].GetInputs(), Outputs: specs[last].GetOutputs()}, nil
}

// known returns what stages take and give, by their names.
func (m *models) known() map[string]*stagev1.Spec {
	if m.gateway.roster == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if now := time.Now(); now.Sub(m.asked) >= specsAge {
		m.specs, m.asked = map[string]*stagev1.Spec{}, now
		for _, s := range discovery.Stages(m.gateway.roster.Hosts()) {
			m.specs[s.Name] = s.Spec
		}
	}
	return m.specs
}
