package gateway_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
)

// secrets is a folder with a token and a certificate for 127.0.0.1.
type secrets struct {
	token, cert, key string
	roots            *x509.CertPool
}

func newSecrets(t *testing.T) secrets {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "gateway"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	s := secrets{token: filepath.Join(folder, "token"), cert: filepath.Join(folder, "cert"), key: filepath.Join(folder, "key"), roots: x509.NewCertPool()}
	for path, data := range map[string][]byte{
		s.token: []byte("open-sesame\n"),
		s.cert:  pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}),
		s.key:   pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}),
	} {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if !s.roots.AppendCertsFromPEM(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})) {
		t.Fatal("the certificate is none")
	}
	return s
}

// list asks the port for letters.
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

func TestTheAdminPortIsApartFromThePublicOne(t *testing.T) {
	t.Parallel()
	g, stop := run(t, bustest.Start(t), func(s *gateway.Settings) { s.Admin.Listen = "127.0.0.1:0" })
	admin, public := "http://"+g.AdminAddr().String(), "http://"+g.Addr().String()
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

func TestThereIsNoAdminPortUnlessOneIsAskedFor(t *testing.T) {
	t.Parallel()
	g, _ := run(t, bustest.Start(t))
	if g.AdminAddr() != nil {
		t.Errorf("it listens at %s", g.AdminAddr())
	}
}

func TestTheAdminPortHasTLSAndAToken(t *testing.T) {
	t.Parallel()
	s := newSecrets(t)
	g, _ := run(t, bustest.Start(t), func(settings *gateway.Settings) {
		// Reached from anywhere, which needs the token.
		settings.Admin = gateway.Admin{Listen: "0.0.0.0:0", TokenFile: s.token, CertFile: s.cert, KeyFile: s.key}
	})
	_, port, err := net.SplitHostPort(g.AdminAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	url := "https://127.0.0.1:" + port
	for name, option := range map[string]connect.ClientOption{"Connect": connect.WithClientOptions(), "gRPC": connect.WithGRPC(), "gRPC-Web": connect.WithGRPCWeb()} {
		if err := list(t, url, "open-sesame", s.roots, option); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, token := range []string{"", "sesame"} {
			if err := list(t, url, token, s.roots, option); connect.CodeOf(err) != connect.CodeUnauthenticated {
				t.Errorf("%s, token %q: %v", name, token, err)
			}
		}
	}
	if err := list(t, url, "open-sesame", nil); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("whom it does not trust: %v", err)
	}
	if err := list(t, "http://127.0.0.1:"+port, "open-sesame", nil); err == nil {
		t.Error("it is served without TLS")
	}
}

func TestAnAdminPortThatWouldBeOpenToAllIsRefused(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		admin gateway.Admin
		want  string
	}{
		"all addresses":    {gateway.Admin{Listen: ":9080"}, "gateway.admin.listen: other machines can reach :9080; name a file with a token in token_file, or listen on 127.0.0.1"},
		"another address":  {gateway.Admin{Listen: "10.0.0.1:9080", CertFile: "c", KeyFile: "k"}, "gateway.admin.listen: other machines can reach 10.0.0.1:9080; "},
		"half a pair":      {gateway.Admin{Listen: "127.0.0.1:0", CertFile: "c"}, "gateway.admin.cert_file: has no key; name its file in key_file"},
		"the other half":   {gateway.Admin{Listen: "127.0.0.1:0", KeyFile: "k"}, "gateway.admin.key_file: has no certificate; name its file in cert_file"},
		"several mistakes": {gateway.Admin{Listen: ":0", KeyFile: "k"}, "gateway.admin.listen: other machines can reach :0; name a file with a token in token_file, or listen on 127.0.0.1\ngateway.admin.key_file: "},
	} {
		if _, err := gateway.New(settings(t, "", func(s *gateway.Settings) { s.Admin = test.admin })); err == nil || !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestAGatewayWhoseAdminPortCannotBeSaysWhy(t *testing.T) {
	t.Parallel()
	broker, s := bustest.Start(t), newSecrets(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { taken.Close() })
	for name, test := range map[string]struct {
		edit func(*gateway.Settings)
		want string
	}{
		"a token that is not there": {func(g *gateway.Settings) { g.Admin.TokenFile = s.token + "2" }, "gateway.admin.token_file: open " + s.token + "2: no such file"},
		"a certificate for another": {func(g *gateway.Settings) { g.Admin.CertFile, g.Admin.KeyFile = s.cert, s.token }, "gateway.admin.cert_file: tls: "},
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
