package rest_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/rest"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// overEach runs f over both protocols of plain HTTP.
func overEach(t *testing.T, f func(t *testing.T, h2c bool)) {
	t.Helper()
	for name, h2c := range map[string]bool{"HTTP/1": false, "HTTP/2": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(t, h2c)
		})
	}
}

// streaming is a request for a stream.
func streaming(contentType, body string, header ...string) ask {
	out := post(contentType, body, header...)
	out.path = "/v1/pipelines/photos:stream"
	return out
}

// events is the answer's, if it is a stream of events.
func (r reply) events(t *testing.T) []fronttest.Event {
	t.Helper()
	out, err := fronttest.ReadEvents(strings.NewReader(r.body)).All()
	if err != nil || r.status != http.StatusOK || r.header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("%d %s %q: %v", r.status, r.header.Get("Content-Type"), r.body, err)
	}
	return out
}

// chunk is the JSON of a chunk.
func chunk(seq int, outputs string) string {
	return fmt.Sprintf(`{"request_id":%q,"seq":%d,"outputs":[%s]}`, fronttest.RequestID, seq, outputs)
}

func word(text string) string {
	return fmt.Sprintf(`{"name":"text","content_type":"text/plain","text":%q}`, text)
}

func TestStreamIsChunksThenTheResponse(t *testing.T) {
	t.Parallel()
	overEach(t, func(t *testing.T, h2c bool) {
		caller := &fronttest.Caller{Chunks: fronttest.Words("one", "two")}
		url := fronttest.Serve(t, rest.New(caller, nil, transport.Settings{}))
		got := streaming("text/plain", "hi").at(t, url, h2c)
		events := got.events(t)
		if len(events) != 3 {
			t.Fatalf("got %v", events)
		}
		for i, want := range []fronttest.Event{
			{ID: "1", Name: "chunk", Data: chunk(1, word("one"))},
			{ID: "2", Name: "chunk", Data: chunk(2, word("two"))},
			{ID: "3", Name: "done", Data: events[2].Data},
		} {
			if events[i] != want {
				t.Errorf("event %d is %+v, expected %+v", i+1, events[i], want)
			}
		}
		final := reply{status: http.StatusOK, header: http.Header{"Content-Type": {"application/json"}}, body: events[2].Data}.document(t)
		if final.RequestID != fronttest.RequestID || *final.Outputs[0].Text != "hi" || final.Timeline["total_ms"] != 4.0 || final.ModelName != "photos" {
			t.Errorf("the answer is %s", events[2].Data)
		}
		if got.header.Get("Stagemesh-Request-Id") != fronttest.RequestID {
			t.Errorf("headers are %v", got.header)
		}
	})
}

func TestStreamWithoutChunksIsItsResponse(t *testing.T) {
	t.Parallel()
	got := streaming("application/json", `{"id": "mine", "inputs": [{"name": "x", "datatype": "INT8", "shape": [1], "data": [7]}]}`).of(t, &fronttest.Caller{})
	events := got.events(t)
	if len(events) != 1 || events[0].ID != "1" || events[0].Name != "done" || !strings.Contains(events[0].Data, `"id":"mine"`) || !strings.Contains(events[0].Data, `"data":[7]`) {
		t.Errorf("got %v", events)
	}
	if got.header.Get("Stagemesh-Request-Id") != fronttest.RequestID {
		t.Errorf("headers are %v", got.header)
	}
}

func TestStreamTakesTheSameRequests(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{}
	a := streaming("image/png", "png", "Stagemesh-Timeout", "250ms", "Stagemesh-Priority", "3", "Idempotency-Key", "k", "Stagemesh-Durability", "file")
	a.path += "?parameters.t=0.5&outputs=a"
	a.of(t, caller).events(t)
	got := caller.Last()
	if got.Pipeline != "photos" || got.Timeout != 250*time.Millisecond || got.Priority != 3 || got.IdempotencyKey != "k" || string(got.Inputs[0].Blob.Data) != "png" ||
		got.Parameters["t"] != payload.Double(0.5) || got.Outputs[0] != "a" {
		t.Errorf("asked is %+v", got)
	}
}

// stepwise is a stream that a test steps through.
func stepwise(t *testing.T, h2c bool, s transport.Settings) (*fronttest.SteppedCaller, *fronttest.Events, context.CancelFunc) {
	t.Helper()
	caller := fronttest.NewSteppedCaller()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, fronttest.Serve(t, rest.New(caller, nil, s))+"/v1/pipelines/p:stream", strings.NewReader("hi"))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "text/plain")
	answers := make(chan *http.Response)
	go func() {
		defer close(answers)
		if response, err := fronttest.Client(t, h2c).Do(r); err == nil { //nolint:bodyclose // it is, at the test's end
			answers <- response
		}
	}()
	if s.PingInterval == 0 {
		caller.Emit <- fronttest.Words("first")[0]
	}
	response, ok := <-answers
	if !ok {
		t.Fatal("there is no answer")
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	return caller, fronttest.ReadEvents(response.Body), cancel
}

