package fronttest

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// Server starts a server with all fronts, for pipelines of any name, and with files and batches of
// which there are none yet. It returns its URL.
type Server func(testing.TB, call.Caller, transport.Settings, *transport.Memory) (url string)

// promises are kept by every front. All memory is given back after each.
var promises = []struct {
	name  string
	check func(*testing.T, *bed)
	// of says which fronts keep it; nil is all.
	of func(*bed) bool
}{
	{"TooLargeMessageIsRejected", checkLimit, func(b *bed) bool { return b.name != "files" }},
	{"SizeAloneCausesRejection", checkDeclaredSize, func(b *bed) bool { return !b.many && b.name != "form" && b.name != "files" }},
	{"CompressedMessageIsMeasuredDecompressed", checkCompression, func(b *bed) bool { return b.encoding != "" }},
	{"StalledBodyFails", checkStalledBody, nil},
	{"TornBodyReachesNoCaller", checkTornBody, nil},
	{"EveryReasonHasItsStatus", checkReasons, isCall},
	{"RequestIsReservedWhileItRuns", checkReservation, isCall},
	{"DisconnectEndsTheCall", checkDisconnect, isCall},
	{"UnreadSmallAnswerEnds", checkUnreadAnswer, func(b *bed) bool { return b.h2c && !b.isNative && isCall(b) }},
	{"ChunkArrivesBeforeNextIsEmitted", checkChunks, isStream},
	{"DisconnectedReaderEndsTheCall", checkDisconnectedReader, isStream},
	{"StalledReaderFailsAlone", checkStalledReader, isStream},
	{"FailureAfterChunkIsReported", checkLateFailure, isStream},
}

func isStream(b *bed) bool { return b.streams }
func isCall(b *bed) bool   { return !b.stores }

// CheckPromises checks what every front promises over the protocols that carry it: on a server of
// all protocols, and on one of gRPC alone.
func CheckPromises(t *testing.T, all, native Server) {
	for _, p := range promises {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			for _, f := range fronts {
				for name, b := range map[string]*bed{
					" over HTTP/1": {front: f, start: all}, " over HTTP/2": {front: f, start: all, h2c: true}, " by grpc-go": {front: f, start: native, h2c: true, isNative: true},
				} {
					if carried := b.isNative && f.native || !b.isNative && (b.h2c && f.http2 || !b.h2c && f.http1); !carried || p.of != nil && !p.of(b) {
						continue
					}
					t.Run(f.name+name, func(t *testing.T) {
						t.Parallel()
						b.pool = budget.NewPool(budget.Settings{Limit: 64 << 20})
						p.check(t, b)
						testbed.Eventually(t, "all memory is given back", func() bool { return b.pool.Held() == 0 })
					})
				}
			}
		})
	}
}

// bed is a front on a server.
type bed struct {
	front

	start         Server
	h2c, isNative bool
	pool          *budget.Pool

	url    string
	client *http.Client
}

// LimitBytes is small, so that tests can exceed it.
const LimitBytes = 64 << 10

func (b *bed) serve(t *testing.T, caller call.Caller, s transport.Settings) {
	t.Helper()
	if s.MaxMessageBytes == 0 {
		s.MaxMessageBytes = LimitBytes
	}
	b.url, b.client = b.start(t, caller, s, transport.NewMemory(b.pool)), Client(t, b.h2c)
}

// request returns a request with the data.
func (b *bed) request(ctx context.Context, t *testing.T, data string) *http.Request {
	t.Helper()
	body, header, value := b.body(data)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, b.url+b.path, strings.NewReader(b.frame(body, false)))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", b.contentType)
	if header != "" {
		r.Header.Set(header, value)
	}
	return r
}

// do returns the failure of an answer, and the answer.
func (b *bed) do(t *testing.T, r *http.Request) (*fault.Fault, answer) {
	t.Helper()
	response, data := testbed.Do(t, b.client, r)
	out := answer{response.StatusCode, response.Header, response.Trailer, string(data)}
	failure, err := b.outcome(out)
	if err != nil {
		t.Fatalf("%v: %d %v %v %.300q", err, out.status, out.header, out.trailer, out.body)
	}
	return failure, out
}

