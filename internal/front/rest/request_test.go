package rest_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

const resultPath = "/v1/requests/" + fronttest.RequestID + "/result"

func fetch(query, accept string) ask {
	return ask{method: http.MethodGet, path: resultPath + query, header: map[string]string{"Accept": accept}}
}

func TestResultHasTheFormOfItsInference(t *testing.T) {
	t.Parallel()
	caller := fronttest.AnswerWith(payload.OfBlob("caption", "text/plain", []byte("a cat")))
	for _, accept := range []string{"*/*", "application/json"} {
		inferred := post("image/png", "x", "Accept", accept)
		inferred.path = "/v1/pipelines/stored:infer"
		want, got := inferred.of(t, caller), fetch("", accept).of(t, caller)
		if got.status != http.StatusOK || got.body != want.body {
			t.Errorf("Accept %s: %d %s, want %s", accept, got.status, got.body, want.body)
		}
		for _, name := range []string{"Content-Type", "Content-Security-Policy", "X-Content-Type-Options", "Stagemesh-Request-Id", "Server-Timing"} {
			if got.header.Get(name) != want.header.Get(name) {
				t.Errorf("Accept %s: %s %q, want %q", accept, name, got.header.Get(name), want.header.Get(name))
			}
		}
		if got.header.Get("Cache-Control") != "no-store" {
			t.Errorf("it may be kept: %v", got.header)
		}
	}
	if id, wait := caller.LastResult(); id != fronttest.RequestID || wait != 0 {
		t.Errorf("asked for %q with a wait of %s", id, wait)
	}
	if got := fetch("", "application/json").of(t, caller).document(t); got.ModelName != "stored" || got.RequestID != fronttest.RequestID {
		t.Errorf("got %+v", got)
	}
}

func TestWaitIsADurationOrMilliseconds(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{}
	for query, want := range map[string]time.Duration{
		"": 0, "?wait=5s": 5 * time.Second, "?wait=250": 250 * time.Millisecond, "?wait=0": 0, "?wait=-1s": -time.Second,
	} {
		if got := fetch(query, "").of(t, caller); got.status != http.StatusOK {
			t.Errorf("%q: %d %s", query, got.status, got.body)
		}
		if _, wait := caller.LastResult(); wait != want {
			t.Errorf("%q: a wait of %s, want %s", query, wait, want)
		}
	}
	for query, says := range map[string]string{
		"?wait=soon": "neither a duration", "?wait=99999999999999999": "too many", "?wait=-99999999999999999": "too many",
		"?wait=1s&wait=2s": "there 2 times", "?timeout=1s": "expected wait", "?wait=%zz": "cannot be read", "?wait=": "neither a duration",
	} {
		fetch(query, "").of(t, caller).wantFailure(t, http.StatusBadRequest, fault.InvalidRequest, says)
	}
}

func TestRequestIsCancelled(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{}
	off := ask{method: http.MethodDelete, path: "/v1/requests/" + fronttest.RequestID}
	if got := off.of(t, caller); got.status != http.StatusNoContent || got.body != "" || caller.LastCancelled() != fronttest.RequestID {
		t.Errorf("%d %q, and the caller was asked for %q", got.status, got.body, caller.LastCancelled())
	}
}

func TestKeyNamesTheRequest(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{Keys: map[request.Key]string{{Pipeline: "p", Key: "order 7"}: fronttest.RequestID}}
	with := func(method, path, key string) ask {
		return ask{method: method, path: path, header: map[string]string{"Idempotency-Key": key}}
	}
	if got := with(http.MethodGet, "/v1/pipelines/p:result?wait=5s", "order 7").of(t, caller); got.status != http.StatusOK || got.header.Get("Cache-Control") != "no-store" {
		t.Errorf("result: %d %s", got.status, got.body)
	}
	if id, wait := caller.LastResult(); id != fronttest.RequestID || wait != 5*time.Second {
		t.Errorf("asked for %q with a wait of %s", id, wait)
	}
	if got := with(http.MethodPost, "/v1/pipelines/p:cancel", "order 7").of(t, caller); got.status != http.StatusNoContent || caller.LastCancelled() != fronttest.RequestID {
		t.Errorf("cancel: %d %s, and the caller was asked for %q", got.status, got.body, caller.LastCancelled())
	}
	with(http.MethodGet, "/v1/pipelines/q:result", "order 7").of(t, caller).wantFailure(t, http.StatusNotFound, fault.NotFound, "key")
	with(http.MethodPost, "/v1/pipelines/p:cancel", "\xff").of(t, caller).wantFailure(t, http.StatusBadRequest, fault.InvalidRequest, "UTF-8")
	with(http.MethodGet, "/v1/pipelines/p:cancel", "order 7").of(t, caller).wantFailure(t, http.StatusMethodNotAllowed, fault.InvalidRequest, http.MethodPost)
}

func TestFailedResultHasItsRequestID(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{Err: fronttest.Fault(fault.BrokerUnavailable)}
	for _, a := range []ask{fetch("", ""), {method: http.MethodDelete, path: "/v1/requests/x"}} {
		got := a.of(t, caller)
		got.wantFailure(t, http.StatusServiceUnavailable, fault.BrokerUnavailable, "what went wrong")
		if got.header.Get("Stagemesh-Request-Id") != fronttest.RequestID || got.header.Get("Retry-After") != "2" {
			t.Errorf("%s: %v", a.method, got.header)
		}
	}
}

func TestWrongMethodNamesTheAllowedOne(t *testing.T) {
	t.Parallel()
	for path, want := range map[string]string{resultPath: "GET, HEAD", "/v1/requests/x": http.MethodDelete} {
		got := ask{method: http.MethodPut, path: path}.of(t, &fronttest.Caller{})
		got.wantFailure(t, http.StatusMethodNotAllowed, fault.InvalidRequest, want)
		if allow := got.header.Get("Allow"); allow != want {
			t.Errorf("%s: Allow %q, want %q", path, allow, want)
		}
	}
}
