package consul_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/consul"
	"github.com/stagemesh/stagemesh/discovery/internal/discoverytest"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// addressVariable has the agent's address for the process of an instance.
const addressVariable = "CONSUL_TEST_ADDRESS"

const mesh = "test"

func TestMain(m *testing.M) {
	discoverytest.Main(m, func(context.Context) (discovery.Registry, error) {
		return consul.New(consul.Settings{Mesh: mesh, Address: os.Getenv(addressVariable)})
	}, shared.End)
}

// patience bounds how long a test waits.
const patience = 60 * time.Second

// shared is the agent of all tests that do not stop it.
var shared testbed.SharedConsul

// store is an agent under test.
type store struct{ *testbed.ConsulAgent }

func start(t testing.TB, exclusive bool) discoverytest.Store {
	t.Helper()
	if exclusive {
		return &store{testbed.StartConsul(t)}
	}
	a, err := shared.Agent()
	if err != nil {
		t.Fatal(err)
	}
	return &store{a}
}

func client(t testing.TB, address string, edits ...func(*consul.Settings)) *consul.Registry {
	t.Helper()
	s := consul.Settings{Mesh: mesh, Address: address}
	for _, edit := range edits {
		edit(&s)
	}
	r, err := consul.New(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

// Client implements discoverytest.Store.
func (s *store) Client(t testing.TB) discovery.Registry { return client(t, s.Addr()) }

// Lossy implements discoverytest.Store.
func (s *store) Lossy(t testing.TB) discovery.Registry {
	t.Helper()
	return client(t, lossy(t, s.Addr()))
}

// lossy returns the address of a proxy that drops every fourth answer to a write.
func lossy(t testing.TB, to string) string {
	t.Helper()
	listener := testbed.Listen(t)
	var writes atomic.Int64
	transport := &http.Transport{}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: to})
	proxy.Transport = transport
	proxy.ModifyResponse = func(r *http.Response) error {
		if strings.HasSuffix(r.Request.URL.Path, "/txn") && writes.Add(1)%4 == 0 {
			return errLost
		}
		return nil
	}
	proxy.ErrorHandler = func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) }
	server := &http.Server{Handler: proxy, ReadHeaderTimeout: patience}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener) // it is closed
	}()
	t.Cleanup(func() {
		_ = server.Close() // it serves nobody any more
		<-served
		transport.CloseIdleConnections()
	})
	return listener.Addr().String()
}

var errLost = errors.New("the answer is lost")

// Stop implements discoverytest.Store.
func (s *store) Stop(testing.TB) { s.Kill() }

// Start implements discoverytest.Store.
func (s *store) Start(t testing.TB) {
	t.Helper()
	if err := s.ConsulAgent.Start(); err != nil {
		t.Fatal(err)
	}
}

// Wipe implements discoverytest.Store.
func (s *store) Wipe(t testing.TB) {
	t.Helper()
	if err := s.ConsulAgent.Wipe(); err != nil {
		t.Fatal(err)
	}
	s.Start(t)
}

// Env implements discoverytest.Store.
func (s *store) Env() []string { return []string{addressVariable + "=" + s.Addr()} }
