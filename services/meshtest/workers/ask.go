package workers

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// Answer is the result of a request.
type Answer struct {
	Text     string
	Response *call.Response
	Fault    *fault.Fault
	At       time.Time
	Took     time.Duration
}

// Ask sends a text and waits for its answer.
func (b *Bed) Ask(text string) Answer { return b.ask(b.t.Context(), text) }

func (b *Bed) ask(ctx context.Context, text string) Answer {
	begin := time.Now()
	response, err := b.Gateway.Service().Infer(ctx, &call.Request{
		Pipeline: "stage:" + Stage, Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte(text))},
	})
	now := time.Now()
	return Answer{Text: text, Response: response, Fault: FaultOf(err), At: now, Took: now.Sub(begin)}
}

// FaultOf returns the fault of a call; nil where it succeeded.
func FaultOf(err error) *fault.Fault {
	if err == nil {
		return nil
	}
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	return fault.Newf("NO_FAULT_AT_ALL", "%w", err)
}

// Send sends a text; the channel gets its answer.
func (b *Bed) Send(ctx context.Context, text string) <-chan Answer {
	out := make(chan Answer, 1)
	go func() { out <- b.ask(ctx, text) }()
	return out
}

// AskAll sends all texts at once and waits for their answers, which come in the
// order of the texts.
func (b *Bed) AskAll(texts []string) []Answer {
	out := make([]Answer, len(texts))
	var calls sync.WaitGroup
	for i, text := range texts {
		calls.Go(func() { out[i] = b.Ask(text) })
	}
	calls.Wait()
	return out
}

// Received waits for an answer.
func (b *Bed) Received(from <-chan Answer) Answer {
	b.t.Helper()
	return testbed.Receive(b.t, "answer", from)
}

// Worker is the index of the worker that answered.
func (a Answer) Worker() string { return a.Response.Metadata["worker"] }

// Succeeds fails the test unless the text came back.
func (a Answer) Succeeds(t testing.TB) {
	t.Helper()
	switch {
	case a.Fault != nil:
		t.Errorf("%q is answered with %v after %s", a.Text, a.Fault, a.Took)
	case len(a.Response.Outputs) != 1 || string(a.Response.Outputs[0].Blob.Data) != a.Text:
		t.Errorf("%q is answered with %v", a.Text, a.Response.Outputs)
	}
}

// Fails fails the test unless the answer is a fault of that reason whose message
// has the words.
func (a Answer) Fails(t testing.TB, reason fault.Reason, words string) {
	t.Helper()
	switch {
	case a.Fault == nil:
		t.Errorf("%q is answered with %v, want %s", a.Text, a.Response.Outputs, reason)
	case a.Fault.Reason != reason || !strings.Contains(a.Fault.Message, words):
		t.Errorf("%q is answered with %v, want %s and %q", a.Text, a.Fault, reason, words)
	}
}

// Count returns a metric of the host or the gateway, over all its series. A counter
// that has not begun is 0.
func (b *Bed) Count(metric string) int {
	b.t.Helper()
	page := httptest.NewRecorder()
	b.metrics.Handler().ServeHTTP(page, httptest.NewRequestWithContext(b.t.Context(), http.MethodGet, "/metrics", http.NoBody))
	sum := 0.0
	for line := range strings.Lines(page.Body.String()) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if series, _, _ := strings.Cut(name, "{"); series != metric {
			continue
		}
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			b.t.Fatalf("%s: %v", line, err)
		}
		sum += n
	}
	return int(sum)
}