// wantAnswer checks that a request with n bytes of data is answered with them.
func (b *bed) wantAnswer(t *testing.T, n int) {
	t.Helper()
	data := strings.Repeat("x", n)
	f, a := b.do(t, b.request(t.Context(), t, data))
	if b.stores { // it is the name of a file
		if f == nil || f.Reason != fault.NotFound {
			t.Fatalf("%d bytes of data: %d %v", n, a.status, f)
		}
		return
	}
	if f != nil || a.status != http.StatusOK {
		t.Fatalf("%d bytes of data: %d %v", n, a.status, f)
	}
	awaitWord(t, strings.NewReader(a.body), data)
}

// wantFault checks that a request fails for the reason.
func (b *bed) wantFault(t *testing.T, r *http.Request, reason fault.Reason, text string) answer {
	t.Helper()
	f, a := b.do(t, r)
	if f == nil || f.Reason != reason || !strings.Contains(f.Message, text) {
		t.Errorf("got %v, want %s ... %s", f, reason, text)
	}
	return a
}

// hideLength hides the length of a body.
func hideLength(r *http.Request) *http.Request {
	r.Body, r.ContentLength = io.NopCloser(struct{ io.Reader }{r.Body}), -1
	return r
}

func checkLimit(t *testing.T, b *bed) {
	caller := &Caller{}
	b.serve(t, caller, transport.Settings{})
	most := b.fits(LimitBytes)
	for _, n := range []int{most + 1, 20 * LimitBytes} {
		data := strings.Repeat("x", n)
		b.wantFault(t, b.request(t.Context(), t, data), fault.PayloadTooLarge, "65536 bytes")
		b.wantFault(t, hideLength(b.request(t.Context(), t, data)), fault.PayloadTooLarge, "65536 bytes")
	}
	if !b.many { // there the next line may be good
		endless := hideLength(b.request(t.Context(), t, strings.Repeat("x", 20*LimitBytes)))
		part(t, endless, 19*LimitBytes)
		b.wantFault(t, endless, fault.PayloadTooLarge, "65536 bytes")
	}
	if caller.Last() != nil {
		t.Error("the caller was asked")
	}
	b.wantAnswer(t, most)
	b.wantAnswer(t, 1)
}

// part is a body of which the first n bytes come; the last ends it.
func part(t *testing.T, r *http.Request, n int) (last *io.PipeWriter) {
	t.Helper()
	whole, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	from, to := io.Pipe()
	t.Cleanup(func() { _ = to.Close() })
	go func() { _, _ = to.Write(whole[:n]) }()
	r.Body = from
	return to
}

// The prefix of a message or the length of the body says how large it is.
func checkDeclaredSize(t *testing.T, b *bed) {
	b.serve(t, &Caller{}, transport.Settings{})
	r := b.request(t.Context(), t, strings.Repeat("x", LimitBytes+4))
	part(t, r, 8<<10) // what net/http sends before the body ends
	b.wantFault(t, r, fault.PayloadTooLarge, "65536 bytes")
	if b.envelope {
		r := b.request(t.Context(), t, "")
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader("\x00\xff\xff\xff\xff")), -1
		b.wantFault(t, r, fault.PayloadTooLarge, "65536 bytes")
	}
}

func checkCompression(t *testing.T, b *bed) {
	b.serve(t, &Caller{}, transport.Settings{})
	request := func(zipped string) *http.Request {
		r, zipped := b.request(t.Context(), t, ""), b.frame(zipped, true)
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader(zipped)), int64(len(zipped))
		r.Header.Set(b.encoding, "gzip")
		return r
	}
	zipped := func(n int) string {
		body, _, _ := b.body(strings.Repeat("x", n))
		return zip(body)
	}
	answered := func() {
		if f, a := b.do(t, request(zipped(LimitBytes/2))); f != nil || a.status != http.StatusOK {
			t.Errorf("got %d %v", a.status, f)
		}
	}
	answered()
	bomb, nothing := zipped(20*LimitBytes), strings.Repeat(zip(""), LimitBytes/20)
	b.wantFault(t, request(bomb), fault.PayloadTooLarge, "65536 bytes")
	b.wantFault(t, hideLength(request(bomb)), fault.PayloadTooLarge, "65536 bytes")
	b.wantFault(t, hideLength(request(nothing)), fault.PayloadTooLarge, "65536 bytes")
	answered()
	half := zipped(100)
	b.wantFault(t, request(half[:len(half)-9]), fault.InvalidRequest, "")
}

