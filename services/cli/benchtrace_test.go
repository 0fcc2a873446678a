package cli_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
)

func TestBenchTracesOnRequest(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		args []string
		want bool
	}{
		"traced":   {[]string{"--traced"}, true},
		"untraced": {nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var received, traced atomic.Int64
			server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				received.Add(1)
				if r.Header.Get("traceparent") != "" {
					traced.Add(1)
				}
			}))
			t.Cleanup(server.Close)
			args := append([]string{"digits", "--payload", "1", "-a", server.URL, "--protocol", "http", "--warmup", "0s", "--requests", "5", "--concurrency", "2"}, test.args...)
			r, out := reported(t, args...)
			if r.Subject.Traced != test.want || strings.Contains(out, "each request with a trace") != test.want {
				t.Errorf("got %+v\n%s", r.Subject, out)
			}
			// One more precedes the measurement.
			want := int64(0)
			if test.want {
				want = received.Load()
			}
			if received.Load() != 6 || traced.Load() != want {
				t.Errorf("%d of %d requests have a trace", traced.Load(), received.Load())
			}
		})
	}
}
