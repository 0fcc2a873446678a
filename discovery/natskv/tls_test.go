package natskv_test

import (
	"errors"
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
