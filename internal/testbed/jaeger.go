package testbed

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// Jaeger is a Jaeger in a process of its own, with its traces in memory.
type Jaeger struct {
	daemon
	query, http, grpc string
}

const jaegerConfig = `
service:
  extensions: [jaeger_storage, jaeger_query]
  pipelines:
    traces: {receivers: [otlp], exporters: [jaeger_storage_exporter]}
  telemetry: {metrics: {level: none}}
extensions:
  jaeger_storage: {backends: {memory: {memory: {max_traces: 20000}}}}
  jaeger_query:
    storage: {traces: memory}
    http: {endpoint: "%s"}
    grpc: {endpoint: "%s"}
receivers:
  otlp: {protocols: {grpc: {endpoint: "%s"}, http: {endpoint: "%s"}}}
exporters:
  jaeger_storage_exporter: {trace_storage: memory}
`

// NewJaeger returns a Jaeger that does not run, and keeps its files in a folder.
func NewJaeger(folder string) (*Jaeger, error) {
	ports, err := FreePorts(4)
	if err != nil {
		return nil, err
	}
	j := &Jaeger{daemon: daemon{name: "jaeger", folder: folder}, query: local(ports[0]), grpc: local(ports[2]), http: local(ports[3])}
	text := fmt.Sprintf(jaegerConfig, j.query, local(ports[1]), j.grpc, j.http)
	return j, os.WriteFile(filepath.Join(folder, "jaeger.yaml"), []byte(text), 0o600)
}

// GRPC returns the URL that takes spans by gRPC.
func (j *Jaeger) GRPC() string { return "http://" + j.grpc }

// HTTP returns the URL that takes spans by HTTP.
func (j *Jaeger) HTTP() string { return "http://" + j.http }

// Start starts Jaeger, and waits until it answers.
func (j *Jaeger) Start() error {
	if err := j.launch("--config", filepath.Join(j.folder, "jaeger.yaml")); err != nil {
		return err
	}
	return j.awaitUntil(func() bool {
		_, err := j.traces("api/services")
		return err == nil
	}, Patience)
}

// JaegerSpan is a span as Jaeger has it.
type JaegerSpan struct {
	Trace, ID, Parent, Name, Service, Kind string
	Begin                                  time.Time
	Took                                   time.Duration
	Tags                                   map[string]any
	// Links are "trace/span", Events their names.
	Links, Events []string
}

type jaegerTrace struct {
	Spans []struct {
		TraceID, SpanID, OperationName, ProcessID string
		References                                []struct{ RefType, TraceID, SpanID string }
		StartTime, Duration                       int64
		Tags                                      []jaegerTag
		Logs                                      []struct{ Fields []jaegerTag }
	}
	Processes map[string]struct{ ServiceName string }
}

type jaegerTag struct {
	Key   string
	Value any
}

func (j *Jaeger) traces(path string) (out []jaegerTrace, err error) {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: consulRequest}
	response, err := client.Get("http://" + j.query + "/" + path) //nolint:noctx // the client has a timeout
	if err != nil {
		return nil, err
	}
	defer response.Body.Close() //nolint:errcheck // it is read
	var answer struct{ Data json.RawMessage }
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return nil, err
	}
	if !strings.HasPrefix(path, "api/traces") {
		return nil, nil
	}
	return out, json.Unmarshal(answer.Data, &out)
}

// Spans returns the spans of a trace that have arrived, in the order of their begin.
func (j *Jaeger) Spans(id string) []JaegerSpan {
	found, err := j.traces("api/traces/" + id)
	if err != nil || len(found) != 1 {
		return nil
	}
	return found[0].spans()
}

// Trace waits until a trace has so many spans, and returns them as Spans does.
func (j *Jaeger) Trace(t testing.TB, id string, spans int) []JaegerSpan {
	t.Helper()
	var out []JaegerSpan
	Eventually(t, fmt.Sprintf("trace %s has %d spans", id, spans), func() bool {
		out = j.Spans(id)
		return len(out) >= spans
	})
	if len(out) != spans {
		t.Fatalf("trace %s has %d spans, want %d:\n%s", id, len(out), spans, Tree(out))
	}
	return out
}

// Find waits until so many traces of a service have an operation, and returns their spans.
func (j *Jaeger) Find(t testing.TB, service, operation string, traces int) (out [][]JaegerSpan) {
	t.Helper()
	Eventually(t, fmt.Sprintf("%d traces of %s have %s", traces, service, operation), func() bool {
		found, err := j.traces(fmt.Sprintf("api/traces?service=%s&operation=%s&limit=1000", service, strings.ReplaceAll(operation, " ", "%20")))
		out = nil
		for _, one := range found {
			out = append(out, one.spans())
		}
		return err == nil && len(out) >= traces
	})
	return out
}

func (trace jaegerTrace) spans() (out []JaegerSpan) {
	for _, s := range trace.Spans {
		one := JaegerSpan{
			Trace: s.TraceID, ID: s.SpanID, Name: s.OperationName, Service: trace.Processes[s.ProcessID].ServiceName,
			Begin: time.UnixMicro(s.StartTime), Took: time.Duration(s.Duration) * time.Microsecond, Tags: map[string]any{},
		}
		for _, tag := range s.Tags {
			one.Tags[tag.Key] = tag.Value
		}
		one.Kind, _ = one.Tags["span.kind"].(string)
		for _, r := range s.References {
			if r.RefType == "CHILD_OF" && r.TraceID == s.TraceID {
				one.Parent = r.SpanID
			} else {
				one.Links = append(one.Links, r.TraceID+"/"+r.SpanID)
			}
		}
		for _, l := range s.Logs {
			for _, field := range l.Fields {
				if name, ok := field.Value.(string); ok && field.Key == "event" {
					one.Events = append(one.Events, name)
				}
			}
		}
		out = append(out, one)
	}
	slices.SortStableFunc(out, func(a, b JaegerSpan) int {
		return cmp.Or(a.Begin.Compare(b.Begin), cmp.Compare(a.Took, b.Took))
	})
	return out
}

// Tree returns the spans of a trace as indented lines: name, kind and service.
func Tree(spans []JaegerSpan) string {
	var b strings.Builder
	known := map[string]bool{}
	for _, s := range spans {
		known[s.ID] = true
	}
	var write func(parent string, depth int)
	write = func(parent string, depth int) {
		for _, s := range spans {
			if s.Parent == parent || depth == 0 && !known[s.Parent] {
				fmt.Fprintf(&b, "%s%s (%s, %s)\n", strings.Repeat("  ", depth), s.Name, s.Kind, s.Service)
				write(s.ID, depth+1)
			}
		}
	}
	write("", 0)
	return b.String()
}

// End ends Jaeger, and removes its files.
func (j *Jaeger) End() {
	j.Kill()
	_ = os.RemoveAll(j.folder) // it is a temporary folder
}
