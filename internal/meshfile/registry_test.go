package meshfile_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/meshfile"
)

const withRegistry = "mesh: m\nnats: {url: \"nats://b:4222\", credentials_file: c}\nstages: {a: {runner: {echo: {}}}}\nregistry: "

func TestRegistrySectionIsRead(t *testing.T) {
	t.Parallel()
	if got := mustParse(t, withRegistry+"{none: true}").Registry; !got.None {
		t.Errorf("none: got %+v", got)
	}
	nats := mustParse(t, withRegistry+"{nats: {replicas: 3}}").Registry.NATS
	if nats == nil || nats.Replicas != 3 {
		t.Errorf("nats: got %+v", nats)
	}
	consul := mustParse(t, withRegistry+"{consul: {address: \"c:8501\", token_file: t, ca_file: ca, stale: true, namespace: n}}").Registry.Consul
	if consul == nil || consul.Address != "c:8501" || !strings.HasSuffix(consul.TokenFile, "/t") || !strings.HasSuffix(consul.CAFile, "/ca") || !consul.Stale || consul.Namespace != "n" {
		t.Errorf("consul: got %+v", consul)
	}
}

func TestRegistryIsOnTheBrokerByDefault(t *testing.T) {
	t.Parallel()
	log := slog.New(slog.DiscardHandler)
	known, err := meshfile.NewRegistry("m", mustParse(t, good).Registry, bus.Settings{URL: "nats://b:4222"}, log)
	if err != nil || known == nil {
		t.Fatalf("without a section: got %v, %v", known, err)
	}
	if _, ok := known.Registry.(*natskv.Store); !ok {
		t.Errorf("without a section: got a %T", known.Registry)
	}
	none, err := meshfile.NewRegistry("m", mustParse(t, withRegistry+"{none: true}").Registry, bus.Settings{URL: "nats://b:4222"}, log)
	if err != nil || none != nil {
		t.Errorf("none: got %v, %v", none, err)
	}
}

func TestMeshHasOneRegistry(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"{nats: {}, consul: {}}":                "registry: consul and nats; a mesh has one registry",
		"{consul: {ca_file: a, cert_file: c}}":  "registry.consul.cert_file: has no key; name its file in consul.key_file",
		"{consul: {ca_file: a, key_file: k}}":   "registry.consul.key_file: has no certificate; name its file in consul.cert_file",
		"{consul: {cert_file: c, key_file: k}}": "registry.consul.cert_file: is for TLS; say tls: true, or name the agent's authority in ca_file",
		"{consul: {server_name: c}}":            "registry.consul.server_name: is for TLS; say tls: true",
		"{nats: {replicas: -1}}":                "registry.nats.replicas",
		"{etcd: {}}":                            `"etcd" is not a key here; there are consul, nats, none`,
		"{none: true, nats: {}}":                "registry.none",
	} {
		_, err := meshfile.Parse("m.yaml", []byte(withRegistry+text), "")
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
}
