package port_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/oip"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/jobs"
	"github.com/stagemesh/stagemesh/internal/openapi"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// start serves the whole of the package on a real port.
func start(t testing.TB, s port.PublicSettings) (url string) {
	t.Helper()
	if s.Caller == nil {
		s.Caller = &fronttest.Caller{}
	}
	handler, err := port.PublicHandler(s)
	if err != nil {
		t.Fatal(err)
	}
	// httptest's Close waits for the connections too.
	server := httptest.NewUnstartedServer(nil)
	server.Config = port.NewServer(handler, slog.New(slog.DiscardHandler))
	server.Start()
	t.Cleanup(server.Close)
	return server.URL
}

// startGRPC serves the RPC services with grpc-go.
func startGRPC(t testing.TB, s port.PublicSettings) (url string) {
	t.Helper()
	if s.Caller == nil {
		s.Caller = &fronttest.Caller{}
	}
	server, err := port.NewGRPC(s, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return fronttest.ServeGRPC(t, server)
}

func TestModelsOfAnyNameAreCalledOverHTTP(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{}
	base, client := start(t, port.PublicSettings{Caller: caller, Models: known{}}), fronttest.Client(t, false)
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	const body = `{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}`
	plain := []string{"plain", "org/name", "a:b", "a/b:c/d", "x;y", "+plus", ".", "..", "org/../up", "a//b", "infer"}
	escaped := append([]string{"org/name:infer", "org/infer", "ünï", "two words", "100%", "q?x=1&y#z", "a%2Fb", "m/versions/1", "end/"}, plain...)
	for form, names := range map[string][]string{"plain": plain, "escaped": escaped} {
		for _, name := range names {
			inPath := name
			if form == "escaped" {
				inPath = url.PathEscape(name)
			}
			for _, path := range []string{"/v1/pipelines/%s:infer", "/v1/pipelines/%s:stream", "/v2/models/%s/infer", "/v2/models/%s/versions/1/infer", "/v2/models/%s/generate"} {
				sent := body
				if strings.HasSuffix(path, "generate") {
					sent = `{"text_input": "x"}`
				}
				answer, text := testbed.Call(t, client, http.MethodPost, base+fmt.Sprintf(path, inPath), sent, "Content-Type", "application/json")
				if last := caller.Last(); answer.StatusCode != http.StatusOK || last.Pipeline != name {
					t.Errorf("%s, %q %s: %s %s, of %q", path, name, form, answer.Status, text, last.Pipeline)
				}
			}
			for _, path := range []string{"/v2/models/%s", "/v2/models/%s/ready", "/v2/models/%s/versions/1"} {
				answer, text := testbed.Call(t, client, http.MethodGet, base+fmt.Sprintf(path, inPath), "")
				var of struct{ Name string }
				if err := json.Unmarshal([]byte(text), &of); err != nil || answer.StatusCode != http.StatusOK || of.Name != name {
					t.Errorf("%s, %q %s: %s %s", path, name, form, answer.Status, text)
				}
			}
			for _, verb := range []string{"load", "unload"} {
				if answer, text := testbed.Call(t, client, http.MethodPost, base+"/v2/repository/models/"+inPath+"/"+verb, ""); text != `{"error":"NOT_FOUND: `+verb+" "+strings.ReplaceAll(name, "&", `\u0026`)+`"}`+"\n" {
					t.Errorf("%s %q %s: %s %s", verb, name, form, answer.Status, text)
				}
			}
		}
	}
}

// known says that there is any model, of which nothing is known.
type known struct{ oip.Models }

func (known) Ready(context.Context, string) error { return nil }
func (known) Model(string) (oip.Model, error)     { return oip.Model{}, nil }
func (known) Version() string                     { return "1" }
func (known) Load(_ context.Context, name string) error {
	return fault.New(fault.NotFound, "load "+name)
}

func (known) Unload(_ context.Context, name string) error {
	return fault.New(fault.NotFound, "unload "+name)
}

func TestLongStreamMayExceedTheBudgetInTotal(t *testing.T) {
	t.Parallel()
	pool := budget.NewPool(budget.Settings{Limit: 60_000}) // of both servers
	onEachServer(t, port.PublicSettings{Models: known{}, Port: port.Port{Memory: transport.NewMemory(pool), Origins: []string{listed}}}, func(t *testing.T, _ string, conn *grpc.ClientConn) {
		stream, err := oipv2.NewGRPCInferenceServiceClient(conn).ModelStreamInfer(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for range 60 { // beside the other server's
			if err := stream.Send(&oipv2.ModelInferRequest{ModelName: "m", Id: strings.Repeat("x", 1500)}); err != nil {
				t.Fatal(err)
			}
			if m, err := stream.Recv(); err != nil || m.GetErrorMessage() != "" {
				t.Fatalf("got %v, %v", m, err)
			}
		}
	})
}

func TestUnknownPathsGetTheErrorOfTheirProtocol(t *testing.T) {
	t.Parallel()
	url := start(t, port.PublicSettings{})
	client := fronttest.Client(t, false)
	for _, path := range []string{"/", "/v1/models", "/v2", "/favicon.ico"} {
		response, body := testbed.Call(t, client, http.MethodGet, url+path, "")
		if response.StatusCode != http.StatusNotFound || !strings.Contains(body, `"reason":"NOT_FOUND"`) {
			t.Errorf("%s: %s %s", path, response.Status, body)
		}
	}
}

// health knows the pipeline photos, which is broken when it says so.
func health(_ context.Context, name string) error {
	switch name {
	case "", "photos":
		return nil
	case "broken":
		return fault.New(fault.NoCapacity, "classify has no live host")
	}
	return fault.Newf(fault.UnknownPipeline, "there is no pipeline %q", name)
}

func TestHealthTakesAName(t *testing.T) {
	t.Parallel()
	onEachServer(t, port.PublicSettings{Port: port.Port{Health: health}}, func(t *testing.T, _ string, conn *grpc.ClientConn) {
		client := healthpb.NewHealthClient(conn)
		for service, want := range map[string]healthpb.HealthCheckResponse_ServingStatus{
			"":                                      healthpb.HealthCheckResponse_SERVING,
			"photos":                                healthpb.HealthCheckResponse_SERVING,
			"broken":                                healthpb.HealthCheckResponse_NOT_SERVING,
			inferencev1connect.InferenceServiceName: healthpb.HealthCheckResponse_SERVING,
		} {
			got, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{Service: service})
			if err != nil || got.GetStatus() != want {
				t.Errorf("%q: %v, %v", service, got, err)
			}
		}
		if _, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "nothing"}); status.Code(err) != codes.NotFound {
			t.Errorf("an unknown service: %v", err)
		}
	})
}

