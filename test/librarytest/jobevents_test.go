package librarytest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// startLetters starts a mesh that spells jobs in chunks, and a second gateway of it. Each letter
// takes a token, where there are some; before the third one the first run of a text with ! hangs.
func startLetters(t *testing.T, tokens <-chan struct{}) (m, second *stagemesh.Mesh) {
	t.Helper()
	const file = `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
nats: {%s}
stages: {echo: {runner: {echo: {}}}}
pipelines: {spell: {steps: [{name: s, stage: spell}]}, p: {steps: [{name: e, stage: echo}]}}
jobs:
  pools: {main: {target: {pipelines: [spell, p]}}}
  queues: {nightly: {}}
`
	var hung atomic.Bool
	idle := time.Duration(0) // the default
	if tokens == nil {
		idle = 200 * time.Millisecond
	}
	spell := inproc.Stream(inproc.Settings{}, func(ctx context.Context, item runner.Item, send func(...payload.Part) error) ([]payload.Part, error) {
		text := item.Inputs[0].Blob.Data
		for i := range text {
			if i == 2 && strings.Contains(string(text), "!") && !hung.Swap(true) {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			if tokens != nil {
				select {
				case <-tokens:
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}
			if err := send(payload.OfBlob("text", "text/plain", text[i:i+1])); err != nil {
				return nil, err
			}
		}
		return item.Inputs, nil
	})
	begin := func(nats string, s stagemesh.FileSettings) *stagemesh.Mesh {
		out := meshtest.FromFile(t, meshtest.Parse(t, fmt.Sprintf(file, nats)), s)
		if s.Dispatcher {
			if err := out.AddStage(stagemesh.Stage{Name: "spell", Runner: spell, Config: stagehost.Config{Stream: stagehost.StreamSettings{Idle: idle}}}); err != nil {
				t.Fatal(err)
			}
		}
		return meshtest.Start(t, out)
	}
	m = begin(`listen: "127.0.0.1:0"`, stagemesh.FileSettings{Dispatcher: true})
	return m, begin(`url: "`+m.BrokerURL()+`"`, stagemesh.FileSettings{Stages: []string{}})
}

func submitJob(t *testing.T, m *stagemesh.Mesh, query, text string) (id string) {
	t.Helper()
	response, body := jobCall(t, m, "POST", "/v1/queues/nightly/jobs"+query, text)
	if response.StatusCode != http.StatusAccepted {
		t.Fatalf("%d %s", response.StatusCode, body)
	}
	return strings.TrimPrefix(response.Header.Get("Location"), "/v1/jobs/")
}

// jobEvents is an open watch of a job.
type jobEvents struct {
	*fronttest.Events

	t    *testing.T
	body io.Closer
	last string
}

func watchJob(t *testing.T, m *stagemesh.Mesh, id, after string) *jobEvents {
	t.Helper()
	r := testbed.Request(t, http.MethodGet, m.URL()+"/v1/jobs/"+id+"/events", http.NoBody)
	r.Header.Set("Last-Event-ID", after)
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	if response.StatusCode != http.StatusOK || response.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("%s %v", response.Status, response.Header)
	}
	return &jobEvents{Events: fronttest.ReadEvents(response.Body), t: t, body: response.Body}
}

// next returns the next event in short: a chunk as its ID and text.
func (e *jobEvents) next() string {
	e.t.Helper()
	event, err := e.Next()
	if errors.Is(err, io.EOF) {
		return ""
	}
	if err != nil {
		e.t.Fatal(err)
	}
	e.last = event.ID
	field := func(name string) string {
		_, value, _ := strings.Cut(event.Data, `"`+name+`":"`)
		value, _, _ = strings.Cut(value, `"`)
		return value
	}
	switch event.Name {
	case "state":
		return field("state")
	case "chunk":
		return event.ID + " " + field("text")
	}
	return event.Name + " " + event.ID
}

// upTo returns the events up to that one, without states before the first attempt: a watch may
// miss them.
func (e *jobEvents) upTo(last string) (out []string) {
	e.t.Helper()
	for len(out) == 0 || out[len(out)-1] != last {
		next := e.next()
		if next == "" {
			e.t.Fatalf("the events end after %q", out)
		}
		if next != "queued" {
			out = append(out, next)
		}
	}
	return out
}

func TestWatchOfAJobIsResumedByAnotherGateway(t *testing.T) {
	t.Parallel()
	tokens := make(chan struct{}, 8)
	m, second := startLetters(t, tokens)
	id := submitJob(t, m, "", "abcd")
	first := watchJob(t, m, id, "")
	if got := first.upTo("running"); len(got) != 1 {
		t.Errorf("it begins with %q", got)
	}
	running := first.last
	tokens <- struct{}{}
	tokens <- struct{}{}
	if got := first.upTo("1.2 b"); !slices.Equal(got, []string{"1.1 a", "1.2 b"}) {
		t.Errorf("got %q", got)
	}
	_ = first.body.Close()
	afterChunk, afterState := watchJob(t, second, id, first.last), watchJob(t, m, id, running)
	if got := afterState.upTo("1.2 b"); !slices.Equal(got, []string{"1.1 a", "1.2 b"}) {
		t.Errorf("after the state: %q", got)
	}
	tokens <- struct{}{}
	tokens <- struct{}{}
	for _, events := range []*jobEvents{afterChunk, afterState} {
		if got := events.upTo("succeeded"); !slices.Equal(got, []string{"1.3 c", "1.4 d", "succeeded"}) || events.next() != "" {
			t.Errorf("after the second chunk: %q", got)
		}
	}
	if got := watchJob(t, m, id, "").upTo("succeeded"); !slices.Equal(got, []string{"1.1 a", "1.2 b", "1.3 c", "1.4 d", "succeeded"}) {
		t.Errorf("after the end: %q", got)
	}
	if response, body := jobCall(t, m, "GET", "/v1/jobs/"+id+"/events", "", "Last-Event-ID", afterChunk.last); response.StatusCode != http.StatusNoContent {
		t.Errorf("after the last event: %d %s", response.StatusCode, body)
	}
	if response, body := jobCall(t, m, "GET", "/v1/jobs/"+id+"/result", ""); response.StatusCode != 200 || body != "abcd" {
		t.Errorf("the result: %d %s", response.StatusCode, body)
	}
	byRPC, err := inferencev1connect.NewJobServiceClient(http.DefaultClient, second.URL()).WatchJob(t.Context(), connect.NewRequest(&inferencev1.WatchJobRequest{Id: id, After: "1.3"}))
	if err != nil {
		t.Fatal(err)
	}
	var letters []string
	state := inferencev1.JobState_JOB_STATE_UNSPECIFIED
	for byRPC.Receive() {
		state = byRPC.Msg().GetState().GetState()
		for _, part := range byRPC.Msg().GetChunk().GetOutputs() {
			letters = append(letters, string(part.GetBlob().GetData()))
		}
	}
	if err := byRPC.Err(); err != nil || !slices.Equal(letters, []string{"d"}) || state != inferencev1.JobState_JOB_STATE_SUCCEEDED {
		t.Errorf("by RPC: %q, %s, %v", letters, state, err)
	}
}

func TestRestartFollowsAnInterruptedAttempt(t *testing.T) {
	t.Parallel()
	m, second := startLetters(t, nil)
	id := submitJob(t, m, "", "a!c")
	first := watchJob(t, m, id, "")
	// The second attempt may have ended before its state is read.
	got := slices.DeleteFunc(first.upTo("succeeded"), func(e string) bool { return e == "running" })
	if want := []string{"1.1 a", "1.2 !", "delayed", "restart 2.0", "2.1 a", "2.2 !", "2.3 c", "succeeded"}; !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	for after, want := range map[string][]string{
		"1.1": {"1.2 !", "restart 2.0", "2.1 a", "2.2 !", "2.3 c", "succeeded"},
		"2.0": {"2.1 a", "2.2 !", "2.3 c", "succeeded"},
		"2.2": {"2.3 c", "succeeded"},
	} {
		if got := watchJob(t, second, id, after).upTo("succeeded"); !slices.Equal(got, want) {
			t.Errorf("after %s: %q", after, got)
		}
	}
}

func TestLostChunksAreAGap(t *testing.T) {
	t.Parallel()
	m, _ := startLetters(t, nil)
	id := submitJob(t, m, "", "abc")
	watchJob(t, m, id, "").upTo("succeeded")
	settings := m.Broker()
	settings.Mesh, settings.Logger = "m", slog.New(slog.DiscardHandler)
	conn, err := bus.Connect(settings)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	for seq := uint64(1); ; seq++ {
		if ok, err := conn.Delete(t.Context(), "m_job_events", seq); err != nil || !ok {
			break
		}
	}
	events := watchJob(t, m, id, "")
	if got := events.upTo("succeeded"); !slices.Equal(got, []string{"gap 1.3", "succeeded"}) {
		t.Errorf("got %q", got)
	}
	if got := watchJob(t, m, id, "1.3").upTo("succeeded"); !slices.Equal(got, []string{"succeeded"}) {
		t.Errorf("after the gap: %q", got)
	}
}

func TestJobWithoutChunksHasStates(t *testing.T) {
	t.Parallel()
	m, _ := startLetters(t, nil)
	got := watchJob(t, m, submitJob(t, m, "?pipeline=p", "a"), "").upTo("succeeded")
	if got[len(got)-1] != "succeeded" || slices.ContainsFunc(got, func(e string) bool { return e != "running" && e != "succeeded" }) {
		t.Errorf("got %q", got)
	}
	waiting := startJobs(t, false)
	id := submitJob(t, waiting, "", "a")
	events := watchJob(t, waiting, id, "")
	if got := events.next(); got != "queued" {
		t.Errorf("it begins with %s", got)
	}
	again := watchJob(t, waiting, id, "")
	if response, body := jobCall(t, waiting, "DELETE", "/v1/jobs/"+id, ""); response.StatusCode != 200 {
		t.Fatalf("%d %s", response.StatusCode, body)
	}
	for _, e := range []*jobEvents{events, again} {
		if got := e.upTo("cancelled"); len(got) != 1 || e.next() != "" {
			t.Errorf("got %q", got)
		}
	}
}

func TestUnknownEventIsRefused(t *testing.T) {
	t.Parallel()
	m := startJobs(t, false)
	at := "/v1/jobs/" + submitJob(t, m, "", "a") + "/events"
	for _, after := range []string{"7", "1.x", "1.2.3.4", "-1.2", "1.99999999999999999999"} {
		if response, body := jobCall(t, m, "GET", at, "", "Last-Event-ID", after); response.StatusCode != 400 || reasonOf(body) != "INVALID_REQUEST" || !strings.Contains(body, `"field":"after"`) {
			t.Errorf("after %s: %d %s", after, response.StatusCode, body)
		}
	}
}

// A HEAD request has no events to wait for: the connection takes the next request at once.
func TestHeadOfEventsEnds(t *testing.T) {
	t.Parallel()
	m := startJobs(t, false)
	at := m.URL() + "/v1/jobs/" + submitJob(t, m, "", "a")
	transport := &http.Transport{MaxConnsPerHost: 1}
	t.Cleanup(transport.CloseIdleConnections)
	client := &http.Client{Transport: transport, Timeout: 30 * time.Second}
	response, _ := testbed.Call(t, client, http.MethodHead, at+"/events", "")
	if response.StatusCode != http.StatusOK || response.Header.Get("Content-Type") != "text/event-stream" {
		t.Errorf("%d %v", response.StatusCode, response.Header)
	}
	if response, body := testbed.Call(t, client, http.MethodGet, at, ""); response.StatusCode != http.StatusOK || !strings.Contains(body, "queued") {
		t.Errorf("%d %s", response.StatusCode, body)
	}
}
