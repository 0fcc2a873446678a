package oip_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/oip"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

type talking = grpc.BidiStreamingClient[oipv2.ModelInferRequest, oipv2.ModelStreamInferResponse]

// front is the front with its settings.
type front struct {
	*transport.Service

	settings transport.Settings
	pool     *budget.Pool
}

func handler(caller call.Caller, s transport.Settings) front {
	return front{oip.New(caller, shelf{}, s), s, nil}
}

// talk opens a stream to grpc-go that ends with the context.
func talk(ctx context.Context, t *testing.T, f front) talking {
	t.Helper()
	conn := testbed.Dial(t, fronttest.ServeService(t, f.Service, f.settings, f.pool))
	out, err := oipv2.NewGRPCInferenceServiceClient(conn).ModelStreamInfer(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// asks is a request with that id, for the model.
func asks(model, id string, parameters ...string) *oipv2.ModelInferRequest {
	out := &oipv2.ModelInferRequest{ModelName: model, Id: id, Parameters: map[string]*oipv2.InferParameter{}}
	for _, name := range parameters {
		out.Parameters[name] = &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_BoolParam{BoolParam: true}}
	}
	return out
}

func send(t *testing.T, to talking, requests ...*oipv2.ModelInferRequest) {
	t.Helper()
	for _, r := range requests {
		if err := to.Send(r); err != nil {
			t.Fatal(err)
		}
	}
}

// nextResponse formats the next response: "id word", and " last" if it is the last.
func nextResponse(t *testing.T, from talking) string {
	t.Helper()
	m, err := from.Recv()
	if err != nil {
		t.Fatal(err)
	}
	r := m.GetInferResponse()
	words := []string{r.GetId()}
	if m.GetErrorMessage() != "" {
		words = append(words, m.GetErrorMessage())
	}
	for _, raw := range r.GetRawOutputContents() {
		words = append(words, string(raw[4:]))
	}
	if r.GetParameters()["triton_final_response"].GetBoolParam() {
		words = append(words, "last")
	}
	return strings.Join(words, " ")
}

// ended returns the status of a stream after its last response.
func ended(t *testing.T, from talking) *status.Status {
	t.Helper()
	m, err := from.Recv()
	if err == nil {
		t.Fatalf("got another response %v", m)
	}
	if errors.Is(err, io.EOF) {
		return status.New(codes.OK, "")
	}
	return status.Convert(err)
}

func hangUp(t *testing.T, s talking) {
	t.Helper()
	if err := s.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if got := ended(t, s); got.Code() != codes.OK {
		t.Errorf("the stream ended with %v", got)
	}
}

func TestStreamResponsesCarryRequestIDs(t *testing.T) {
	t.Parallel()
	caller := fronttest.AnswerWith(payload.OfBlob("text", "text/plain", []byte("whole")))
	s := talk(t.Context(), t, handler(caller, transport.Settings{}))
	for i := range 5 {
		id := fmt.Sprint(i)
		send(t, s, asks("simple", id))
		if got, want := nextResponse(t, s), id+" whole last"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	hangUp(t, s)
}

func TestEachChunkIsOneMessage(t *testing.T) {
	t.Parallel()
	caller := fronttest.AnswerWith(payload.OfBlob("text", "text/plain", []byte("one two")))
	caller.Chunks = fronttest.Words("one", "two")
	s := talk(t.Context(), t, handler(caller, transport.Settings{}))
	send(t, s, asks("simple", "a"))
	for _, want := range []string{"a one", "a two"} {
		if got := nextResponse(t, s); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	send(t, s, asks("simple", "b", "triton_enable_empty_final_response", "mine"))
	for _, want := range []string{"b one", "b two", "b last"} {
		if got := nextResponse(t, s); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if p := caller.Last().Parameters; len(p) != 1 || p["mine"] != payload.Bool(true) {
		t.Errorf("runners get the parameters %v", p)
	}
	hangUp(t, s)
}

func TestRequestWithoutChunksGetsOneResponse(t *testing.T) {
	t.Parallel()
	caller := fronttest.AnswerWith(payload.OfBlob("text", "text/plain", []byte("whole")))
	s := talk(t.Context(), t, handler(caller, transport.Settings{}))
	send(t, s, asks("simple", "a", "triton_enable_empty_final_response"))
	if got := nextResponse(t, s); got != "a whole last" {
		t.Errorf("got %q", got)
	}
	hangUp(t, s)
}

func TestFailedStreamRequestFailsAlone(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{Answer: func(_ context.Context, r *request.Request) (*request.Response, error) {
		if r.Pipeline == "broken" {
			return nil, fault.New(fault.RunnerFailed, "it broke")
		}
		return fronttest.Respond(payload.OfBlob("text", "text/plain", []byte("fine"))), nil
	}}
	s := talk(t.Context(), t, handler(caller, transport.Settings{}))
	misspelt := asks("simple", "d")
	misspelt.Parameters["triton_enable_empty_final_response"] = &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_Int64Param{Int64Param: 1}}
	version := asks("simple", "e")
	version.ModelVersion = "2"
	for _, row := range []struct {
		ask  *oipv2.ModelInferRequest
		want string
	}{
		{asks("nothing", "a"), "a UNKNOWN_PIPELINE: there is none last"},
		{asks("broken", "b"), "b RUNNER_FAILED: it broke last"},
		{asks("simple", "c"), "c fine last"},
		{misspelt, "d INVALID_REQUEST: parameters.triton_enable_empty_final_response: 1 is neither true nor false last"},
		{version, `e NOT_FOUND: model "simple" has no version "2"; its only one is 1 last`},
	} {
		send(t, s, row.ask)
		if got := nextResponse(t, s); got != row.want {
			t.Errorf("got %q, want %q", got, row.want)
		}
	}
	hangUp(t, s)
}

// held answers each request when the test releases its model.
type held struct {
	fronttest.Caller

	mu    sync.Mutex
	gates map[string]chan struct{}
	// inFlight is how many requests are in flight, and most its maximum.
	inFlight, most atomic.Int64
	began, ended   chan string
}

func hold(requests int) *held {
	return &held{gates: map[string]chan struct{}{}, began: make(chan string, requests), ended: make(chan string, requests)}
}

func (h *held) gate(name string) chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.gates[name] == nil {
		h.gates[name] = make(chan struct{})
	}
	return h.gates[name]
}

func (h *held) Stream(ctx context.Context, r *request.Request, _ func(request.Chunk) error) (*request.Response, error) {
	if n := h.inFlight.Add(1); n > h.most.Load() {
		h.most.Store(n)
	}
	defer h.inFlight.Add(-1)
	h.began <- r.Pipeline
	select {
	case <-h.gate(r.Pipeline):
		return fronttest.Respond(payload.OfBlob("text", "text/plain", []byte(r.Pipeline))), nil
	case <-ctx.Done():
		h.ended <- r.Pipeline
		return nil, ctx.Err()
	}
}

func TestStreamRequestsRunConcurrently(t *testing.T) {
	t.Parallel()
	caller := hold(2)
	s := talk(t.Context(), t, handler(caller, transport.Settings{}))
	send(t, s, asks("slow", "a"), asks("fast", "b"))
	if err := s.CloseSend(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"fast", "slow"} {
		close(caller.gate(name))
		if got := nextResponse(t, s); !strings.HasSuffix(got, name+" last") {
			t.Errorf("got %q", got)
		}
	}
	if got := ended(t, s); got.Code() != codes.OK {
		t.Errorf("the stream ended with %v", got)
	}
}

func TestStreamBoundsItsRequestsInFlight(t *testing.T) {
	t.Parallel()
	const requests, atOnce = 200, 64
	caller := hold(requests)
	s := talk(t.Context(), t, handler(caller, transport.Settings{}))
	for i := range requests {
		send(t, s, asks("simple", fmt.Sprint(i)))
	}
	for range atOnce {
		<-caller.began
	}
	close(caller.gate("simple"))
	for range requests {
		_ = nextResponse(t, s)
	}
	hangUp(t, s)
	if got := caller.most.Load(); got > atOnce {
		t.Errorf("%d requests were in flight", got)
	}
}

func TestStreamCancelCancelsItsRequests(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	caller := hold(2)
	s := talk(ctx, t, handler(caller, transport.Settings{}))
	send(t, s, asks("a", "a"), asks("b", "b"))
	for range 2 {
		<-caller.began
	}
	cancel()
	for range 2 {
		testbed.Receive(t, "the end of the call", caller.ended)
	}
}

func TestUnreadableMessageEndsStream(t *testing.T) {
	t.Parallel()
	const limit = 1000
	large := asks("a", "b")
	large.RawInputContents = [][]byte{make([]byte, limit)}
	caller := hold(1)
	s := talk(t.Context(), t, handler(caller, transport.Settings{MaxMessageBytes: limit}))
	send(t, s, asks("a", "a"))
	<-caller.began
	send(t, s, large)
	// A request in flight may report that it is cancelled.
	testbed.Receive(t, "the end of the call", caller.ended)
	var got *status.Status
	for got == nil {
		if _, err := s.Recv(); err != nil {
			got = status.Convert(err)
		}
	}
	if got.Code() != codes.InvalidArgument || !strings.Contains(got.Message(), "1000 bytes") || len(got.Details()) == 0 {
		t.Errorf("the stream ended with %v", got)
	}
}

// ending is the trailers of an answer, and the bytes before them.
type ending struct {
	http.Header

	body string
}

// raw opens a stream of bytes to the procedure; answer receives the ending.
func raw(t *testing.T, h http.Handler) (to *io.PipeWriter, answer <-chan ending) {
	t.Helper()
	from, to := io.Pipe()
	r := testbed.Request(t, http.MethodPost, fronttest.Serve(t, h)+"/inference.GRPCInferenceService/ModelStreamInfer", from)
	r.Header.Set("Content-Type", "application/grpc")
	answers, client := make(chan ending, 1), fronttest.Client(t, true)
	var asking sync.WaitGroup
	asking.Go(func() {
		defer close(answers)
		response, err := client.Do(r)
		if err != nil {
			t.Error(err)
			return
		}
		defer response.Body.Close()
		// The trailers follow the body.
		data, _ := io.ReadAll(response.Body)
		answers <- ending{response.Trailer, string(data)}
	})
	t.Cleanup(func() {
		_ = to.Close()
		asking.Wait()
	})
	return to, answers
}

func TestMalformedBytesEndStream(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		bytes, status, text string
	}{
		"no message":        {"\x00\x00\x00\x00\x01\xff", "3", "cannot be decoded"},
		"half a message":    {"\x00\x00\x00\x00\x05a", "13", "promised 5 bytes"},
		"half a prefix":     {"\x00\x00", "13", "incomplete envelope"},
		"a message too big": {"\x00\xff\xff\xff\xff", "3", "larger than"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			to, trailers := raw(t, handler(&fronttest.Caller{}, transport.Settings{}))
			_, _ = to.Write([]byte(row.bytes))
			_ = to.Close()
			if got := testbed.Receive(t, "the answer", trailers); got.Get("Grpc-Status") != row.status || !strings.Contains(got.Get("Grpc-Message"), row.text) {
				t.Errorf("got %v", got)
			}
		})
	}
}

