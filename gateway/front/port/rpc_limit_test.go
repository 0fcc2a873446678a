package port_test

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/grpc"

	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/gateway/front/fronttest"
	"github.com/stagemesh/stagemesh/gateway/front/port"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

func TestMessageOverTheLimitIsPayloadTooLarge(t *testing.T) {
	t.Parallel()
	for _, size := range []int{limitBytes, 20 * limitBytes} {
		caller := &fronttest.Caller{}
		onEach(t, caller, func(t *testing.T, _ protocol, client inferencev1connect.InferenceServiceClient) {
			_, err := infer(t.Context(), client, blob(size))
			_ = wantReason(t, err, fault.PayloadTooLarge)
			_, err = stream(t.Context(), client, blob(size))
			got := wantReason(t, err, fault.PayloadTooLarge)
			if !strings.Contains(got.Message(), "65536 bytes") {
				t.Errorf("the message names no limit: %q", got.Message())
			}
			if caller.Last() != nil {
				t.Error("the caller was asked")
			}
		})
	}
}

func TestMessageAtTheLimitIsAccepted(t *testing.T) {
	t.Parallel()
	onEach(t, &fronttest.Caller{}, func(t *testing.T, p protocol, client inferencev1connect.InferenceServiceClient) {
		size := limitBytes - 64
		if strings.Contains(p.name, "JSON") {
			size = limitBytes*3/4 - 128
		}
		if _, err := infer(t.Context(), client, blob(size)); err != nil {
			t.Error(err)
		}
		if _, err := stream(t.Context(), client, blob(size)); err != nil {
			t.Error(err)
		}
	})
}

func TestCompressedMessageIsMeasuredDecompressed(t *testing.T) {
	t.Parallel()
	for _, p := range protocols() {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			client := p.client(t, p.serve(t, &fronttest.Caller{}), connect.WithSendGzip())
			if _, err := infer(t.Context(), client, blob(limitBytes/2)); err != nil {
				t.Errorf("small: %v", err)
			}
			_, err := infer(t.Context(), client, blob(20*limitBytes))
			_ = wantReason(t, err, fault.PayloadTooLarge)
			_, err = stream(t.Context(), client, blob(20*limitBytes))
			_ = wantReason(t, err, fault.PayloadTooLarge)
			if _, err := infer(t.Context(), client, blob(limitBytes/2)); err != nil {
				t.Errorf("after a bomb: %v", err)
			}
		})
	}
}

// wireError is an error of Connect's unary protocol.
type wireError struct {
	Code    string
	Message string
	Details []struct {
		Type  string
		Debug struct{ Reason string }
	}
}

func post(t *testing.T, client *http.Client, url, contentType string, body io.Reader, header ...string) (head, []byte) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, body)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", contentType)
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return head{response.Status, response.StatusCode, response.Header, response.Trailer}, data
}

func reasonOf(t *testing.T, data []byte) string {
	t.Helper()
	var out wireError
	if err := json.Unmarshal(data, &out); err != nil || len(out.Details) == 0 {
		t.Fatalf("%s: %v", data, err)
	}
	return out.Details[0].Debug.Reason
}

func TestBodyOfUnknownLengthIsBounded(t *testing.T) {
	t.Parallel()
	url := serve(t, &fronttest.Caller{}) + inferencev1connect.InferenceServiceInferProcedure
	body := io.MultiReader(bytes.NewReader(make([]byte, limitBytes)), bytes.NewReader(make([]byte, 1)))
	response, data := post(t, fronttest.Client(t, false), url, "application/proto", struct{ io.Reader }{body})
	if response.StatusCode != http.StatusBadRequest || reasonOf(t, data) != string(fault.PayloadTooLarge) {
		t.Errorf("%s: %s", response.Status, data)
	}
}

// promise is a body that sends its prefix and then waits for the answer.
func promise(t *testing.T, size uint32) io.Reader {
	t.Helper()
	out, in := io.Pipe()
	t.Cleanup(func() { _ = in.Close() })
	go func() { _, _ = in.Write(binary.BigEndian.AppendUint32([]byte{0}, size)) }()
	return out
}

