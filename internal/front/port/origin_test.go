package port_test

import (
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

const (
	listed   = "https://app.example.com"
	stranger = "https://elsewhere.example.com"
	restPath = "/v1/pipelines/echo:infer"
	livePath = "/v1/pipelines/echo:stream"
)

func preflight(t *testing.T, url, origin string) testbed.Response {
	t.Helper()
	response, _ := testbed.Call(t, fronttest.Client(t, false), http.MethodOptions, url, "",
		"Origin", origin, "Access-Control-Request-Method", "POST",
		"Access-Control-Request-Headers", "connect-protocol-version,content-type,stagemesh-timeout,stagemesh-wait-for-capacity,traceparent")
	return response
}

func TestNoOtherOriginMayCallByDefault(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{}
	url := start(t, port.PublicSettings{Caller: caller})
	for _, path := range []string{restPath, livePath, inferencev1connect.InferenceServiceInferProcedure} {
		if got := preflight(t, url+path, stranger).Header; got.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s: preflight answered %v", path, got)
		}
		response, body := testbed.Call(t, fronttest.Client(t, false), http.MethodPost, url+path, "{}", "Origin", stranger, "Content-Type", "application/json")
		if response.StatusCode != http.StatusForbidden || !strings.Contains(body, "PERMISSION_DENIED") || response.Header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s: %s %s", path, response.Status, body)
		}
	}
	response, _ := testbed.Call(t, fronttest.Client(t, false), http.MethodPost, url+restPath, "x", "Sec-Fetch-Site", "cross-site", "Content-Type", "text/plain")
	if response.StatusCode != http.StatusForbidden {
		t.Errorf("a form of another site: %s", response.Status)
	}
	if caller.Last() != nil {
		t.Error("the caller was asked")
	}
	response, _ = testbed.Call(t, fronttest.Client(t, false), http.MethodPost, url+restPath, "x", "Origin", url, "Sec-Fetch-Site", "same-origin", "Content-Type", "text/plain")
	if response.StatusCode != http.StatusOK {
		t.Errorf("the gateway's own page: %s", response.Status)
	}
}

func TestListedOriginMayCall(t *testing.T) {
	t.Parallel()
	url := start(t, port.PublicSettings{Port: port.Port{Origins: []string{listed}}})
	for _, path := range []string{restPath, livePath, inferencev1connect.InferenceServiceInferProcedure} {
		got := preflight(t, url+path, listed)
		if got.StatusCode != http.StatusNoContent || got.Header.Get("Access-Control-Allow-Origin") != listed ||
			!strings.Contains(got.Header.Get("Access-Control-Allow-Headers"), "stagemesh-timeout") || got.Header.Get("Access-Control-Max-Age") != "7200" {
			t.Errorf("%s: %s %v", path, got.Status, got.Header)
		}
		if got := preflight(t, url+path, stranger).Header; got.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s: a stranger's preflight was answered %v", path, got)
		}
	}
	for _, path := range []string{restPath, livePath} {
		response, body := testbed.Call(t, fronttest.Client(t, false), http.MethodPost, url+path, "x", "Origin", listed, "Sec-Fetch-Site", "cross-site", "Content-Type", "text/plain")
		if response.StatusCode != http.StatusOK || response.Header.Get("Access-Control-Allow-Origin") != listed {
			t.Errorf("%s: %s %v %s", path, response.Status, response.Header, body)
		}
		exposed := response.Header.Get("Access-Control-Expose-Headers")
		for _, name := range []string{"Stagemesh-Request-Id", "Server-Timing", "Trailer-Server-Timing", "Grpc-Status", "Retry-After"} {
			if !strings.Contains(exposed, name) {
				t.Errorf("%s: %s is not exposed: %s", path, name, exposed)
			}
		}
	}
	response, _ := testbed.Call(t, fronttest.Client(t, false), http.MethodPost, url+restPath, "x", "Origin", stranger, "Content-Type", "text/plain")
	if response.StatusCode != http.StatusForbidden {
		t.Errorf("a stranger: %s", response.Status)
	}
}

