package adminapi_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/adminapi"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// fakePipelines are pipelines in memory. All share the last revision.
type fakePipelines struct {
	mu       sync.Mutex
	problem  error
	revision uint64
	entries  []pipelines.Entry
	changed  chan struct{}
}

func (b *fakePipelines) Ready() error { return b.problem }

func (b *fakePipelines) List() []pipelines.Entry {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.entries)
}

func (b *fakePipelines) find(name pipeline.Name) int {
	return slices.IndexFunc(b.entries, func(e pipelines.Entry) bool { return e.Pipeline.Name == name })
}

func (b *fakePipelines) Get(name pipeline.Name) (pipelines.Entry, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := b.find(name); i >= 0 {
		return b.entries[i], nil
	}
	return pipelines.Entry{}, fault.Newf(fault.UnknownPipeline, "there is no %s", name)
}

func (b *fakePipelines) Plan(p pipeline.Pipeline) (*pipelines.Entry, adminv1.PipelineChange) {
	e, err := b.Get(p.Name)
	switch {
	case err != nil:
		return nil, adminv1.PipelineChange_PIPELINE_CHANGE_CREATE
	case proto.Equal(e.Pipeline.ToProto(), p.ToProto()):
		return &e, adminv1.PipelineChange_PIPELINE_CHANGE_NONE
	}
	return &e, adminv1.PipelineChange_PIPELINE_CHANGE_UPDATE
}

func (b *fakePipelines) Apply(_ context.Context, p pipeline.Pipeline, expect *uint64) (pipelines.Entry, adminv1.PipelineChange, error) {
	_, change := b.Plan(p)
	b.mu.Lock()
	defer b.mu.Unlock()
	if expect != nil && *expect != b.revision {
		return pipelines.Entry{}, change, fault.New(fault.RevisionMismatch, "it is another")
	}
	b.revision++
	e := pipelines.Entry{Pipeline: p, Revision: b.revision, AppliedAt: time.Now()}
	if i := b.find(p.Name); i < 0 {
		b.entries = append(b.entries, e)
	} else {
		b.entries[i] = e
	}
	b.turn()
	return e, change, nil
}

func (b *fakePipelines) Delete(_ context.Context, name pipeline.Name, _ *uint64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	i := b.find(name)
	if i < 0 {
		return fault.Newf(fault.UnknownPipeline, "there is no %s", name)
	}
	b.entries = slices.Delete(b.entries, i, i+1)
	b.turn()
	return nil
}

func (b *fakePipelines) turn() {
	if b.changed != nil {
		close(b.changed)
		b.changed = nil
	}
}

func (b *fakePipelines) Stale() (time.Time, error) { return time.Time{}, nil }

func (b *fakePipelines) Changed() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.changed == nil {
		b.changed = make(chan struct{})
	}
	return b.changed
}

// traffic is a broker that serves the stages that a test names.
type traffic struct {
	served []pipeline.StageName
	err    error
	// report is what it says of any request; nil for nothing.
	report *meshv1.RequestReport
}

func (traffic) MaxPayload() int { return 0 }

func (traffic) Tap(context.Context, payload.ModelRef, int, func(call.Tapped) error) error { return nil }

func (t traffic) Explain(context.Context, string) (*meshv1.RequestReport, error) {
	if t.report == nil {
		return nil, fault.New(fault.NotFound, "nobody knows it")
	}
	return t.report, nil
}

func (t traffic) Ended(_ context.Context, failed bool, stage pipeline.StageName, limit int) []*meshv1.RequestReport {
	all := []*meshv1.RequestReport{{RequestId: "3", Fault: &meshv1.Fault{Stage: "a"}}, {RequestId: "2"}, {RequestId: "1", Fault: &meshv1.Fault{Stage: "b"}}}
	all = slices.DeleteFunc(all, func(r *meshv1.RequestReport) bool {
		return failed && r.GetFault() == nil || stage != "" && r.GetFault().GetStage() != string(stage)
	})
	return all[:min(limit, len(all))]
}

func (t traffic) FanFactors(pipeline.Name) map[string]float64 { return nil }

func (t traffic) PipelineReady(_ context.Context, name string, _ bool) error {
	if name == "ready" {
		return nil
	}
	return fault.New(fault.NoCapacity, "stage b has no host")
}

func (t traffic) Stage(_ context.Context, name pipeline.StageName) (call.StageState, error) {
	if t.err != nil {
		return call.StageState{}, t.err
	}
	return call.StageState{Served: slices.Contains(t.served, name), Queues: []call.QueueState{{
		Durability: pipeline.File, Backlog: call.Backlog{Items: 6, Bytes: 60, Classes: map[pipeline.Class]uint64{pipeline.High: 1, pipeline.Normal: 2, pipeline.Low: 3}, MaxBytes: 100},
	}}}, nil
}

