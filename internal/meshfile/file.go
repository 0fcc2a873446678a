// Package meshfile reads the one file that describes a mesh: its name, its
// stages with runner and batching, its pipelines, and how the gateway listens.
// docs/configuration.md is its reference, with docs/configuration-jobs.md.
//
// The program passes the kinds of runners that it has, so that it links no others:
//
//	decode := meshfile.KindOf("image_decode", runners.NewImageDecode)
//
//	f, err := meshfile.Load("mesh.yaml", runners.All()...)   // for all of the mesh
//	routes, err := f.Routes()
//
//	f, err := meshfile.Read("mesh.yaml", decode)             // for one stage of it
//	host, err := f.Host("decode")
//
// Every error names file, line, column and key. A File may be used
// concurrently unless it is changed.
package meshfile

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/front/openai"
	"github.com/stagemesh/stagemesh/internal/jobs"
	"github.com/stagemesh/stagemesh/internal/jobs/dispatch"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// File is a mesh as it is written down. Zero values mean the defaults.
type File struct {
	// Mesh is the mesh's name.
	Mesh     string         `yaml:"mesh"`
	NATS     NATS           `yaml:"nats"`
	Gateway  gateway.Config `yaml:"gateway"`
	Ops      Ops            `yaml:"ops"`
	Registry RegistryConfig `yaml:"registry"`
	// Tracing says which requests are traced, and where their spans go.
	Tracing tracing.Config `yaml:"tracing"`
	// LocalHops lets items pass in memory between the gateway and the hosts of one process;
	// nil means that they may.
	LocalHops *bool `yaml:"local_hops"`
	// Results, DeadLetters and Idempotency are the broker's stores of results, dead
	// letters and idempotency keys. Every process of a mesh has the same.
	Results     store.Settings `yaml:"results"`
	DeadLetters store.Settings `yaml:"dead_letters"`
	Idempotency store.Settings `yaml:"idempotency"`
	// Jobs are the queues of jobs, and where they go.
	Jobs dispatch.Config `yaml:"jobs"`

	Stages    map[string]Stage             `yaml:"stages"`
	Pipelines map[string]pipeline.Pipeline `yaml:"pipelines"`
	// OpenAI maps the names of models in calls of the OpenAI API to pipelines.
	OpenAI openai.Config `yaml:"openai"`
	// Models and Aliases are registered by gateways, those that are missing.
	Models  map[string]model.Model `yaml:"models"`
	Aliases map[string]Alias       `yaml:"aliases"`

	doc    *config.Doc
	folder string
	// path and flags are what the file was read with; path is empty for bytes.
	path  string
	flags Flags
	kinds []Kind
	// pipelinesOnly is true when the stages of the pipelines are not in the file.
	pipelinesOnly bool
}

// NATS is the broker.
type NATS struct {
	// URL of a broker; empty means one in the process.
	URL string `yaml:"url"`
	// Broker has the files of those that connect: to the broker at URL, or to the one in
	// the process.
	credentials.Broker
	// Listen is where the broker in the process listens, so that other
	// processes may join; empty means nowhere.
	Listen string `yaml:"listen"`
	// Insecure allows other machines to join without a token.
	Insecure bool `yaml:"insecure"`
	// ListenCertFile and ListenKeyFile hold its certificate; without them it has no
	// TLS.
	ListenCertFile string `yaml:"listen_cert_file,path"`
	ListenKeyFile  string `yaml:"listen_key_file,path"`
	// StoreDir holds the files of the broker in the process; empty means a temporary
	// folder, which ends with the process, and with it durable requests, results, dead
	// letters and idempotency keys.
	StoreDir string `yaml:"store_dir,path"`
	// MaxMemory bounds the queues in memory of the broker in the process; 0 means what the
	// stages' queues and a registry reserve, and 64 MiB; 4 GiB more where other processes
	// may join with stages of theirs.
	MaxMemory int64 `yaml:"max_memory,size"`
	// MaxStore bounds the files of the broker in the process; 0 means what the stages'
	// queues, results, dead letters, idempotency keys and a registry reserve, and 16 GiB.
	MaxStore int64 `yaml:"max_store,size"`
	// MaxPayload bounds one message of the broker in the process; 0 means 8 MiB.
	MaxPayload int `yaml:"max_payload,size"`
}

// Ops is the operations port.
type Ops struct {
	// Listen is the address of /livez, /readyz, /metrics and /debug/pprof,
	// 127.0.0.1:9090 where empty.
	Listen string `yaml:"listen"`
	// Insecure allows other machines to call it: nobody authenticates. AnyHost allows callers of a
	// loopback address to name it by any host name.
	Insecure bool `yaml:"insecure"`
	AnyHost  bool `yaml:"any_host"`
}

