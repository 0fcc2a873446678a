package meshtest_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// withAdmin is an edit that opens a gateway's admin port.
func withAdmin(s *gateway.Settings) { s.Admin.Listen = "127.0.0.1:0" }

// explain returns what a gateway's admin port says of a request.
func explain(t *testing.T, g meshtest.Gateway, id string) (*meshv1.RequestReport, error) {
	t.Helper()
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	client := adminv1connect.NewMeshServiceClient(&http.Client{Transport: transport}, g.AdminURL())
	response, err := client.ExplainRequest(t.Context(), connect.NewRequest(&adminv1.ExplainRequestRequest{RequestId: id}))
	if err != nil {
		return nil, err
	}
	return response.Msg.GetReport(), nil
}

// mustExplain asks until the mesh knows the request: others have a quarter of a second to
// answer, and may be busy with other tests.
func mustExplain(t *testing.T, g meshtest.Gateway, id string) (report *meshv1.RequestReport) {
	t.Helper()
	testbed.Eventually(t, "the request is known", func() bool {
		var err error
		report, err = explain(t, g, id)
		if err != nil && reasonOf(err) != "NOT_FOUND" {
			t.Fatal(err)
		}
		return err == nil
	})
	return report
}

// idOf returns the ID of the gateway's only request in flight.
func idOf(t *testing.T, g meshtest.Gateway) (id string) {
	t.Helper()
	testbed.Eventually(t, "the request is in flight", func() bool {
		var own []*meshv1.RequestReport
		requests, _ := g.Service().Requests(t.Context(), "", 100)
		for _, one := range requests {
			if one.GetGateway() == string(g.ID) {
				own = append(own, one)
			}
		}
		if len(own) == 1 {
			id = own[0].GetRequestId()
		}
		return len(own) == 1
	})
	return id
}

func TestEveryGatewayExplainsFinishedRequests(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		one := bed.Host("one", each(unchanged))
		two := bed.Host("two", each(func(_ context.Context, item runner.Item) ([]payload.Part, error) {
			if strings.HasPrefix(string(item.Inputs[0].Blob.Data), "bad") {
				return nil, errors.New("it is bad")
			}
			return item.Inputs, nil
		}))
		pipelines := []pipeline.Pipeline{testbed.Pipeline("both", "one", "two")}
		took, other := bed.Gateway(pipelines, withAdmin), bed.Gateway(pipelines, withAdmin)
		const others = 7
		for range others {
			infer(t.Context(), took, requestFor("both", "good")).checkOK(t)
		}
		good := infer(t.Context(), took, requestFor("both", "good")).checkOK(t).response
		bad := infer(t.Context(), took, requestFor("both", "bad")).want(t, fault.RunnerFailed)
		rejected := infer(t.Context(), took, requestFor("none", "x")).want(t, fault.UnknownPipeline)
		for _, asked := range []meshtest.Gateway{took, other} {
			r := mustExplain(t, asked, good.RequestID)
			if r.GetSource() != meshv1.RequestSource_REQUEST_SOURCE_GATEWAY || r.GetPipeline() != "both" || r.GetFault() != nil || r.GetCompared() != others ||
				r.GetTotal().AsDuration() != good.Timeline.Total || len(r.GetSteps()) != 2 || len(r.GetSummary()) < 2 {
				t.Fatalf("an answered request: %v", r)
			}
			for i, host := range []meshtest.Host{one, two} {
				s, want := r.GetSteps()[i], good.Timeline.Steps[i]
				if s.GetTiming().GetHost() != host.Record().GetHost() || s.GetTiming().GetRun().AsDuration() != want.Run || s.GetTiming().GetDispatchReason() != want.Dispatch || s.GetUsual().GetRun().AsDuration() <= 0 {
					t.Errorf("step %d: %v", i, s)
				}
			}
			r = mustExplain(t, asked, strings.ToUpper(bad.Metadata["request_id"]))
			if f := r.GetFault(); f.GetReason() != "RUNNER_FAILED" || f.GetStep() != "two" || f.GetHost() != two.Record().GetHost() || len(r.GetSteps()) != 2 || r.GetTotal().AsDuration() <= 0 {
				t.Errorf("a failed request: %v", r)
			}
			r = mustExplain(t, asked, rejected.Metadata["request_id"])
			if r.GetFault().GetReason() != "UNKNOWN_PIPELINE" || r.GetPipeline() != "none" || len(r.GetSteps()) != 0 {
				t.Errorf("a rejected request: %v", r)
			}
		}
		for _, asked := range []meshtest.Gateway{took, other} {
			testbed.Eventually(t, "each gateway lists what ended last", func() bool {
				all, failed := asked.Service().Ended(t.Context(), false, "", 100), asked.Service().Ended(t.Context(), true, "two", 100)
				return len(all) == others+3 && all[0].GetRequestId() == rejected.Metadata["request_id"] && len(failed) == 1 && failed[0].GetRequestId() == bad.Metadata["request_id"]
			})
		}
		took.Stop()
		if _, err := explain(t, other, good.RequestID); reasonOf(err) != "NOT_FOUND" || !strings.Contains(err.Error(), "no gateway that answered remembers it") || !strings.HasSuffix(err.Error(), "until they stop") {
			t.Errorf("a request of a gateway that is gone: %v", err)
		}
	})
}

