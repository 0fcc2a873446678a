package config_test

import (
	"log/slog"
	"net"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/config"
)

func TestOpenAddressNeedsAuthenticationOrInsecure(t *testing.T) {
	t.Parallel()
	for address, isOpen := range map[string]bool{
		"127.0.0.1:9080": false, "127.1.2.3:0": false, "[::1]:9080": false, "localhost:9080": false,
		":9080": true, "0.0.0.0:9080": true, "[::]:9080": true, "10.0.0.1:9080": true, "example.com:80": true, "nonsense": true,
	} {
		e := config.Exposure{Listen: address}
		if err := e.Check("listen", "sign in, "); (err != nil) != isOpen || err != nil && !strings.HasPrefix(err.Error(), "listen: other machines can reach "+address+"; sign in, listen on 127.0.0.1") {
			t.Errorf("%s: %v", address, err)
		}
		var log strings.Builder
		e.Warn(slog.New(slog.NewTextHandler(&log, nil)), "listen")
		if (log.Len() > 0) != isOpen || e.IsPrivate() == isOpen {
			t.Errorf("%s: private %t, logged %q", address, e.IsPrivate(), log.String())
		}
		for _, allowed := range []config.Exposure{{Listen: address, IsAuthenticated: true}, {Listen: address, Insecure: true}} {
			if err := allowed.Check("listen", ""); err != nil || allowed.IsPrivate() != (allowed.Insecure && !isOpen) {
				t.Errorf("%+v: %v, private %t", allowed, err, allowed.IsPrivate())
			}
		}
		if e.AnyHost = true; e.IsPrivate() {
			t.Errorf("%+v is private", e)
		}
	}
}

func TestAllAddressesAreAdvertisedAsOne(t *testing.T) {
	t.Parallel()
	for listener, want := range map[string]string{
		"127.0.0.1:90": "127.0.0.1:90", "10.1.2.3:90": "10.1.2.3:90", "example.com:90": "example.com:90",
		":90": "host:90", "[::]:90": "host:90", "0.0.0.0:90": "host:90",
	} {
		if got := config.Advertised(listener, "host"); got != want {
			t.Errorf("%s is advertised as %s", listener, got)
		}
	}
	host, _, err := net.SplitHostPort(config.Advertised(":90", ""))
	if ip := net.ParseIP(host); err != nil || ip == nil || ip.IsUnspecified() {
		t.Errorf("all addresses are advertised as %q: %v", host, err)
	}
}