func TestBrokenStreamCancelsRequestsWithCause(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		bytes string
		hold  bool // the stream stays open
		want  string
	}{
		"half a message":    {"\x00\x00\x00\x00\x05a", false, "promised 5 bytes"},
		"a stalled one":     {"\x00\x00\x00\x00\x05a", true, "less than 256 KiB within 50ms"},
		"a message too big": {"\x00\xff\xff\xff\xff", true, "larger than"},
		"no message":        {"\x00\x00\x00\x00\x01\xff", true, "cannot be decoded"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			caller := hold(1)
			to, answer := raw(t, handler(caller, transport.Settings{StallTimeout: 50 * time.Millisecond}))
			_, _ = to.Write(fronttest.EncodeMessage(t, asks("a", "a")))
			testbed.Receive(t, "the call", caller.began)
			_, _ = to.Write([]byte(row.bytes))
			if !row.hold {
				_ = to.Close()
			}
			got := testbed.Receive(t, "the answer", answer).body
			if start := strings.Index(got, "CANCELLED: the stream ended: "); start < 0 || !strings.Contains(got[start:], row.want) || strings.Contains(got, "went away") || strings.Contains(got, "the caller disconnected") {
				t.Errorf("the cause is %q", got)
			}
		})
	}
}

// A caller may pause between messages for any time. Within a message the stall timeout
// applies.
func TestStallTimeoutAppliesWithinMessages(t *testing.T) {
	t.Parallel()
	const patience = 50 * time.Millisecond
	caller := &fronttest.Caller{}
	h := handler(caller, transport.Settings{StallTimeout: patience})
	s := talk(t.Context(), t, h)
	for _, id := range []string{"a", "b"} {
		<-time.After(4 * patience)
		send(t, s, asks("simple", id))
		if got := nextResponse(t, s); got != id+" last" {
			t.Errorf("got %q", got)
		}
	}
	hangUp(t, s)
	to, trailers := raw(t, h)
	_, _ = to.Write([]byte("\x00\x00\x00\x00\x05a"))
	if got := testbed.Receive(t, "the answer", trailers); got.Get("Grpc-Status") != "4" || !strings.Contains(got.Get("Grpc-Message"), "50ms") {
		t.Errorf("got %v", got)
	}
}