func (t traffic) Requests(_ context.Context, stage pipeline.StageName, limit int) ([]*meshv1.RequestReport, uint64) {
	all := []*meshv1.RequestReport{
		{
			RequestId: "1", Pipeline: "p", IdempotencyKey: "k", Stages: []string{"a", "b"}, Deadline: timestamppb.New(time.Unix(1010, 0)), Gateway: "g",
			Steps:   []*meshv1.ReportedStep{{}, {Timing: &inferencev1.StepTiming{Step: "two"}}},
			Holders: []*meshv1.RequestHolder{{Stage: "b", Host: "h", State: "queued"}},
		},
		{RequestId: "2", Stages: []string{string(stage)}},
	}
	return all[:min(limit, len(all))], uint64(len(all))
}

func planner(t *testing.T, s adminapi.Settings, p protocol) adminv1connect.PipelineServiceClient {
	t.Helper()
	s.DeadLetters = newBed(t)
	return adminv1connect.NewPipelineServiceClient(fronttest.Client(t, p.h2c), serve(t, s), p.options...)
}

func applyTo(t *testing.T, client adminv1connect.PipelineServiceClient, r *adminv1.ApplyPipelineRequest) (*adminv1.ApplyPipelineResponse, error) {
	t.Helper()
	response, err := client.ApplyPipeline(t.Context(), connect.NewRequest(r))
	if err != nil {
		return nil, err
	}
	return response.Msg, nil
}

func TestPipelineIsAppliedShownAndDeleted(t *testing.T) {
	t.Parallel()
	for _, p := range protocols() {
		client := planner(t, adminapi.Settings{Pipelines: &fakePipelines{}, Traffic: traffic{served: []pipeline.StageName{"a"}}}, p)
		wanted := testbed.Pipeline("ready", "a").ToProto()
		applied, err := applyTo(t, client, &adminv1.ApplyPipelineRequest{Pipeline: wanted, ExpectRevision: proto.Uint64(0)})
		if err != nil || applied.GetChange() != adminv1.PipelineChange_PIPELINE_CHANGE_CREATE || !applied.GetPipeline().GetReady() || applied.GetPipeline().GetRevision() != 1 {
			t.Fatalf("%s: apply returns %v, %v", p.name, applied, err)
		}
		got, err := client.GetPipeline(t.Context(), connect.NewRequest(&adminv1.GetPipelineRequest{Name: "ready"}))
		if err != nil || !proto.Equal(got.Msg.GetPipeline().GetPipeline(), wanted) || got.Msg.GetPipeline().GetAppliedAt() == nil {
			t.Errorf("%s: get returns %v, %v", p.name, got, err)
		}
		_, err = applyTo(t, client, &adminv1.ApplyPipelineRequest{Pipeline: wanted, ExpectRevision: proto.Uint64(0)})
		expect(t, p.name+": another revision", err, fault.RevisionMismatch)
		all, err := client.ListPipelines(t.Context(), connect.NewRequest(&adminv1.ListPipelinesRequest{}))
		if err != nil || len(all.Msg.GetPipelines()) != 1 {
			t.Errorf("%s: list returns %v, %v", p.name, all, err)
		}
		if _, err := client.DeletePipeline(t.Context(), connect.NewRequest(&adminv1.DeletePipelineRequest{Name: "ready"})); err != nil {
			t.Errorf("%s: %v", p.name, err)
		}
		_, err = client.DeletePipeline(t.Context(), connect.NewRequest(&adminv1.DeletePipelineRequest{Name: "ready"}))
		expect(t, p.name+": what was deleted", err, fault.UnknownPipeline)
		_, err = client.GetPipeline(t.Context(), connect.NewRequest(&adminv1.GetPipelineRequest{Name: "ready"}))
		expect(t, p.name+": what was deleted", err, fault.UnknownPipeline)
	}
}

