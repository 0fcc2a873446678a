package port_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// Clients ask for large answers and read no more than the status. The heap is the process's, so
// nothing runs beside this test.
func TestUnreadResponsesStayWithinTheBudget(t *testing.T) { //nolint:paralleltest // see above
	const readers, size, limit, slack = 80, 4 << 20, 64 << 20, 64 << 20
	for name, test := range map[string]struct{ method, path, contentType, body string }{
		"a result":       {http.MethodGet, "/v1/requests/" + fronttest.RequestID + "/result", "", ""},
		"a JSON result":  {http.MethodGet, "/v1/requests/" + fronttest.RequestID + "/result", "\r\nAccept: application/json", ""},
		"an RPC":         {http.MethodPost, "/stagemesh.inference.v1.InferenceService/GetResult", "application/json", `{"requestId": "` + fronttest.RequestID + `"}`},
		"a stream":       {http.MethodPost, "/v1/pipelines/p:stream", "text/plain", "x"},
		"an OIP request": {http.MethodPost, "/v2/models/p/generate", "application/json", `{"text_input": "x"}`},
	} {
		t.Run(name, func(t *testing.T) {
			answer := func(context.Context, *request.Request) (*request.Response, error) {
				return fronttest.Respond(payload.OfBlob("y", "text/plain", []byte(strings.Repeat("x", size)))), nil
			}
			pool := budget.NewPool(budget.Settings{Limit: limit})
			before := heap()
			url := start(t, port.PublicSettings{Models: known{}, Caller: &fronttest.Caller{Answer: answer}, Port: port.Port{Memory: transport.NewMemory(pool)}})
			conns := make([]net.Conn, readers)
			statuses := map[int]int{}
			for i := range conns {
				conns[i] = unread(t, url, test.method, test.path, test.contentType, test.body)
			}
			for _, conn := range conns {
				response, err := http.ReadResponse(bufio.NewReaderSize(conn, 16), nil) //nolint:bodyclose // its connection is closed
				if err != nil {
					t.Fatal(err)
				}
				statuses[response.StatusCode]++
			}
			if now := heap(); now > before+limit+slack {
				t.Errorf("the heap has %d MiB, with a budget of %d MiB and %d before", now>>20, limit>>20, before>>20)
			}
			if statuses[http.StatusTooManyRequests] == 0 || statuses[http.StatusOK] == 0 {
				t.Errorf("the clients got %v", statuses)
			}
			for _, conn := range conns {
				_ = conn.Close()
			}
			testbed.Eventually(t, "the budget is free again", func() bool { return pool.Held() == 0 })
		})
	}
}

// The same for callers of grpc-go, which take the header of a response alone.
func TestUnreadCallsStayWithinTheBudget(t *testing.T) { //nolint:paralleltest // see above
	const readers, size, limit, slack = 80, 4 << 20, 64 << 20, 64 << 20
	answer := func(context.Context, *request.Request) (*request.Response, error) {
		return fronttest.Respond(payload.OfBlob("y", "text/plain", []byte(strings.Repeat("x", size)))), nil
	}
	pool := budget.NewPool(budget.Settings{Limit: limit})
	before := heap()
	url := startGRPC(t, port.PublicSettings{Caller: &fronttest.Caller{Answer: answer}, Port: port.Port{Memory: transport.NewMemory(pool)}})
	conns, calls := make([]*grpc.ClientConn, readers), make([]grpc.ClientStream, readers)
	for i := range calls {
		conns[i] = testbed.Dial(t, url, grpc.WithInitialWindowSize(64<<10), grpc.WithInitialConnWindowSize(64<<10))
		var err error
		if calls[i], err = conns[i].NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, inferencev1.InferenceService_Infer_FullMethodName); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(calls[i].SendMsg(blob(1)), calls[i].CloseSend()); err != nil {
			t.Fatal(err)
		}
	}
	codesOf := map[codes.Code]int{}
	for _, c := range calls {
		if header, err := c.Header(); err == nil && len(header.Get("stagemesh-request-id")) > 0 {
			codesOf[codes.OK]++
			continue
		}
		codesOf[status.Code(c.RecvMsg(&inferencev1.InferResponse{}))]++
	}
	if now := heap(); now > before+limit+slack {
		t.Errorf("the heap has %d MiB, with a budget of %d MiB and %d before", now>>20, limit>>20, before>>20)
	}
	if codesOf[codes.OK] == 0 || codesOf[codes.OK]+codesOf[codes.ResourceExhausted] != readers {
		t.Errorf("the callers got %v", codesOf)
	}
	for _, conn := range conns {
		_ = conn.Close()
	}
	testbed.Eventually(t, "the budget is free again", func() bool { return pool.Held() == 0 })
}

// unread sends a request on a connection with small buffers.
func unread(t *testing.T, url, method, path, contentType, body string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.(*net.TCPConn).SetReadBuffer(4 << 10); err != nil {
		t.Fatal(err)
	}
	if err := conn.SetDeadline(time.Now().Add(testbed.Patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, fmt.Sprintf("%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s", method, path, contentType, len(body), body)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// heap returns the bytes that are in use.
func heap() uint64 {
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}
