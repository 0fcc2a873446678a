package adminapi_test

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/stagemesh/stagemesh/internal/testbed"
	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"

	"github.com/stagemesh/stagemesh/internal/adminapi"
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func tokens(t *testing.T, text string) credentials.Tokens {
	t.Helper()
	out, err := credentials.NewTokens(text)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestCallsWithoutValidTokenAreRejected(t *testing.T) {
	t.Parallel()
	url := serve(t, adminapi.Settings{DeadLetters: &fake{}, Tokens: tokens(t, "open-sesame")})
	for _, p := range protocols() {
		for authorization, served := range map[string]bool{
			"": false, "Bearer": false, "Bearer ": false, "Bearer open": false, "Bearer open-sesame2": false, "Basic open-sesame": false,
			"open-sesame": false, "Bearer open-sesame": true, "bearer  open-sesame": true,
		} {
			request := connect.NewRequest(&adminv1.ListDeadLettersRequest{})
			request.Header().Set("Authorization", authorization)
			_, err := p.client(t, url).ListDeadLetters(t.Context(), request)
			switch {
			case served && err != nil:
				t.Errorf("%s, %q: %v", p.name, authorization, err)
			case !served:
				expect(t, p.name+", "+authorization, err, fault.Unauthenticated)
			}
			if err != nil && strings.Contains(err.Error(), "sesame") {
				t.Errorf("%s: %v contains the token", p.name, err)
			}
		}
	}
}

func do(t *testing.T, method, url string, edits ...func(*http.Request)) (testbed.Response, string) {
	t.Helper()
	r := testbed.Request(t, method, url, strings.NewReader("{}"))
	r.Header.Set("Content-Type", "application/json")
	for _, edit := range edits {
		edit(r)
	}
	response, body := testbed.Do(t, fronttest.Client(t, false), r)
	return response, string(body)
}

func TestRejectedCallReportsRequiredToken(t *testing.T) {
	t.Parallel()
	url := serve(t, adminapi.Settings{DeadLetters: &fake{}, Tokens: tokens(t, "open-sesame")})
	for _, path := range []string{adminv1connect.DeadLetterServiceListDeadLettersProcedure, "/elsewhere", "/pages/", "/page/.." + adminv1connect.ModelServiceListModelsProcedure, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"} {
		response, body := do(t, http.MethodPost, url+path)
		if response.StatusCode != http.StatusUnauthorized || response.Header.Get("WWW-Authenticate") != "Bearer" || !strings.Contains(body, "Authorization: Bearer TOKEN") {
			t.Errorf("%s: %s %s", path, response.Status, body)
		}
	}
}

func TestProbesNeedNoToken(t *testing.T) {
	t.Parallel()
	var stopping atomic.Bool
	url := serve(t, adminapi.Settings{DeadLetters: &fake{}, Tokens: tokens(t, "open-sesame"), Health: func() error {
		if stopping.Load() {
			return fault.New(fault.ShuttingDown, "the gateway is stopping")
		}
		return nil
	}})
	conn := testbed.Dial(t, url)
	for _, want := range []healthpb.HealthCheckResponse_ServingStatus{healthpb.HealthCheckResponse_SERVING, healthpb.HealthCheckResponse_NOT_SERVING} {
		status := http.StatusOK
		if want != healthpb.HealthCheckResponse_SERVING {
			status = http.StatusServiceUnavailable
			stopping.Store(true)
		}
		if response, body := do(t, http.MethodGet, url+"/readyz"); response.StatusCode != status {
			t.Errorf("readyz: %s %s", response.Status, body)
		}
		for _, name := range []string{"", adminv1connect.DeadLetterServiceName} {
			answer, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: name})
			if err != nil || answer.GetStatus() != want {
				t.Errorf("health of %q: %v, %v", name, answer, err)
			}
		}
	}
	for path, want := range map[string]string{"/livez": "ok", "/page/": "Aliases", "/": `<a href="page/">`} {
		if response, body := do(t, http.MethodGet, url+path); response.StatusCode != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: %s %s", path, response.Status, body)
		}
	}
	if _, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: "pipeline"}); err == nil {
		t.Error("the health of an unknown service is known")
	}
}