func TestMismatchedPipelineNeedsForce(t *testing.T) {
	t.Parallel()
	shape := func(n int64) *stagev1.PartSpec {
		return &stagev1.PartSpec{Name: "x", Body: &stagev1.PartSpec_Tensor{Tensor: &stagev1.TensorSpec{Datatype: "FP32", Shape: []int64{n}}}}
	}
	spec := func(in, out int64) *stagev1.Spec {
		return &stagev1.Spec{Inputs: []*stagev1.PartSpec{shape(in)}, Outputs: []*stagev1.PartSpec{shape(out)}}
	}
	hosts := []discovery.Host{
		{Record: &meshv1.HostRecord{Stage: "one", Host: "1", Ready: true, Spec: spec(1, 2)}, Alive: true},
		{Record: &meshv1.HostRecord{Stage: "three", Host: "2", Ready: true, Spec: spec(3, 4), Durabilities: []string{"file"}}, Alive: true},
	}
	client := planner(t, adminapi.Settings{Pipelines: &fakePipelines{}, Traffic: traffic{}, Membership: fakeMembership{hosts: hosts}}, protocols()[0])
	wanted := testbed.Pipeline("p", "one", "three", "nowhere").ToProto()
	_, err := applyTo(t, client, &adminv1.ApplyPipelineRequest{Pipeline: wanted})
	expect(t, "what does not fit", err, fault.PipelineDoesNotFit)
	plans, err := client.PlanPipelines(t.Context(), connect.NewRequest(&adminv1.PlanPipelinesRequest{Pipelines: []*meshv1.Pipeline{wanted, {Name: "q"}}}))
	if err != nil || len(plans.Msg.GetPlans()) != 2 {
		t.Fatalf("plans are %v, %v", plans, err)
	}
	var fields []string
	for _, problem := range plans.Msg.GetPlans()[0].GetProblems() {
		fields = append(fields, problem.GetField())
	}
	if want := []string{"steps[1].stage", "steps[1].inputs.x", "steps[2].stage"}; !slices.Equal(fields, want) {
		t.Errorf("problems are with %v, want %v", fields, want)
	}
	if problems := plans.Msg.GetPlans()[1].GetProblems(); len(problems) != 1 || problems[0].GetSeverity() != adminv1.PipelineSeverity_PIPELINE_SEVERITY_INVALID {
		t.Errorf("an invalid name has problems %v", problems)
	}
	forced, err := applyTo(t, client, &adminv1.ApplyPipelineRequest{Pipeline: wanted, Force: true})
	if err != nil || len(forced.GetProblems()) != 3 || forced.GetPipeline().GetCause() == "" {
		t.Errorf("with force: %v, %v", forced, err)
	}
	_, err = applyTo(t, client, &adminv1.ApplyPipelineRequest{Pipeline: &meshv1.Pipeline{Name: "q"}, Force: true})
	expect(t, "what is not a pipeline", err, fault.InvalidRequest)
}

func TestPlanReportsChanges(t *testing.T) {
	t.Parallel()
	b := &fakePipelines{}
	client := planner(t, adminapi.Settings{Pipelines: b, Traffic: traffic{served: []pipeline.StageName{"a", "b"}}}, protocols()[0])
	for _, p := range []pipeline.Pipeline{testbed.Pipeline("same", "a"), testbed.Pipeline("other", "a")} {
		if _, _, err := b.Apply(t.Context(), p, nil); err != nil {
			t.Fatal(err)
		}
	}
	plans, err := client.PlanPipelines(t.Context(), connect.NewRequest(&adminv1.PlanPipelinesRequest{Pipelines: []*meshv1.Pipeline{
		testbed.Pipeline("new", "a").ToProto(), testbed.Pipeline("other", "b").ToProto(), testbed.Pipeline("same", "a").ToProto(),
	}}))
	if err != nil {
		t.Fatal(err)
	}
	var changes []adminv1.PipelineChange
	for _, plan := range plans.Msg.GetPlans() {
		changes = append(changes, plan.GetChange())
		if len(plan.GetProblems()) > 0 || (plan.GetCurrent() == nil) != (plan.GetName() == "new") {
			t.Errorf("%v", plan)
		}
	}
	if want := []adminv1.PipelineChange{adminv1.PipelineChange_PIPELINE_CHANGE_CREATE, adminv1.PipelineChange_PIPELINE_CHANGE_UPDATE, adminv1.PipelineChange_PIPELINE_CHANGE_NONE}; !slices.Equal(changes, want) {
		t.Errorf("changes are %v", changes)
	}
	if n := len(b.List()); n != 2 {
		t.Errorf("after the plan %d pipelines exist", n)
	}
}

