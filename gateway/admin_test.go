package gateway_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// secrets are files with tokens and with a certificate for 127.0.0.1.
type secrets struct {
	token, cert, key string
	roots            *x509.CertPool
}

func newSecrets(t *testing.T) secrets {
	t.Helper()
	authority := testbed.NewAuthority(t)
	s := secrets{token: testbed.SecretFile(t, "open-sesame\nopen-simsim\n"), roots: authority.Roots}
	s.cert, s.key = authority.Certificate("127.0.0.1")
	return s
}

// list lists the dead letters of the port.
func list(t *testing.T, url, token string, roots *x509.CertPool, options ...connect.ClientOption) error {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, Protocols: new(http.Protocols)}
	transport.Protocols.SetHTTP2(true)
	transport.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(transport.CloseIdleConnections)
	request := connect.NewRequest(&adminv1.ListDeadLettersRequest{})
	if token != "" {
		request.Header().Set("Authorization", "Bearer "+token)
	}
	_, err := adminv1connect.NewDeadLetterServiceClient(&http.Client{Transport: transport}, url, options...).ListDeadLetters(t.Context(), request)
	return err
}

func TestAdminPortIsSeparateFromPublicPort(t *testing.T) {
	t.Parallel()
	g, stop := run(t, testbed.StartBroker(t), func(s *gateway.Settings) { s.Admin.Listen = "127.0.0.1:0" })
	admin, public := g.AdminURL(), g.URL()
	if err := list(t, admin, "", nil); err != nil {
		t.Errorf("the admin port: %v", err)
	}
	if err := list(t, public, "", nil); connect.CodeOf(err) != connect.CodeUnimplemented && connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("the public port: %v", err)
	}
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	if status, _ := reasonOf(t, &http.Client{Transport: transport}, http.MethodPost, admin+"/v1/pipelines/stage:s:infer"); status != http.StatusNotFound {
		t.Errorf("inference on the admin port: %d", status)
	}
	stop()
	if err := list(t, admin, "", nil); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("after the stop: %v", err)
	}
}

func TestAdminPortIsOffByDefault(t *testing.T) {
	t.Parallel()
	g, _ := run(t, testbed.StartBroker(t))
	if g.AdminAddr() != nil || g.AdminURL() != "" {
		t.Errorf("the admin port listens at %s", g.AdminAddr())
	}
}

func TestAdminPortRequiresTLSAndToken(t *testing.T) {
	t.Parallel()
	s := newSecrets(t)
	g, _ := run(t, testbed.StartBroker(t), func(settings *gateway.Settings) {
		// Other machines can reach it, so it needs the token.
		settings.Admin = gateway.Admin{Listen: "0.0.0.0:0", Access: gateway.Access{TokenFile: s.token, CertFile: s.cert, KeyFile: s.key}}
	})
	if want := "https://" + g.AdminAddr().String(); g.AdminURL() != want {
		t.Errorf("URL is %s, want %s", g.AdminURL(), want)
	}
	_, port, err := net.SplitHostPort(g.AdminAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	url := "https://127.0.0.1:" + port
	for name, option := range map[string]connect.ClientOption{"Connect": connect.WithClientOptions(), "gRPC": connect.WithGRPC(), "gRPC-Web": connect.WithGRPCWeb()} {
		for _, token := range []string{"open-sesame", "open-simsim"} {
			if err := list(t, url, token, s.roots, option); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		for _, token := range []string{"", "sesame"} {
			if err := list(t, url, token, s.roots, option); connect.CodeOf(err) != connect.CodeUnauthenticated {
				t.Errorf("%s, token %q: %v", name, token, err)
			}
		}
	}
	if err := list(t, url, "open-sesame", nil); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("untrusted certificate: %v", err)
	}
	if err := list(t, "http://127.0.0.1:"+port, "open-sesame", nil); err == nil {
		t.Error("a call without TLS succeeds")
	}
}

func TestExposedAdminPortWithoutTokenIsRejected(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		admin gateway.Admin
		want  string
	}{
		"all addresses":    {gateway.Admin{Listen: ":9080"}, "gateway.admin.listen: other machines can reach :9080; name a file with a token in token_file, listen on 127.0.0.1, or set insecure: true"},
		"another address":  {gateway.Admin{Listen: "10.0.0.1:9080", Access: gateway.Access{CertFile: "c", KeyFile: "k"}}, "gateway.admin.listen: other machines can reach 10.0.0.1:9080; "},
		"half a pair":      {gateway.Admin{Listen: "127.0.0.1:0", Access: gateway.Access{CertFile: "c"}}, "gateway.admin.cert_file: has no key; name its file in key_file"},
		"the other half":   {gateway.Admin{Listen: "127.0.0.1:0", Access: gateway.Access{KeyFile: "k"}}, "gateway.admin.key_file: has no certificate; name its file in cert_file"},
		"several mistakes": {gateway.Admin{Listen: ":0", Access: gateway.Access{KeyFile: "k"}}, "gateway.admin.listen: other machines can reach :0; name a file with a token in token_file, listen on 127.0.0.1, or set insecure: true\ngateway.admin.key_file: "},
	} {
		if _, err := gateway.New(settings(t, "", func(s *gateway.Settings) { s.Admin = test.admin })); err == nil || !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestInvalidAdminPortIsRejectedByKey(t *testing.T) {
	t.Parallel()
	broker, s := testbed.StartBroker(t), newSecrets(t)
	taken := testbed.Listen(t)
	for name, test := range map[string]struct {
		edit func(*gateway.Settings)
		want string
	}{
		"a token that is not there": {func(g *gateway.Settings) { g.Admin.TokenFile = s.token + "2" }, "gateway.admin.token_file: open " + s.token + "2: no such file"},
		"a certificate for another": {func(g *gateway.Settings) { g.Admin.CertFile, g.Admin.KeyFile = s.cert, s.token }, "gateway.admin.key_file: "},
		"an address that is taken":  {func(g *gateway.Settings) { g.Admin.Listen = taken.Addr().String() }, "gateway.admin.listen: listen tcp "},
		"a public address, too":     {func(g *gateway.Settings) { g.Listen = taken.Addr().String() }, "gateway.listen: listen tcp "},
	} {
		g, err := gateway.New(settings(t, broker.URL(), func(s *gateway.Settings) {
			s.Admin.Listen = "127.0.0.1:0"
			test.edit(s)
		}))
		if err != nil {
			t.Fatal(err)
		}
		if err := g.Run(t.Context()); err == nil || !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}