func TestReflectionListsServices(t *testing.T) {
	t.Parallel()
	url := serve(t, adminapi.Settings{DeadLetters: &fake{}})
	stream := grpcreflect.NewClient(fronttest.Client(t, true), url, connect.WithGRPC()).NewStream(t.Context())
	names, err := stream.ListServices()
	if _, closeErr := stream.Close(); err != nil || closeErr != nil {
		t.Fatal(err, closeErr)
	}
	found := false
	for _, name := range names {
		found = found || string(name) == adminv1connect.DeadLetterServiceName
		if pipeline.ValidPipelineName(string(name)) == nil {
			t.Errorf("a pipeline may have the name %s", name)
		}
	}
	if !found {
		t.Errorf("services are %v", names)
	}
}

// A page may let its own name resolve to 127.0.0.1, and then has the origin of the
// port.
func TestPortWithoutTokenRequiresLoopbackHost(t *testing.T) {
	t.Parallel()
	open := serve(t, adminapi.Settings{DeadLetters: &fake{}})
	closed := serve(t, adminapi.Settings{DeadLetters: &fake{}, Tokens: tokens(t, "open-sesame")})
	for host, served := range map[string]bool{
		"localhost": true, "LOCALHOST:1": true, "127.0.0.1": true, "127.9.9.9:80": true, "[::1]:80": true, "[::1]": true,
		"evil.example": false, "evil.example:9080": false, "localhost.evil.example": false, "10.0.0.1": false, "[fe80::1]:80": false,
	} {
		path := adminv1connect.DeadLetterServiceListDeadLettersProcedure
		named := func(r *http.Request) { r.Host = host }
		if response, body := do(t, http.MethodPost, open+path, named); (response.StatusCode == http.StatusOK) != served || strings.Contains(body, "UNAUTHENTICATED") == served {
			t.Errorf("%s: %s %s", host, response.Status, body)
		}
		response, body := do(t, http.MethodPost, closed+path, named, func(r *http.Request) { r.Header.Set("Authorization", "Bearer open-sesame") })
		if response.StatusCode != http.StatusOK {
			t.Errorf("%s, with the token: %s %s", host, response.Status, body)
		}
	}
}

func TestCrossOriginCallsAreRejected(t *testing.T) {
	t.Parallel()
	url := serve(t, adminapi.Settings{DeadLetters: &fake{}})
	response, body := do(t, http.MethodPost, url+adminv1connect.DeadLetterServiceListDeadLettersProcedure, func(r *http.Request) {
		r.Header.Set("Origin", "https://evil.example")
		r.Header.Set("Sec-Fetch-Site", "cross-site")
	})
	if response.StatusCode != http.StatusForbidden || !strings.Contains(body, "PERMISSION_DENIED") || response.Header.Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("%s %s", response.Status, body)
	}
}

func TestOversizedRequestIsRejected(t *testing.T) {
	t.Parallel()
	client := open(t, &fake{})
	_, err := client.ListDeadLetters(t.Context(), connect.NewRequest(&adminv1.ListDeadLettersRequest{Stage: strings.Repeat("x", 8<<20)}))
	expect(t, "a large request", err, fault.PayloadTooLarge)
}

func TestUnknownPathIsNotFound(t *testing.T) {
	t.Parallel()
	response, body := do(t, http.MethodPost, serve(t, adminapi.Settings{DeadLetters: &fake{}})+"/v1/pipelines/p:infer")
	if response.StatusCode != http.StatusNotFound || !strings.Contains(body, "this is the admin port") {
		t.Errorf("%s %s", response.Status, body)
	}
}
