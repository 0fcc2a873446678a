package adminapi_test

import (
	"strings"
	"testing"

	"connectrpc.com/connect"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/adminapi"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// explain returns what is said of a request of which the mesh knows that report.
func explain(t *testing.T, letters adminapi.DeadLetters, known *meshv1.RequestReport, id string) (*meshv1.RequestReport, error) {
	t.Helper()
	url := serve(t, adminapi.Settings{DeadLetters: letters, Traffic: traffic{report: known}})
	client := adminv1connect.NewMeshServiceClient(fronttest.Client(t, false), url)
	response, err := client.ExplainRequest(t.Context(), connect.NewRequest(&adminv1.ExplainRequestRequest{RequestId: id}))
	if err != nil {
		return nil, err
	}
	return response.Msg.GetReport(), nil
}

func TestDeadLetterExplainsAForgottenRequest(t *testing.T) {
	t.Parallel()
	d := newBed(t)
	d.storeMessage(nil)
	d.garbage()
	d.storeMessage(d.encode(item(t)))
	e := item(t)
	seq := d.storeMessage(d.encode(e))
	got, err := explain(t, d, nil, strings.ToUpper(string(e.RequestID)))
	if err != nil {
		t.Fatal(err)
	}
	if got.GetSource() != meshv1.RequestSource_REQUEST_SOURCE_DEAD_LETTER || got.GetDeadLetter() != seq || got.GetRequestId() != string(e.RequestID) || got.GetPipeline() != "pipeline" ||
		got.GetFault().GetReason() != "RUNNER_CRASHED" || len(got.GetSteps()) != 1 || len(got.GetSummary()) < 2 {
		t.Errorf("it is %v", got)
	}
	_, err = explain(t, d, nil, "00000000-0000-7000-8000-000000000000")
	expect(t, "another", err, fault.NotFound)
}

func TestGivenUpRequestIsShownWithItsDeadLetter(t *testing.T) {
	t.Parallel()
	d := newBed(t)
	e := item(t)
	seq := d.storeMessage(d.encode(e))
	for reason, want := range map[string]uint64{"RUNNER_CRASHED": seq, "ATTEMPTS_EXHAUSTED": seq, "RUNNER_FAILED": 0} {
		got, err := explain(t, d, &meshv1.RequestReport{RequestId: string(e.RequestID), Fault: &meshv1.Fault{Reason: reason}}, string(e.RequestID))
		if err != nil || got.GetDeadLetter() != want || len(got.GetSummary()) == 0 {
			t.Errorf("%s: %v, %v", reason, got, err)
		}
	}
}
