package stagehost_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// secure is an edit: the host has a port with TLS.
func secure(cert, key, name string) func(*stagehost.Settings) {
	return func(s *stagehost.Settings) {
		s.Listen, s.CertFile, s.KeyFile, s.ServerName = "127.0.0.1:0", cert, key, name
	}
}

func TestHostWithTLSRefusesPlainClients(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	s := b.store(b.broker.URL())
	view := discovery.NewMembership(s, s, string(mesh), discard())
	testbed.Background(b.t, view.Run)
	authority := testbed.NewAuthority(t)
	cert, key := authority.Certificate("classify.example")
	h := b.host(inproc.Each(inproc.Settings{}, echo), registered(s), secure(cert, key, "classify.example"))
	testbed.Eventually(t, "the host is alive", func() bool {
		hosts := view.Hosts()
		return len(hosts) == 1 && hosts[0].Alive
	})
	conn, err := grpc.NewClient(h.Addr().String(), grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: authority.Roots, ServerName: "classify.example"})))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if got, err := stagev1.NewStageServiceClient(conn).Describe(t.Context(), &stagev1.DescribeRequest{}); err != nil || got.GetStage() != string(stage) {
		t.Errorf("with TLS: %v, %v", got, err)
	}
	if _, err := stagev1.NewStageServiceClient(dial(t, h)).Describe(t.Context(), &stagev1.DescribeRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("without: %v", err)
	}
}

// announcing keeps what is announced.
type announcing struct {
	discovery.Announcer
	heard chan discovery.Instance
}

// Announce implements discovery.Announcer.
func (a announcing) Announce(ctx context.Context, i discovery.Instance, state func(error)) error {
	select {
	case a.heard <- i:
	default:
	}
	return a.Announcer.Announce(ctx, i, state)
}

func TestRegistryChecksTheHostsCertificate(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	s := b.store(b.broker.URL())
	a := announcing{s, make(chan discovery.Instance, 1)}
	authority := testbed.NewAuthority(t)
	cert, key := authority.Certificate("classify.example")
	h := b.host(inproc.Each(inproc.Settings{}, echo), func(settings *stagehost.Settings) {
		settings.Registry = &stagehost.Registry{Announcer: a, Table: s}
	}, secure(cert, key, "classify.example"))
	instance := testbed.Receive(t, "the instance", a.heard)
	own, err := tls.Dial("tcp", h.Addr().String(), instance.TLS)
	if err != nil {
		t.Fatalf("the host itself: %v", err)
	}
	_ = own.Close() // nothing was said
	for name, stranger := range map[string]*tls.Config{
		"of the same authority": authority.Server("classify.example"),
		"of another":            testbed.NewAuthority(t).Server("classify.example"),
	} {
		listener, err := tls.Listen("tcp", "127.0.0.1:0", stranger)
		if err != nil {
			t.Fatal(err)
		}
		served := make(chan struct{})
		go func() {
			defer close(served)
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(make([]byte, 1)) // it is refused
			_ = conn.Close()
		}()
		if conn, err := tls.Dial("tcp", listener.Addr().String(), instance.TLS); !isUnknown(err) {
			t.Errorf("a stranger %s: %v", name, err)
			if err == nil {
				_ = conn.Close() // it should not be
			}
		}
		_ = listener.Close() // it has served
		<-served
	}
}

func isUnknown(err error) bool {
	_, ok := errors.AsType[x509.UnknownAuthorityError](err)
	return ok
}

