package meshfile

import (
	"errors"
	"fmt"

	"github.com/stagemesh/stagemesh/discovery/consul"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/mesh/credentials"
	"github.com/stagemesh/stagemesh/services/registry"
)

// RegistrySettings are those of the mesh's registry, nil where the file wants none.
// Broker, credentials and logger are for the caller to fill in.
func (f *File) RegistrySettings() *registry.Settings {
	out := &registry.Settings{Mesh: f.Mesh}
	switch c, n := f.Registry.Consul, f.Registry.NATS; {
	case f.Registry.None:
		return nil
	case c != nil:
		out.TokenFile = f.relative(c.TokenFile)
		out.Consul = &consul.Settings{
			Address: c.Address, Datacenter: c.Datacenter, Namespace: c.Namespace, Partition: c.Partition, Stale: c.Stale,
			TLS: consul.TLS{
				Enabled: c.TLS, CAFile: f.relative(c.CAFile), CertFile: f.relative(c.CertFile), KeyFile: f.relative(c.KeyFile), ServerName: c.ServerName,
			},
		}
	default:
		out.NATS = &natskv.Settings{URL: f.NATS.URL, Auth: f.BrokerAuth()}
		if n != nil {
			out.NATS.Replicas = n.Replicas
		}
	}
	return out
}

func (r Registry) validate() error {
	if r.Consul != nil && r.NATS != nil {
		return errors.New("consul and nats; a mesh has one registry")
	}
	if r.None && (r.Consul != nil || r.NATS != nil) {
		return errors.New("none: and there is one; leave out one of them")
	}
	if c := r.Consul; c != nil {
		return c.validate()
	}
	if n := r.NATS; n != nil {
		return notNegative("nats.replicas", n.Replicas)
	}
	return nil
}

func (c Consul) validate() error {
	errs := []error{credentials.Pair{CertFile: c.CertFile, KeyFile: c.KeyFile}.Check("consul.")}
	if secure := c.TLS || c.CAFile != ""; !secure {
		errs = append(errs, withoutTLS("consul.cert_file", c.CertFile), withoutTLS("consul.server_name", c.ServerName))
	}
	return errors.Join(errs...)
}

// withoutTLS refuses a value that is for a connection with TLS.
func withoutTLS(key, value string) error {
	if value == "" {
		return nil
	}
	return fmt.Errorf("%s: is for TLS; say tls: true, or name the agent's authority in ca_file", key)
}
