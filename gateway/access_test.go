package gateway_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/nats-io/nats-server/v2/server"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// over returns an HTTPS client for one version of HTTP.
func over(t *testing.T, roots *x509.CertPool, two bool) *http.Client {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, Protocols: new(http.Protocols)}
	transport.Protocols.SetHTTP1(!two)
	transport.Protocols.SetHTTP2(two)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// protocols are the RPC protocols of the public port.
func protocols() map[string]connect.ClientOption {
	return map[string]connect.ClientOption{"Connect": connect.WithClientOptions(), "gRPC": connect.WithGRPC(), "gRPC-Web": connect.WithGRPCWeb()}
}

// off cancels a request. The token may be empty.
func off(t *testing.T, client *http.Client, url, token string, option connect.ClientOption) error {
	t.Helper()
	request := connect.NewRequest(&inferencev1.CancelRequest{RequestId: "01a1fc37-9c70-7089-b8a4-eabc34a6f203"})
	if token != "" {
		request.Header().Set("Authorization", "Bearer "+token)
	}
	_, err := inferencev1connect.NewInferenceServiceClient(client, url, option).Cancel(t.Context(), request)
	return err
}

func TestPublicPortRequiresTLSAndTokenOnEveryProtocol(t *testing.T) {
	t.Parallel()
	s := newSecrets(t)
	g, _ := run(t, testbed.StartBroker(t), func(settings *gateway.Settings) {
		settings.GRPCListen, settings.Access = "127.0.0.1:0", gateway.Access{TokenFile: s.token, CertFile: s.cert, KeyFile: s.key}
	})
	if want := "https://" + g.Addr().String(); g.URL() != want {
		t.Errorf("URL is %s, want %s", g.URL(), want)
	}
	for _, two := range []bool{false, true} {
		client := over(t, s.roots, two)
		for name, option := range protocols() {
			if name == "gRPC" && !two {
				continue
			}
			for _, token := range []string{"open-sesame", "open-simsim"} {
				if err := off(t, client, g.URL(), token, option); err != nil {
					t.Errorf("%s, HTTP/2 %t: %v", name, two, err)
				}
			}
			for token, wantText := range map[string]string{"": "needs a token", "sesame": "this is not a token in the gateway's gateway.token_file"} {
				err := off(t, client, g.URL(), token, option)
				if connect.CodeOf(err) != connect.CodeUnauthenticated || !strings.Contains(err.Error(), wantText) || strings.Contains(err.Error(), "sesame") {
					t.Errorf("%s, HTTP/2 %t, token %q: %v", name, two, token, err)
				}
			}
		}
	}
	grpcOver(t, g.URL(), s)
	grpcOver(t, g.GRPCURL(), s)
}

// grpcOver checks a port with grpc-go.
func grpcOver(t *testing.T, url string, s secrets) {
	t.Helper()
	conn, err := grpc.NewClient(strings.TrimPrefix(url, "https://"), grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: s.roots})))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	message := &inferencev1.CancelRequest{RequestId: "01a1fc37-9c70-7089-b8a4-eabc34a6f203"}
	if _, err := inferencev1.NewInferenceServiceClient(conn).Cancel(t.Context(), message); status.Code(err) != codes.Unauthenticated {
		t.Errorf("grpc-go without a token: %v", err)
	}
	known := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer open-sesame")
	if _, err := inferencev1.NewInferenceServiceClient(conn).Cancel(known, message); err != nil {
		t.Errorf("grpc-go with a token: %v", err)
	}
	if answer, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil || answer.GetStatus() != healthpb.HealthCheckResponse_SERVING {
		t.Errorf("health without a token: %v, %v", answer, err)
	}
}

// fetch requests a path and returns the status, the challenge and the body.
func fetch(t *testing.T, client *http.Client, method, url, token string, edits ...func(*http.Request)) (status int, challenge, body string) {
	t.Helper()
	r := testbed.Request(t, method, url, http.NoBody)
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	for _, edit := range edits {
		edit(r)
	}
	response, data := testbed.Do(t, client, r)
	return response.StatusCode, response.Header.Get("WWW-Authenticate"), string(data)
}

