package librarytest

import (
	"net/http"
	"testing"

	"connectrpc.com/connect"

	"github.com/stagemesh/stagemesh/internal/request"
	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

func TestTapShowsRequestsAndDelaysNone(t *testing.T) {
	t.Parallel()
	admin := gateway.Admin{}
	admin.Listen = "127.0.0.1:0"
	m := meshtest.Start(t, newMesh(t, stagemesh.Settings{
		Registry: &meshfile.RegistryConfig{},
		Gateway: gateway.Settings{
			Config: gateway.Config{Listen: "127.0.0.1:0", Admin: admin, ModelControl: true},
			Models: []model.Model{
				{ID: "first", Stage: "score", Source: "a", Size: model.Size{Host: 1 << 20}},
				{ID: "second", Stage: "score", Source: "b", Size: model.Size{Host: 1 << 20}},
				{ID: "failing", Stage: "score", Source: "failing", Size: model.Size{Host: 1 << 20}},
			},
			Aliases: []models.AliasChange{{Name: "best", Route: &meshv1.AliasRoute{Model: "first", Shadow: &meshv1.AliasShadow{Model: "second", Percent: 100}}}},
		},
	}, stagemesh.Stage{
		Name: "score", Runner: sourceModels(), Config: stagehost.Config{Models: &stagehost.ModelSettings{Capacity: 16 << 20, DefaultSize: 1 << 20}},
	}))
	askWithKey := func(name string, data []byte, key string) error {
		_, err := m.Infer(stagemesh.WithTenant(t.Context(), "blue"), &request.Request{
			Pipeline: name, Inputs: []payload.Part{payload.OfBlob("x", "text/plain", data)}, IdempotencyKey: key,
		})
		return err
	}
	ask := func(name string, data []byte) error { return askWithKey(name, data, "") }
	testbed.Eventually(t, "the alias answers", func() bool { return ask("alias:best", []byte("to")) == nil })

	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	client := adminv1connect.NewModelServiceClient(&http.Client{Transport: transport}, m.AdminURL())
	// tap returns a tap once a request has been shown, which ask makes: a call begins with its
	// first message.
	tap := func(in *adminv1.TapModelRequest, ask func()) *connect.ServerStreamForClient[adminv1.TapModelResponse] {
		t.Helper()
		opened := make(chan *connect.ServerStreamForClient[adminv1.TapModelResponse], 1)
		go func() {
			stream, err := client.TapModel(t.Context(), connect.NewRequest(in))
			if err != nil {
				t.Error(err)
			}
			opened <- stream
		}()
		testbed.Eventually(t, "a request is shown", func() bool {
			ask()
			return len(opened) == 1
		})
		return <-opened
	}
	for name, row := range map[string]struct {
		tap                      *adminv1.TapModelRequest
		ask, model, answer, fail string
		isShadow                 bool
	}{
		"a model":                     {tap: &adminv1.TapModelRequest{Model: "first"}, ask: "model:first", model: "first", answer: "a"},
		"an alias":                    {tap: &adminv1.TapModelRequest{Alias: "best", Percent: 100}, ask: "alias:best", model: "first", answer: "a"},
		"a shadow":                    {tap: &adminv1.TapModelRequest{Model: "second"}, ask: "alias:best", model: "second", answer: "b", isShadow: true},
		"one that fails":              {tap: &adminv1.TapModelRequest{Model: "failing"}, ask: "model:failing", model: "failing", fail: "RUNNER_FAILED"},
		"a model's requests by alias": {tap: &adminv1.TapModelRequest{Model: "first"}, ask: "alias:best", model: "first", answer: "a"},
	} {
		stream := tap(row.tap, func() {
			if err := ask(row.ask, []byte("to")); (err != nil) != (row.fail != "") {
				t.Fatalf("%s: %v", name, err)
			}
		})
		stream.Receive()
		one := stream.Msg()
		if one.GetModel() != row.model || string(one.GetInputs()[0].GetBlob().GetData()) != "to" || one.GetShadow() != row.isShadow || one.GetTenant() != "blue" || one.GetFault().GetReason() != row.fail ||
			row.fail == "" && string(one.GetOutputs()[0].GetBlob().GetData()) != row.answer {
			t.Errorf("%s: %v, %v", name, one, stream.Err())
		}
		if err := stream.Close(); err != nil {
			t.Error(err)
		}
	}

	// Requests that get the answer of another, or that are rejected, do not run.
	stream := tap(&adminv1.TapModelRequest{Model: "first"}, func() { _ = ask("model:first", []byte("to")) })
	if first, again, other := askWithKey("model:first", []byte("keyed"), "key"), askWithKey("model:first", []byte("keyed"), "key"),
		askWithKey("model:first", []byte("other"), "key"); first != nil || again != nil || fault.From(other).Reason != fault.IdempotencyMismatch {
		t.Fatal(first, again, other)
	}
	if err := ask("model:first", []byte("end")); err != nil {
		t.Fatal(err)
	}
	shown := map[string]int{}
	for shown["end"] == 0 && stream.Receive() {
		shown[string(stream.Msg().GetInputs()[0].GetBlob().GetData())]++
	}
	if shown["keyed"] != 1 || shown["other"] != 0 {
		t.Errorf("the tap shows %v", shown)
	}
	if err := stream.Close(); err != nil {
		t.Error(err)
	}

	for name, row := range map[string]struct {
		url  string
		in   *adminv1.TapModelRequest
		code connect.Code
	}{
		"no name":         {m.AdminURL(), &adminv1.TapModelRequest{}, connect.CodeInvalidArgument},
		"two names":       {m.AdminURL(), &adminv1.TapModelRequest{Model: "first", Alias: "best"}, connect.CodeInvalidArgument},
		"101 percent":     {m.AdminURL(), &adminv1.TapModelRequest{Model: "first", Percent: 101}, connect.CodeInvalidArgument},
		"unknown model":   {m.AdminURL(), &adminv1.TapModelRequest{Model: "none"}, connect.CodeNotFound},
		"unknown alias":   {m.AdminURL(), &adminv1.TapModelRequest{Alias: "first"}, connect.CodeNotFound},
		"the public port": {m.URL(), &adminv1.TapModelRequest{Model: "first"}, connect.CodeUnimplemented},
	} {
		stream, err := adminv1connect.NewModelServiceClient(&http.Client{Transport: transport}, row.url).TapModel(t.Context(), connect.NewRequest(row.in))
		if err != nil {
			t.Fatal(err)
		}
		if stream.Receive() || connect.CodeOf(stream.Err()) != row.code {
			t.Errorf("%s: %v", name, stream.Err())
		}
		_ = stream.Close()
	}

	// Nobody reads these, so they fill. A fifth one is too many.
	full := make([]*connect.ServerStreamForClient[adminv1.TapModelResponse], 4)
	askFirst := func() {
		if err := ask("model:first", []byte("to")); err != nil {
			t.Fatal(err)
		}
	}
	for i := range full {
		full[i] = tap(&adminv1.TapModelRequest{Model: "first"}, askFirst)
		defer full[i].Close()
	}
	if more := tap(&adminv1.TapModelRequest{Model: "first"}, askFirst); more.Receive() || connect.CodeOf(more.Err()) != connect.CodeResourceExhausted {
		t.Errorf("a fifth tap: %v", more.Err())
	}
	big := make([]byte, 1<<20)
	for range 100 {
		if err := ask("model:first", big); err != nil {
			t.Fatal(err)
		}
	}
	for i, stream := range full {
		testbed.Eventually(t, "requests were dropped", func() bool { return stream.Receive() && stream.Msg().GetDropped() > 0 })
		if stream.Err() != nil {
			t.Errorf("tap %d: %v", i, stream.Err())
		}
	}
}
