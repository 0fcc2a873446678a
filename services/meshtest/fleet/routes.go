package fleet

import (
	"context"
	"net/http"

	"connectrpc.com/connect"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Apply applies a pipeline through a gateway.
func (m *Member) Apply(p pipeline.Pipeline) error {
	ctx, cancel := context.WithTimeout(m.fleet.t.Context(), viewTime)
	defer cancel()
	_, err := m.routes().ApplyPipeline(ctx, connect.NewRequest(&adminv1.ApplyPipelineRequest{Pipeline: p.ToProto()}))
	return err
}

// Delete deletes a pipeline through a gateway.
func (m *Member) Delete(name pipeline.Name) error {
	ctx, cancel := context.WithTimeout(m.fleet.t.Context(), viewTime)
	defer cancel()
	_, err := m.routes().DeletePipeline(ctx, connect.NewRequest(&adminv1.DeletePipelineRequest{Name: string(name)}))
	return err
}

// Pipelines returns the names of the pipelines that a gateway serves, sorted, and fails
// the test where it does not say.
func (m *Member) Pipelines() []pipeline.Name {
	t := m.fleet.t
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), viewTime)
	defer cancel()
	answer, err := m.routes().ListPipelines(ctx, connect.NewRequest(&adminv1.ListPipelinesRequest{}))
	if err != nil {
		t.Fatalf("%s: %v", m.name, err)
	}
	var out []pipeline.Name
	for _, p := range answer.Msg.GetPipelines() {
		out = append(out, pipeline.Name(p.GetPipeline().GetName()))
	}
	return out
}

func (m *Member) routes() adminv1connect.PipelineServiceClient {
	m.mu.Lock()
	defer m.mu.Unlock()
	return adminv1connect.NewPipelineServiceClient(&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, "http://"+m.hello.Admin)
}
