package gateway_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.opentelemetry.io/otel/metric/noop"
	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	payloads "github.com/stagemesh/stagemesh/mesh/payload"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// settings returns a gateway's settings without pipelines; the edits change them.
func settings(t *testing.T, broker string, edits ...func(*gateway.Settings)) gateway.Settings {
	t.Helper()
	s := gateway.Settings{
		Config: gateway.Config{Listen: "127.0.0.1:0"},
		Call:   call.Settings{Mesh: "test", Gateway: "gateway", Logger: slog.New(slog.DiscardHandler), Meter: noop.Meter{}},
		Bus:    bus.Settings{URL: broker},
	}
	for _, edit := range edits {
		edit(&s)
	}
	return s
}

// run runs a gateway on the broker. The gateway stops with the test, or when stop is
// called.
func run(t *testing.T, broker *testbed.Broker, edits ...func(*gateway.Settings)) (g *gateway.Gateway, stop func()) {
	t.Helper()
	g, err := gateway.New(settings(t, broker.URL(), edits...))
	if err != nil {
		t.Fatal(err)
	}
	stop = testbed.Background(t, g.Run)
	waiting, leave := context.WithTimeout(t.Context(), testbed.Patience)
	defer leave()
	if err := g.WaitReady(waiting); err != nil {
		t.Fatal(err)
	}
	return g, stop
}

// reasonOf sends a request and returns its status, and the reason of a failure.
func reasonOf(t *testing.T, client *http.Client, method, url string) (status int, reason fault.Reason) {
	t.Helper()
	r := testbed.Request(t, method, url, strings.NewReader("x"))
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var answer struct{ Error struct{ Reason fault.Reason } }
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, answer.Error.Reason
}

func TestGatewayWithoutBrokerIsNotReady(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	g, _ := run(t, broker)
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	client, url := &http.Client{Transport: transport}, "http://"+g.Addr().String()
	if status, reason := reasonOf(t, client, http.MethodGet, url+"/readyz"); status != http.StatusOK {
		t.Errorf("ready: %d %s", status, reason)
	}
	if _, reason := reasonOf(t, client, http.MethodPost, url+"/v1/pipelines/stage:nowhere:infer"); reason != fault.NoCapacity {
		t.Errorf("without a host: %s", reason)
	}
	broker.Stop()
	testbed.Eventually(t, "the connection is lost", func() bool { return g.Ready() != nil })
	for method, path := range map[string]string{http.MethodGet: "/readyz", http.MethodPost: "/v1/pipelines/stage:nowhere:infer"} {
		if status, reason := reasonOf(t, client, method, url+path); status != http.StatusServiceUnavailable || reason != fault.BrokerUnavailable {
			t.Errorf("%s: %d %s", path, status, reason)
		}
	}
	broker.Restore()
	testbed.Eventually(t, "the gateway is ready again", func() bool { return g.Ready() == nil })
}

func TestUnknownRequestIDsAreAnswered(t *testing.T) {
	t.Parallel()
	g, _ := run(t, testbed.StartBroker(t))
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	client, url := &http.Client{Transport: transport}, "http://"+g.Addr().String()+"/v1/requests/0199aaaa-bbbb-7ccc-8ddd-eeeeffff0000"
	if status, reason := reasonOf(t, client, http.MethodGet, url+"/result?wait=10"); status != http.StatusNotFound || reason != fault.NotFound {
		t.Errorf("a result: %d %s", status, reason)
	}
	r := testbed.Request(t, http.MethodDelete, url, nil)
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusNoContent {
		t.Errorf("cancel: %s", response.Status)
	}
	if status, reason := reasonOf(t, client, http.MethodDelete, url[:len(url)-1]); status != http.StatusBadRequest || reason != fault.InvalidRequest {
		t.Errorf("invalid id: %d %s", status, reason)
	}
}

func TestStoppedGatewayReportsShutdown(t *testing.T) {
	t.Parallel()
	g, stop := run(t, testbed.StartBroker(t))
	stop()
	if f := fault.From(g.Ready()); f.Reason != fault.ShuttingDown {
		t.Errorf("got %v", f)
	}
	_, err := g.Service().Infer(t.Context(), &request.Request{Pipeline: "stage:nowhere"})
	if f := fault.From(err); f.Reason != fault.ShuttingDown {
		t.Errorf("a call: %v", f)
	}
}