func TestHealthIsWatched(t *testing.T) {
	t.Parallel()
	ended := fault.New(fault.ShuttingDown, "the gateway is stopping")
	for name, start := range map[string]func(testing.TB, port.PublicSettings) string{"net/http": start, "grpc-go": startGRPC} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var now atomic.Pointer[fault.Fault]
			url := start(t, port.PublicSettings{Port: port.Port{Health: func(context.Context, string) error {
				if f := now.Load(); f != nil {
					return f
				}
				return nil
			}}})
			watch, err := healthpb.NewHealthClient(testbed.Dial(t, url)).Watch(t.Context(), &healthpb.HealthCheckRequest{Service: "photos"})
			if err != nil {
				t.Fatal(err)
			}
			for _, step := range []struct {
				health *fault.Fault
				want   healthpb.HealthCheckResponse_ServingStatus
			}{
				{nil, healthpb.HealthCheckResponse_SERVING},
				{fault.New(fault.UnknownPipeline, "it is deleted"), healthpb.HealthCheckResponse_SERVICE_UNKNOWN},
				{ended, healthpb.HealthCheckResponse_NOT_SERVING},
			} {
				now.Store(step.health)
				if got, err := watch.Recv(); err != nil || got.GetStatus() != step.want {
					t.Fatalf("%v, not %s: %v", got, step.want, err)
				}
			}
			if _, err := watch.Recv(); status.Code(err) != codes.Unavailable {
				t.Errorf("when the gateway stops: %v", err)
			}
		})
	}
}

// A Watch lasts, so many of them could take what probes have.
func TestWatchesCountAsProbes(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(testing.TB, port.PublicSettings) string{"net/http": start, "grpc-go": startGRPC} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			memory := transport.NewMemory(nil)
			memory.Anonymous = budget.NewPool(budget.Settings{Limit: 64 << 10})
			conn := testbed.Dial(t, start(t, port.PublicSettings{Port: port.Port{Memory: memory}}))
			ctx, cancel := context.WithCancel(t.Context())
			refused := 0
			for range 20 {
				watch, err := healthpb.NewHealthClient(conn).Watch(ctx, &healthpb.HealthCheckRequest{})
				if err == nil {
					_, err = watch.Recv()
				}
				if err != nil {
					refused++
				}
			}
			if refused < 12 {
				t.Errorf("%d of 20 are refused", refused)
			}
			cancel()
			testbed.Eventually(t, "their memory is free again", func() bool { return memory.Anonymous.Held() == 0 })
		})
	}
}

