package gateway

import (
	"errors"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/adminapi"
	"github.com/stagemesh/stagemesh/internal/admission"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/front/openai"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/jobs"
	registry "github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/passthrough"
	"github.com/stagemesh/stagemesh/internal/scale"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Limits bound the requests of a gateway.
type Limits = call.Limits

// Config is the configuration of a mesh's gateways: the section gateway of the mesh
// file. 0 means the default.
type Config struct {
	// Listen is the public address. It is empty for a gateway that serves as a
	// library.
	Listen string `yaml:"listen"`
	// GRPCListen is the address of a port for gRPC alone, which takes less time than on
	// the public port. If it is empty, there is none.
	GRPCListen string `yaml:"grpc_listen"`
	// Access configures the TLS and the tokens of both ports.
	Access
	Limits
	// Docs enables /openapi.json and /docs on the public port; nil means enabled.
	Docs *bool `yaml:"docs"`
	// StagePipelines enables the implicit pipelines of single stages, models and aliases; nil means
	// enabled.
	StagePipelines *bool `yaml:"stage_pipelines"`
	// ModelControl lets callers of the public ports register, load and unload models.
	ModelControl bool `yaml:"model_control"`
	// AllowOrigins are the web origins from which browsers may call.
	AllowOrigins []string `yaml:"allow_origins"`
	// Passthrough are the gRPC methods, as package.Service/Method, that the gateway passes on to
	// the server of the model that a call names. The value is the field of the message with the ID
	// of the model, such as 1.2; empty where it has none.
	Passthrough map[string]string `yaml:"passthrough"`
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
	// Scaler configures how many hosts are wanted for stages; nil where nobody asks.
	Scaler *Scaler `yaml:"scaler"`
}

// Settings are a gateway's Config and the settings that its program adds.
type Settings struct {
	Config

	// Call configures the request path. New replaces its limits by Config's.
	// The gateway shares its logger and meter.
	Call call.Settings
	// Jobs are the queues of jobs. New sets what has to do with requests.
	Jobs jobs.Settings
	Bus  bus.Settings
	// Pipelines come from the gateway's file. With a registry, the gateway writes
	// them to the registry and serves the registry's pipelines. New sets Call.Router.
	Pipelines []pipeline.Pipeline
	// Bounds are the fewest and the most hosts of stages, where the file has them.
	Bounds map[pipeline.StageName]scale.Bounds
	// OpenAI maps the names of models in calls of the OpenAI API to pipelines.
	OpenAI openai.Config
	// Models and Aliases come from the gateway's file. It writes to the registry what
	// is missing there.
	Models  []model.Model
	Aliases []registry.AliasChange
	// Registry is where hosts register; nil means that there is no registry.
	Registry *Registry
	// Members are the hosts of a mesh without a registry, if they are known.
	Members Members
	// Version of the program and the address of its operations port are for the registry.
	Version, Operations string
}

// Members are the hosts of a mesh.
type Members = adminapi.Membership

// Registry is the source of the mesh's members and pipelines.
type Registry struct {
	Watcher discovery.Watcher
	Table   discovery.Table
	// Models is the table of the mesh's broker, where models are registered.
	Models discovery.Table
	// Announcer registers the gateway, so that monitoring finds it; it may be nil.
	Announcer discovery.Announcer
}

// Defaults of Settings.
const (
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
		s.MaxPayload = admission.DefaultMaxPayload
	}
	s.Call.Limits = s.Limits
	if s.MaxInFlightBytes == 0 {
		s.MaxInFlightBytes = max(DefaultMaxInFlightBytes, leastRequests*admission.MaxRequest(s.MaxPayload))
	}
	if s.DrainTimeout == 0 {
		s.DrainTimeout = DefaultDrainTimeout
	}
	return s
}

// ServesDocs reports whether the public port serves /openapi.json and /docs.
func (c Config) ServesDocs() bool { return c.Docs == nil || *c.Docs }

// hasImplicit reports whether callers may name a stage, a model or an alias instead of a pipeline.
func (c Config) hasImplicit() bool { return c.StagePipelines == nil || *c.StagePipelines }

// Validate checks the section except Admin, without reading files. Messages name the
// key in the section.
func (c Config) Validate() error {
	errs := []error{
		c.checkListen("listen", c.Listen),
		c.checkListen("grpc_listen", c.GRPCListen),
		c.Limits.Validate(),
		config.NotNegative("drain_delay", c.DrainDelay),
		config.NotNegative("drain_timeout", c.DrainTimeout),
		c.Access.Validate(),
	}
	if least := admission.MaxRequest(c.MaxPayload); c.MaxInFlightBytes != 0 && c.MaxInFlightBytes < least {
		errs = append(errs, fmt.Errorf("max_in_flight_bytes: %s is less than the %s that one request may need, five times max_payload", config.Bytes(c.MaxInFlightBytes), config.Bytes(least)))
	}
	if c.Scaler != nil {
		errs = append(errs, config.InSection("scaler", c.Scaler.validate()))
	}
	for method, path := range c.Passthrough {
		_, err := passthrough.ParsePath(path)
		if err = errors.Join(passthrough.CheckMethod(method), err); err != nil {
			errs = append(errs, fmt.Errorf("passthrough: %s: %w", method, err))
		}
	}
	return errors.Join(append(errs, port.CheckOrigins(c.AllowOrigins)...)...)
}

// Access configures a port's TLS and tokens. ReadFiles reads the files.
type Access struct {
	// TokenFile holds the tokens that callers authenticate with, one a line. Without
	// it callers need no token.
	TokenFile string `yaml:"token_file,path"`
	// CertFile and KeyFile hold a certificate chain and its key, in PEM. Without them
	// the port is plain HTTP.
	CertFile string `yaml:"cert_file,path"`
	KeyFile  string `yaml:"key_file,path"`
	// Insecure allows other machines to call without a token.
	Insecure bool `yaml:"insecure"`
	// AnyHost allows callers of a loopback address to name it by any host name.
	AnyHost bool `yaml:"any_host"`
}

// exposure returns how the port at that address may be reached.
func (a Access) exposure(listen string) config.Exposure {
	return config.Exposure{Listen: listen, IsAuthenticated: a.TokenFile != "", Insecure: a.Insecure, AnyHost: a.AnyHost}
}

// checkListen checks the address of a port. Errors begin with its key.
func (a Access) checkListen(key, listen string) error {
	if err := config.Address(key, listen); err != nil {
		return err
	}
	return a.exposure(listen).Check(key, "name a file with a token in token_file, ")
}

// Validate checks the settings without reading the files. Errors begin with the key
// that they are about.
func (a Access) Validate() error {
	return a.pair().Check("")
}

func (a Access) pair() credentials.Pair {
	return credentials.Pair{CertFile: a.CertFile, KeyFile: a.KeyFile}
}

// Admin configures the port for operators.
type Admin struct {
	// Listen is its address. If it is empty, there is no admin port.
	Listen string `yaml:"listen"`
	// Access configures its TLS and tokens.
	Access
}

// Validate checks the settings without reading the files. Errors begin with the key
// that they are about.
func (a Admin) Validate() error {
	return errors.Join(a.checkListen("listen", a.Listen), a.Access.Validate())
}

// publicKey and adminKey are the sections of the ports in a mesh file.
const (
	publicKey = "gateway"
	adminKey  = "gateway.admin"

	listenKey     = publicKey + ".listen"
	grpcListenKey = publicKey + ".grpc_listen"
)