func TestPlainHTTPNeedsTokenAndProbesDoNot(t *testing.T) {
	t.Parallel()
	s := newSecrets(t)
	g, _ := run(t, testbed.StartBroker(t), func(settings *gateway.Settings) {
		settings.Access.TokenFile, settings.AllowOrigins = s.token, []string{"https://app.example.com"}
	})
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	const request = "/v1/requests/01a1fc37-9c70-7089-b8a4-eabc34a6f203"
	for _, token := range []string{"", "sesame"} {
		status, challenge, body := fetch(t, client, http.MethodDelete, g.URL()+request, token)
		if status != http.StatusUnauthorized || challenge != "Bearer" || !strings.Contains(body, `{"error":{"code":"UNAUTHENTICATED","reason":"UNAUTHENTICATED"`) || strings.Contains(body, "sesame") {
			t.Errorf("token %q: %d %s %s", token, status, challenge, body)
		}
	}
	if status, _, body := fetch(t, client, http.MethodDelete, g.URL()+request, "open-simsim"); status != http.StatusOK && status != http.StatusNoContent && status != http.StatusAccepted {
		t.Errorf("with a token: %d %s", status, body)
	}
	if status, _, body := fetch(t, client, http.MethodGet, g.URL()+"/v2/models/m", ""); status != http.StatusUnauthorized || !strings.HasPrefix(body, `{"error":"UNAUTHENTICATED: `) {
		t.Errorf("without a token: %d %s", status, body)
	}
	for path, want := range map[string]int{"/livez": http.StatusOK, "/readyz": http.StatusOK, "/v2/health/live": http.StatusOK, "/v2/health/ready": http.StatusOK, "/elsewhere": http.StatusUnauthorized, "/livez/x": http.StatusUnauthorized} {
		if status, _, body := fetch(t, client, http.MethodGet, g.URL()+path, ""); status != want {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	// Browsers send a preflight request without a token.
	status, _, body := fetch(t, client, http.MethodOptions, g.URL()+request, "", func(r *http.Request) {
		r.Header.Set("Origin", "https://app.example.com")
		r.Header.Set("Access-Control-Request-Method", "DELETE")
		r.Header.Set("Access-Control-Request-Headers", "authorization")
	})
	if status != http.StatusNoContent {
		t.Errorf("preflight: %d %s", status, body)
	}
}

// A page whose own name resolves to 127.0.0.1 must not reach the port.
func TestLoopbackPortRejectsOtherHostNames(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	private, _ := run(t, broker, func(s *gateway.Settings) { s.GRPCListen = "127.0.0.1:0" })
	for host, want := range map[string]codes.Code{"evil.example:8080": codes.Unauthenticated, "localhost:8080": codes.OK} {
		conn := testbed.Dial(t, private.GRPCURL(), grpc.WithAuthority(host))
		if _, err := oipv2.NewGRPCInferenceServiceClient(conn).ServerLive(t.Context(), &oipv2.ServerLiveRequest{}); status.Code(err) != want {
			t.Errorf("%s: %v", host, err)
		}
	}
	insecure, _ := run(t, broker, func(s *gateway.Settings) { s.Insecure, s.Call.Gateway = true, "insecure" })
	proxied, _ := run(t, broker, func(s *gateway.Settings) { s.AnyHost, s.Call.Gateway = true, "proxied" })
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for _, test := range []struct {
		g    *gateway.Gateway
		host string
		want int
	}{{private, "evil.example:8080", http.StatusUnauthorized}, {private, "localhost:8080", http.StatusNotFound}, {insecure, "evil.example:8080", http.StatusUnauthorized}, {proxied, "evil.example:8080", http.StatusNotFound}} {
		if status, _, body := fetch(t, client, http.MethodGet, test.g.URL()+"/nothing", "", func(r *http.Request) { r.Host = test.host }); status != test.want {
			t.Errorf("%s: %d %s", test.host, status, body)
		}
	}
}

func TestOpenPublicPortNeedsTokensOrInsecure(t *testing.T) {
	t.Parallel()
	var log testbed.Log
	open := settings(t, testbed.StartBroker(t).URL(), func(s *gateway.Settings) {
		s.Listen = "0.0.0.0:0"
		s.Call.Logger = slog.New(slog.NewTextHandler(&log, nil))
	})
	if _, err := gateway.New(open); err == nil || !strings.HasPrefix(err.Error(), "gateway.listen: other machines can reach 0.0.0.0:0; ") {
		t.Errorf("got %v", err)
	}
	open.Insecure = true
	g, err := gateway.New(open)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	testbed.Eventually(t, "the warning", func() bool { return log.Has("other machines can call this port without authentication") })
	cancel()
	if err := testbed.Receive(t, "its end", done); err != nil {
		t.Errorf("Run returned %v", err)
	}
}

// Callers without a token must not learn which pipelines exist, nor make the gateway ask
// the broker about a stage for each name that they can think of.
func TestProbesAnswerForCataloguedPipelinesOnly(t *testing.T) {
	t.Parallel()
	s, broker := newSecrets(t), testbed.StartBroker(t)
	asked, err := broker.Client().SubscribeSync("test.alive.>")
	if err != nil {
		t.Fatal(err)
	}
	secret := pipeline.Pipeline{Name: "secret", Steps: []pipeline.Step{{Name: "s", Stage: "s"}}}
	g, _ := run(t, broker, func(settings *gateway.Settings) {
		settings.Access = gateway.Access{TokenFile: s.token, CertFile: s.cert, KeyFile: s.key}
		settings.Admin = gateway.Admin{Listen: "127.0.0.1:0", Access: gateway.Access{TokenFile: s.token, CertFile: s.cert, KeyFile: s.key}}
		settings.Pipelines = []pipeline.Pipeline{secret}
	})
	client := over(t, s.roots, false)
	for _, url := range []string{g.URL(), g.AdminURL()} {
		for _, name := range []string{"nope", "stage:nope", "stage:s"} {
			if status, _, body := fetch(t, client, http.MethodGet, url+"/readyz?pipeline="+name, ""); status != http.StatusNotFound || strings.Contains(body, "secret") {
				t.Errorf("%s, %s: %d %s", url, name, status, body)
			}
		}
		conn, err := grpc.NewClient(strings.TrimPrefix(url, "https://"), grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: s.roots})))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		for _, name := range []string{"nope", "stage:nope"} {
			_, err = healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: name})
			if status.Code(err) != codes.NotFound || strings.Contains(err.Error(), "secret") {
				t.Errorf("%s, %s: %v", url, name, err)
			}
		}
	}
	if n, _, err := asked.Pending(); err != nil || n > 0 {
		t.Errorf("the hosts of stages were asked for %d times, %v", n, err)
	}
	// The subscriber counts as a host that is slow to answer.
	if status, _, body := fetch(t, client, http.MethodGet, g.URL()+"/readyz?pipeline=secret", ""); status != http.StatusOK {
		t.Errorf("a pipeline of the catalog: %d %s", status, body)
	}
}