func TestExplainNeedsTheIDOfARequest(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	gateways := []meshtest.Gateway{bed.Gateway(nil, withAdmin), bed.Gateway(nil, withAdmin)}
	for id, want := range map[string]string{"": "INVALID_REQUEST", "x": "INVALID_REQUEST", uuid.NewString(): "NOT_FOUND"} {
		_, err := explain(t, gateways[0], id)
		if f := reasonOf(err); f != want {
			t.Errorf("%q: %v, want %s", id, err, want)
		}
		if want == "NOT_FOUND" && !strings.Contains(err.Error(), "gateways remember all requests of the last ") {
			t.Errorf("it says %v", err)
		}
	}
}

func TestRunningRequestIsFoundOnItsHost(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		runner := newHeld()
		bed.Host("one", each(unchanged))
		two := bed.Host("two", runner)
		pipelines := []pipeline.Pipeline{testbed.Pipeline("both", "one", "two")}
		took, other := bed.Gateway(pipelines, withAdmin), bed.Gateway(pipelines, withAdmin)
		answered := send(t.Context(), took, requestFor("both", "x"))
		testbed.Receive(t, "a batch", runner.entered)
		id := idOf(t, took)
		for _, asked := range []meshtest.Gateway{took, other} {
			var r *meshv1.RequestReport
			testbed.Eventually(t, "its host answers in time", func() bool {
				r = mustExplain(t, asked, id)
				return len(r.GetSteps()) == 2
			})
			if r.GetSource() != meshv1.RequestSource_REQUEST_SOURCE_IN_FLIGHT || r.GetPipeline() != "both" || len(r.GetHolders()) != 1 {
				t.Fatalf("it is %v", r)
			}
			h := r.GetHolders()[0]
			if h.GetHost() != two.Record().GetHost() || h.GetStage() != "two" || h.GetState() != "running" || time.Since(h.GetSince().AsTime()) > time.Minute {
				t.Errorf("%v has it", h)
			}
			if s := r.GetSteps()[1].GetTiming(); s.GetStep() != "two" || s.GetBatchSize() != 1 || s.GetDispatchReason() == "" {
				t.Errorf("it is at step %v", s)
			}
		}
		all := list(t, other, two.Record().GetHost())
		if r := all[0]; len(all) != 1 || r.GetRequestId() != id || r.GetStage() != "two" || r.GetStep() != "two" || r.GetState() != "a worker runs it" ||
			r.GetGateway() != string(took.ID) || len(r.GetStages()) != 2 || r.GetDeadline() == nil || time.Since(r.GetSince().AsTime()) > time.Minute {
			t.Errorf("in flight are %v", all)
		}
		close(runner.release)
		await(t, answered).checkOK(t)
	})
}

