package transport_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
)

const inferPath = "/inference.GRPCInferenceService/ModelInfer"

type infers = func(context.Context, *transport.Call, *oipv2.ModelInferRequest) (*oipv2.ModelInferResponse, error)

// answerSized answers each request with as many bytes as its version says.
func answerSized(size int) infers {
	return func(_ context.Context, _ *transport.Call, in *oipv2.ModelInferRequest) (*oipv2.ModelInferResponse, error) {
		return &oipv2.ModelInferResponse{Id: in.GetId(), RawOutputContents: [][]byte{make([]byte, size)}}, nil
	}
}

// serveGRPC serves ModelInfer and ModelStreamInfer with grpc-go, and returns the address.
func serveGRPC(t *testing.T, s transport.Settings, pool *budget.Pool, infer infers) string {
	t.Helper()
	service := transport.NewService(oipv2.File_oip_v2_inference_proto.Services().ByName("GRPCInferenceService"), s)
	transport.Unary(service, "ModelInfer", infer)
	transport.BidiStream(service, "ModelStreamInfer", transport.InFlight[*oipv2.ModelInferRequest]{Limit: 1}, echo(0))
	return fronttest.ServeService(t, service, s, pool)
}

func dialGRPC(t *testing.T, address string, options ...grpc.DialOption) oipv2.GRPCInferenceServiceClient {
	t.Helper()
	return oipv2.NewGRPCInferenceServiceClient(testbed.Dial(t, address, options...))
}

func reasonOf(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info.GetReason()
		}
	}
	return ""
}

func TestFullBudgetRejectsMessages(t *testing.T) {
	t.Parallel()
	for name, size := range map[string]int{"within the window": 60 << 10, "beyond it": 1 << 20} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := budget.NewPool(budget.Settings{Limit: 50 << 10})
			client := dialGRPC(t, serveGRPC(t, transport.Settings{}, pool, answerSized(1)))
			request := &oipv2.ModelInferRequest{Id: strings.Repeat("x", size)}
			if _, err := client.ModelInfer(t.Context(), request); status.Code(err) != codes.InvalidArgument || reasonOf(err) != string(fault.PayloadTooLarge) {
				t.Errorf("got %v", err)
			}
			free := func() {
				t.Helper()
				testbed.Eventually(t, "the budget is free again", func() bool { return pool.Held() == 0 })
			}
			free() // the answer comes a moment before
			stream, err := client.ModelStreamInfer(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := stream.Send(request); err != nil {
				t.Fatal(err)
			}
			if m, err := stream.Recv(); status.Code(err) != codes.InvalidArgument || reasonOf(err) != string(fault.PayloadTooLarge) {
				t.Errorf("the stream answers %v, %v", m, err)
			}
			free()
			if _, err := client.ModelInfer(t.Context(), &oipv2.ModelInferRequest{}); err != nil {
				t.Errorf("afterwards: %v", err)
			}
			free()
		})
	}
}

func TestFullBudgetRejectsResponse(t *testing.T) {
	t.Parallel()
	pool := budget.NewPool(budget.Settings{Limit: 50 << 10})
	client := dialGRPC(t, serveGRPC(t, transport.Settings{}, pool, answerSized(30<<10)))
	if _, err := client.ModelInfer(t.Context(), &oipv2.ModelInferRequest{}); reasonOf(err) != string(fault.Overloaded) {
		t.Errorf("got %v", err)
	}
}

// rawConn is a client that does what it is told, frame by frame.
type rawConn struct {
	t    *testing.T
	conn net.Conn
	*http2.Framer
}

// dialRaw connects. The server may send so much on each stream, and so much in all.
func dialRaw(t *testing.T, address string, streamWindow, connWindow uint32) *rawConn {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(testbed.Patience)); err != nil {
		t.Fatal(err)
	}
	out := &rawConn{t, conn, http2.NewFramer(conn, conn)}
	out.must(io.WriteString(conn, http2.ClientPreface))
	out.must(0, out.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: streamWindow}))
	if connWindow > 65535 {
		out.must(0, out.WriteWindowUpdate(0, connWindow-65535))
	}
	return out
}