func TestPipelineWatchEndsWhenGatewayStops(t *testing.T) {
	t.Parallel()
	for _, p := range protocols() {
		b := &fakePipelines{}
		stopping, stop := context.WithCancel(t.Context())
		client := planner(t, adminapi.Settings{Pipelines: b, Traffic: traffic{}, Stopping: stopping}, p)
		stream, err := client.WatchPipelines(t.Context(), connect.NewRequest(&adminv1.WatchPipelinesRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		seen := make(chan int)
		ended := make(chan error, 1)
		go func() {
			for stream.Receive() {
				seen <- len(stream.Msg().GetPipelines())
			}
			ended <- stream.Err()
		}()
		if n := testbed.Receive(t, "what there is", seen); n != 0 {
			t.Errorf("%s: the first message has %d", p.name, n)
		}
		if _, _, err := b.Apply(t.Context(), testbed.Pipeline("p", "a"), nil); err != nil {
			t.Fatal(err)
		}
		if n := testbed.Receive(t, "the change", seen); n != 1 {
			t.Errorf("%s: after a change the message has %d", p.name, n)
		}
		stop()
		expect(t, p.name+": the end", testbed.Receive(t, "the end", ended), fault.ShuttingDown)
		if err := stream.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestStagesListHostsQueuesAndPipelines(t *testing.T) {
	t.Parallel()
	b := &fakePipelines{}
	for _, p := range []pipeline.Pipeline{testbed.Pipeline("p", "a", "b"), testbed.Pipeline("q", "a")} {
		if _, _, err := b.Apply(t.Context(), p, nil); err != nil {
			t.Fatal(err)
		}
	}
	hosts := []discovery.Host{
		{Record: &meshv1.HostRecord{Stage: "a", Host: "1", Ready: true, InFlight: 2, MaxInFlight: 10, Running: 1, Slots: 1, Engine: "x 1"}, Alive: true},
		{Record: &meshv1.HostRecord{Stage: "a", Host: "2", InFlight: 1, MaxInFlight: 10, Slots: 2, Engine: "x 2, GPU"}, Alive: true},
		{Record: &meshv1.HostRecord{Stage: "a", Host: "3", InFlight: 5, MaxInFlight: 10, Engine: "y 1"}},
		{Record: &meshv1.HostRecord{Stage: "c", Host: "4", Ready: true, Draining: true, Engine: "x, CPU"}, Alive: true},
		{Record: &meshv1.HostRecord{Stage: "c", Host: "5"}, Alive: true},
		{Record: &meshv1.HostRecord{Stage: "c", Host: "6", Engine: "y"}, Alive: true},
	}
	client := func(s adminapi.Settings) adminv1connect.MeshServiceClient {
		s.DeadLetters, s.Pipelines = newBed(t), b
		return adminv1connect.NewMeshServiceClient(fronttest.Client(t, false), serve(t, s))
	}
	all, err := client(adminapi.Settings{Membership: fakeMembership{hosts: hosts}, Traffic: traffic{served: []pipeline.StageName{"a"}}}).ListStages(t.Context(), connect.NewRequest(&adminv1.ListStagesRequest{}))
	if err != nil || len(all.Msg.GetStages()) != 3 {
		t.Fatalf("got %v, %v", all, err)
	}
	queue := &adminv1.QueueStatus{Durability: pipeline.File.ToProto(), Items: 6, Bytes: 60, High: 1, Normal: 2, Low: 3, MaxBytes: 100}
	for i, want := range []*adminv1.StageStatus{
		{Stage: "a", Hosts: 2, ReadyHosts: 1, Served: true, InFlight: 3, MaxInFlight: 20, Running: 1, Slots: 3, Pipelines: []string{"p", "q"}},
		{Stage: "b", Pipelines: []string{"p"}},
		{Stage: "c", Hosts: 3, UnhealthyCause: "hosts run two engines: x, CPU (4), y (6); answers depend on the host"},
	} {
		want.Queues = []*adminv1.QueueStatus{queue}
		if got := all.Msg.GetStages()[i]; !proto.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	}
	// The list needs no registry, and omits fields that the broker does not report.
	outage := fault.New(fault.BrokerUnavailable, "the broker is unreachable").Caused(errors.New("why"))
	few, err := client(adminapi.Settings{Traffic: traffic{err: outage}}).ListStages(t.Context(), connect.NewRequest(&adminv1.ListStagesRequest{}))
	if err != nil || len(few.Msg.GetStages()) != 2 || few.Msg.GetStages()[0].GetQueuesCause() != "the broker is unreachable" || len(few.Msg.GetStages()[0].GetQueues()) > 0 {
		t.Errorf("got %v, %v", few, err)
	}
}

func TestPipelinesAreUnavailableBeforeRegistryLoads(t *testing.T) {
	t.Parallel()
	s := adminapi.Settings{Pipelines: &fakePipelines{problem: errors.New("not yet")}, Traffic: traffic{}}
	client := planner(t, s, protocols()[0])
	_, err := client.ListPipelines(t.Context(), connect.NewRequest(&adminv1.ListPipelinesRequest{}))
	expect(t, "a list", err, fault.RegistryUnavailable)
	_, err = client.PlanPipelines(t.Context(), connect.NewRequest(&adminv1.PlanPipelinesRequest{}))
	expect(t, "a plan", err, fault.RegistryUnavailable)
}
