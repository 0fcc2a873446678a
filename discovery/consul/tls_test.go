package consul_test

import (
	"context"
	"crypto/tls"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/consul"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// startSecureAgent starts an agent that trusts the authority in its checks, and has a port with
// TLS beside its plain one. It returns the address of that port.
func startSecureAgent(t *testing.T, authority *testbed.Authority) (*testbed.ConsulAgent, string) {
	t.Helper()
	cert, key := authority.Certificate("consul.example")
	edit, address, err := testbed.ConsulTLS(authority.File, cert, key)
	if err != nil {
		t.Fatal(err)
	}
	return testbed.StartConsul(t, edit), address
}

func TestAgentTLSErrorsNameTheSetting(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	a, address := startSecureAgent(t, authority)
	get := func(address string, with consul.TLS) error {
		_, err := client(t, address, func(s *consul.Settings) { s.TLS = with }).Get(t.Context(), "a")
		return err
	}
	if err := get(address, consul.TLS{CAFile: authority.File, ServerName: "consul.example"}); !errors.Is(err, discovery.ErrNotFound) {
		t.Errorf("one that is trusted: %v", err)
	}
	for name, test := range map[string]struct {
		address string
		with    consul.TLS
		want    string
	}{
		"no authority":      {address, consul.TLS{Enabled: true, ServerName: "consul.example"}, "; registry.consul.ca_file names a file"},
		"another authority": {address, consul.TLS{CAFile: testbed.NewAuthority(t).File, ServerName: "consul.example"}, "; registry.consul.ca_file names a file"},
		"another name":      {address, consul.TLS{CAFile: authority.File}, "; registry.consul.server_name is the name"},
		"no TLS here":       {address, consul.TLS{}, "the agent's port needs TLS: set registry.consul.tls"},
		"no TLS there":      {a.Addr(), consul.TLS{CAFile: authority.File}, "; the agent's port has no TLS"},
	} {
		if err := get(test.address, test.with); !errors.Is(err, discovery.ErrUnavailable) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// serveChecked serves gRPC health with TLS for stage.example. It returns the address, and a channel
// that receives a value after each check.
func serveChecked(t *testing.T, authority *testbed.Authority) (address string, checked <-chan struct{}) {
	t.Helper()
	checks := make(chan struct{}, 1)
	intercept := func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		select {
		case checks <- struct{}{}:
		default:
		}
		return next(ctx, request)
	}
	address, _, _ = testbed.ServeHealth(t, grpc.Creds(credentials.NewTLS(authority.Server("stage.example"))), grpc.UnaryInterceptor(intercept))
	return address, checks
}

func TestInstanceWithTLSIsCheckedByItsName(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	a, _ := startSecureAgent(t, authority)
	address, checked := serveChecked(t, authority)
	r := client(t, a.Addr())
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		instance := discovery.Instance{Service: "stage", ID: "one", Address: address, TLS: &tls.Config{ServerName: "stage.example", MinVersion: tls.VersionTLS12}}
		ended <- r.Announce(ctx, instance, func(error) {})
	}()
	select {
	case <-checked:
	case <-time.After(patience):
		t.Error("it is not checked")
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// Another process listens at the instance's address.
func TestInstanceOfAnotherAuthorityIsNotHealthy(t *testing.T) {
	t.Parallel()
	a, _ := startSecureAgent(t, testbed.NewAuthority(t))
	address, checked := serveChecked(t, testbed.NewAuthority(t))
	r := client(t, a.Addr())
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	registered := make(chan error, 8)
	go func() {
		instance := discovery.Instance{Service: "stage", ID: "one", Address: address, TLS: &tls.Config{ServerName: "stage.example", MinVersion: tls.VersionTLS12}}
		ended <- r.Announce(ctx, instance, func(err error) { registered <- err })
	}()
	if err := <-registered; err != nil {
		t.Error(err)
	}
	late := time.NewTimer(patience)
	defer late.Stop()
	poll := time.NewTicker(50 * time.Millisecond)
	defer poll.Stop()
	for critical := false; !critical && !t.Failed(); {
		select {
		case <-poll.C:
			critical = strings.Contains(checksOf(t, a.Addr(), "stage"), `"Status":"critical"`)
		case <-checked:
			t.Error("it is checked")
		case <-late.C:
			t.Error("it is not critical")
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// checksOf returns the agent's checks of a service.
func checksOf(t *testing.T, address, service string) string {
	t.Helper()
	_, checks := testbed.Get(t, "http://"+address+"/v1/health/checks/"+service)
	return checks
}