func TestTLSPortRejectsPlainConnections(t *testing.T) {
	t.Parallel()
	s := newSecrets(t)
	g, _ := run(t, testbed.StartBroker(t), func(settings *gateway.Settings) {
		settings.Access = gateway.Access{CertFile: s.cert, KeyFile: s.key}
	})
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	if status, _, body := fetch(t, client, http.MethodGet, "http://"+g.Addr().String()+"/livez", ""); status != http.StatusBadRequest || !strings.Contains(body, "HTTPS server") {
		t.Errorf("plain HTTP: %d %s", status, body)
	}
	if err := off(t, over(t, nil, true), g.URL(), "", connect.WithGRPC()); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("untrusted certificate: %v", err)
	}
	old := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: s.roots, MaxVersion: tls.VersionTLS11}}} //nolint:gosec // the server has to reject it
	if err := off(t, old, g.URL(), "", connect.WithClientOptions()); err == nil || !strings.Contains(err.Error(), "version") {
		t.Errorf("TLS 1.1: %v", err)
	}
}

// Operators see the cause, and callers see the fault.
func TestGatewayReportsThatBrokerRejectsIt(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t, func(o *server.Options) { o.Authorization = "open-sesame" })
	g, err := gateway.New(settings(t, broker.URL(), func(s *gateway.Settings) { s.Bus.Auth.TokenFile = testbed.SecretFile(t, "sesame") }))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	testbed.Eventually(t, "it is not ready", func() bool {
		err := g.Ready()
		return errors.Is(err, bus.ErrDisconnected) && strings.Contains(err.Error(), "nats.token_file") && !strings.Contains(err.Error(), "sesame")
	})
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	if status, _, body := fetch(t, client, http.MethodGet, g.URL()+"/readyz", ""); status != http.StatusServiceUnavailable || !strings.Contains(body, "BROKER_UNAVAILABLE") || strings.Contains(body, "token") {
		t.Errorf("/readyz: %d %s", status, body)
	}
	if status, reason := reasonOf(t, client, http.MethodPost, g.URL()+"/v1/pipelines/stage:s:infer"); status != http.StatusServiceUnavailable || reason != fault.BrokerUnavailable {
		t.Errorf("a call: %d %s", status, reason)
	}
	cancel()
	if err := testbed.Receive(t, "its end", done); err != nil {
		t.Errorf("Run returned %v", err)
	}
}

