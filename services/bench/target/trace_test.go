package target_test

import (
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh/services/bench/load"
	"github.com/stagemesh/stagemesh/services/bench/target"
)

// ear is a server of HTTP/1.1 and HTTP/2 that hears traces, and answers nothing that
// anybody understands.
type ear struct {
	mu    sync.Mutex
	heard []string
}

// ServeHTTP implements http.Handler.
func (e *ear) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.heard = append(e.heard, strings.Join(r.Header.Values("traceparent"), " and "))
}

// hears returns what it hears of so many requests.
func hears(t *testing.T, requests int, s target.Settings) []string {
	t.Helper()
	e := &ear{}
	server := httptest.NewUnstartedServer(e)
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetHTTP1(true)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	t.Cleanup(server.Close)
	s.Address, s.Pipeline, s.Inputs = server.URL, "p", inputs(t)
	to := open(t, s)
	for range requests {
		_ = to.Do(t.Context(), &load.Answer{}) // it is the request that counts
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.heard
}

// A traceparent by which a trace is recorded.
var sampled = regexp.MustCompile(`^00-([0-9a-f]{32})-([0-9a-f]{16})-01$`)

func TestEveryRequestBeginsATraceOfItsOwnInEveryProtocol(t *testing.T) {
	t.Parallel()
	const requests = 20
	ways := map[string]target.Settings{"a stream": {Protocol: target.Connect, Streams: true, Token: "kept"}}
	for _, protocol := range protocols {
		ways[string(protocol)] = target.Settings{Protocol: protocol, Token: "kept"}
	}
	for name, s := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s.Traced = true
			traces, spans := map[string]bool{}, map[string]bool{}
			for _, text := range hears(t, requests, s) {
				ids := sampled.FindStringSubmatch(text)
				if ids == nil || strings.Trim(ids[1], "0") == "" || strings.Trim(ids[2], "0") == "" {
					t.Fatalf("it hears %q", text)
				}
				traces[ids[1]], spans[ids[2]] = true, true
			}
			if len(traces) != requests || len(spans) != requests {
				t.Errorf("of %d requests it hears %d traces and %d spans", requests, len(traces), len(spans))
			}
		})
	}
}

func TestARequestBeginsNoTraceUnlessItIsToldTo(t *testing.T) {
	t.Parallel()
	for _, protocol := range protocols {
		t.Run(string(protocol), func(t *testing.T) {
			t.Parallel()
			heard := hears(t, 1, target.Settings{Protocol: protocol})
			if len(heard) != 1 || heard[0] != "" {
				t.Errorf("it hears %q", heard)
			}
		})
	}
}