func (c *rawConn) must(_ int, err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// call sends the headers of a call and its message.
func (c *rawConn) call(id uint32, m proto.Message) {
	c.t.Helper()
	c.headers(id, "te", "trailers")
	c.message(id, m)
}

// headers sends the headers of a call, and one more.
func (c *rawConn) headers(id uint32, name, value string) {
	c.t.Helper()
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	fields := [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", inferPath}, {":authority", "x"}, {"content-type", "application/grpc"}, {name, value}}
	if name == ":path" {
		fields[2], fields = fields[5], fields[:5]
	}
	for _, field := range fields {
		if err := encoder.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]}); err != nil {
			c.t.Fatal(err)
		}
	}
	c.must(0, c.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block.Bytes(), EndHeaders: true}))
}

func (c *rawConn) message(id uint32, m proto.Message) {
	c.t.Helper()
	data, err := proto.Marshal(m)
	if err != nil {
		c.t.Fatal(err)
	}
	c.must(0, c.WriteData(id, true, append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(data))), data...)))
}

// await reads frames until one satisfies the function.
func (c *rawConn) await(what string, isIt func(http2.Frame) bool) {
	c.t.Helper()
	for {
		frame, err := c.ReadFrame()
		if err != nil {
			c.t.Fatalf("%s: %v", what, err)
		}
		if settings, ok := frame.(*http2.SettingsFrame); ok && !settings.IsAck() {
			c.must(0, c.WriteSettingsAck())
		}
		if isIt(frame) {
			return
		}
	}
}

func (c *rawConn) awaitReset(id uint32) {
	c.t.Helper()
	c.await("a reset", func(f http2.Frame) bool { return f.Header().Type == http2.FrameRSTStream && f.Header().StreamID == id })
}

func (c *rawConn) awaitEnd(id uint32) {
	c.t.Helper()
	c.await("an end", func(f http2.Frame) bool {
		return f.Header().StreamID == id && f.Header().Flags.Has(http2.FlagHeadersEndStream)
	})
}

// A client that takes nothing of one response loses that, and its other calls go on.
func TestUnreadResponseIsReset(t *testing.T) {
	t.Parallel()
	pool := budget.NewPool(budget.Settings{Limit: 10 << 20})
	const large, window = 1 << 20, 1 << 10
	var size atomic.Int64
	size.Store(large)
	address := serveGRPC(t, transport.Settings{StallTimeout: 200 * time.Millisecond}, pool, func(ctx context.Context, c *transport.Call, in *oipv2.ModelInferRequest) (*oipv2.ModelInferResponse, error) {
		return answerSized(int(size.Load()))(ctx, c, in)
	})
	conn := dialRaw(t, address, window, 1<<20)
	conn.call(1, &oipv2.ModelInferRequest{})
	conn.await("headers", func(f http2.Frame) bool { return f.Header().StreamID == 1 })
	if got := pool.Held(); got < large {
		t.Errorf("%d bytes are reserved", got)
	}
	size.Store(10)
	conn.call(3, &oipv2.ModelInferRequest{})
	conn.awaitEnd(3)
	conn.awaitReset(1)
	conn.call(5, &oipv2.ModelInferRequest{})
	conn.awaitEnd(5)
	testbed.Eventually(t, "the budget is free again", func() bool { return pool.Held() == 0 })
}

func TestResponseThatIsReadSlowlyArrives(t *testing.T) {
	t.Parallel()
	const size, part = 900 << 10, 150 << 10
	address := serveGRPC(t, transport.Settings{StallTimeout: 2 * time.Second}, nil, answerSized(size))
	conn := dialRaw(t, address, 0, 1<<20)
	conn.call(1, &oipv2.ModelInferRequest{})
	conn.await("headers", func(f http2.Frame) bool { return f.Header().StreamID == 1 })
	ticker := time.NewTicker(500 * time.Millisecond)
	defer ticker.Stop()
	var reader sync.WaitGroup
	defer reader.Wait()
	reader.Go(func() {
		for range 7 { // six of them take longer than the timeout
			<-ticker.C
			_ = conn.WriteWindowUpdate(1, part)
		}
	})
	conn.awaitEnd(1)
}

