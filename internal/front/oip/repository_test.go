package oip_test

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/oip"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
)

type indexed struct{ Name, Version, State, Reason string }

// checkIndex checks the models of an index, of which there is one in step.
func checkIndex(t *testing.T, got []indexed, step int) {
	t.Helper()
	if len(got) != shelfModels/step {
		t.Fatalf("%d models are listed", len(got))
	}
	for i, one := range got {
		want := indexed{fmt.Sprintf("m/%d", i*step), "1", "READY", ""}
		if i*step%2 == 1 {
			want.State, want.Reason = "UNAVAILABLE", `host "a": no memory`
		}
		if one != want {
			t.Fatalf("entry %d is %v, not %v", i, one, want)
		}
	}
}

func TestRepositoryIndexListsModels(t *testing.T) {
	t.Parallel()
	c, g := rest(t, &fronttest.Caller{}, oip.Model{}, transport.Settings{}), client(t, &fronttest.Caller{}, oip.Model{})
	for body, step := range map[string]int{"": 1, "{}": 1, `{"ready": false}`: 1, `{"ready": true}`: 2} {
		code, _, text := c.ask(http.MethodPost, "/v2/repository/index", body)
		var got []indexed
		if err := json.Unmarshal([]byte(text), &got); err != nil || code != http.StatusOK {
			t.Fatalf("%s: %d, %v, %.200s", body, code, err, text)
		}
		checkIndex(t, got, step)
		message, err := g.RepositoryIndex(t.Context(), &oipv2.RepositoryIndexRequest{Ready: step == 2})
		if err != nil {
			t.Fatal(err)
		}
		got = nil
		for _, one := range message.GetModels() {
			got = append(got, indexed{one.GetName(), one.GetVersion(), one.GetState(), one.GetReason()})
		}
		checkIndex(t, got, step)
	}
	for _, body := range []string{`{"ready": 1}`, "[", "x", "null", " null ", `{"ready": null}`} {
		if code, _, text := c.ask(http.MethodPost, "/v2/repository/index", body); code != http.StatusBadRequest {
			t.Errorf("%s: %d %s", body, code, text)
		}
	}
	if code, _, _ := c.ask(http.MethodGet, "/v2/repository/index", ""); code != http.StatusMethodNotAllowed {
		t.Errorf("GET is answered %d", code)
	}
}

func TestRepositoryIndexCountsAgainstTheBudget(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	service := oip.New(&fronttest.Caller{}, shelf{}, transport.Settings{})
	mux.Handle(service.Path(), service)
	for size, want := range map[int64]codes.Code{100 << 10: codes.ResourceExhausted, math.MaxInt32: codes.OK} {
		pool := budget.NewPool(budget.Settings{Limit: size})
		c := dial(t, fronttest.Serve(t, fronttest.WithMemory(mux, pool)))
		_, err := c.RepositoryIndex(t.Context(), &oipv2.RepositoryIndexRequest{})
		if status.Code(err) != want {
			t.Errorf("with %d bytes: %v", size, err)
		}
		testbed.Eventually(t, "the memory is free again", func() bool { return pool.Held() == 0 })
	}
}

func TestRepositoryLoadsAndUnloadsModels(t *testing.T) {
	t.Parallel()
	c, g := rest(t, &fronttest.Caller{}, oip.Model{}, transport.Settings{}), client(t, &fronttest.Caller{}, oip.Model{})
	config := map[string]*oipv2.ModelRepositoryParameter{"config": {ParameterChoice: &oipv2.ModelRepositoryParameter_StringParam{StringParam: "{}"}}}
	for _, test := range []struct {
		path, body string
		http       int
		grpc       codes.Code
	}{
		{"simple/load", "", http.StatusOK, codes.OK},
		{"simple/load", "{}", http.StatusOK, codes.OK},
		{"idle/load", "{}", http.StatusServiceUnavailable, codes.Unavailable},
		{"none/load", "{}", http.StatusNotFound, codes.NotFound},
		{"simple/load", `{"parameters": {"config": "{}"}}`, http.StatusNotImplemented, codes.Unimplemented},
		{"simple/unload", `{"parameters": {"config": "{}"}}`, http.StatusOK, codes.OK},
		{"simple/load", "null", http.StatusBadRequest, codes.OK},
		{"simple/unload", `{"parameters": null}`, http.StatusBadRequest, codes.OK},
		{"none/unload", "", http.StatusNotFound, codes.NotFound},
	} {
		if code, _, text := c.ask(http.MethodPost, "/v2/repository/models/"+test.path, test.body); code != test.http {
			t.Errorf("%s %s: %d %s", test.path, test.body, code, text)
		}
		name, verb, _ := strings.Cut(test.path, "/")
		parameters := config
		if !strings.Contains(test.body, "config") {
			parameters = nil
		}
		var err error
		if verb == "load" {
			_, err = g.RepositoryModelLoad(t.Context(), &oipv2.RepositoryModelLoadRequest{ModelName: name, Parameters: parameters})
		} else {
			_, err = g.RepositoryModelUnload(t.Context(), &oipv2.RepositoryModelUnloadRequest{ModelName: name, Parameters: parameters})
		}
		if status.Code(err) != test.grpc {
			t.Errorf("%s %s over gRPC: %v", test.path, test.body, err)
		}
	}
	for _, path := range []string{"/v2/repository", "/v2/repository/models/simple", "/v2/repository/models/simple/infer", "/v2/repository/models//load"} {
		if code, _, _ := c.ask(http.MethodPost, path, ""); code != http.StatusNotFound {
			t.Errorf("%s is answered %d", path, code)
		}
	}
}
