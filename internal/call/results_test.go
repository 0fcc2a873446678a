package call_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// finished returns a durable item as its last host has it.
func finished() *envelope.Envelope {
	return &envelope.Envelope{
		Mesh: mesh, Gateway: "gateway", Pipeline: "pipeline", Durability: pipeline.File,
		RequestID: pipeline.RequestID(uuid.NewString()), ExecutionID: pipeline.ExecutionID(uuid.NewString()),
		AdmittedAt: time.Now(), Timings: []envelope.StepTiming{{Step: "step", Stage: stage, Run: time.Second}},
	}
}

func TestAnyGatewayReturnsAResult(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.ensureResults()
	env := finished()
	reply := env.NewReply()
	reply.Parts = []payload.Part{payload.OfBlob("x", "text/plain", []byte("stored")), payload.OfBlob("y", "", nil)}
	reply.Metadata = map[string]string{"note": "from the runner"}
	b.storeReply(env, reply)
	for name, service := range map[string]*call.Service{"the one": b.service, "another": b.gateway("another")} {
		r, err := service.Result(t.Context(), string(env.RequestID), 0)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if r.RequestID != string(env.RequestID) || r.Pipeline != "pipeline" || len(r.Outputs) != 2 || textOf(r.Outputs) != "stored" || r.Metadata["note"] == "" {
			t.Errorf("%s returned %+v", name, r)
		}
		if r.Timeline.Total != 1500*time.Millisecond || len(r.Timeline.Steps) != 1 || r.Timeline.Steps[0].Run != time.Second {
			t.Errorf("%s returned the timeline %+v", name, r.Timeline)
		}
	}
}

func TestStoredFaultIsTheRequests(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.ensureResults()
	env := finished()
	reply := env.NewReply()
	reply.Fault = fault.New(fault.InvalidInput, "no image").At(string(stage), "step", "host").WithViolation("inputs.x", "no image")
	b.storeReply(env, reply)
	for _, wait := range []time.Duration{0, testbed.Patience} {
		response, err := b.service.Result(t.Context(), string(env.RequestID), wait)
		f := wantFault(t, response, err, fault.InvalidInput)
		if f.Message != "no image" || f.Host != "host" || len(f.Violations) != 1 || f.Metadata["request_id"] != string(env.RequestID) {
			t.Errorf("got %+v", f)
		}
	}
}

func TestRequestWithoutAResultIsNotFound(t *testing.T) {
	t.Parallel()
	b := newBed(t, func(s *call.Settings) { s.MaxTimeout = 50 * time.Millisecond })
	for range 2 {
		for _, wait := range []time.Duration{0, time.Millisecond, time.Hour} {
			id := uuid.NewString()
			begin := time.Now()
			response, err := b.service.Result(t.Context(), id, wait)
			if f := wantFault(t, response, err, fault.NotFound); f.Metadata["request_id"] != id {
				t.Errorf("got %+v", f)
			}
			if took := time.Since(begin); took > atOnce {
				t.Errorf("a wait of %s took %s", wait, took)
			}
		}
		b.ensureResults()
	}
	response, err := b.service.Result(t.Context(), uuid.NewString(), -1)
	_ = wantFault(t, response, err, fault.InvalidRequest)
}

func TestStoredResultIsFoundDespiteAShortWait(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.ensureResults()
	env := finished()
	b.store(env, "stored")
	for range 10 {
		r, err := b.service.Result(t.Context(), string(env.RequestID), time.Nanosecond)
		if err != nil || textOf(r.Outputs) != "stored" {
			t.Fatalf("got %+v, %v", r, err)
		}
	}
}

func TestWaitEndsWithTheResult(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.ensureResults()
	other := b.gateway("another")
	env := finished()
	got := make(chan answered, 1)
	go func() {
		response, err := other.Result(t.Context(), string(env.RequestID), testbed.Patience)
		got <- answered{response, err}
	}()
	b.store(env, "late")
	if r := testbed.Receive(t, "result", got); r.err != nil || textOf(r.response.Outputs) != "late" {
		t.Errorf("got %+v, %v", r.response, r.err)
	}
}

func TestWaitCountsAsInFlight(t *testing.T) {
	t.Parallel()
	b := newBed(t, func(s *call.Settings) { s.MaxInFlight = 1 })
	b.ensureResults()
	b.waitsForAResult("its caller leaves", func(leave func()) { leave() }, fault.Cancelled)
	b.waitsForAResult("the gateway stops", func(func()) { b.stops[b.service]() }, fault.ShuttingDown)
}

