package natskv_test

import (
	"errors"
	"log/slog"
	"net"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/mesh/brokerauth"
	"github.com/stagemesh/stagemesh/mesh/tlstest"
)

func TestWhatIsWrongWithTheBrokersTLSIsSaid(t *testing.T) {
	t.Parallel()
	authority := tlstest.New(t)
	b := broker(t, func(o *server.Options) {
		o.TLSConfig, o.TLSTimeout = authority.Server("127.0.0.1"), 5
	})
	plain := broker(t)
	with := func(url string, auth brokerauth.Files) error {
		_, err := client(t, settings(url, func(s *natskv.Settings) { s.Auth = auth })).List(t.Context(), "")
		return err
	}
	if err := with(b.ClientURL(), brokerauth.Files{CAFile: authority.File}); err != nil {
		t.Errorf("one that is trusted: %v", err)
	}
	for name, test := range map[string]struct {
		url, ca, want string
	}{
		"nobody vouches":  {b.ClientURL(), "", "; nats.ca_file names a file"},
		"another vouches": {b.ClientURL(), tlstest.New(t).File, "; nats.ca_file names a file"},
		"another name":    {strings.Replace(b.ClientURL(), "127.0.0.1", "localhost", 1), authority.File, "; nats.url has to name the broker as its certificate does"},
		"there is no TLS": {plain.ClientURL(), authority.File, "; the broker has no TLS, which nats.ca_file"},
	} {
		if err := with(test.url, brokerauth.Files{CAFile: test.ca}); !errors.Is(err, discovery.ErrUnavailable) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestABrokerThatWantsATokenGetsIt(t *testing.T) {
	t.Parallel()
	b := broker(t, func(o *server.Options) { o.Authorization = "open-sesame" })
	for name, test := range map[string]struct {
		token string
		want  error
	}{
		"the token": {tlstest.File(t, "open-sesame\n"), nil},
		"another":   {tlstest.File(t, "sesame-secret"), discovery.ErrDenied},
		"none":      {"", discovery.ErrDenied},
	} {
		_, err := client(t, settings(b.ClientURL(), func(s *natskv.Settings) { s.Auth.TokenFile = test.token })).List(t.Context(), "")
		if !errors.Is(err, test.want) || err != nil && (!strings.Contains(err.Error(), "nats.token_file") || strings.Contains(err.Error(), "sesame")) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := natskv.New(settings(b.ClientURL(), func(s *natskv.Settings) { s.Auth.TokenFile = "nowhere" })); !errors.Is(err, discovery.ErrInvalid) || !strings.Contains(err.Error(), "nats.token_file: open nowhere") {
		t.Errorf("a file that is not there: %v", err)
	}
}

// The client hears of each refusal, and those who ask are told.
func TestABrokerThatComesBackAndRefusesIsNotInTheLogForEver(t *testing.T) {
	t.Parallel()
	options := brokerOptions(t.TempDir())
	options.Authorization = "open-sesame"
	s, err := startBroker(options)
	if err != nil {
		t.Fatal(err)
	}
	url := s.ClientURL()
	log := &loud{}
	c := client(t, settings(url, func(s *natskv.Settings) {
		s.Auth.TokenFile, s.Logger = tlstest.File(t, "open-sesame"), slog.New(slog.NewTextHandler(log, nil))
	}))
	_, err = c.List(t.Context(), "")
	options.Port = s.Addr().(*net.TCPAddr).Port
	s.Shutdown()
	s.WaitForShutdown()
	if err != nil {
		t.Fatal(err)
	}
	options.Authorization = "sesame-secret"
	other, err := startBroker(options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		other.Shutdown()
		other.WaitForShutdown()
	})
	eventually(t, "it is refused again", func() bool {
		seen, err := other.Varz(nil)
		return err == nil && seen.TotalConnections >= 3
	})
	if _, err := c.List(t.Context(), ""); !errors.Is(err, discovery.ErrDenied) || !strings.Contains(err.Error(), "nats.token_file") {
		t.Errorf("it is away for %v", err)
	}
	if text := log.String(); strings.Contains(text, "registry's broker") || strings.Contains(text, "sesame") {
		t.Errorf("it logs\n%s", text)
	}
}