// Browsers and load balancers open connections ahead of requests. net/http waits for them for 5 s, grpc-go for 10 s.
func TestStopDoesNotWaitForSilentConnections(t *testing.T) {
	t.Parallel()
	ports := map[string]func(g *gateway.Gateway) string{
		"callers": func(g *gateway.Gateway) string { return g.Addr().String() },
		"admin":   func(g *gateway.Gateway) string { return g.AdminAddr().String() },
		"gRPC":    func(g *gateway.Gateway) string { return strings.TrimPrefix(g.GRPCURL(), "http://") },
	}
	for name, address := range ports {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g, stop := run(t, testbed.StartBroker(t), func(s *gateway.Settings) { s.GRPCListen, s.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0" })
			dial := func() net.Conn {
				conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", address(g))
				if err != nil {
					t.Fatal(err)
				}
				return conn
			}
			silent, later := dial(), dial()
			defer silent.Close()
			defer later.Close()
			// Connections are accepted in turn: the server has the silent one when it ends the later one.
			if _, err := io.WriteString(later, strings.Repeat("no request\r\n\r\n", 2)); err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, later) // it may be reset
			begin := time.Now()
			stop()
			if took := time.Since(begin); took > 4*time.Second {
				t.Errorf("the stop took %s", took)
			}
		})
	}
}

// Load balancers and clients with an open connection need time to notice the shutdown.
func TestGatewayServesDuringDrainDelay(t *testing.T) {
	t.Parallel()
	web := func(http2 bool) func(*testing.T, string, *atomic.Int64) func() fault.Reason {
		return func(t *testing.T, address string, connections *atomic.Int64) func() fault.Reason {
			client := counted(t, http2, connections)
			return func() fault.Reason {
				_, reason := reasonOf(t, client, http.MethodPost, "http://"+address+"/v1/pipelines/stage:nowhere:infer")
				return reason
			}
		}
	}
	for name, clientOf := range map[string]func(*testing.T, string, *atomic.Int64) func() fault.Reason{
		"HTTP/1": web(false), "HTTP/2": web(true), "gRPC": countedGRPC,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const delay = 2 * time.Second
			g, stop := run(t, testbed.StartBroker(t), func(s *gateway.Settings) { s.DrainDelay = delay })
			var connections atomic.Int64
			ask := clientOf(t, g.Addr().String(), &connections)
			ask()
			begin, stopped := time.Now(), make(chan struct{})
			go func() {
				defer close(stopped)
				stop()
			}()
			testbed.Eventually(t, "it reports shutdown", func() bool { return g.Ready() != nil })
			if status, reason := reasonOf(t, counted(t, false, new(atomic.Int64)), http.MethodGet, g.URL()+"/readyz"); status != http.StatusServiceUnavailable || reason != fault.ShuttingDown {
				t.Errorf("ready: %d %s", status, reason)
			}
			if reason := ask(); reason != fault.NoCapacity {
				t.Errorf("a call during the drain delay: %s", reason)
			}
			// It must not keep its connection for long.
			testbed.Eventually(t, "another connection is made", func() bool { return ask() == fault.NoCapacity && connections.Load() > 1 })
			testbed.Receive(t, "end", stopped)
			if took := time.Since(begin); took < delay {
				t.Errorf("Run returned after %s", took)
			}
		})
	}
}

// countedGRPC returns a call of grpc-go, which counts its connections.
func countedGRPC(t *testing.T, address string, n *atomic.Int64) func() fault.Reason {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
		n.Add(1)
		return (&net.Dialer{}).DialContext(ctx, "tcp", address)
	}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return func() fault.Reason {
		_, err := inferencev1.NewInferenceServiceClient(conn).Infer(t.Context(), &inferencev1.InferRequest{Pipeline: "stage:nowhere", Inputs: []*inferencev1.Part{{
			Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{}},
		}}})
		for _, detail := range status.Convert(err).Details() {
			if info, ok := detail.(*errdetails.ErrorInfo); ok {
				return fault.Reason(info.GetReason())
			}
		}
		return ""
	}
}

// counted returns a client that counts its connections.
func counted(t *testing.T, http2 bool, n *atomic.Int64) *http.Client {
	t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		n.Add(1)
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}}
	if http2 {
		transport.Protocols = new(http.Protocols)
		transport.Protocols.SetUnencryptedHTTP2(true)
	}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// A small compressed body may have many uncompressed bytes.
func TestCompressedRequestsCountUncompressedBytes(t *testing.T) {
	t.Parallel()
	const payload = 1 << 20
	g, _ := run(t, testbed.StartBroker(t), func(s *gateway.Settings) {
		s.MaxPayload, s.MaxInFlightBytes = payload, 5*payload
	})
	inputs := []payloads.Part{payloads.OfBlob("", "text/plain", make([]byte, payload))}
	for range 3 {
		// A request that is rejected for another reason returns its bytes.
		_, err := g.Service().Infer(t.Context(), &request.Request{Pipeline: "stage:nowhere", Inputs: inputs})
		if f := fault.From(err); f.Reason != fault.NoCapacity {
			t.Errorf("got %v", f)
		}
	}
	many := make([]payloads.Part, 6)
	for i := range many {
		many[i] = payloads.OfBlob(fmt.Sprint(i), "text/plain", make([]byte, payload))
	}
	_, err := g.Service().Infer(t.Context(), &request.Request{Pipeline: "stage:nowhere", Inputs: many})
	if f := fault.From(err); f.Reason != fault.PayloadTooLarge {
		t.Errorf("more than max_in_flight_bytes: %v", f)
	}
}