func TestGatewayShutdownEndsStreamsAfterResponses(t *testing.T) {
	t.Parallel()
	stopping := make(chan struct{})
	caller := hold(1)
	h := handler(caller, transport.Settings{Stopping: stopping})
	idle, busy := talk(t.Context(), t, h), talk(t.Context(), t, h)
	send(t, busy, asks("simple", "a"))
	<-caller.began
	close(stopping)
	if got := ended(t, idle); got.Code() != codes.Unavailable || !strings.Contains(got.Message(), "another stream") {
		t.Errorf("the idle stream ended with %v", got)
	}
	close(caller.gate("simple"))
	if got := nextResponse(t, busy); got != "a simple last" {
		t.Errorf("got %q", got)
	}
	if got := ended(t, busy); got.Code() != codes.Unavailable {
		t.Errorf("the busy stream ended with %v", got)
	}
}

func TestLongStreamReturnsBudgetAfterEachMessage(t *testing.T) {
	t.Parallel()
	// The stream, and two messages: one is still held for a moment after its answer.
	pool := budget.NewPool(budget.Settings{Limit: 55_000})
	h := handler(&fronttest.Caller{}, transport.Settings{})
	h.pool = pool
	s := talk(t.Context(), t, h)
	large := asks("simple", "a")
	large.Parameters["x"] = &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_StringParam{StringParam: strings.Repeat("x", 5000)}}
	for range 20 {
		send(t, s, large)
		if got := nextResponse(t, s); got != "a last" {
			t.Fatalf("got %q", got)
		}
	}
	hangUp(t, s)
	testbed.Eventually(t, "the stream has returned what it held", func() bool { return pool.Held() == 0 })
}

