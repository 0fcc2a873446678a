package transport_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

const headerTimeout = 10 * time.Second

// sharedPort is a port that both servers serve. That of net/http answers with what it has
// received.
type sharedPort struct {
	address string
	calls   *grpc.Server
}

func serveShared(t *testing.T, secure *tls.Config, headerTimeout time.Duration) sharedPort {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	web := &http.Server{ReadHeaderTimeout: headerTimeout, TLSConfig: secure, Protocols: new(http.Protocols)}
	web.Protocols.SetHTTP1(true)
	web.Protocols.SetHTTP2(true)
	web.Protocols.SetUnencryptedHTTP2(true)
	web.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		negotiated := "-"
		if r.TLS != nil {
			negotiated = r.TLS.NegotiatedProtocol
		}
		_, _ = fmt.Fprintf(w, "%s %s %d", r.Proto, negotiated, len(body))
	})
	service := transport.NewService(oipv2.File_oip_v2_inference_proto.Services().ByName("GRPCInferenceService"), transport.Settings{})
	transport.Unary(service, "ModelInfer", answerSized(1))
	out := sharedPort{address: listener.Addr().String(), calls: transport.NewGRPC(transport.GRPCSettings{
		Logger: slog.New(slog.DiscardHandler),
		Guard:  func(ctx context.Context, _ string, _ transport.GRPCHeader) (context.Context, error) { return ctx, nil },
	}, service)}
	shared := transport.NewSharedListener(listener, web, slog.New(slog.DiscardHandler))
	var serving sync.WaitGroup
	serving.Go(func() { _ = out.calls.Serve(shared.GRPC()) })
	serving.Go(func() { _ = web.Serve(shared) })
	t.Cleanup(func() {
		_ = web.Close()
		out.calls.Stop()
		serving.Wait()
	})
	return out
}

// ask sends a request, and returns what answers: a body of net/http's, or "gRPC".
func ask(t *testing.T, client *http.Client, url string, header map[string]string, body string) string {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+inferPath, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range header {
		request.Header.Set(name, value)
	}
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	out, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	if response.Header.Get("Grpc-Status")+response.Trailer.Get("Grpc-Status") != "" {
		return "gRPC"
	}
	return string(out)
}

func TestFirstRequestDecidesWhichServerAnswers(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	plain, secure := serveShared(t, nil, headerTimeout), serveShared(t, authority.Server("127.0.0.1"), headerTimeout)
	const large = 200 << 10
	for name, test := range map[string]struct {
		header   map[string]string
		http1    bool
		body     int
		want     string
		wantOver string
	}{
		"a gRPC client":             {header: map[string]string{"Content-Type": "application/grpc", "User-Agent": "grpc-c/1"}, want: "gRPC", wantOver: "gRPC"},
		"Connect's gRPC":            {header: map[string]string{"Content-Type": "application/grpc", "User-Agent": "grpc-go-connect/1.21.1 (go1.26)"}, want: "HTTP/2.0 - 0", wantOver: "HTTP/2.0 h2 0"},
		"a gRPC client with a name": {header: map[string]string{"Content-Type": "application/grpc", "User-Agent": "app/1 grpc-c/1"}, want: "gRPC", wantOver: "gRPC"},
		"its JSON":                  {header: map[string]string{"Content-Type": "application/grpc+json", "User-Agent": "grpc-c/1"}, want: "gRPC", wantOver: "gRPC"},
		"its parameter":             {header: map[string]string{"Content-Type": "application/grpc;proto", "User-Agent": "grpc-c/1"}, want: "gRPC", wantOver: "gRPC"},
		"a large header":            {header: map[string]string{"Content-Type": "application/grpc", "User-Agent": "grpc-c/1", "X": strings.Repeat("x", 40<<10)}, want: "gRPC", wantOver: "gRPC"},
		"gRPC-Web":                  {header: map[string]string{"Content-Type": "application/grpc-web", "User-Agent": "grpc-c/1"}, want: "HTTP/2.0 - 0", wantOver: "HTTP/2.0 h2 0"},
		"another client":            {header: map[string]string{"Content-Type": "application/grpc", "User-Agent": "connect-go/1"}, want: "HTTP/2.0 - 0", wantOver: "HTTP/2.0 h2 0"},
		"a proxy":                   {header: map[string]string{"Content-Type": "application/grpc", "User-Agent": "grpc-c/1", "X-Forwarded-Proto": "https"}, want: "HTTP/2.0 - 0", wantOver: "HTTP/2.0 h2 0"},
		"a proxy that says so":      {header: map[string]string{"Content-Type": "application/grpc", "User-Agent": "grpc-c/1", "Via": "2 proxy"}, want: "HTTP/2.0 - 0", wantOver: "HTTP/2.0 h2 0"},
		"another request":           {want: "HTTP/2.0 - 0", wantOver: "HTTP/2.0 h2 0"},
		"a large body":              {body: large, want: fmt.Sprint("HTTP/2.0 - ", large), wantOver: fmt.Sprint("HTTP/2.0 h2 ", large)},
		"HTTP/1":                    {http1: true, want: "HTTP/1.1 - 0", wantOver: "HTTP/1.1  0"},
		"HTTP/1 with a large body":  {http1: true, body: large, want: fmt.Sprint("HTTP/1.1 - ", large), wantOver: fmt.Sprint("HTTP/1.1  ", large)},
		"HTTP/1 of a gRPC client's": {http1: true, header: map[string]string{"Content-Type": "application/grpc", "User-Agent": "grpc-c/1"}, want: "HTTP/1.1 - 0", wantOver: "HTTP/1.1  0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client := func(secure bool) *http.Client {
				out := &http.Transport{Protocols: new(http.Protocols), TLSClientConfig: &tls.Config{RootCAs: authority.Roots}}
				out.Protocols.SetHTTP1(test.http1)
				out.Protocols.SetHTTP2(!test.http1 && secure)
				out.Protocols.SetUnencryptedHTTP2(!test.http1 && !secure)
				t.Cleanup(out.CloseIdleConnections)
				return &http.Client{Transport: out}
			}
			body := strings.Repeat("x", test.body)
			if got := ask(t, client(false), "http://"+plain.address, test.header, body); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
			over := client(true)
			for range 2 {
				if got := ask(t, over, "https://"+secure.address, test.header, body); got != test.wantOver {
					t.Errorf("over TLS: got %q, want %q", got, test.wantOver)
				}
			}
		})
	}
}

