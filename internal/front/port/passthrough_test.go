package port_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/passthrough"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

const (
	predict = "predict.Predictor/Predict"
	byField = "predict.Predictor/PredictByField"
)

// passOn dials a port that passes the methods on to a caller.
// starter starts one of the servers that serve gRPC.
type starter = func(testing.TB, port.PublicSettings) string

func onBothServers(t *testing.T, check func(*testing.T, starter)) {
	t.Helper()
	for name, start := range map[string]starter{"net/http": start, "grpc-go": startGRPC} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			check(t, start)
		})
	}
}

func passOn(t *testing.T, start starter, answer func(ctx context.Context, r *request.Request) (*request.Response, error)) *grpc.ClientConn {
	t.Helper()
	return testbed.Dial(t, start(t, port.PublicSettings{
		Settings: limited(), Caller: &fronttest.Caller{Answer: answer},
		Passthrough: map[string]string{predict: "", byField: "1"},
	}))
}

// answerName answers with the name of the pipeline, as the value of a StringValue.
func answerName(_ context.Context, r *request.Request) (*request.Response, error) {
	if strings.HasSuffix(r.Pipeline, ":unknown") {
		return nil, fault.New(fault.UnknownModel, "no such model")
	}
	part := payload.OfBlob("response", "", append([]byte{1<<3 | 2, byte(len(r.Pipeline))}, r.Pipeline...))
	part.Parameters = payload.Parameters{
		passthrough.Headers:  payload.String(passthrough.EncodeHeaders(map[string][]string{"x-a": {"1", "2"}, "x-b-bin": {"\xff"}})),
		passthrough.Trailers: payload.String(passthrough.EncodeHeaders(map[string][]string{"x-c": {"3"}})),
	}
	return &request.Response{RequestID: fronttest.RequestID, Outputs: []payload.Part{part}}, nil
}

func TestCallNamesItsModel(t *testing.T) {
	t.Parallel()
	onBothServers(t, checkCallNamesItsModel)
}

func checkCallNamesItsModel(t *testing.T, start starter) {
	t.Helper()
	conn := passOn(t, start, answerName)
	for name, test := range map[string]struct {
		method  string
		headers []string
		message string
		want    string // the last of concatenated answers, or a code
	}{
		"a model":               {predict, []string{"mm-model-id", "a"}, "", "model:a"},
		"in any bytes":          {predict, []string{"mm-model-id-bin", "Ирис"}, "", "model:Ирис"},
		"an alias":              {predict, []string{"mm-vmodel-id", "a", "mm-balanced", "true"}, "", "alias:a"},
		"an alias in any bytes": {predict, []string{"mm-vmodel-id-bin", "ö"}, "", "alias:ö"},
		"a field":               {byField, nil, "a", "model:a"},
		"header before field":   {byField, []string{"mm-model-id", "b"}, "a", "model:b"},
		"several":               {predict, []string{"mm-model-id", "a", "mm-model-id", "b"}, "", "model:b"},
		"one is unknown":        {predict, []string{"mm-model-id", "a", "mm-model-id", "unknown"}, "", "model:a"},
		"all are required":      {predict, []string{"mm-model-id", "a", "mm-model-id", "unknown", "mm-required", "all"}, "", "NotFound"},
		"all are unknown":       {predict, []string{"mm-model-id", "unknown"}, "", "NotFound"},
		"none":                  {predict, nil, "a", "InvalidArgument"},
		"an empty one":          {predict, []string{"mm-model-id", "a", "mm-model-id", ""}, "", "InvalidArgument"},
		"an empty field":        {byField, nil, "", "InvalidArgument"},
		"two kinds":             {predict, []string{"mm-model-id", "a", "mm-vmodel-id", "a"}, "", "InvalidArgument"},
		"too many":              {predict, slices.Repeat([]string{"mm-model-id", "a"}, 101), "", "InvalidArgument"},
		"too large":             {predict, []string{"mm-model-id", "a"}, strings.Repeat("a", 100*fronttest.LimitBytes), "InvalidArgument"},
		"another method":        {"predict.Predictor/Other", []string{"mm-model-id", "a"}, "", "Unimplemented"},
		"management":            {"mmesh.ModelRuntime/unloadModel", []string{"mm-model-id", "a"}, "", "Unimplemented"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out wrapperspb.StringValue
			var header, trailer metadata.MD
			ctx := metadata.AppendToOutgoingContext(t.Context(), test.headers...)
			err := conn.Invoke(ctx, "/"+test.method, wrapperspb.String(test.message), &out, grpc.Header(&header), grpc.Trailer(&trailer))
			if got := out.GetValue(); err != nil && status.Code(err).String() != test.want || err == nil && got != test.want {
				t.Fatalf("got %q, %v; want %q", got, err, test.want)
			}
			if err == nil && (!slices.Equal(header["x-a"], []string{"1", "2"}) || !slices.Equal(header["x-b-bin"], []string{"\xff"}) || !slices.Equal(trailer["x-c"], []string{"3"})) {
				t.Errorf("header %v, trailer %v", header, trailer)
			}
		})
	}
}