func TestBadCertificateFailsTheStart(t *testing.T) {
	t.Parallel()
	_, key := testbed.NewAuthority(t).Certificate("127.0.0.1")
	if err := cannotStart(t, secure(key, key, "")); !strings.HasPrefix(err.Error(), "stage "+string(stage)+": cert_file: tls: ") {
		t.Errorf("got %v", err)
	}
	cert, _ := testbed.NewAuthority(t).Certificate("127.0.0.1")
	if err := cannotStart(t, secure(cert, "/nowhere", "")); !strings.HasPrefix(err.Error(), "stage "+string(stage)+": key_file: open /nowhere: ") {
		t.Errorf("got %v", err)
	}
	for want, edit := range map[string]func(*stagehost.Settings){
		"cert_file: has no key":                    secure("c", "", ""),
		"key_file: has no certificate":             secure("", "k", ""),
		"listen: :9000 is not an address by which": func(s *stagehost.Settings) { secure("c", "k", "")(s); s.Listen, s.Insecure = ":9000", true },
		"listen: 0.0.0.0:9000 is not an address":   func(s *stagehost.Settings) { secure("c", "k", "")(s); s.Listen, s.Insecure = "0.0.0.0:9000", true },
		"listen: [::]:9000 is not an address":      func(s *stagehost.Settings) { secure("c", "k", "")(s); s.Listen, s.Insecure = "[::]:9000", true },
		"server_name: is a name in a certificate":  secure("", "", "n"),
	} {
		s := stagehost.Settings{Mesh: mesh, Stage: stage, Host: "host", Runner: inproc.Each(inproc.Settings{}, echo)}
		s.Batch.MaxSize = 1
		edit(&s)
		if err := s.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

func TestStageServiceDemandsTokenOrCertificate(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	authority := testbed.NewAuthority(t)
	cert, key := authority.Certificate("127.0.0.1")
	h := b.host(inproc.Each(inproc.Settings{}, echo), secure(cert, key, ""), func(s *stagehost.Settings) {
		s.TokenFile, s.ClientCAFile = testbed.SecretFile(t, "open-sesame treasure\nopen-simsim\n"), authority.File
	})
	testbed.Eventually(t, "the stage service listens", func() bool { return h.Addr() != nil })
	own, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		certificates []tls.Certificate
		token        string
		want         codes.Code
	}{
		"nothing":       {nil, "", codes.Unauthenticated},
		"another token": {nil, "sesame", codes.Unauthenticated},
		"the token":     {nil, "open-sesame", codes.OK},
		"the second":    {nil, "open-simsim", codes.OK},
		"a certificate": {[]tls.Certificate{own}, "", codes.OK},
	} {
		conn, err := grpc.NewClient(h.Addr().String(), grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: authority.Roots, Certificates: test.certificates})))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+test.token)
		if _, err := stagev1.NewStageServiceClient(conn).Describe(ctx, &stagev1.DescribeRequest{}); status.Code(err) != test.want {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{}); err != nil {
			t.Errorf("%s: health: %v", name, err)
		}
	}
}

// A message of a stranger would take memory.
func TestStageServiceRefusesStrangersUnread(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	h := b.host(inproc.Each(inproc.Settings{}, echo), listening, func(s *stagehost.Settings) { s.TokenFile = testbed.SecretFile(t, "open-sesame") })
	ctx, cancel := context.WithTimeout(t.Context(), testbed.Patience)
	defer cancel()
	stream, err := dial(t, h).NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, stagev1.StageService_Infer_FullMethodName)
	if err != nil {
		t.Fatal(err)
	}
	err = stream.RecvMsg(new(stagev1.InferResponse))
	if status.Code(err) != codes.Unauthenticated || len(status.Convert(err).Details()) == 0 {
		t.Errorf("got %v", err)
	}
}

func TestStagePortOfLoopbackRejectsOtherHostNames(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		host string
		edit func(*stagehost.Settings)
		want codes.Code
	}{
		{"evil.example:9000", func(*stagehost.Settings) {}, codes.Unauthenticated},
		{"localhost:9000", func(*stagehost.Settings) {}, codes.OK},
		{"evil.example:9000", func(s *stagehost.Settings) { s.Insecure = true }, codes.Unauthenticated},
		{"evil.example:9000", func(s *stagehost.Settings) { s.AnyHost = true }, codes.OK},
	} {
		h := newBed(t).host(inproc.Each(inproc.Settings{}, echo), listening, test.edit)
		testbed.Eventually(t, "the stage service listens", func() bool { return h.Addr() != nil })
		conn, err := grpc.NewClient(h.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority(test.host))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		if _, err := stagev1.NewStageServiceClient(conn).Describe(t.Context(), &stagev1.DescribeRequest{}); status.Code(err) != test.want {
			t.Errorf("%s: %v, want %s", test.host, err, test.want)
		}
		if _, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{}); err != nil {
			t.Errorf("%s: health: %v", test.host, err)
		}
	}
}

func TestOpenStagePortNeedsAuthentication(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		edit func(*stagehost.Settings)
		isOK bool
	}{
		"nothing":  {func(*stagehost.Settings) {}, false},
		"a token":  {func(s *stagehost.Settings) { s.TokenFile = "t" }, true},
		"insecure": {func(s *stagehost.Settings) { s.Insecure = true }, true},
	} {
		s := stagehost.Settings{Mesh: mesh, Stage: stage, Host: "host", Runner: inproc.Each(inproc.Settings{}, echo)}
		s.Batch.MaxSize, s.Listen = 1, ":9000"
		test.edit(&s)
		if err := s.Validate(); (err == nil) != test.isOK || err != nil && !strings.Contains(err.Error(), "listen: other machines can reach :9000") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