func TestLongWaitSendsPings(t *testing.T) {
	t.Parallel()
	overEach(t, func(t *testing.T, h2c bool) {
		// The head has come, and with it a comment.
		caller, events, _ := stepwise(t, h2c, transport.Settings{PingInterval: 20 * time.Millisecond})
		go func() {
			caller.Answer = func(context.Context, *request.Request) (*request.Response, error) {
				return nil, fronttest.Fault(fault.NoCapacity)
			}
			close(caller.Emit)
		}()
		got, err := events.Next()
		if err != nil || got.Name != "error" || got.Pings == 0 || got.ID != "" {
			t.Errorf("got %+v, %v", got, err)
		}
	})
}

func TestFailureAfterTheFirstEventIsTheLastEvent(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		err    error
		reason fault.Reason
	}{
		"with its id":    {fronttest.Fault(fault.StreamInterrupted), fault.StreamInterrupted},
		"without":        {fault.New(fault.StreamInterrupted, "the host died"), fault.StreamInterrupted},
		"an answer that": {nil, fault.RunnerOutputInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			caller := fronttest.FailWith(row.err)
			if row.err == nil {
				notNumber := payload.OfTensor("x", tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{1}, Raw: []byte{0, 0, 0xc0, 0x7f}})
				caller = fronttest.AnswerWith(notNumber)
			}
			caller.Chunks = fronttest.Words("one")
			events := streaming("text/plain", "hi").of(t, caller).events(t)
			if len(events) != 2 || events[1].Name != "error" {
				t.Fatalf("got %+v", events)
			}
			var got failed
			if err := json.Unmarshal([]byte(events[1].Data), &got); err != nil || got.Error.Reason != string(row.reason) || got.Error.RequestID != fronttest.RequestID || got.Error.Code == "" {
				t.Errorf("got %s, %v", events[1].Data, err)
			}
		})
	}
}

func TestUnrepresentableChunkEndsTheStream(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{Chunks: append(fronttest.Words("one"), request.Chunk{
		RequestID: fronttest.RequestID, Seq: 2,
		Outputs: []payload.Part{payload.OfTensor("h", tensor.Tensor{Datatype: tensor.FP16, Shape: []int64{1}, Raw: []byte{0, 0x3c}})},
	})}
	events := streaming("text/plain", "hi").of(t, caller).events(t)
	if len(events) != 2 || events[1].Name != "error" || !strings.Contains(events[1].Data, "NOT_SUPPORTED") || !strings.Contains(events[1].Data, fronttest.RequestID) {
		t.Errorf("got %+v", events)
	}
}

func TestJSONOfAStageIsOneLine(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{Chunks: []request.Chunk{{
		RequestID: fronttest.RequestID, Seq: 1, Outputs: []payload.Part{payload.OfBlob("", "application/json", []byte("{\n  \"a\": 1\r\n}\n"))},
	}}}
	events := streaming("text/plain", "hi").of(t, caller).events(t)
	if want := chunk(1, `{"name":"","content_type":"application/json","json":{   "a": 1  } }`); events[0].Data != want {
		t.Errorf("got %s, wanted is %s", events[0].Data, want)
	}
}

func TestBrokenStreamCannotBeResumed(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{}
	streaming("text/plain", "hi", "Last-Event-ID", "7").of(t, caller).wantFailure(t, 400, fault.InvalidRequest, "Last-Event-ID")
	if caller.Last() != nil {
		t.Error("the caller was asked")
	}
}

func TestInvalidStreamRequestIsRejected(t *testing.T) {
	t.Parallel()
	get := ask{method: http.MethodGet, path: "/v1/pipelines/photos:stream"}.of(t, &fronttest.Caller{})
	get.wantFailure(t, 405, fault.InvalidRequest, "is POST, not GET")
	if get.header.Get("Allow") != http.MethodPost {
		t.Errorf("Allow is %q", get.header.Get("Allow"))
	}
	streaming("text/plain", "").of(t, &fronttest.Caller{}).wantFailure(t, 400, fault.InvalidRequest, "empty")
	streaming("text/plain", strings.Repeat("x", fronttest.LimitBytes+1)).of(t, &fronttest.Caller{}).wantFailure(t, 413, fault.PayloadTooLarge, "65536")
	a := streaming("text/plain", "hi")
	a.path = "/v1/pipelines/:stream"
	a.of(t, &fronttest.Caller{}).wantFailure(t, 404, fault.NotFound, "nothing")
}