// A connection that is closed returns the budget of the responses on it.
func TestClosedConnectionReturnsBudget(t *testing.T) {
	t.Parallel()
	pool := budget.NewPool(budget.Settings{Limit: 100 << 20})
	address := serveGRPC(t, transport.Settings{}, pool, answerSized(1<<20))
	conn := dialRaw(t, address, 1<<10, 1<<20)
	for id := uint32(1); id < 20; id += 2 {
		conn.call(id, &oipv2.ModelInferRequest{})
	}
	conn.await("headers", func(f http2.Frame) bool { return f.Header().StreamID == 19 })
	_ = conn.conn.Close()
	testbed.Eventually(t, "the budget is free again", func() bool { return pool.Held() == 0 })
}

func TestClosingGatewayAwaitsNoMessage(t *testing.T) {
	t.Parallel()
	closing := make(chan struct{})
	conn := dialRaw(t, serveGRPC(t, transport.Settings{Closing: closing}, nil, answerSized(1)), 1<<20, 1<<20)
	conn.headers(1, "te", "trailers")
	close(closing)
	conn.awaitEnd(1)
}

// Clients of net/http write a prefix and its message as two frames, and others may split
// anything.
func TestMessagesMayBeSplitAnywhere(t *testing.T) {
	t.Parallel()
	pool := budget.NewPool(budget.Settings{Limit: 1 << 20})
	conn := dialRaw(t, serveGRPC(t, transport.Settings{MaxMessageBytes: 100}, pool, answerSized(1)), 1<<20, 1<<20)
	conn.headers(1, "te", "trailers")
	for i, b := range []byte("\x00\x00\x00\x00\x03\x1a\x01x") {
		conn.must(0, conn.WriteData(1, i == 7, []byte{b}))
	}
	conn.awaitEnd(1)
	conn.headers(3, "te", "trailers")
	for _, b := range []byte("\x00\x00\x00\x00\x65") { // 101 bytes
		conn.must(0, conn.WriteData(3, false, []byte{b}))
	}
	conn.awaitEnd(3)
	testbed.Eventually(t, "the budget is free again", func() bool { return pool.Held() == 0 })
}

// A frame may have one byte of a message, and far more padding.
func TestSmallFramesCountWithTheirPadding(t *testing.T) {
	t.Parallel()
	const frames, padding = 500, 200
	prefix := []byte("\x00\x00\x00\x00\x00")
	for name, begin := range map[string][]byte{"of prefixes": nil, "of a message": []byte("\x00\x00\x00\x10\x00")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, gate := budget.NewPool(budget.Settings{Limit: 1 << 20}), make(chan struct{})
			defer close(gate)
			conn := dialRaw(t, serveGRPC(t, transport.Settings{}, pool, func(ctx context.Context, _ *transport.Call, _ *oipv2.ModelInferRequest) (*oipv2.ModelInferResponse, error) {
				<-gate
				return nil, ctx.Err()
			}), 1<<20, 1<<20)
			conn.headers(1, "te", "trailers")
			conn.must(0, conn.WriteData(1, false, begin))
			for i := range frames {
				conn.must(0, conn.WriteDataPadded(1, false, prefix[i%5:i%5+1], make([]byte, padding)))
			}
			testbed.Eventually(t, "the frames count", func() bool { return pool.Held() > frames*padding*9/10 })
		})
	}
}

func TestPanicFailsItsCallAlone(t *testing.T) {
	t.Parallel()
	client := dialGRPC(t, serveGRPC(t, transport.Settings{}, nil, func(ctx context.Context, c *transport.Call, in *oipv2.ModelInferRequest) (*oipv2.ModelInferResponse, error) {
		if in.GetId() == "broken" {
			panic("a bug")
		}
		return answerSized(1)(ctx, c, in)
	}))
	if _, err := client.ModelInfer(t.Context(), &oipv2.ModelInferRequest{Id: "broken"}); reasonOf(err) != string(fault.Internal) {
		t.Errorf("got %v", err)
	}
	if _, err := client.ModelInfer(t.Context(), &oipv2.ModelInferRequest{}); err != nil {
		t.Error(err)
	}
}

