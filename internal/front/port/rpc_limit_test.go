package port_test

import (
	"encoding/json"
	"io"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/emptypb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/internal/admission"
	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// wireError is an error of Connect's unary protocol.
type wireError struct {
	Code    string
	Message string
	Details []struct {
		Type  string
		Debug struct{ Reason string }
	}
}

func post(t *testing.T, client *http.Client, url, contentType, body string, header ...string) (testbed.Response, string) {
	t.Helper()
	return testbed.Call(t, client, http.MethodPost, url, body, append(header, "Content-Type", contentType)...)
}

func reasonOf(t *testing.T, data string) string {
	t.Helper()
	var out wireError
	if err := json.Unmarshal([]byte(data), &out); err != nil || len(out.Details) == 0 {
		t.Fatalf("%s: %v", data, err)
	}
	return out.Details[0].Debug.Reason
}

func TestBytesThatAreNoMessageAreAnInvalidRequest(t *testing.T) {
	t.Parallel()
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
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := serve(t, &fronttest.Caller{}) + inferencev1connect.InferenceServiceInferProcedure
			response, data := post(t, fronttest.Client(t, false), url, row.contentType, row.body, "Content-Encoding", row.encoding)
			if response.StatusCode != http.StatusBadRequest || reasonOf(t, data) != string(fault.InvalidRequest) {
				t.Errorf("%s: %s", response.Status, data)
			}
		})
	}
}

func TestGarbageEnvelopeIsInvalidRequestAndHoldsNothing(t *testing.T) {
	t.Parallel()
	pool := budget.NewPool(budget.Settings{Limit: 1 << 30})
	onEachServer(t, port.PublicSettings{Port: port.Port{Memory: transport.NewMemory(pool)}}, func(t *testing.T, url string, _ *grpc.ClientConn) {
		client := inferencev1connect.NewInferenceServiceClient(garbler{fronttest.Client(t, true)}, url, connect.WithGRPC())
		_, err := infer(t.Context(), client, blob(10))
		_ = wantReason(t, err, fault.InvalidRequest)
		_, err = stream(t.Context(), client, blob(10))
		_ = wantReason(t, err, fault.InvalidRequest)
		testbed.Eventually(t, "nothing is held", func() bool { return pool.Held() == 0 })
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
		response, _ := post(t, fronttest.Client(t, true), url+inferencev1connect.InferenceServiceInferProcedure, "application/grpc", "")
		if got := response.Header.Get("Grpc-Status") + response.Trailer.Get("Grpc-Status"); got != "12" {
			t.Errorf("Grpc-Status %q %v", got, response.Trailer)
		}
	})
}

// field is a field of a message that has a length.
func field(number protowire.Number, value string) string {
	return string(protowire.AppendString(protowire.AppendTag(nil, number, protowire.BytesType), value))
}

// Not parallel: it counts allocations. A few bytes on the wire are many in memory where they are
// elements.
func TestElementsOfMessagesAreBounded(t *testing.T) { //nolint:paralleltest // see above
	const many = 1 << 20
	shape := func(body string) string { return field(1, "echo") + field(2, field(1, "x")+body) }
	bodies := map[string]string{
		"inputs":                        strings.Repeat("\x12\x00", many),
		"entries of a map":              strings.Repeat("\x1a\x00", many),
		"names of outputs":              strings.Repeat("\x52\x00", many),
		"extents, packed":               shape(field(3, field(2, strings.Repeat("\x00", 2*many+many/2)))),
		"extents, not packed":           shape(field(3, strings.Repeat("\x10\x00", many))),
		"extents, packed one by one":    shape(field(3, strings.Repeat("\x12\x01\x00", many))),
		"extents, of tensors in pieces": shape(strings.Repeat("\x1a\x03\x12\x01\x00", many)),
		"bodies of one input":           shape(strings.Repeat("\x12\x00\x1a\x00", many)),
		"steps with models":             strings.Repeat(field(4, "\x12\x02\x0a\x00"), many),
		"fields that are unknown":       strings.Repeat("\x78\x00", 5*many),
		"inputs, as JSON":               `{"inputs":[` + strings.Repeat("{},", many) + "{}]}",
		"extents, as JSON":              `{"inputs":[{"tensor":{"shape":[` + strings.Repeat("0,", 2*many+many/2) + "0]}}]}",
		"names of outputs, as JSON":     `{"outputs":[` + strings.Repeat(`"",`, many) + `""]}`,
		"anything, behind quotes":       `{"pipeline":"\\\"{","inputs":[` + strings.Repeat("{},", many) + "{}]}",
	}
	const bound = 160 << 20 // of what the library copies of up to 10 MiB, and no element
	for server, start := range map[string]func(testing.TB, port.PublicSettings) string{"net/http": start, "grpc-go": startGRPC} {
		caller := &fronttest.Caller{}
		url := start(t, port.PublicSettings{Caller: caller, Settings: transport.Settings{MaxMessageBytes: admission.MaxBody(0)}})
		for name, body := range bodies {
			t.Run(server+", "+name, func(t *testing.T) {
				options := []grpc.CallOption{grpc.ForceCodec(bytesCodec{})}
				if strings.HasPrefix(body, "{") {
					options = append(options, grpc.CallContentSubtype("json"))
				}
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				began := time.Now()
				err := testbed.Dial(t, url).Invoke(t.Context(), inferencev1.InferenceService_Infer_FullMethodName, []byte(body), &emptypb.Empty{}, options...)
				runtime.ReadMemStats(&after)
				if text := status.Convert(err).Message(); !strings.Contains(text, "take more than 16777216 bytes of memory") {
					t.Errorf("got %.300q", text)
				}
				if got := after.TotalAlloc - before.TotalAlloc; got > bound {
					t.Errorf("%d bytes are allocated for %d in %s", got, len(body), time.Since(began))
				}
				if caller.Last() != nil {
					t.Error("the caller was asked")
				}
			})
		}
	}
}

func TestElementsAreReservedBeforeTheyAreDecoded(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		inputs int
		want   string
	}{
		"which are decoded and refused": {3000, "3000 inputs"},
		"more than the memory":          {10_000, "more than the 1048576 that one may have"},
	} {
		pool := budget.NewPool(budget.Settings{Limit: 1 << 20})
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onEachServer(t, port.PublicSettings{Port: port.Port{Memory: transport.NewMemory(pool)}}, func(t *testing.T, _ string, conn *grpc.ClientConn) {
				err := conn.Invoke(t.Context(), inferencev1.InferenceService_Infer_FullMethodName, []byte(strings.Repeat("\x12\x00", row.inputs)), &emptypb.Empty{}, grpc.ForceCodec(bytesCodec{}))
				if status.Code(err) != codes.InvalidArgument || !strings.Contains(status.Convert(err).Message(), row.want) {
					t.Errorf("got %v", err)
				}
				testbed.Eventually(t, "the memory is free again", func() bool { return pool.Held() == 0 })
			})
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
	handler := rpcHandler(t, &fronttest.Caller{}, transport.Settings{MaxMessageBytes: admission.MaxBody(0)})
	url := fronttest.Serve(t, handler) + inferencev1connect.InferenceServiceInferProcedure
	body := `{"pipeline":"echo",` + parameters + `,"inputs":[` + strings.Join(parts, ",") + "]}"
	response, data := post(t, fronttest.Client(t, false), url, "application/json", body)
	// It is decoded, for it is told which parameter has no value.
	if response.StatusCode != http.StatusBadRequest || !strings.Contains(data, "has no value") {
		t.Errorf("%s: %.300s", response.Status, data)
	}
}