func TestProbes(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		health port.Health
		status int
		text   string
	}{
		"nobody asked": {nil, 200, `{"status":"ok"}`},
		"ready":        {health, 200, `{"status":"ok"}`},
		"not ready":    {func(context.Context, string) error { return errors.New("the broker is disconnected") }, 503, "not ready: the broker is disconnected"},
		"without broker": {func(context.Context, string) error {
			return fault.New(fault.BrokerUnavailable, "the broker is disconnected")
		}, 503, `"reason":"BROKER_UNAVAILABLE"`},
		"with its reason": {func(context.Context, string) error { return fault.New(fault.ShuttingDown, "draining") }, 503, `"reason":"SHUTTING_DOWN"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := start(t, port.PublicSettings{Port: port.Port{Health: row.health}})
			client := fronttest.Client(t, false)
			response, body := testbed.Call(t, client, http.MethodGet, url+"/readyz", "")
			if response.StatusCode != row.status || !strings.Contains(body, row.text) || response.Header.Get("Content-Type") != "application/json" {
				t.Errorf("readyz: %s %s", response.Status, body)
			}
			if response, body := testbed.Call(t, client, http.MethodGet, url+"/livez", ""); response.StatusCode != http.StatusOK {
				t.Errorf("livez: %s %s", response.Status, body)
			}
		})
	}
}

func TestPipelineHasItsOwnProbe(t *testing.T) {
	t.Parallel()
	url := start(t, port.PublicSettings{Port: port.Port{Health: func(_ context.Context, name string) error {
		switch name {
		case "idle":
			return fault.New(fault.NoCapacity, "it has no host")
		case "unknown":
			return fault.New(fault.UnknownPipeline, "there is none; there is secret")
		}
		return nil
	}}})
	for name, want := range map[string]int{"": http.StatusOK, "fine": http.StatusOK, "idle": http.StatusServiceUnavailable, "unknown": http.StatusNotFound} {
		if response, body := testbed.Call(t, fronttest.Client(t, false), http.MethodGet, url+"/readyz?pipeline="+name, ""); response.StatusCode != want || strings.Contains(body, "secret") {
			t.Errorf("%q: %s %s", name, response.Status, body)
		}
	}
}

func TestReflectionNamesAndDescribesTheServices(t *testing.T) {
	t.Parallel()
	onEachServer(t, port.PublicSettings{}, func(t *testing.T, url string, _ *grpc.ClientConn) {
		stream := grpcreflect.NewClient(fronttest.Client(t, true), url, connect.WithGRPC()).NewStream(t.Context())
		services, err := stream.ListServices()
		if err != nil || len(services) != 2 {
			t.Fatalf("got %v, %v", services, err)
		}
		for _, service := range services {
			if files, err := stream.FileContainingSymbol(service); err != nil || len(files) == 0 {
				t.Errorf("%s: %v, %v", service, files, err)
			}
			if pipeline.ValidPipelineName(string(service)) == nil {
				t.Errorf("a pipeline may have the name %s", service)
			}
		}
		if _, err := stream.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestBothVersionsOfReflectionAreThere(t *testing.T) {
	t.Parallel()
	onEachServer(t, port.PublicSettings{}, func(t *testing.T, url string, _ *grpc.ClientConn) {
		for _, service := range []string{grpcreflect.ReflectV1ServiceName, grpcreflect.ReflectV1AlphaServiceName} {
			response, _ := testbed.Call(t, fronttest.Client(t, true), http.MethodPost, url+"/"+service+"/ServerReflectionInfo", "", "Content-Type", "application/grpc")
			if got := response.Header.Get("Grpc-Status") + response.Trailer.Get("Grpc-Status"); got != "0" {
				t.Errorf("%s: %s %v", service, response.Status, response.Trailer)
			}
		}
	})
}

func TestGetImpliesHead(t *testing.T) {
	t.Parallel()
	url := start(t, port.PublicSettings{Models: known{}, Docs: described{}})
	for _, h2c := range []bool{false, true} {
		client := fronttest.Client(t, h2c)
		client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		for _, path := range []string{
			"/livez", "/readyz", "/", "/docs", "/openapi.json", "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/m", "/v2/models/m/ready", "/v2/models/none",
			"/v1/requests/" + fronttest.RequestID + "/result", "/v1/requests/x/result?wait=never", "/v1/nothing",
		} {
			get, _ := testbed.Call(t, client, http.MethodGet, url+path, "")
			head, body := testbed.Call(t, client, http.MethodHead, url+path, "")
			if head.StatusCode != get.StatusCode || body != "" || head.Header.Get("Content-Type") != get.Header.Get("Content-Type") {
				t.Errorf("%s: GET is %s, HEAD is %s with %q", path, get.Status, head.Status, body)
			}
		}
	}
}

func TestWrongMethodIsRejectedInTheFormOfItsPath(t *testing.T) {
	t.Parallel()
	url := start(t, port.PublicSettings{Models: known{}, Docs: described{}, Jobs: &jobs.Service{}, Batches: &jobs.Service{}})
	const plain, tensors, openAI = `{"error":{"code":"INVALID_ARGUMENT"`, `{"error":"INVALID_REQUEST: `, `{"error":{"code":"invalid_request"`
	for path, want := range map[string][2]string{
		"/livez": {"GET, HEAD", plain}, "/readyz": {"GET, HEAD", plain}, "/": {"GET, HEAD", plain}, "/docs/docs.css": {"GET, HEAD", plain}, "/openapi.json": {"GET, HEAD", plain},
		"/v2": {"GET, HEAD", tensors}, "/v2/health/live": {"GET, HEAD", tensors}, "/v2/models/m/infer": {"POST", tensors},
		"/v1/pipelines/p:infer": {"POST", plain}, "/v1/requests/x": {"DELETE", plain}, "/v1/requests/x/result": {"GET, HEAD", plain},
		"/v1/jobs/x": {"DELETE, GET, HEAD", plain}, "/v1/queues/q/jobs": {"GET, HEAD, POST", plain}, "/v1/jobs/x/events": {"GET, HEAD", plain},
		"/v1/files": {"GET, HEAD, POST", openAI}, "/v1/files/x": {"DELETE, GET, HEAD", openAI}, "/v1/files/x/content": {"GET, HEAD", openAI}, "/v1/batches/x/cancel": {"POST", openAI},
	} {
		for _, method := range []string{http.MethodTrace, http.MethodPatch} {
			got, body := testbed.Call(t, fronttest.Client(t, false), method, url+path, "")
			if got.StatusCode != http.StatusMethodNotAllowed || got.Header.Get("Allow") != want[0] || !strings.HasPrefix(body, want[1]) || !strings.Contains(body, "not "+method) {
				t.Errorf("%s %s: %s, Allow %q, %s", method, path, got.Status, got.Header.Get("Allow"), body)
			}
		}
	}
}

func TestServerHasBounds(t *testing.T) {
	t.Parallel()
	server := port.NewServer(http.NotFoundHandler(), slog.New(slog.DiscardHandler))
	if server.ReadHeaderTimeout <= 0 || server.ConnState == nil || server.MaxHeaderBytes <= 0 || server.ReadTimeout != 0 || server.WriteTimeout != 0 {
		t.Errorf("got %+v", server)
	}
	url := start(t, port.PublicSettings{})
	response, _ := testbed.Call(t, fronttest.Client(t, false), http.MethodGet, url+"/livez", "", "X-Large", strings.Repeat("x", 100<<10))
	if response.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("100 KiB of headers: %s", response.Status)
	}
}

// described is a source of a document.
type described struct{}

func (described) Document(context.Context) (*openapi.Document, error) {
	return openapi.NewDocument([]byte(`{"openapi": "3.1.0"}`)), nil
}

func TestPageNeedsNoTokenButDocumentDoes(t *testing.T) {
	t.Parallel()
	tokens, err := credentials.NewTokens("open-sesame")
	if err != nil {
		t.Fatal(err)
	}
	url := start(t, port.PublicSettings{Docs: described{}, Port: port.Port{Tokens: tokens, TokensKey: "token_file"}})
	client := fronttest.Client(t, false)
	for path, want := range map[string]int{
		"/docs": 200, "/docs/": 200, "/docs/docs.css": 200, "/docs/none": 404, "/docsx": 401, "/openapi.json": 401, "/": 401,
	} {
		if response, body := testbed.Call(t, client, http.MethodGet, url+path, ""); response.StatusCode != want {
			t.Errorf("%s: %s %s", path, response.Status, body)
		}
	}
	if response, body := testbed.Call(t, client, http.MethodGet, url+"/openapi.json", ""); !strings.Contains(body, `"reason":"UNAUTHENTICATED"`) || response.Header.Get("WWW-Authenticate") != "Bearer" {
		t.Errorf("%s %v", body, response.Header)
	}
	if response, body := testbed.Call(t, client, http.MethodGet, url+"/openapi.json", "", "Authorization", "Bearer open-sesame"); response.StatusCode != http.StatusOK || !strings.Contains(body, "3.1.0") {
		t.Errorf("%s %s", response.Status, body)
	}
}

func TestRejectionHasTheFormOfItsPath(t *testing.T) {
	t.Parallel()
	tokens, err := credentials.NewTokens("open-sesame")
	if err != nil {
		t.Fatal(err)
	}
	const plain, tensors, called = `{"error":{"code":"`, `{"error":"`, `{"code":"`
	guarded := start(t, port.PublicSettings{Models: known{}, Docs: described{}, Port: port.Port{Tokens: tokens, TokensKey: "token_file"}})
	open := start(t, port.PublicSettings{Models: known{}, Docs: described{}})
	client := fronttest.Client(t, false)
	for path, want := range map[string]string{
		"/v1/pipelines/echo:infer": plain, "/v1/pipelines/echo:stream": plain, "/openapi.json": plain, "/DOCS": plain, "/": plain, "/v2x": plain, "/some.Service/Method": plain,
		"/v2": tensors, "/v2/models/m/infer": tensors,
		inferencev1connect.InferenceServiceInferProcedure: called, "/inference.GRPCInferenceService/ModelInfer": called,
		"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": called,
	} {
		response, body := testbed.Call(t, client, http.MethodPost, guarded+path, "{}", "Content-Type", "application/json")
		if response.StatusCode != http.StatusUnauthorized || !strings.HasPrefix(body, want) || response.Header.Get("WWW-Authenticate") != "Bearer" {
			t.Errorf("%s without a token: %s %s", path, response.Status, body)
		}
		if want == called {
			want = plain // no page reads it
		}
		response, body = testbed.Call(t, client, http.MethodPost, open+path, "{}", "Content-Type", "application/json", "Origin", stranger)
		if response.StatusCode != http.StatusForbidden || !strings.HasPrefix(body, want) || !strings.Contains(body, "PERMISSION_DENIED") {
			t.Errorf("%s of another origin: %s %s", path, response.Status, body)
		}
	}
	err = testbed.Dial(t, guarded).Invoke(t.Context(), "/some.Service/Method", &inferencev1.InferRequest{}, &inferencev1.InferResponse{})
	if got := status.Convert(err); got.Code() != codes.Unauthenticated || len(got.Details()) == 0 {
		t.Errorf("gRPC to no service: %v", err)
	}
}

func TestNotFoundNamesTheDocument(t *testing.T) {
	t.Parallel()
	client := fronttest.Client(t, false)
	for _, described := range []openapi.Source{nil, described{}} {
		url := start(t, port.PublicSettings{Docs: described})
		for _, path := range []string{"/v1/pipelines/x:nonsense", "/docs/nothing"} {
			_, body := testbed.Call(t, client, http.MethodPost, url+path, "")
			if !strings.Contains(body, "<pipeline>:infer") || !strings.Contains(body, ":stream") {
				t.Errorf("%s: %s", path, body)
			}
		}
		if _, body := testbed.Call(t, client, http.MethodGet, url+"/docs/nothing", ""); strings.Contains(body, "/openapi.json") != (described != nil) {
			t.Errorf("with %v: %s", described, body)
		}
	}
}

func TestPagesOfOthersDoNotReadTheDocument(t *testing.T) {
	t.Parallel()
	url := start(t, port.PublicSettings{Docs: described{}, Port: port.Port{Origins: []string{listed}}})
	client := fronttest.Client(t, false)
	for origin, want := range map[string]string{stranger: "", listed: listed} {
		response, _ := testbed.Call(t, client, http.MethodGet, url+"/openapi.json", "", "Origin", origin)
		if got := response.Header.Get("Access-Control-Allow-Origin"); got != want {
			t.Errorf("%s: %q", origin, got)
		}
	}
}