// list returns what a gateway's admin port lists as in flight, once the host with the first has answered.
func list(t *testing.T, g meshtest.Gateway, host string) (out []*adminv1.RequestStatus) {
	t.Helper()
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	client := adminv1connect.NewMeshServiceClient(&http.Client{Transport: transport}, g.AdminURL())
	testbed.Eventually(t, "all answer in time", func() bool {
		response, err := client.ListRequests(t.Context(), connect.NewRequest(&adminv1.ListRequestsRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		out = response.Msg.GetRequests()
		return response.Msg.GetTotal() > 0 && len(out) > 0 && out[0].GetHost() == host
	})
	return out
}

func TestQueuedRequestIsFoundInItsQueue(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	runner := newHeld()
	bed.Host("one", each(unchanged))
	const most = 8
	bed.Host("two", runner, func(s *stagehost.Settings) { s.MaxInFlight = most })
	pipelines := []pipeline.Pipeline{testbed.Pipeline("both", "one", "two")}
	busy, took := bed.Gateway(pipelines), bed.Gateway(pipelines, withAdmin)
	var answers []<-chan answer
	for range most {
		answers = append(answers, send(t.Context(), busy, requestFor("both", "x")))
	}
	testbed.Eventually(t, "the host has all that it may", func() bool {
		state, err := took.Service().Stage(t.Context(), "two")
		return err == nil && len(state.Queues) > 0 && state.Queues[0].Items == most
	})
	answers = append(answers, send(t.Context(), took, requestFor("both", "y")))
	id := idOf(t, took)
	testbed.Eventually(t, "it waits in the second queue", func() bool {
		h := mustExplain(t, took, id).GetHolders()
		return len(h) == 1 && h[0].GetStage() == "two" && h[0].GetHost() == "" && h[0].GetItems() == most+1
	})
	close(runner.release)
	for _, each := range answers {
		await(t, each).checkOK(t)
	}
}

func TestReplyAfterTheDeadlineCompletesTheReport(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	entered, release := make(chan struct{}), make(chan struct{})
	bed.Host("deaf", each(func(context.Context, runner.Item) ([]payload.Part, error) {
		close(entered)
		<-release
		return nil, errors.New("it is too late")
	}))
	g := bed.Gateway(nil, withAdmin)
	request := requestFor("stage:deaf", "x")
	request.Timeout = 3 * time.Second // a host drops what has expired before it runs
	answered := send(t.Context(), g, request)
	testbed.Receive(t, "the run", entered)
	f := await(t, answered).want(t, fault.DeadlineExceeded)
	id := f.Metadata["request_id"]
	if r := mustExplain(t, g, id); len(r.GetSteps()) != 0 || r.GetFault().GetReason() != "DEADLINE_EXCEEDED" {
		t.Errorf("before the reply it is %v", r)
	}
	close(release)
	testbed.Eventually(t, "the reply has come", func() bool { return len(mustExplain(t, g, id).GetSteps()) == 1 })
}

func TestStoredResultIsExplained(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	runner := newHeld()
	bed.Host("one", runner)
	took, other := bed.Gateway(nil, withAdmin), bed.Gateway(nil, withAdmin)
	request := requestFor("stage:one", "x")
	request.Durability = pipeline.File
	ctx, leave := context.WithCancel(t.Context())
	answered := send(ctx, took, request)
	testbed.Receive(t, "a batch", runner.entered)
	id := idOf(t, took)
	leave()
	await(t, answered).checkFault(t, fault.Cancelled)
	close(runner.release)
	if _, err := other.Service().Result(t.Context(), id, testbed.Patience); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "its gateway answers in time", func() bool {
		r := mustExplain(t, other, id)
		return r.GetFault().GetReason() == "CANCELLED" && r.GetStored() && len(r.GetSteps()) == 1
	})
	took.Stop()
	testbed.Eventually(t, "when that is gone, and the host has sent its reply, only the result is left", func() bool {
		r := mustExplain(t, other, id)
		return r.GetSource() == meshv1.RequestSource_REQUEST_SOURCE_STORED_RESULT && r.GetFault() == nil && len(r.GetSteps()) == 1 && r.GetTotal() != nil
	})
}

func TestGatewayExplainsItsRequestsWithoutBroker(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	bed.Host("one", each(unchanged))
	g := bed.Gateway(nil, withAdmin)
	id := infer(t.Context(), g, requestFor("stage:one", "x")).checkOK(t).response.RequestID
	bed.Broker.Stop()
	if r := mustExplain(t, g, id); len(r.GetSteps()) != 1 {
		t.Errorf("it is %v", r)
	}
	testbed.Eventually(t, "it says that the broker is missing", func() bool {
		_, err := explain(t, g, uuid.NewString())
		return reasonOf(err) == "BROKER_UNAVAILABLE"
	})
	bed.Broker.Restore()
}
