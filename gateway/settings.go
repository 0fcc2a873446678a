package gateway

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/config"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Config is the configuration of a mesh's gateways: the section gateway of the mesh
// file. 0 means the default.
type Config struct {
	// Listen is the public address. It is empty for a gateway that serves as a
	// library.
	Listen string `yaml:"listen"`
	// Access configures the TLS and the tokens of the public port.
	Access
	call.Limits
	// Docs enables /openapi.json and /docs on the public port; nil means enabled.
	Docs *bool `yaml:"docs"`
	// AllowOrigins are the web origins from which browsers may call.
	AllowOrigins []string `yaml:"allow_origins"`
	// MaxInFlightBytes bounds the bytes of all requests together. 0 means
	// DefaultMaxInFlightBytes, or space for four requests if that is more.
	MaxInFlightBytes int `yaml:"max_in_flight_bytes,size"`
	// DrainDelay is how long a draining gateway keeps serving while it reports that it
	// is not ready, so that load balancers notice. Without an address there is no
	// delay.
	DrainDelay time.Duration `yaml:"drain_delay"`
	// DrainTimeout bounds how long a stop waits for calls after the delay; 0 means
	// DefaultDrainTimeout.
	DrainTimeout time.Duration `yaml:"drain_timeout"`
	// Admin is the port for operators.
	Admin Admin `yaml:"admin"`
}

// Settings are a gateway's Config and the settings that its program adds.
type Settings struct {
	Config

	// Call configures the request path. New replaces its limits by those of Config.
	// The gateway shares its logger and meter.
	Call call.Settings
	Bus  bus.Settings
	// Pipelines are those of the gateway's file. With a registry, the gateway writes
	// them to the registry and serves the registry's pipelines. New sets Call.Catalog.
	Pipelines []pipeline.Pipeline
	// Registry is where hosts register; nil means that there is no registry.
	Registry *Registry
	// MaxBody bounds a request's body, in bytes. 0 means four times the largest
	// payload, which is about what JSON needs.
	MaxBody int
}

// Defaults of Settings.
const (
	// DefaultMaxPayload bounds the inputs of a request, in bytes.
	DefaultMaxPayload = admission.DefaultMaxPayload
	// DefaultMaxInFlightBytes bounds the bytes of all requests together.
	DefaultMaxInFlightBytes = 512 << 20
	DefaultDrainTimeout     = 30 * time.Second

	leastRequests = 4
	// lastResponses is the time left to write the last responses.
	lastResponses = time.Second
)

// withDefaults returns the settings with every 0 of this package replaced.
func (s Settings) withDefaults() Settings {
	if s.MaxPayload == 0 {
		s.MaxPayload = DefaultMaxPayload
	}
	s.Call.Limits = s.Limits
	if s.MaxBody == 0 {
		s.MaxBody = admission.MaxBody(s.MaxPayload)
	}
	if s.MaxInFlightBytes == 0 {
		s.MaxInFlightBytes = max(DefaultMaxInFlightBytes, leastRequests*(s.MaxBody+s.MaxPayload))
	}
	if s.DrainTimeout == 0 {
		s.DrainTimeout = DefaultDrainTimeout
	}
	return s
}

// ServesDocs reports whether the public port serves /openapi.json and /docs.
func (c Config) ServesDocs() bool { return c.Docs == nil || *c.Docs }

// Validate checks the section except Admin, without reading files. Messages name the
// key in the section.
func (c Config) Validate() error {
	errs := []error{
		config.Address("listen", c.Listen),
		config.NotNegative("max_in_flight", c.MaxInFlight),
		config.NotNegative("timeout", c.Timeout),
		config.NotNegative("max_timeout", c.MaxTimeout),
		config.NotNegative("host_grace", c.HostGrace),
		config.NotNegative("drain_delay", c.DrainDelay),
		config.NotNegative("drain_timeout", c.DrainTimeout),
		c.Access.Validate(),
	}
	if c.MaxTimeout > 0 && c.Timeout > c.MaxTimeout {
		errs = append(errs, fmt.Errorf("timeout: %s is more than the max_timeout of %s", c.Timeout, c.MaxTimeout))
	}
	if least := admission.MaxRequest(c.MaxPayload); c.MaxInFlightBytes != 0 && c.MaxInFlightBytes < least {
		errs = append(errs, fmt.Errorf("max_in_flight_bytes: %s is less than the %s that one request may need, five times max_payload", config.Bytes(c.MaxInFlightBytes), config.Bytes(least)))
	}
	return errors.Join(append(errs, validateOrigins(c.AllowOrigins)...)...)
}

// anyOrigin allows calls from every page.
const anyOrigin = "*"

func validateOrigins(origins []string) []error {
	var errs []error
	for i, origin := range origins {
		switch {
		case origin == anyOrigin && len(origins) == 1:
		case origin == anyOrigin:
			errs = append(errs, fmt.Errorf("allow_origins[%d]: %q allows every origin, so it stands alone; leave out it or the others", i, origin))
		case strings.Contains(origin, anyOrigin) || http.NewCrossOriginProtection().AddTrustedOrigin(origin) != nil:
			errs = append(errs, fmt.Errorf(`allow_origins[%d]: %q is no origin such as https://app.example.com or http://localhost:5173: write scheme://host[:port], without a path, or "*" alone for all`, i, origin))
		}
	}
	return errs
}
