package traces_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// gatedModels is a runner of models that answer with their input. Model "slow" loads when the
// gate is closed.
func gatedModels(gate <-chan struct{}) runner.Runner {
	return inproc.NewModels(inproc.Settings{}, inproc.Models{
		Load: func(_ context.Context, m model.Model) (any, runner.LoadedModel, error) {
			if m.ID == "slow" {
				<-gate
			}
			return nil, runner.LoadedModel{Size: m.Size}, nil
		},
	}, func(_ context.Context, _ any, b runner.Batch, sink runner.Sink) error {
		var errs []error
		for i, item := range b.Items {
			errs = append(errs, sink.SetOutcome(i, runner.Output(item.Inputs...)))
		}
		return errors.Join(errs...)
	})
}

func TestTheWaitForAModelIsSeen(t *testing.T) {
	t.Parallel()
	gate := make(chan struct{})
	b := start(t, func(s *stagemesh.Settings, _ *tracing.Config) {
		s.Registry = &meshfile.RegistryConfig{}
		for _, id := range []model.ID{"quick", "slow"} {
			s.Gateway.Models = append(s.Gateway.Models, model.Model{ID: id, Stage: "one", Size: model.Size{Host: 1 << 20}})
		}
	}, serves("one", gatedModels(gate), func(s *stagemesh.Stage) {
		s.Config = stagehost.Config{Models: &stagehost.ModelSettings{Capacity: 8 << 20, DefaultSize: 64 << 10}, Queue: stagehost.QueueSettings{AckWait: time.Second}}
	}))
	of := func(id string) *request.Request {
		r := tracedRequest("x")
		r.Pipeline = "model:" + id
		return r
	}
	testbed.Eventually(t, "the models are registered", func() bool {
		_, err := b.Infer(t.Context(), of("quick"))
		return err == nil
	})
	cold, answer := of("slow"), make(chan *request.Response, 1)
	go func() {
		response, err := b.Infer(context.Background(), cold)
		if err != nil {
			t.Error(err)
		}
		answer <- response
	}()
	testbed.Eventually(t, "it is seen to wait", func() bool {
		all, err := b.admin().ListRequests(t.Context(), connect.NewRequest(&adminv1.ListRequestsRequest{}))
		if err != nil || len(all.Msg.GetRequests()) != 1 {
			return false
		}
		report, err := b.admin().ExplainRequest(t.Context(), connect.NewRequest(&adminv1.ExplainRequestRequest{RequestId: all.Msg.GetRequests()[0].GetRequestId()}))
		return err == nil && strings.Contains(strings.Join(report.Msg.GetReport().GetSummary(), " "), "waits for its model")
	})
	close(gate)
	response := testbed.Receive(t, "answer", answer)
	if step := response.Timeline.Steps[0]; step.ModelWait <= 0 || step.ModelWait > step.BatchWait {
		t.Errorf("it waited %s for its model, %s in all", step.ModelWait, step.BatchWait)
	}
	b.tree(cold.Trace, `
infer (server, MESH-gateway)
  publish one (producer, MESH-gateway)
    queue one (internal, MESH-one)
    process one (consumer, MESH-one)
      load one (internal, MESH-one)
      wait one (internal, MESH-one)
      run one (internal, MESH-one)
      reply (client, MESH-one)
`)
	for _, want := range []string{
		`stagemesh_gateway_model_routes_total{to="placed"} `, `stagemesh_stage_model_load_seconds_count{stage="one"} 2`,
		`state="loaded"} 2`, `memory="host",stage="one"} 2.097152e+06`, `stagemesh_stage_model_memory_capacity_bytes{`, `stagemesh_stage_model_oldest_use_seconds{`,
		`stagemesh_stage_model_waiting_items{`, `stagemesh_stage_model_requests_total{result="miss",stage="one"} 2`,
		`stagemesh_stage_model_wait_seconds_count{stage="one"} 2`, `stagemesh_stage_model_size_bytes_count{memory="host",stage="one"} 2`,
	} {
		testbed.Eventually(t, want, func() bool { return strings.Contains(b.metrics(), want) })
	}
}