func TestStoppedGRPCServerLeavesConnectionsToHTTP(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	for name, test := range map[string]struct {
		port        sharedPort
		credentials credentials.TransportCredentials
	}{
		"plain": {serveShared(t, nil, headerTimeout), insecure.NewCredentials()},
		"TLS":   {serveShared(t, authority.Server("127.0.0.1"), headerTimeout), credentials.NewTLS(&tls.Config{RootCAs: authority.Roots})},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn, err := grpc.NewClient(test.port.address, grpc.WithTransportCredentials(test.credentials))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = conn.Close() })
			client := oipv2.NewGRPCInferenceServiceClient(conn)
			if _, err := client.ModelInfer(t.Context(), &oipv2.ModelInferRequest{}); err != nil {
				t.Fatal(err)
			}
			test.port.calls.GracefulStop()
			// The handler of net/http answers in plain text.
			if _, err := client.ModelInfer(t.Context(), &oipv2.ModelInferRequest{}); !strings.Contains(status.Convert(err).Message(), "text/plain") {
				t.Errorf("afterwards: %v", err)
			}
		})
	}
}

// Some clients wait for the server's settings, and others send everything at once.
func TestSettingsAreSentBeforeTheFirstRequest(t *testing.T) {
	t.Parallel()
	conn := dialRaw(t, serveShared(t, nil, headerTimeout).address, 1<<20, 1<<20)
	conn.await("settings", func(f http2.Frame) bool { return f.Header().Type == http2.FrameSettings })
	conn.must(0, conn.WritePing(false, [8]byte{1}))
	conn.headers(1, "user-agent", "grpc-c/1")
	conn.message(1, &oipv2.ModelInferRequest{})
	conn.awaitEnd(1)
}

// Clients that connect early send the request again that crosses the end.
func TestConnectionWithoutARequestGoesAway(t *testing.T) {
	t.Parallel()
	conn := dialRaw(t, serveShared(t, nil, 200*time.Millisecond).address, 1<<20, 1<<20)
	conn.await("GOAWAY", func(f http2.Frame) bool {
		goAway, ok := f.(*http2.GoAwayFrame)
		return ok && goAway.LastStreamID == 0 && goAway.ErrCode == http2.ErrCodeNo
	})
}

// A stop of net/http's server waits for connections that have sent nothing.
func TestConnectionsWithoutARequestGoAwayAtAStop(t *testing.T) {
	t.Parallel()
	port := serveShared(t, nil, headerTimeout)
	conn := dialRaw(t, port.address, 1<<20, 1<<20)
	conn.await("settings", func(f http2.Frame) bool { return f.Header().Type == http2.FrameSettings })
	began := time.Now()
	port.calls.GracefulStop()
	conn.await("GOAWAY", func(f http2.Frame) bool { return f.Header().Type == http2.FrameGoAway })
	if took := time.Since(began); took >= headerTimeout {
		t.Errorf("it took %s", took)
	}
}

func TestConnectionsWithoutARequestEnd(t *testing.T) {
	t.Parallel()
	address := serveShared(t, nil, 200*time.Millisecond).address
	for name, send := range map[string]func(c *rawConn){
		"nothing more": func(*rawConn) {},
		"no acknowledgement": func(c *rawConn) {
			c.headers(1, "user-agent", "grpc-c/1")
		},
		"no end of the header": func(c *rawConn) {
			c.must(0, c.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0x83}}))
		},
		"too much": func(c *rawConn) {
			for range 20 {
				if c.WriteData(1, false, make([]byte, 16<<10)) != nil {
					return
				}
			}
		},
		"a frame that is too large": func(c *rawConn) {
			c.must(c.conn.Write([]byte{0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := dialRaw(t, address, 1<<20, 1<<20)
			send(c)
			if _, err := io.Copy(io.Discard, c.conn); err != nil && !strings.Contains(err.Error(), "reset") {
				t.Errorf("it ends with %v", err)
			}
		})
	}
	t.Run("half a preface", func(t *testing.T) {
		t.Parallel()
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		if _, err := io.WriteString(conn, "PRI * HT"); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(conn); err != nil || len(got) > 0 {
			t.Errorf("it ends with %q, %v", got, err)
		}
	})
	t.Run("a short request", func(t *testing.T) {
		t.Parallel()
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		if _, err := io.WriteString(conn, "GET / HTTP/1.0\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(conn); err != nil || !strings.HasSuffix(string(got), "HTTP/1.0 - 0") {
			t.Errorf("it ends with %q, %v", got, err)
		}
	})
}