// summing answers with the sum of its sequence so far: of the parameters n, by the parameter
// sequence_id. A request for the model "held" waits for the gate before; one with n of 3 fails.
type summing struct {
	fronttest.Caller

	gate  chan struct{}
	began chan string

	mu   sync.Mutex
	sums map[string]int64
}

func (c *summing) Stream(ctx context.Context, r *request.Request, _ func(request.Chunk) error) (*request.Response, error) {
	sequence := r.Parameters["sequence_id"].String()
	c.began <- sequence
	if r.Pipeline == "held" {
		select {
		case <-c.gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	n, _ := r.Parameters["n"].Int()
	if n == 3 {
		return nil, fault.New(fault.RunnerFailed, "three")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sums[sequence] += n
	return fronttest.Respond(payload.OfBlob("sum", "text/plain", fmt.Append(nil, c.sums[sequence]))), nil
}

// adds is a request of a sequence, with n as its ID too.
func adds(model string, sequence *oipv2.InferParameter, n int64) *oipv2.ModelInferRequest {
	out := asks(model, fmt.Sprint(n))
	out.Parameters["sequence_id"] = sequence
	out.Parameters["n"] = &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_Int64Param{Int64Param: n}}
	return out
}

func sequenceText(id string) *oipv2.InferParameter {
	return &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_StringParam{StringParam: id}}
}

func sequenceNumber(id int64) *oipv2.InferParameter {
	return &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_Int64Param{Int64Param: id}}
}