func TestLengthPrefixAloneCausesRejection(t *testing.T) {
	t.Parallel()
	for _, row := range []struct{ contentType, procedure string }{
		{"application/grpc", inferencev1connect.InferenceServiceInferProcedure},
		{"application/grpc+proto", inferencev1connect.InferenceServiceInferStreamProcedure},
		{"application/grpc-web+proto", inferencev1connect.InferenceServiceInferProcedure},
		{"application/connect+proto", inferencev1connect.InferenceServiceInferStreamProcedure},
		{"application/connect+json", inferencev1connect.InferenceServiceInferStreamProcedure},
	} {
		for name, start := range map[string]func(testing.TB, port.PublicSettings) string{"net/http": start, "grpc-go": startGRPC} {
			if name == "grpc-go" && !strings.HasPrefix(row.contentType, "application/grpc+") && row.contentType != "application/grpc" {
				continue
			}
			t.Run(name+" "+row.contentType, func(t *testing.T) {
				t.Parallel()
				url := start(t, port.PublicSettings{Settings: limited()}) + row.procedure
				response, data := post(t, fronttest.Client(t, true), url, row.contentType, promise(t, 1<<31))
				told := string(data) + response.trailer("Grpc-Message")
				if !strings.Contains(told, "limit of 65536 bytes") {
					t.Errorf("%s %v %v %q", response.Status, response.Header, response.Trailer, data)
				}
			})
		}
	}
}

func TestStalledBodyFails(t *testing.T) {
	t.Parallel()
	onEachServer(t, port.PublicSettings{Settings: transport.Settings{StallTimeout: 50 * time.Millisecond}}, func(t *testing.T, url string, _ *grpc.ClientConn) {
		response, data := post(t, fronttest.Client(t, true), url+inferencev1connect.InferenceServiceInferProcedure, "application/grpc", promise(t, 100))
		if got := response.trailer("Grpc-Status"); got != "4" || !strings.Contains(response.trailer("Grpc-Message"), "50ms") {
			t.Errorf("%s %v %q", response.Status, response.Trailer, data)
		}
	})
}

func TestBytesThatAreNoMessageAreAnInvalidRequest(t *testing.T) {
	t.Parallel()
	var zipped bytes.Buffer
	w := gzip.NewWriter(&zipped)
	_, _ = w.Write([]byte("{}"))
	_ = w.Close()
	for name, row := range map[string]struct{ contentType, body, encoding string }{
		"protobuf":           {"application/proto", "\xff\xff\xff", ""},
		"JSON":               {"application/json", "{", ""},
		"JSON with charset":  {"application/json; charset=utf-8", "[]", ""},
		"no JSON at all":     {"application/json", "", ""},
		"an unknown field":   {"application/json", `{"pipelin": "x"}`, ""},
		"an unknown enum":    {"application/json", `{"durability": "DURABILITY_STONE"}`, ""},
		"a number of 32 bit": {"application/json", `{"priority": 4294967296}`, ""},
		"deep nesting":       {"application/json", strings.Repeat(`{"a":`, 100), ""},
		"no gzip":            {"application/json", "{}", "gzip"},
		"broken gzip":        {"application/json", zipped.String()[:zipped.Len()-9], "gzip"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := serve(t, &fronttest.Caller{}) + inferencev1connect.InferenceServiceInferProcedure
			response, data := post(t, fronttest.Client(t, false), url, row.contentType, strings.NewReader(row.body), "Content-Encoding", row.encoding)
			if response.StatusCode != http.StatusBadRequest || reasonOf(t, data) != string(fault.InvalidRequest) {
				t.Errorf("%s: %s", response.Status, data)
			}
		})
	}
}

func TestGarbageEnvelopeIsInvalidRequest(t *testing.T) {
	t.Parallel()
	onEachServer(t, port.PublicSettings{}, func(t *testing.T, url string, _ *grpc.ClientConn) {
		client := inferencev1connect.NewInferenceServiceClient(garbler{fronttest.Client(t, true)}, url, connect.WithGRPC())
		_, err := infer(t.Context(), client, blob(10))
		_ = wantReason(t, err, fault.InvalidRequest)
		_, err = stream(t.Context(), client, blob(10))
		_ = wantReason(t, err, fault.InvalidRequest)
	})
}

// garbler replaces every message that is sent by three bytes that are none.
type garbler struct{ *http.Client }

func (g garbler) Do(r *http.Request) (*http.Response, error) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return nil, err
	}
	const garbage = "\x00\x00\x00\x00\x03\xff\xff\xff"
	r.Body, r.ContentLength = io.NopCloser(strings.NewReader(garbage)), int64(len(garbage))
	return g.Client.Do(r)
}

func TestEmptyBodyIsAProtocolError(t *testing.T) {
	t.Parallel()
	onEachServer(t, port.PublicSettings{}, func(t *testing.T, url string, _ *grpc.ClientConn) {
		response, _ := post(t, fronttest.Client(t, true), url+inferencev1connect.InferenceServiceInferProcedure, "application/grpc", http.NoBody)
		if got := response.trailer("Grpc-Status"); got != "12" {
			t.Errorf("Grpc-Status %q %v", got, response.Trailer)
		}
	})
}

