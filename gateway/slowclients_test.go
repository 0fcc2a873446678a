package gateway_test

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// soon is far longer than a gateway waits for a body that it does not need, and far
// shorter than it waits for one that it does.
const soon = 10 * time.Second

// announce sends a request's head, which announces a body, and none of the body.
func announce(t *testing.T, address net.Addr, method, path, headers string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", address.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(soon)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, method+" "+path+" HTTP/1.1\r\nHost: 127.0.0.1\r\n"+headers+"\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	return conn
}

func TestRefusalReachesClientThatSendsNoBody(t *testing.T) {
	t.Parallel()
	s := newSecrets(t)
	open, _ := run(t, testbed.StartBroker(t), func(settings *gateway.Settings) { settings.Admin.Listen = "127.0.0.1:0" })
	guarded, _ := run(t, testbed.StartBroker(t), func(settings *gateway.Settings) { settings.TokenFile = s.token })
	const infer, rpc = "/v1/pipelines/p:infer", "/stagemesh.inference.v1.InferenceService/"
	for name, test := range map[string]struct {
		address               net.Addr
		method, path, headers string
		want                  int
	}{
		"no such path":        {open.Addr(), "POST", "/nowhere", "", http.StatusNotFound},
		"a wrong method":      {open.Addr(), "GET", infer, "", http.StatusMethodNotAllowed},
		"a probe with a body": {open.Addr(), "GET", "/livez", "", http.StatusOK},
		"another origin":      {open.Addr(), "POST", infer, "Origin: https://evil.example\r\n", http.StatusForbidden},
		"a bad content type":  {open.Addr(), "POST", infer, "Content-Type: nothing/\r\n", http.StatusUnsupportedMediaType},
		"no RPC method":       {open.Addr(), "POST", rpc + "Nothing", "", http.StatusNotFound},
		"no RPC":              {open.Addr(), "POST", rpc + "Infer", "Content-Type: text/plain\r\n", http.StatusUnsupportedMediaType},
		"an admin path":       {open.AdminAddr(), "POST", "/nowhere", "", http.StatusNotFound},
		"no token":            {guarded.Addr(), "POST", infer, "", http.StatusUnauthorized},
		"an RPC, no token":    {guarded.Addr(), "POST", rpc + "Infer", "", http.StatusUnauthorized},
		"a body on demand":    {guarded.Addr(), "POST", infer, "Expect: 100-continue\r\n", http.StatusUnauthorized},
	} {
		for _, length := range []string{"Content-Length: 100", "Transfer-Encoding: chunked"} {
			t.Run(name+", "+length, func(t *testing.T) {
				t.Parallel()
				conn := announce(t, test.address, test.method, test.path, test.headers+length)
				response, err := http.ReadResponse(bufio.NewReader(conn), nil)
				if err != nil {
					t.Fatal(err)
				}
				defer response.Body.Close()
				if response.StatusCode != test.want || !response.Close {
					t.Errorf("%s, closes the connection: %t", response.Status, response.Close)
				}
				if _, err := io.Copy(io.Discard, response.Body); err != nil {
					t.Error(err)
				}
				if n, err := conn.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
					t.Errorf("after the answer came %d bytes, %v", n, err)
				}
			})
		}
	}
}

// A connection whose refused body arrives carries the next request.
func TestRefusedRequestKeepsItsConnection(t *testing.T) {
	t.Parallel()
	g, _ := run(t, testbed.StartBroker(t))
	conn := announce(t, g.Addr(), "POST", "/nowhere", "Content-Length: 4")
	if _, err := io.WriteString(conn, "bodyGET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	from := bufio.NewReader(conn)
	for _, want := range []int{http.StatusNotFound, http.StatusOK} {
		response, err := http.ReadResponse(from, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, response.Body); err != nil {
			t.Error(err)
		}
		_ = response.Body.Close()
		if response.StatusCode != want || response.Close {
			t.Errorf("%s, closes the connection: %t", response.Status, response.Close)
		}
	}
}

func TestStopDoesNotWaitForBodies(t *testing.T) {
	t.Parallel()
	g, stop := run(t, testbed.StartBroker(t), func(s *gateway.Settings) { s.DrainTimeout = testbed.Patience })
	announce(t, g.Addr(), "POST", "/nowhere", "Content-Length: 100")
	upload := announce(t, g.Addr(), "POST", "/v1/pipelines/p:infer", "Content-Type: text/plain\r\nContent-Length: 100\r\nExpect: 100-continue")
	from := bufio.NewReader(upload)
	for _, want := range []int{http.StatusContinue, http.StatusServiceUnavailable} {
		response, err := http.ReadResponse(from, nil)
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
		if response.StatusCode != want {
			t.Fatalf("the upload is answered with %s", response.Status)
		}
		if want == http.StatusContinue {
			if _, err := io.WriteString(upload, "the beginning"); err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			stop()
			if took := time.Since(begin); took > soon {
				t.Errorf("the stop took %s", took)
			}
		}
	}
}

func TestStopDoesNotWaitForCalls(t *testing.T) {
	t.Parallel()
	g, stop := run(t, testbed.StartBroker(t), func(s *gateway.Settings) { s.GRPCListen, s.DrainTimeout = "127.0.0.1:0", testbed.Patience })
	conn := testbed.Dial(t, g.GRPCURL())
	// This call's message does not come. The server has it when it answers the next one.
	silent, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true}, inferencev1.InferenceService_Infer_FullMethodName)
	if err != nil {
		t.Fatal(err)
	}
	talk, err := oipv2.NewGRPCInferenceServiceClient(conn).ModelStreamInfer(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := talk.Send(&oipv2.ModelInferRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := talk.Recv(); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	stop()
	if took := time.Since(begin); took > soon {
		t.Errorf("the stop took %s", took)
	}
	if _, err := talk.Recv(); !strings.Contains(err.Error(), "the gateway is stopping; open another stream") {
		t.Errorf("the stream ends with %v", err)
	}
	if err := silent.RecvMsg(&inferencev1.InferResponse{}); !strings.Contains(err.Error(), "the gateway is stopping") {
		t.Errorf("the call ends with %v", err)
	}
}
