package load_test

import (
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// traceServer is a server of HTTP/1.1 and HTTP/2 that keeps the traceparents of its
// requests. Its answers are of no protocol.
type traceServer struct {
	mu      sync.Mutex
	parents []string
}

// ServeHTTP implements http.Handler.
func (s *traceServer) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.parents = append(s.parents, strings.Join(r.Header.Values("traceparent"), " and "))
}

// traceParents returns the traceparents of a number of requests.
func traceParents(t *testing.T, requests int, s load.ClientSettings) []string {
	t.Helper()
	received := &traceServer{}
	server := httptest.NewUnstartedServer(received)
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetHTTP1(true)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	t.Cleanup(server.Close)
	s.Address, s.Pipeline, s.Inputs = server.URL, "p", [][]payload.Part{{payload.OfBlob("x", "text/plain", []byte("x"))}}
	to := open(t, s)
	for range requests {
		_ = to.Do(t.Context(), &load.Answer{}) // only the request matters
	}
	received.mu.Lock()
	defer received.mu.Unlock()
	return received.parents
}

// sampled matches the traceparent of a sampled trace.
var sampled = regexp.MustCompile(`^00-([0-9a-f]{32})-([0-9a-f]{16})-01$`)

func TestEveryTracedRequestHasItsOwnTrace(t *testing.T) {
	t.Parallel()
	const requests = 20
	ways := map[string]load.ClientSettings{"a stream": {Protocol: load.Connect, Streams: true, Token: "any"}}
	for _, protocol := range protocols {
		ways[string(protocol)] = load.ClientSettings{Protocol: protocol, Token: "any"}
	}
	for name, s := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s.Traced = true
			traces, spans := map[string]bool{}, map[string]bool{}
			for _, text := range traceParents(t, requests, s) {
				ids := sampled.FindStringSubmatch(text)
				if ids == nil || strings.Trim(ids[1], "0") == "" || strings.Trim(ids[2], "0") == "" {
					t.Fatalf("got %q", text)
				}
				traces[ids[1]], spans[ids[2]] = true, true
			}
			if len(traces) != requests || len(spans) != requests {
				t.Errorf("%d requests have %d traces and %d spans", requests, len(traces), len(spans))
			}
		})
	}
}

func TestRequestsHaveNoTraceByDefault(t *testing.T) {
	t.Parallel()
	for _, protocol := range protocols {
		t.Run(string(protocol), func(t *testing.T) {
			t.Parallel()
			got := traceParents(t, 1, load.ClientSettings{Protocol: protocol})
			if len(got) != 1 || got[0] != "" {
				t.Errorf("got %q", got)
			}
		})
	}
}
