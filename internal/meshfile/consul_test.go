package meshfile_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/discovery/consul"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestConsulFileErrorsNameTheSetting(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	cert, key := authority.Certificate("client")
	for name, test := range map[string]struct {
		token string
		tls   consul.TLS
		want  string
	}{
		"no token file":            {"/nowhere", consul.TLS{}, "registry.consul.token_file: open /nowhere: "},
		"an empty one":             {testbed.SecretFile(t, "\n"), consul.TLS{}, "there is no token in it"},
		"two lines":                {testbed.SecretFile(t, "open\nsesame"), consul.TLS{}, "a token is one word of visible ASCII"},
		"no authority":             {"", consul.TLS{CAFile: "/nowhere"}, "registry.consul.ca_file: open /nowhere: "},
		"no certificate authority": {"", consul.TLS{CAFile: key}, "registry.consul.ca_file: " + key},
		"no certificate":           {"", consul.TLS{Enabled: true, CertFile: "/nowhere", KeyFile: key}, "registry.consul.cert_file: open /nowhere: "},
		"no key":                   {"", consul.TLS{Enabled: true, CertFile: cert, KeyFile: "/nowhere"}, "registry.consul.key_file: open /nowhere: "},
		"everything is valid":      {testbed.SecretFile(t, " open-sesame\n"), consul.TLS{CAFile: authority.File, CertFile: cert, KeyFile: key}, ""},
	} {
		c := &meshfile.Consul{TokenFile: test.token, Settings: consul.Settings{Address: "127.0.0.1:1", TLS: test.tls}}
		_, err := meshfile.NewRegistry("m", meshfile.RegistryConfig{Consul: c}, bus.Settings{}, slog.New(slog.DiscardHandler))
		if (err == nil) != (test.want == "") || err != nil && (!strings.Contains(err.Error(), test.want) || !strings.HasPrefix(err.Error(), "registry.consul.") || strings.Contains(err.Error(), "sesame")) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
