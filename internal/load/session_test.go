package load_test

import (
	"testing"

	"github.com/stagemesh/stagemesh/discovery/consul"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/internal/meshfile"
)

func TestSeparateMeshLeavesTheRegistryOfOthersAlone(t *testing.T) {
	t.Parallel()
	for url, shares := range map[string]bool{"": false, "nats://other": true} {
		f := &meshfile.File{Registry: meshfile.RegistryConfig{Consul: &meshfile.Consul{Settings: consul.Settings{Address: "other"}}}}
		f.NATS.URL = url
		f.Gateway.Scaler = &gateway.Scaler{Listen: ":9091"}
		load.Separate(f)
		if got := f.Registry.Consul != nil; got != shares || f.Gateway.Scaler.Listen != "127.0.0.1:0" {
			t.Errorf("with the broker %q it uses Consul: %t; the scaler listens on %s", url, got, f.Gateway.Scaler.Listen)
		}
	}
}