func TestCallReachesTheCallerAsItIs(t *testing.T) {
	t.Parallel()
	onBothServers(t, checkCallReachesTheCallerAsItIs)
}

func checkCallReachesTheCallerAsItIs(t *testing.T, start starter) {
	t.Helper()
	// A tag that is longer than it has to be.
	message := []byte{0x8a, 0x80, 0, 1, 'x'}
	requests := make(chan *request.Request, 1)
	conn := passOn(t, start, func(ctx context.Context, r *request.Request) (*request.Response, error) {
		requests <- r
		return answerName(ctx, r)
	})
	ctx := metadata.AppendToOutgoingContext(t.Context(), "mm-model-id", "a", "x-user", "me", "authorization", "Bearer t")
	for _, options := range [][]grpc.CallOption{nil, {grpc.UseCompressor(gzip.Name)}} {
		if err := conn.Invoke(ctx, "/"+byField, message, &emptypb.Empty{}, append(options, grpc.ForceCodec(bytesCodec{}))...); err != nil {
			t.Fatal(err)
		}
		part := (<-requests).Inputs[0]
		if string(part.Blob.Data) != string(message) {
			t.Errorf("message %x", part.Blob.Data)
		}
		headers := passthrough.DecodeHeaders(part.Parameters[passthrough.Headers].String())
		if part.Parameters[passthrough.Method].String() != byField || part.Parameters[passthrough.IDPath].String() != "1" ||
			!slices.Equal(headers["x-user"], []string{"me"}) || headers["authorization"] != nil {
			t.Errorf("parameters %v, headers %v", part.Parameters, headers)
		}
	}
}

// bytesCodec sends bytes as they are, and drops answers.
type bytesCodec struct{}

func (bytesCodec) Name() string                    { return "proto" }
func (bytesCodec) Marshal(m any) ([]byte, error)   { return m.([]byte), nil }
func (bytesCodec) Unmarshal(_ []byte, _ any) error { return nil }

func TestFourModelsRunAtOnce(t *testing.T) {
	t.Parallel()
	onBothServers(t, checkFourModelsRunAtOnce)
}

func checkFourModelsRunAtOnce(t *testing.T, start starter) {
	t.Helper()
	var mu sync.Mutex
	running, most, began := 0, 0, make(chan struct{}, 100)
	conn := passOn(t, start, func(ctx context.Context, r *request.Request) (*request.Response, error) {
		mu.Lock()
		running++
		most = max(most, running)
		mu.Unlock()
		began <- struct{}{}
		defer func() {
			mu.Lock()
			defer mu.Unlock()
			running--
		}()
		if r.Pipeline == "model:bad" {
			for range 4 {
				<-began // the others run
			}
			return nil, fault.New(fault.RunnerFailed, "bad")
		}
		<-ctx.Done()
		return nil, fault.From(ctx.Err())
	})
	ctx := metadata.AppendToOutgoingContext(t.Context(), slices.Concat([]string{"mm-model-id", "bad"}, slices.Repeat([]string{"mm-model-id", "a"}, 9))...)
	err := conn.Invoke(ctx, "/"+predict, &emptypb.Empty{}, &emptypb.Empty{})
	if status.Code(err) != codes.Internal || status.Convert(err).Message() != "bad" {
		t.Errorf("got %v", err)
	}
	mu.Lock()
	defer mu.Unlock()
	if most != 4 {
		t.Errorf("%d ran at once", most)
	}
}

func TestStageThatPassesNothingOnIsUnimplemented(t *testing.T) {
	t.Parallel()
	onBothServers(t, checkStageThatPassesNothingOnIsUnimplemented)
}

func checkStageThatPassesNothingOnIsUnimplemented(t *testing.T, start starter) {
	t.Helper()
	conn := passOn(t, start, func(context.Context, *request.Request) (*request.Response, error) {
		return &request.Response{}, nil
	})
	ctx := metadata.AppendToOutgoingContext(t.Context(), "mm-model-id", "a")
	if err := conn.Invoke(ctx, "/"+predict, &emptypb.Empty{}, &emptypb.Empty{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("got %v", err)
	}
}
