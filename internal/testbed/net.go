package testbed

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
)

// Listen returns a listener on a free port, which is closed with the test.
func Listen(t testing.TB) net.Listener {
	t.Helper()
	out, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = out.Close() }) // it may be closed
	return out
}

// Dial returns a connection of gRPC without TLS to an address or a URL. It is closed with the test.
func Dial(t testing.TB, address string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(strings.TrimPrefix(address, "http://"), append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// ServeHealth serves grpc.health.v1 until the test ends, or stop is called.
func ServeHealth(t testing.TB, options ...grpc.ServerOption) (address string, h *health.Server, stop func()) {
	t.Helper()
	listener, server := Listen(t), grpc.NewServer(options...)
	h = health.NewServer()
	healthv1.RegisterHealthServer(server, h)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	stop = sync.OnceFunc(func() {
		server.Stop()
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return listener.Addr().String(), h, stop
}

// Get returns the status and body of a page. It keeps no connection open, and works in a
// cleanup too.
func Get(t testing.TB, url string) (status int, body string) {
	t.Helper()
	request, err := http.NewRequestWithContext(context.WithoutCancel(t.Context()), http.MethodGet, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	response, text := Do(t, &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, request)
	return response.StatusCode, string(text)
}

// Request returns a request that ends with the test.
func Request(t testing.TB, method, url string, body io.Reader) *http.Request {
	t.Helper()
	out, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Response is a response without its body.
type Response struct {
	Status          string
	StatusCode      int
	Header, Trailer http.Header
}

// Do sends a request, and returns its response and the body of that.
func Do(t testing.TB, client *http.Client, request *http.Request) (Response, []byte) {
	t.Helper()
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }() // it is read whole
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return Response{response.Status, response.StatusCode, response.Header, response.Trailer}, body
}

// Call sends a text with headers, each a name and a value, and returns the response and its body.
func Call(t testing.TB, client *http.Client, method, url, text string, headers ...string) (response Response, body string) {
	t.Helper()
	r := Request(t, method, url, strings.NewReader(text))
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	response, data := Do(t, client, r)
	return response, string(data)
}

// Metric returns a metric from a page of Prometheus, summed over the series that have the
// labels, each written as name="value". A counter that does not exist yet is 0.
func Metric(t testing.TB, page, metric string, labels ...string) int {
	t.Helper()
	sum := 0.0
	for line := range strings.Lines(page) {
		series, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		name, _, _ := strings.Cut(series, "{")
		if name != metric || slices.ContainsFunc(labels, func(label string) bool { return !strings.Contains(series, label) }) {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		sum += v
	}
	return int(sum)
}