func checkStalledBody(t *testing.T, b *bed) {
	caller := &Caller{}
	b.serve(t, caller, transport.Settings{StallTimeout: time.Second})
	lengths := []int64{-1, 8, LimitBytes}
	if b.envelope {
		lengths = lengths[:1] // the prefix says it
	}
	for _, declared := range lengths {
		r := b.request(t.Context(), t, "some data")
		part(t, r, 7)
		r.ContentLength = declared
		b.wantFault(t, r, fault.DeadlineExceeded, "1s")
	}
	if caller.Last() != nil {
		t.Error("the caller was asked")
	}
}

func checkTornBody(t *testing.T, b *bed) {
	caller := &Caller{}
	b.serve(t, caller, transport.Settings{})
	const size = 32 << 10
	r := b.request(t.Context(), t, strings.Repeat("x", size))
	last := part(t, r, size/2)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if response, err := b.client.Do(r); err == nil {
			_ = response.Body.Close()
		}
	}()
	testbed.Eventually(t, "the request has begun", func() bool { return b.pool.Held() > 0 })
	_ = last.CloseWithError(io.ErrUnexpectedEOF)
	<-ended
	testbed.Eventually(t, "the request has ended", func() bool { return b.pool.Held() == 0 })
	if caller.Last() != nil {
		t.Error("the caller was asked")
	}
	if b.stores {
		if _, list := testbed.Get(t, b.url+b.path); !strings.Contains(list, `"data":[]`) {
			t.Errorf("it is stored: %s", list)
		}
	}
}

func checkReasons(t *testing.T, b *bed) {
	var err error
	b.serve(t, &Caller{Answer: func(context.Context, *request.Request) (*request.Response, error) { return nil, err }}, transport.Settings{})
	for _, reason := range fault.Reasons() {
		err = Fault(reason)
		a := b.wantFault(t, b.request(t.Context(), t, "x"), reason, "what went wrong: "+string(reason))
		if !strings.Contains(fmt.Sprint(a.header, a.trailer, a.body), RequestID) && !strings.HasSuffix(b.path, "ModelStreamInfer") {
			t.Errorf("%s: the request's ID is missing: %v", reason, a)
		}
		if strings.HasPrefix(b.path, "/v") && !b.many && (a.status != fault.Classify(reason).HTTP || a.header.Get("Retry-After") != "2") {
			t.Errorf("%s: the answer is %d, %v", reason, a.status, a.header)
		}
	}
	err = errors.New("password is 1234")
	if a := b.wantFault(t, b.request(t.Context(), t, "x"), fault.Internal, "internal error"); strings.Contains(fmt.Sprint(a), "1234") {
		t.Errorf("the answer reveals the error: %v", a)
	}
}

func checkReservation(t *testing.T, b *bed) {
	const size = 40 << 10
	caller := &Caller{Answer: func(ctx context.Context, r *request.Request) (*request.Response, error) {
		if held := b.pool.Held(); held < size {
			t.Errorf("%d bytes are reserved for %d", held, size)
		}
		return Echo(ctx, r)
	}}
	b.serve(t, caller, transport.Settings{})
	b.wantAnswer(t, size)
}

func checkDisconnect(t *testing.T, b *bed) {
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	seen := make(chan error, 1)
	b.serve(t, &Caller{Answer: func(ctx context.Context, _ *request.Request) (*request.Response, error) {
		leave()
		<-ctx.Done()
		seen <- ctx.Err()
		return nil, ctx.Err()
	}}, transport.Settings{})
	if response, err := b.client.Do(b.request(ctx, t, "x")); err == nil {
		_ = response.Body.Close()
	}
	if err := testbed.Receive(t, "the end of the call", seen); fault.From(err).Reason != fault.Cancelled {
		t.Errorf("the call ended with %v", err)
	}
}

// The first answer takes all of the connection's window and is never read, so that no byte of a
// later one can be sent.
func checkUnreadAnswer(t *testing.T, b *bed) {
	const window = 64 << 10
	answer := strings.Repeat("x", 4*window)
	b.serve(t, &Caller{Answer: func(context.Context, *request.Request) (*request.Response, error) {
		return Respond(payload.OfBlob("y", "text/plain", []byte(answer))), nil
	}}, transport.Settings{StallTimeout: time.Second})
	b.client.Transport.(*http.Transport).HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerConnection: window, MaxReceiveBufferPerStream: 8 * window}
	_ = b.unread(t)
	answer = "small"
	paths := []string{b.path}
	if !b.envelope {
		paths = append(paths, "/v1/nothing")
	}
	for _, b.path = range paths {
		cut := false
		for range 100 { // some may come before all of the window is taken
			body, ended := b.unread(t), make(chan error, 1)
			go func() {
				_, err := io.ReadAll(body)
				ended <- err
			}()
			if cut = testbed.Receive(t, "the end of the answer", ended) != nil; cut {
				break
			}
		}
		if !cut {
			t.Errorf("%s: answers that nobody reads are sent", b.path)
		}
	}
}