func TestInvalidPublicPortIsRejectedByKey(t *testing.T) {
	t.Parallel()
	s := newSecrets(t)
	var log strings.Builder
	with := func(access gateway.Access) gateway.Settings {
		return settings(t, "nats://127.0.0.1:1", func(s *gateway.Settings) {
			s.Access = access
			s.Call.Logger = slog.New(slog.NewTextHandler(&log, nil))
		})
	}
	for name, test := range map[string]struct {
		access gateway.Access
		want   string
	}{
		"half a pair":    {gateway.Access{CertFile: "c"}, "gateway.cert_file: has no key; name its file in key_file"},
		"the other half": {gateway.Access{KeyFile: "k"}, "gateway.key_file: has no certificate; name its file in cert_file"},
	} {
		if _, err := gateway.New(with(test.access)); err == nil || !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	for name, test := range map[string]struct {
		access gateway.Access
		want   string
	}{
		"tokens that are not there":   {gateway.Access{TokenFile: s.token + "2"}, "gateway.token_file: open " + s.token + "2: no such file"},
		"a key that is none":          {gateway.Access{CertFile: s.cert, KeyFile: s.token}, "gateway.key_file: " + s.token + ": there is no private key in it"},
		"a key that is not there":     {gateway.Access{CertFile: s.cert, KeyFile: "/nowhere"}, "gateway.key_file: open /nowhere: "},
		"a token of several words":    {gateway.Access{TokenFile: testbed.SecretFile(t, "open it, sesame")}, "gateway.token_file: "},
		"a certificate that is a key": {gateway.Access{CertFile: s.key, KeyFile: s.key}, "gateway.cert_file: tls: "},
	} {
		g, err := gateway.New(with(test.access))
		if err != nil {
			t.Fatal(err)
		}
		if err := g.Run(t.Context()); err == nil || !strings.HasPrefix(err.Error(), test.want) || strings.Contains(err.Error(), "sesame") {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if strings.Contains(log.String(), "sesame") {
		t.Errorf("the log contains a token: %s", log.String())
	}
}

func TestWrongTokensWaitAndValidOnesDoNot(t *testing.T) {
	t.Parallel()
	s := newSecrets(t)
	g, _ := run(t, testbed.StartBroker(t), func(settings *gateway.Settings) {
		settings.Access.TokenFile, settings.GRPCListen = s.token, "127.0.0.1:0"
	})
	conn := testbed.Dial(t, g.GRPCURL())
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	const id = "01a1fc37-9c70-7089-b8a4-eabc34a6f203"
	for name, call := range map[string]func(token string) bool{
		"HTTP": func(token string) bool {
			status, _, _ := fetch(t, client, http.MethodGet, g.URL()+"/v2", token)
			return status == http.StatusOK
		},
		"gRPC, on one connection": func(token string) bool {
			ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+token)
			_, err := inferencev1.NewInferenceServiceClient(conn).Cancel(ctx, &inferencev1.CancelRequest{RequestId: id})
			return err == nil
		},
	} {
		testbed.Eventually(t, name+": a valid token overtakes wrong ones", func() bool {
			const wrong = 8
			took := make(chan time.Duration, wrong)
			for range wrong {
				go func() {
					begin := time.Now()
					if call("sesame") {
						t.Errorf("%s: a wrong token is taken", name)
					}
					took <- time.Since(begin)
				}()
			}
			if !call("open-sesame") {
				t.Errorf("%s: a valid token is refused", name)
			}
			overtook := len(took) == 0
			for range wrong {
				if took := <-took; took < 500*time.Millisecond {
					t.Errorf("%s: a wrong token took %s", name, took)
				}
			}
			return overtook
		})
	}
}