// Load reads a mesh's file and validates all of it, for a process that runs the
// whole mesh. The kinds are of the runners that it has. Paths in the file
// are relative to its folder.
func Load(path string, kinds ...Kind) (*File, error) {
	return Flags{}.Load(path, kinds...)
}

// Flags are what a command line changes in a file before its checks.
type Flags struct {
	// Broker is the URL of a broker: the file's broker in a process then belongs to another
	// process.
	Broker string
	// Consul is the address of an agent, which is then the registry; the file may have the rest
	// of its settings.
	Consul string
	// Insecure allows other machines to call every port without authentication, AnyHost this one
	// every loopback port by any host name.
	Insecure, AnyHost bool
	// Listen, Admin and Ops are addresses instead of gateway.listen, gateway.admin.listen and ops.listen.
	Listen, Admin, Ops string
}

// Load is Load with the flags.
func (o Flags) Load(path string, kinds ...Kind) (*File, error) {
	f, err := o.read(path, kinds)
	return f.checkWith((*File).Validate, err)
}

// Read is Read with the flags.
func (o Flags) Read(path string, kinds ...Kind) (*File, error) {
	f, err := o.read(path, kinds)
	return f.checkWith((*File).validateShared, err)
}

func (o Flags) read(path string, kinds []Kind) (*File, error) {
	f, err := read(path, File{kinds: kinds, path: path, flags: o})
	if o.Broker != "" {
		f.NATS = NATS{URL: o.Broker, Broker: f.NATS.Broker}
	}
	if o.Consul != "" {
		var agent Consul
		if f.Registry.Consul != nil {
			agent = *f.Registry.Consul
		}
		agent.Address = o.Consul
		f.Registry = RegistryConfig{Consul: &agent}
	}
	o.Override(f)
	return f, err
}

// Override puts the addresses into the file, and sets Insecure and AnyHost of all its ports.
func (o Flags) Override(f *File) {
	g := &f.Gateway
	g.Listen, g.Admin.Listen, f.Ops.Listen = cmp.Or(o.Listen, g.Listen), cmp.Or(o.Admin, g.Admin.Listen), cmp.Or(o.Ops, f.Ops.Listen)
	f.NATS.Insecure = f.NATS.Insecure || o.Insecure
	allow := func(insecure, anyHost *bool) {
		*insecure, *anyHost = *insecure || o.Insecure, *anyHost || o.AnyHost
	}
	allow(&f.Ops.Insecure, &f.Ops.AnyHost)
	allow(&f.Gateway.Insecure, &f.Gateway.AnyHost)
	allow(&f.Gateway.Admin.Insecure, &f.Gateway.Admin.AnyHost)
	if f.Gateway.Scaler != nil {
		f.Gateway.Scaler.Insecure = f.Gateway.Scaler.Insecure || o.Insecure
	}
	for name, s := range f.Stages {
		allow(&s.Insecure, &s.AnyHost)
		f.Stages[name] = s
	}
}

// SecretFiles returns the files with secrets that the file names, and itself if its URL of the
// broker has one.
func (f *File) SecretFiles() []string {
	out := config.SecretFiles(f)
	if f.path != "" && f.flags.Broker == "" && HasSecret(f.NATS.URL) {
		out = append(out, f.path)
	}
	return out
}

// Path returns where the file is; empty for bytes.
func (f *File) Path() string { return f.path }

// Reload reads the file again, with the same flags, and checks all but its stages.
func (f *File) Reload() (*File, error) {
	again, err := f.flags.read(f.path, f.kinds)
	return again.checkWith(func(f *File) error { return f.ValidatePart(nil) }, err)
}

// Parse is Load of bytes; the name is for messages, and paths are relative to
// the folder.
func Parse(name string, data []byte, folder string, kinds ...Kind) (*File, error) {
	f := &File{folder: folder, kinds: kinds}
	var err error
	f.doc, err = config.Parse(name, folder, data, f)
	return f.checkWith((*File).Validate, err)
}

// Read is Load for a program that runs a part of the mesh, and may have only the
// kinds for that: stages are validated when they are asked for, and all else
// but the mesh's name and its broker by ValidatePart.
func Read(path string, kinds ...Kind) (*File, error) {
	return Flags{}.Read(path, kinds...)
}

// ReadPipelines reads the pipelines of a file, sorted by name: of a mesh's, or of one
// that has nothing else. It does not check whether their stages are there.
func ReadPipelines(path string) ([]pipeline.Pipeline, error) {
	f, err := read(path, File{pipelinesOnly: true})
	if err != nil {
		return nil, err
	}
	if len(f.Pipelines) == 0 {
		return nil, f.At(errors.New("there are none"), "pipelines")
	}
	return f.Routes()
}