// unread returns the body of an answer whose head has come.
func (b *bed) unread(t *testing.T) io.Reader {
	t.Helper()
	response, err := b.client.Do(b.request(t.Context(), t, "x"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	return response.Body
}

// stream begins a call whose chunks the test emits, and returns the answer after the first.
func (b *bed) stream(ctx context.Context, t *testing.T) (*SteppedCaller, io.Reader) {
	t.Helper()
	caller := NewSteppedCaller()
	b.serve(t, caller, transport.Settings{})
	go func() {
		select {
		case caller.Emit <- Words("first")[0]:
		case <-t.Context().Done():
		}
	}()
	response, err := b.client.Do(b.request(ctx, t, "x"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	awaitWord(t, response.Body, "first")
	return caller, response.Body
}

// awaitWord reads until a word has come, as it is or in Base64.
func awaitWord(t *testing.T, from io.Reader, word string) {
	t.Helper()
	inBase64 := base64.StdEncoding.EncodeToString([]byte(word))
	for got, buf := "", make([]byte, 4<<10); !strings.Contains(got, word) && !strings.Contains(got, inBase64); {
		n, err := from.Read(buf)
		if got += string(buf[:n]); err != nil && n == 0 {
			t.Fatalf("%s has not come: %v after %q", word, err, got)
		}
	}
}

func checkChunks(t *testing.T, b *bed) {
	caller, body := b.stream(t.Context(), t)
	for _, word := range Words("second", "third") {
		caller.Emit <- word
		awaitWord(t, body, string(word.Outputs[0].Blob.Data))
	}
	close(caller.Emit)
	if _, err := io.ReadAll(body); err != nil {
		t.Error(err)
	}
}

func checkDisconnectedReader(t *testing.T, b *bed) {
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	caller, _ := b.stream(ctx, t)
	leave()
	if err := testbed.Receive(t, "the end of the call", caller.Ended); fault.From(err).Reason != fault.Cancelled {
		t.Errorf("the call ended with %v", err)
	}
}

// endless emits one large word until that fails, and reports the cause.
type endless struct {
	Caller

	ended chan error
}

// Stream implements the fronts' Caller.
func (e *endless) Stream(ctx context.Context, r *request.Request, emit func(request.Chunk) error) (*request.Response, error) {
	if payload.Size(r.Inputs) > 100 {
		return e.Infer(ctx, r)
	}
	large := Words(strings.Repeat("w", 256<<10))[0]
	for {
		if err := emit(large); err != nil {
			e.ended <- err
			return nil, err
		}
	}
}

// A stream holds its place in the gateway, so its reader has to read. Others are answered, even on
// the same connection.
func checkStalledReader(t *testing.T, b *bed) {
	caller := &endless{ended: make(chan error, 1)}
	b.serve(t, caller, transport.Settings{StallTimeout: 500 * time.Millisecond})
	// On a busy machine the stream may be over before its head has come.
	if response, err := b.client.Do(b.request(t.Context(), t, "x")); err == nil {
		t.Cleanup(func() { _ = response.Body.Close() })
	}
	b.wantAnswer(t, 200)
	if err := testbed.Receive(t, "the end of the call", caller.ended); fault.From(err).Reason != fault.Cancelled {
		t.Errorf("emit failed with %v", err)
	}
}

func checkLateFailure(t *testing.T, b *bed) {
	caller := FailWith(fault.New(fault.StreamInterrupted, "the host died"))
	caller.Chunks = Words("one")
	b.serve(t, caller, transport.Settings{})
	a := b.wantFault(t, b.request(t.Context(), t, "x"), fault.StreamInterrupted, "the host died")
	awaitWord(t, strings.NewReader(a.body), "one")
	if !strings.Contains(fmt.Sprint(a.header, a.trailer), RequestID) && !strings.HasSuffix(b.path, "ModelStreamInfer") {
		t.Errorf("the request's ID is missing: %v", a)
	}
}