func TestWaitsLeaveRoomForRequests(t *testing.T) {
	t.Parallel()
	const inFlight, waits = 8, 2
	b := newBed(t, func(s *call.Settings) { s.MaxInFlight = inFlight })
	b.ensureResults()
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	got := make(chan answered, inFlight)
	for range inFlight {
		go func() {
			response, err := b.service.Result(ctx, uuid.NewString(), testbed.Patience)
			got <- answered{response, err}
		}()
	}
	for range inFlight - waits {
		r := testbed.Receive(t, "one wait too many", got)
		_ = wantFault(t, r.response, r.err, fault.Overloaded)
	}
	response, err := b.service.Result(t.Context(), uuid.NewString(), 0)
	_ = wantFault(t, response, err, fault.NotFound)
	leave()
	for range waits {
		r := testbed.Receive(t, "a wait", got)
		_ = wantFault(t, r.response, r.err, fault.Cancelled)
	}
}

func TestWaitsOfOneTenantLeaveRoomForAnother(t *testing.T) {
	t.Parallel()
	const inFlight, waits = 128, 32
	b := newBed(t, func(s *call.Settings) { s.MaxInFlight, s.Shared = inFlight, true })
	b.ensureResults()
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	got := make(chan answered, inFlight)
	wait := func(tenant string) {
		response, err := b.service.Result(budget.WithTenant(ctx, tenant), uuid.NewString(), testbed.Patience)
		got <- answered{response, err}
	}
	for range waits {
		go wait("a")
	}
	for range waits / 8 { // a tenant alone has seven eighths
		r := testbed.Receive(t, "a wait too many", got)
		_ = wantFault(t, r.response, r.err, fault.Overloaded)
	}
	response, err := b.service.Result(budget.WithTenant(ctx, "b"), uuid.NewString(), 10*time.Millisecond)
	_ = wantFault(t, response, err, fault.NotFound)
	leave()
	for range waits * 7 / 8 {
		r := testbed.Receive(t, "a wait", got)
		_ = wantFault(t, r.response, r.err, fault.Cancelled)
	}
}

func TestRequestsOfOneTenantLeaveRoomForAnother(t *testing.T) {
	t.Parallel()
	const inFlight = 16
	b := newBed(t, func(s *call.Settings) { s.MaxInFlight, s.Shared = inFlight, true })
	b.alive()
	b.ensureResults()
	_ = b.pulls(pipeline.Memory)
	as := func(tenant string) context.Context {
		return budget.NewContext(budget.WithTenant(t.Context(), tenant), budget.NewAccount(nil, tenant))
	}
	for range inFlight * 7 / 8 {
		infer(as("a"), b.service, ask("x"))
	}
	testbed.Eventually(t, "a tenant alone has seven eighths", func() bool { return b.service.InFlight() == inFlight*7/8 })
	response, err := b.service.Infer(as("a"), ask("x"))
	_ = wantFault(t, response, err, fault.Overloaded)
	response, err = b.service.Result(as("b"), uuid.NewString(), 0)
	_ = wantFault(t, response, err, fault.NotFound)
	infer(as("b"), b.service, ask("x"))
	testbed.Eventually(t, "another tenant's request is in flight", func() bool { return b.service.InFlight() == inFlight*7/8+1 })
}

// waitsForAResult waits at a gateway with a limit of one request until end ends it.
func (b *bed) waitsForAResult(name string, end func(leave func()), reason fault.Reason) {
	b.t.Helper()
	ctx, leave := context.WithCancel(b.t.Context())
	defer leave()
	got := make(chan answered, 1)
	go func() {
		for {
			response, err := b.service.Result(ctx, uuid.NewString(), testbed.Patience)
			if fault.From(err).Reason != fault.Overloaded { // by the check below
				got <- answered{response, err}
				return
			}
		}
	}()
	testbed.Eventually(b.t, "the wait counts", func() bool {
		_, err := b.service.Result(b.t.Context(), uuid.NewString(), 0)
		return fault.From(err).Reason == fault.Overloaded
	})
	begin := time.Now()
	end(leave)
	r := testbed.Receive(b.t, name, got)
	_ = wantFault(b.t, r.response, r.err, reason)
	if took := time.Since(begin); took > atOnce {
		b.t.Errorf("%s: it took %s", name, took)
	}
}

func TestResultIsUnavailableWithoutABroker(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.broker.Stop()
	testbed.Eventually(t, "the connection is lost", func() bool { return b.service.Ready() != nil })
	for _, wait := range []time.Duration{0, testbed.Patience} {
		response, err := b.service.Result(t.Context(), uuid.NewString(), wait)
		if f := wantFault(t, response, err, fault.BrokerUnavailable); f.RetryAfter <= 0 {
			t.Errorf("retry after %s", f.RetryAfter)
		}
	}
	b.broker.Restore()
}
