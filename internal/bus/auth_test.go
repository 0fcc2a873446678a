package bus_test

import (
	"crypto/tls"
	"errors"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// reach returns a bus that may not be connected, and what it logs.
func reach(t *testing.T, url string, auth credentials.Broker) (*bus.Bus, *testbed.Log) {
	t.Helper()
	log := &testbed.Log{}
	b, err := bus.Connect(bus.Settings{Mesh: mesh, URL: url, Name: "test", Auth: auth, Logger: slog.New(slog.NewTextHandler(log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b, log
}

func TestBusAuthenticatesByItsFiles(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	token := testbed.SecretFile(t, "open-sesame\n")
	cert, key := authority.Certificate("a process")
	for name, test := range map[string]struct {
		broker func(*server.Options)
		auth   credentials.Broker
	}{
		"a token":           {func(o *server.Options) { o.Authorization = "open-sesame" }, credentials.Broker{TokenFile: token}},
		"TLS":               {func(o *server.Options) { o.TLSConfig = authority.Server("127.0.0.1") }, credentials.Broker{CAFile: authority.File}},
		"TLS and a token":   {func(o *server.Options) { o.TLSConfig, o.Authorization = authority.Server("127.0.0.1"), "open-sesame" }, credentials.Broker{CAFile: authority.File, TokenFile: token}},
		"TLS on both sides": {mutual(authority), credentials.Broker{CAFile: authority.File, CertFile: cert, KeyFile: key}},
	} {
		b, _ := reach(t, testbed.StartBroker(t, test.broker).URL(), test.auth)
		if err := b.WaitConnected(t.Context()); err != nil || b.ConnectionError() != nil {
			t.Errorf("%s: %v, %v", name, err, b.ConnectionError())
		}
	}
}

func mutual(authority *testbed.Authority) func(*server.Options) {
	return func(o *server.Options) {
		o.TLSConfig = authority.Server("127.0.0.1")
		o.TLSConfig.ClientAuth, o.TLSConfig.ClientCAs = tls.RequireAndVerifyClientCert, authority.Roots
	}
}

func TestRefusedConnectionIsLoggedAtOnce(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	known := func(o *server.Options) { o.Authorization = "open-sesame" }
	secure := func(o *server.Options) { o.TLSConfig = authority.Server("127.0.0.1") }
	elsewhere := func(o *server.Options) { o.TLSConfig = authority.Server("localhost") }
	oldCert, oldKey := authority.Expired("127.0.0.1")
	stale := func(o *server.Options) { o.TLSConfig = testbed.ServerTLS(t, oldCert, oldKey) }
	for name, test := range map[string]struct {
		broker func(*server.Options)
		auth   credentials.Broker
		want   string
	}{
		"a token is wrong":      {known, credentials.Broker{TokenFile: testbed.SecretFile(t, "sesame-secret")}, "; the broker refuses who this process says it is: see nats.token_file"},
		"a token is missing":    {known, credentials.Broker{}, "; the broker refuses who this process says it is: see nats.token_file"},
		"nobody vouches":        {secure, credentials.Broker{}, "; nats.ca_file names a file"},
		"another vouches":       {secure, credentials.Broker{CAFile: testbed.NewAuthority(t).File}, "; nats.ca_file names a file"},
		"another name":          {elsewhere, credentials.Broker{CAFile: authority.File}, "; nats.url has to name the broker as its certificate does"},
		"its time is over":      {stale, credentials.Broker{CAFile: authority.File}, "; the broker's certificate, or the one in nats.ca_file"},
		"there is no TLS":       {func(*server.Options) {}, credentials.Broker{CAFile: authority.File}, "; the broker has no TLS, which nats.ca_file"},
		"a certificate is none": {mutual(authority), credentials.Broker{CAFile: authority.File}, "; the broker wants another certificate of this process: nats.cert_file"},
	} {
		b, log := reach(t, testbed.StartBroker(t, test.broker).URL(), test.auth)
		testbed.Eventually(t, name+": it is logged", func() bool { return strings.Contains(log.String(), test.want) })
		if err := b.ConnectionError(); !errors.Is(err, bus.ErrDisconnected) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: disconnected for %v", name, err)
		}
		if text := log.String(); strings.Contains(text, "sesame") || strings.Count(text, test.want) != 1 {
			t.Errorf("%s: it logs\n%s", name, text)
		}
	}
}

// The client tells nobody by itself what a broker says that answers late, or anew.
func TestRefusedReconnectIsLogged(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	token := credentials.Broker{TokenFile: testbed.SecretFile(t, "open-sesame")}
	trust := credentials.Broker{CAFile: authority.File}
	plain := func(o *server.Options) { o.TLSConfig, o.Authorization = nil, "" }
	known := func(o *server.Options) { o.Authorization = "open-sesame" }
	secure := func(o *server.Options) { o.TLSConfig = authority.Server("127.0.0.1") }
	for name, test := range map[string]struct {
		auth credentials.Broker
		// first is nil where the broker is not there at first.
		first, then func(*server.Options)
		want        string
	}{
		"late with another token":       {token, nil, func(o *server.Options) { o.Authorization = "sesame-secret" }, "see nats.token_file"},
		"late with another authority":   {trust, nil, func(o *server.Options) { o.TLSConfig = testbed.NewAuthority(t).Server("127.0.0.1") }, "nats.ca_file names a file"},
		"late without TLS":              {trust, nil, plain, "the broker has no TLS"},
		"again with another token":      {token, known, func(o *server.Options) { o.Authorization = "sesame-secret" }, "see nats.token_file"},
		"again with another authority":  {trust, secure, func(o *server.Options) { o.TLSConfig = testbed.NewAuthority(t).Server("127.0.0.1") }, "nats.ca_file names a file"},
		"again without TLS, as another": {trust, secure, plain, "the broker has no TLS"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			first := test.first
			if first == nil {
				first = plain
			}
			broker := testbed.StartBroker(t, first)
			if test.first == nil {
				broker.Stop()
			}
			b, log := reach(t, broker.URL(), test.auth)
			if test.first == nil {
				testbed.Eventually(t, "nobody is there", func() bool { return strings.Contains(log.String(), "connection refused") })
			} else {
				if err := b.WaitConnected(t.Context()); err != nil {
					t.Fatal(err)
				}
				broker.Stop()
			}
			broker.Change(test.then)
			broker.Restore()
			testbed.Eventually(t, "it is logged", func() bool { return strings.Contains(log.String(), test.want) })
			if err := b.ConnectionError(); !errors.Is(err, bus.ErrDisconnected) || !strings.Contains(err.Error(), test.want) {
				t.Errorf("disconnected for %v", err)
			}
			before := broker.Connections()
			testbed.Eventually(t, "it is refused again", func() bool { return broker.Connections() >= before+2 })
			text := log.String()
			if strings.Contains(text, "sesame") || strings.Count(text, test.want) != 1 || strings.Contains(text, "broker error") || strings.Contains(text, "no servers") {
				t.Errorf("it logs\n%s", text)
			}
		})
	}
}

// The client gives up by itself after two refusals, which would be the end of the bus.
func TestBusConnectsOnceItsTokenIsFixed(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t, func(o *server.Options) { o.Authorization = "open-sesame" })
	token := testbed.SecretFile(t, "sesame-secret")
	b, log := reach(t, broker.URL(), credentials.Broker{TokenFile: token})
	again := b.Reconnects()
	testbed.Eventually(t, "it is refused", func() bool { return strings.Contains(log.String(), "nats.token_file") })
	before := broker.Connections()
	testbed.Eventually(t, "it is refused again and again", func() bool { return broker.Connections() >= before+2 })
	if err := os.WriteFile(token, []byte("open-sesame"), 0o600); err != nil {
		t.Fatal(err)
	}
	testbed.Receive(t, "the connection", again)
	if err := b.WaitConnected(t.Context()); err != nil || b.ConnectionError() != nil {
		t.Errorf("%v, %v", err, b.ConnectionError())
	}
}

func TestBadCredentialsFileFailsConnect(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	cert, key := authority.Certificate("a process")
	for want, auth := range map[string]credentials.Broker{
		"broker: nats.token_file: open nowhere: ":        {TokenFile: "nowhere"},
		"broker: nats.credentials_file: open nowhere: ":  {CredentialsFile: "nowhere"},
		"broker: nats.ca_file: open nowhere: ":           {CAFile: "nowhere"},
		"broker: nats.ca_file: " + key + ": there is no": {CAFile: key},
		"broker: nats.cert_file: tls: ":                  {CertFile: key, KeyFile: key},
		"broker: nats.key_file: open nowhere: ":          {CertFile: cert, KeyFile: "nowhere"},
	} {
		if _, err := bus.Connect(bus.Settings{Mesh: mesh, URL: "nats://127.0.0.1:1", Auth: auth, Logger: discard()}); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
	two := testbed.SecretFile(t, "open sesame")
	if _, err := bus.Connect(bus.Settings{Mesh: mesh, URL: "nats://127.0.0.1:1", Auth: credentials.Broker{TokenFile: two}, Logger: discard()}); err == nil || !strings.Contains(err.Error(), "nats.token_file") || strings.Contains(err.Error(), "sesame") {
		t.Errorf("got %v", err)
	}
}