func TestListedOriginMayFetchResultsAndCancel(t *testing.T) {
	t.Parallel()
	url := start(t, port.PublicSettings{Port: port.Port{Origins: []string{listed}}}) + "/v1/requests/" + fronttest.RequestID
	for method, path := range map[string]string{http.MethodGet: "/result", http.MethodDelete: ""} {
		got, _ := testbed.Call(t, fronttest.Client(t, false), http.MethodOptions, url+path, "", "Origin", listed, "Access-Control-Request-Method", method)
		if !strings.Contains(got.Header.Get("Access-Control-Allow-Methods"), method) {
			t.Errorf("%s: preflight answered %v", method, got.Header)
		}
		got, body := testbed.Call(t, fronttest.Client(t, false), method, url+path, "", "Origin", listed, "Sec-Fetch-Site", "cross-site")
		if got.StatusCode >= http.StatusBadRequest || got.Header.Get("Access-Control-Allow-Origin") != listed {
			t.Errorf("%s: %s %v %s", method, got.Status, got.Header, body)
		}
		if got, _ := testbed.Call(t, fronttest.Client(t, false), method, url+path, "", "Origin", stranger, "Sec-Fetch-Site", "cross-site"); got.Header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s: a stranger was answered %v", method, got.Header)
		}
	}
	got, _ := testbed.Call(t, fronttest.Client(t, false), http.MethodDelete, url, "", "Origin", stranger, "Sec-Fetch-Site", "cross-site")
	if got.StatusCode != http.StatusForbidden {
		t.Errorf("an unlisted origin cancelled: %s", got.Status)
	}
}

func TestListedOriginMaySendAndReadProtocolHeaders(t *testing.T) {
	t.Parallel()
	url := start(t, port.PublicSettings{Models: known{}, Docs: described{}, Port: port.Port{Origins: []string{listed}}})
	for path, row := range map[string]struct{ method, sent, read string }{
		"/v2/models/m/infer": {http.MethodPost, "inference-header-content-length", "Inference-Header-Content-Length"},
		"/openapi.json":      {http.MethodGet, "if-none-match", "Etag"},
		"/v1/jobs/x/events":  {http.MethodGet, "authorization,last-event-id", "Stagemesh-Job-State"},
		"/v1/chat/completions": {
			http.MethodPost, "authorization,content-type,openai-organization,openai-project,user-agent,x-stainless-arch,x-stainless-helper-method,x-stainless-lang,x-stainless-os," +
				"x-stainless-package-version,x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout", "X-Request-Id",
		},
	} {
		got, _ := testbed.Call(t, fronttest.Client(t, false), http.MethodOptions, url+path, "", "Origin", listed,
			"Access-Control-Request-Method", row.method, "Access-Control-Request-Headers", row.sent)
		if got.Header.Get("Access-Control-Allow-Headers") != row.sent {
			t.Errorf("%s: preflight answered %v", path, got.Header)
		}
		got, _ = testbed.Call(t, fronttest.Client(t, false), row.method, url+path, "{}", "Origin", listed)
		if exposed := got.Header.Get("Access-Control-Expose-Headers"); !slices.Contains(strings.Split(exposed, ", "), row.read) {
			t.Errorf("%s: %s is not exposed: %s", path, row.read, exposed)
		}
	}
}

func TestAllOriginsMayBeListed(t *testing.T) {
	t.Parallel()
	url := start(t, port.PublicSettings{Port: port.Port{Origins: []string{"*"}}})
	response, _ := testbed.Call(t, fronttest.Client(t, false), http.MethodPost, url+restPath, "x", "Origin", stranger, "Sec-Fetch-Site", "cross-site", "Content-Type", "text/plain")
	if response.StatusCode != http.StatusOK || response.Header.Get("Access-Control-Allow-Origin") != "*" {
		t.Errorf("%s %v", response.Status, response.Header)
	}
}

func TestOriginsThatAreNoneAreRefused(t *testing.T) {
	t.Parallel()
	for _, origins := range [][]string{{"app.example.com"}, {"https://app.example.com/"}, {"https://*.example.com"}, {"*", listed}, {""}} {
		if _, err := port.PublicHandler(port.PublicSettings{Caller: &fronttest.Caller{}, Port: port.Port{Origins: origins}}); err == nil {
			t.Errorf("%q was taken", origins)
		}
	}
}