// HasOnlyPipelines reports whether a file has pipelines and no mesh, as `stagemesh pipelines`
// takes it, too.
func HasOnlyPipelines(path string) bool {
	f, _ := read(path, File{pipelinesOnly: true})
	return f.Mesh == "" && len(f.Stages) == 0 && len(f.Pipelines) > 0
}

// read reads a file and checks its types only. The file is never nil.
func read(path string, f File) (*File, error) {
	f.folder = filepath.Dir(path)
	var err error
	f.doc, err = config.Load(path, &f)
	return &f, err
}

// checkWith returns the file unless there is an error or the check has one.
func (f *File) checkWith(check func(*File) error, err error) (*File, error) {
	if f.doc != nil {
		err = errors.Join(err, check(f))
	}
	if err != nil {
		return nil, err
	}
	return f, nil
}

// FlagError is an error of Load or Read with the flag that named the file, where
// it is the flag that is wrong: there is no such file.
func FlagError(flag string, err error) error {
	if _, inside := errors.AsType[*config.PositionError](err); !inside && errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: %w; this is the file that describes the mesh", flag, err)
	}
	return err
}

// Addresses where the file names none.
const (
	DefaultListen = "127.0.0.1:8080"
	DefaultAdmin  = "127.0.0.1:9080"
	DefaultOps    = "127.0.0.1:9090"
)

// OpsListen is the address of the operations port.
func (f *File) OpsListen() string { return cmp.Or(f.Ops.Listen, DefaultOps) }

// Exposure returns how the broker in the process may be reached.
func (n NATS) Exposure() config.Exposure {
	return config.Exposure{Listen: n.Listen, IsAuthenticated: n.TokenFile != "", Insecure: n.Insecure}
}

// GatewaySettings returns the settings of a gateway. Its id, logger, meter and registry
// are for the caller to fill in. Errors point into the file.
func (f *File) GatewaySettings() (out gateway.Settings, err error) {
	out.Config, out.OpenAI, out.Bus = f.Gateway, f.OpenAI, bus.Settings{URL: f.NATS.URL, Auth: f.NATS.Broker}
	out.Listen, out.Admin.Listen = cmp.Or(out.Listen, DefaultListen), cmp.Or(out.Admin.Listen, DefaultAdmin)
	out.Call = call.Settings{Mesh: pipeline.MeshName(f.Mesh), Results: f.Results, Idempotency: f.Idempotency, Sampling: f.Tracing.Sampling}
	out.Jobs = jobs.Settings{Settings: f.Jobs.Settings, Webhooks: f.Jobs.Webhooks, Batches: f.Jobs.Batches, Queues: JobQueues(f.Jobs), Tenants: map[string][]pipeline.QueueName{}, NATS: f.Jobs.NATS}
	for name, t := range f.Jobs.Tenants {
		for _, queue := range t.Queues {
			out.Jobs.Tenants[name] = append(out.Jobs.Tenants[name], pipeline.QueueName(queue))
		}
	}
	if err := errors.Join(f.At(out.Config.Validate(), "gateway"), f.At(out.Admin.Validate(), "gateway", "admin")); err != nil {
		return out, err
	}
	var routes, loadable error
	out.Pipelines, routes = f.Routes()
	out.Bounds = f.bounds()
	out.Models, out.Aliases, loadable = f.models()
	return out, errors.Join(routes, loadable)
}

// JobQueues returns the queues of a section jobs as a gateway has them.
func JobQueues(c dispatch.Config) map[pipeline.QueueName]jobs.Queue {
	out := map[pipeline.QueueName]jobs.Queue{}
	c = c.WithWebhooks()
	for name, q := range c.Queues {
		pool, _ := c.PoolOf(name) // Validate has checked it
		target := c.Pools[pool].Target
		out[pipeline.QueueName(name)] = jobs.Queue{Pool: pool, JobQueueSettings: q.JobQueueSettings, Pipelines: target.Pipelines, HTTP: target.HTTP != nil}
	}
	return out
}

// Joinable reports whether other processes may serve stages of the mesh.
func (f *File) Joinable() bool { return f.NATS.URL != "" || f.NATS.Listen != "" }

// StageNames returns the names of the stages, sorted.
func (f *File) StageNames() []string { return slices.Sorted(maps.Keys(f.Stages)) }

// At points an error at a key of the file, which is given element by element.
func (f *File) At(err error, path ...string) error { return f.doc.At(path, err) }