func TestManyCallsShareOneConnection(t *testing.T) {
	t.Parallel()
	const calls = 4096
	var inFlight atomic.Int64
	gate := make(chan struct{})
	client := dialGRPC(t, serveGRPC(t, transport.Settings{}, nil, func(ctx context.Context, c *transport.Call, in *oipv2.ModelInferRequest) (*oipv2.ModelInferResponse, error) {
		if inFlight.Add(1) == calls {
			close(gate)
		}
		select {
		case <-gate:
		case <-ctx.Done():
		}
		return answerSized(1)(ctx, c, in)
	}))
	errs := make(chan error, calls)
	for range calls {
		go func() {
			_, err := client.ModelInfer(t.Context(), &oipv2.ModelInferRequest{})
			errs <- err
		}()
	}
	for range calls {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
}

// The library answers such calls itself, and no handler sees them.
func TestCallsWithoutHandlerReturnBudget(t *testing.T) {
	t.Parallel()
	for name, field := range map[string][2]string{
		"path":     {":path", "/unknown"},
		"encoding": {"grpc-encoding", "br"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := budget.NewPool(budget.Settings{Limit: 10 << 20})
			conn := dialRaw(t, serveGRPC(t, transport.Settings{}, pool, answerSized(1)), 1<<20, 1<<20)
			for id := uint32(1); id < 20; id += 2 {
				conn.headers(id, field[0], field[1])
				conn.message(id, &oipv2.ModelInferRequest{Id: strings.Repeat("x", 1000)})
			}
			conn.awaitEnd(19)
			testbed.Eventually(t, "the budget is free again", func() bool { return pool.Held() == 0 })
		})
	}
}

// A response is not changed before it is written, whatever its size.
func TestWaitingResponseKeepsItsBytes(t *testing.T) {
	t.Parallel()
	const window, headers = 200 << 10, 4
	address := serveGRPC(t, transport.Settings{}, nil, func(_ context.Context, _ *transport.Call, in *oipv2.ModelInferRequest) (*oipv2.ModelInferResponse, error) {
		size := 250 << 10
		if in.GetId() == "a" {
			size = 256<<10 + 1 - headers // with them one byte more than a part has
		}
		return &oipv2.ModelInferResponse{RawOutputContents: [][]byte{bytes.Repeat([]byte(in.GetId()), size)}}, nil
	})
	conn := dialRaw(t, address, window, 16<<20)
	left := map[uint32]int{}
	call := func(id uint32, text string) {
		left[id] = window
		conn.call(id, &oipv2.ModelInferRequest{Id: text})
		conn.await("a window of data", func(f http2.Frame) bool {
			left[f.Header().StreamID] -= dataOf(f)
			return left[id] == 0
		})
	}
	call(1, "a")
	for id := uint32(3); id < 23; id += 2 {
		call(id, "b")
	}
	conn.must(0, conn.WriteWindowUpdate(1, window))
	conn.await("the end", func(f http2.Frame) bool {
		if data, ok := f.(*http2.DataFrame); ok && f.Header().StreamID == 1 && bytes.Trim(data.Data(), "a") != nil {
			t.Fatalf("the response has %q", bytes.Trim(data.Data(), "a")[:1])
		}
		return f.Header().StreamID == 1 && f.Header().Flags.Has(http2.FlagHeadersEndStream)
	})
}

func dataOf(f http2.Frame) int {
	if data, ok := f.(*http2.DataFrame); ok {
		return len(data.Data())
	}
	return 0
}

// A client may leave within a frame, at each of its bytes.
func TestClientLeavesWithinAFrame(t *testing.T) {
	t.Parallel()
	pool := budget.NewPool(budget.Settings{Limit: 1 << 20})
	address := serveGRPC(t, transport.Settings{}, pool, answerSized(1))
	const header, message = 9, 5 + 3
	frame := append([]byte{0, 0, message, 0, 0, 0, 0, 0, 1}, 0, 0, 0, 0, 3, 'a', 'b', 'c')
	for n := 1; n < header+message; n++ {
		conn := dialRaw(t, address, 1<<20, 1<<20)
		conn.headers(1, "te", "trailers")
		conn.must(conn.conn.Write(frame[:n]))
		_ = conn.conn.Close()
	}
	conn := dialRaw(t, address, 1<<20, 1<<20)
	conn.call(1, &oipv2.ModelInferRequest{})
	conn.awaitEnd(1)
	testbed.Eventually(t, "the budget is free again", func() bool { return pool.Held() == 0 })
}
