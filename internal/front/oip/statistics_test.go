package oip_test

import (
	"net/http"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/oip"
	"github.com/stagemesh/stagemesh/internal/transport"
)

// sameMessage compares a message with one in protobuf's JSON.
func sameMessage[M proto.Message](t *testing.T, what string, got M, text string) {
	t.Helper()
	want := got.ProtoReflect().New().Interface()
	if err := protojson.Unmarshal([]byte(text), want); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(got, want) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func TestStatisticsAreInTritonsForm(t *testing.T) {
	t.Parallel()
	const simple = `{
		"name": "simple", "version": "1", "last_inference": 1700000000123, "inference_count": 48, "execution_count": 3,
		"inference_stats": {
			"success": {"count": 12, "ns": 12000000}, "fail": {"count": 0, "ns": 0}, "queue": {"count": 12, "ns": 6000000}, "compute_infer": {"count": 12, "ns": 1000000},
			"compute_input": {"count": 0, "ns": 0}, "compute_output": {"count": 0, "ns": 0}, "cache_hit": {"count": 0, "ns": 0}, "cache_miss": {"count": 0, "ns": 0}
		}
	}`
	const other = `{
		"name": "other", "version": "1", "last_inference": 5000, "inference_count": 0, "execution_count": 0,
		"inference_stats": {
			"success": {"count": 0, "ns": 0}, "fail": {"count": 1, "ns": 1000000000}, "queue": {"count": 0, "ns": 0}, "compute_infer": {"count": 0, "ns": 0},
			"compute_input": {"count": 0, "ns": 0}, "compute_output": {"count": 0, "ns": 0}, "cache_hit": {"count": 0, "ns": 0}, "cache_miss": {"count": 0, "ns": 0}
		}
	}`
	r, g := rest(t, &fronttest.Caller{}, oip.Model{}, transport.Settings{}), client(t, &fronttest.Caller{}, oip.Model{})
	for name, want := range map[string]string{"simple": `{"model_stats": [` + simple + `]}`, "": `{"model_stats": [` + other + `, ` + simple + `]}`} {
		got, err := g.ModelStatistics(t.Context(), &oipv2.ModelStatisticsRequest{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		sameMessage(t, name, got, want)
	}
	if _, err := g.ModelStatistics(t.Context(), &oipv2.ModelStatisticsRequest{Name: "simple", Version: "2"}); status.Code(err) != codes.NotFound {
		t.Errorf("another version: %v", err)
	}
	for path, want := range map[string]string{
		"/v2/models/simple/stats":            `{"model_stats": [` + simple + `]}`,
		"/v2/models/simple/versions/1/stats": `{"model_stats": [` + simple + `]}`,
		"/v2/models/unknown/stats":           `{"error": "UNKNOWN_PIPELINE: there is none"}`,
	} {
		_, _, body := r.ask(http.MethodGet, path, "")
		sameJSON(t, path, body, want)
	}
}

func TestAllStatisticsHaveAPath(t *testing.T) {
	t.Parallel()
	all := restful{t, fronttest.Serve(t, oip.NewREST(&fronttest.Caller{}, noStats{}, transport.Settings{})), rest(t, &fronttest.Caller{}, oip.Model{}, transport.Settings{}).protocol}
	if status, _, body := all.ask(http.MethodGet, "/v2/models/stats", ""); status != http.StatusOK || len(body) < 500 {
		t.Errorf("got %d %s", status, body)
	}
}

// noStats has no model of the name "stats".
type noStats struct{ shelf }

func (s noStats) Model(name string) (oip.Model, error) {
	if name == "stats" {
		name = "nothing"
	}
	return s.shelf.Model(name)
}

func TestConfigurationSaysWhatClientsMaySend(t *testing.T) {
	t.Parallel()
	optional := tensorOf("mask", "BOOL", -1, 4)
	optional.Optional = true
	for name, row := range map[string]struct {
		model oip.Model
		want  string
	}{
		"with rows": {
			oip.Model{Inputs: []*stagev1.PartSpec{tensorOf("x", "FP32", -1, 64), optional}, Outputs: []*stagev1.PartSpec{tensorOf("y", "BYTES", -1)}, MaxRows: 32},
			`"max_batch_size": 32, "model_transaction_policy": {"decoupled": false},
			"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [64], "optional": false}, {"name": "mask", "data_type": "TYPE_BOOL", "dims": [4], "optional": true}],
			"output": [{"name": "y", "data_type": "TYPE_STRING", "dims": []}]`,
		},
		"with a blob": {
			oip.Model{Inputs: []*stagev1.PartSpec{blobOf("image")}, Outputs: []*stagev1.PartSpec{tensorOf("y", "INT64", -1)}, MaxRows: 32, Streams: true},
			`"max_batch_size": 0, "model_transaction_policy": {"decoupled": true},
			"input": [{"name": "image", "data_type": "TYPE_STRING", "dims": [1], "optional": false}], "output": [{"name": "y", "data_type": "TYPE_INT64", "dims": [-1]}]`,
		},
		"unknown": {oip.Model{MaxRows: 32}, `"max_batch_size": 0, "model_transaction_policy": {"decoupled": false}, "input": [], "output": []`},
	} {
		want := `{"name": "simple", "platform": "stagemesh_pipeline", "backend": "stagemesh", ` + row.want + `}`
		got, err := client(t, &fronttest.Caller{}, row.model).ModelConfig(t.Context(), &oipv2.ModelConfigRequest{Name: "simple"})
		if err != nil {
			t.Fatal(err)
		}
		sameMessage(t, name, got, `{"config": `+want+`}`)
		for _, path := range []string{"/v2/models/simple/config", "/v2/models/simple/versions/1/config"} {
			_, _, body := rest(t, &fronttest.Caller{}, row.model, transport.Settings{}).ask(http.MethodGet, path, "")
			sameJSON(t, name, body, want)
		}
	}
}