// While a request of one sequence runs, its 99 others wait, and all else on the stream is
// answered: another sequence, the same ID for another model, and requests without a sequence.
func TestSequencesOfStreamKeepTheirOrder(t *testing.T) {
	t.Parallel()
	const requests = 100
	for name, sequence := range map[string]*oipv2.InferParameter{
		"number":   sequenceNumber(5),
		"unsigned": {ParameterChoice: &oipv2.InferParameter_Uint64Param{Uint64Param: 5}},
		"text":     sequenceText("five"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			caller := &summing{gate: make(chan struct{}), began: make(chan string, 2*requests), sums: map[string]int64{}}
			s := talk(t.Context(), t, handler(caller, transport.Settings{}))
			for n := range int64(requests) {
				send(t, s, adds("held", sequence, n))
			}
			testbed.Receive(t, "the call", caller.began)
			others := []*oipv2.ModelInferRequest{
				adds("free", sequence, 1000), adds("free", sequenceText("other"), 1001), adds("free", sequenceNumber(0), 1002), adds("free", sequenceText(""), 1003),
			}
			for _, other := range others {
				send(t, s, other)
				if got := nextResponse(t, s); !strings.HasPrefix(got, other.GetId()+" ") || !strings.HasSuffix(got, " last") {
					t.Errorf("request %s got %q", other.GetId(), got)
				}
				testbed.Receive(t, "the call", caller.began)
			}
			if n := len(caller.began); n > 0 {
				t.Errorf("%d more requests of the sequence began", n)
			}
			caller.mu.Lock()
			clear(caller.sums)
			caller.mu.Unlock()
			close(caller.gate)
			sum := int64(0)
			for n := range int64(requests) {
				want := "3 RUNNER_FAILED: three last"
				if n != 3 {
					sum += n
					want = fmt.Sprintf("%d %d last", n, sum)
				}
				if got := nextResponse(t, s); got != want {
					t.Errorf("got %q, want %q", got, want)
				}
			}
			hangUp(t, s)
		})
	}
}

func TestCancelledStreamRunsNoWaitingRequests(t *testing.T) {
	t.Parallel()
	pool := budget.NewPool(budget.Settings{Limit: 1 << 20})
	caller := &summing{gate: make(chan struct{}), began: make(chan string, 10), sums: map[string]int64{}}
	h := handler(caller, transport.Settings{})
	h.pool = pool
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s := talk(ctx, t, h)
	for n := range int64(10) {
		send(t, s, adds("held", sequenceNumber(7), n))
	}
	send(t, s, adds("free", sequenceNumber(0), 10))
	_ = nextResponse(t, s) // all others have been read
	testbed.Receive(t, "the call", caller.began)
	testbed.Receive(t, "the call", caller.began)
	cancel()
	testbed.Eventually(t, "the stream has returned what it held", func() bool { return pool.Held() == 0 })
	if n := len(caller.began); n > 0 {
		t.Errorf("%d more requests of the sequence began", n)
	}
}