var errTorn = errors.New("torn")

func TestTruncatedBodyReachesNoCaller(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{}
	onEachServer(t, port.PublicSettings{Caller: caller}, func(t *testing.T, url string, _ *grpc.ClientConn) {
		out, in := io.Pipe()
		go func() {
			_, _ = in.Write([]byte{0, 0, 0})
			_ = in.CloseWithError(errTorn)
		}()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+inferencev1connect.InferenceServiceInferProcedure, out)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/grpc")
		if response, err := fronttest.Client(t, true).Do(r); err == nil {
			_ = response.Body.Close()
		}
		if caller.Last() != nil {
			t.Error("the caller was asked")
		}
	})
}

// The first answer takes all of the connection's window and is never read, so
// that no byte of the next can be sent.
func TestUnreadSmallUnaryResponseEnds(t *testing.T) {
	t.Parallel()
	const window = 64 << 10
	handler := rpcHandler(t, &fronttest.Caller{}, transport.Settings{StallTimeout: 300 * time.Millisecond})
	url := fronttest.Serve(t, handler) + inferencev1connect.InferenceServiceInferProcedure
	client := fronttest.Client(t, true)
	client.Transport.(*http.Transport).HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerConnection: window, MaxReceiveBufferPerStream: 4 * window}
	_ = unreadAnswer(t, client, url, strings.Repeat("xxxx", window/2))
	for cut := false; !cut; { // one may come before all of the window is taken
		answer, ended := unreadAnswer(t, client, url, "eA=="), make(chan error, 1)
		go func() {
			_, err := io.ReadAll(answer)
			ended <- err
		}()
		select {
		case err := <-ended:
			cut = err != nil
		case <-time.After(20 * time.Second):
			t.Fatal("the answer is still being sent")
		}
	}
}

// unreadAnswer returns the body of an answer whose head has come.
func unreadAnswer(t *testing.T, client *http.Client, url, base64 string) io.Reader {
	t.Helper()
	body := `{"pipeline":"echo","inputs":[{"blob":{"data":"` + base64 + `"}}]}`
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	return response.Body
}

// A few bytes on the wire are many in memory where they are messages.
func TestTooManyNestedMessagesAreInvalidRequest(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{}
	handler := rpcHandler(t, caller, transport.Settings{})
	url := fronttest.Serve(t, handler) + inferencev1connect.InferenceServiceInferProcedure
	const most = 1 << 18
	for name, row := range map[string]struct{ contentType, body string }{
		"inputs":              {"application/proto", strings.Repeat("\x12\x00", most+1)},
		"entries of a map":    {"application/proto", strings.Repeat("\x1a\x00", most+1)},
		"names of outputs":    {"application/proto", strings.Repeat("\x52\x00", 4*most+1)},
		"inputs, as JSON":     {"application/json", `{"inputs":[` + strings.Repeat("{},", most) + "{}]}"},
		"anything, in quotes": {"application/json", `{"pipeline":"\\\"{","inputs":[` + strings.Repeat("{},", most) + "{}]}"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			response, data := post(t, fronttest.Client(t, false), url, row.contentType, strings.NewReader(row.body))
			if response.StatusCode != http.StatusBadRequest || reasonOf(t, data) != string(fault.InvalidRequest) || !bytes.Contains(data, []byte("more than 262144 messages")) {
				t.Errorf("%s: %.300s", response.Status, data)
			}
			if caller.Last() != nil {
				t.Error("the caller was asked")
			}
		})
	}
}

// All that a request may have is not too much.
func TestMessageMayHaveAllPartsWithAllParameters(t *testing.T) {
	t.Parallel()
	var values, parts []string
	for i := range payload.MaxParameters {
		values = append(values, `"`+strconv.Itoa(i)+`":{}`)
	}
	parameters := `"parameters":{` + strings.Join(values, ",") + "}"
	for i := range payload.MaxParts {
		parts = append(parts, `{"name":"`+strconv.Itoa(i)+`","blob":{},`+parameters+"}")
	}
	handler := rpcHandler(t, &fronttest.Caller{}, transport.Settings{})
	url := fronttest.Serve(t, handler) + inferencev1connect.InferenceServiceInferProcedure
	body := `{"pipeline":"echo",` + parameters + `,"inputs":[` + strings.Join(parts, ",") + "]}"
	response, data := post(t, fronttest.Client(t, false), url, "application/json", strings.NewReader(body))
	// It is decoded, for it is told which parameter has no value.
	if response.StatusCode != http.StatusBadRequest || !bytes.Contains(data, []byte("has no value")) {
		t.Errorf("%s: %.300s", response.Status, data)
	}
}
