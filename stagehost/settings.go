package stagehost

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/credentials"
	registry "github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/internal/item"
	"github.com/stagemesh/stagemesh/stagehost/internal/modelcache"
	"github.com/stagemesh/stagemesh/stagehost/internal/models"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// What the items of a host are configured by.
type (
	// Batch says how a host batches.
	Batch = batch.Settings
	// StreamSettings bound how long a runner that answers in chunks may say nothing.
	StreamSettings = item.StreamSettings
	// ExposeErrors is how much a caller gets of an exception that its request has raised.
	ExposeErrors = item.ExposeErrors
)

// Values of ExposeErrors: nothing, its type and message, or its traceback too.
const (
	ExposeNone      = item.ExposeNone
	ExposeMessage   = item.ExposeMessage
	ExposeTraceback = item.ExposeTraceback
)

// Config is the configuration of a stage's hosts: the stage's section of a mesh's
// file. 0 means the default.
type Config struct {
	// Batch bounds the batches. A file's default is DefaultBatch.
	Batch Batch `yaml:"batch"`
	// Stream bounds the silence of a runner that answers in chunks.
	Stream StreamSettings `yaml:"stream"`
	// MaxInFlight bounds the items pulled and not settled; 0 means two full batches for
	// each slot and some slack; where the runner answers in chunks, an item for each slot
	// and a few more.
	MaxInFlight int           `yaml:"max_in_flight"`
	Queue       QueueSettings `yaml:"queue"`
	// CrashLimit is how many runs of an item alone may end with their worker or their
	// host, all hosts together, before it fails with RUNNER_CRASHED. A worker or a host
	// may also end for another reason while an innocent item runs.
	CrashLimit int `yaml:"crash_limit"`
	// ExposeErrors is how much callers get of the exceptions of the runner's workers; empty
	// means nothing.
	ExposeErrors ExposeErrors `yaml:"expose_errors"`
	// Listen is the address of the gRPC StageService; empty means none. It is
	// taken before the runner starts.
	Listen string `yaml:"listen"`
	// CertFile and KeyFile hold its certificate chain and the key, in PEM; without
	// them it is plain. ServerName is the name in the certificate by which the
	// registry's checks ask; empty means the address's.
	CertFile   string `yaml:"cert_file,path"`
	KeyFile    string `yaml:"key_file,path"`
	ServerName string `yaml:"server_name"`
	// Callers of the StageService need a token in TokenFile, or a certificate that the
	// authorities in ClientCAFile have signed, where either is set. Insecure allows other
	// machines to call without both.
	TokenFile    string `yaml:"token_file,path"`
	ClientCAFile string `yaml:"client_ca_file,path"`
	Insecure     bool   `yaml:"insecure"`
	// AnyHost allows callers of a loopback address to name it by any host name.
	AnyHost bool `yaml:"any_host"`
	// Models is set for a stage that loads models on demand; its runner is a
	// runner.ModelLoader.
	Models *ModelSettings `yaml:"models"`
	// Labels are shown in the registry.
	Labels map[string]string `yaml:"labels"`
	// StartTimeout bounds the runner's start; DrainTimeout how long a stop
	// waits for items in flight.
	StartTimeout time.Duration `yaml:"start_timeout"`
	DrainTimeout time.Duration `yaml:"drain_timeout"`
}

// SetDefaults implements config.Defaulter.
func (c *Config) SetDefaults() { c.Batch = DefaultBatch() }

// DefaultBatch returns the batching of a stage whose section does not set it: adaptive, or
// stream where the runner answers in chunks.
func DefaultBatch() Batch {
	return Batch{MaxSize: 32, MaxBytes: 16 << 20, MaxWait: 5 * time.Millisecond}
}

// Settings are a host's Config and what its program adds.
type Settings struct {
	Config

	Mesh  pipeline.MeshName
	Stage pipeline.StageName
	Host  pipeline.HostID
	// Version of the program, for Describe and the registry.
	Version string
	// Operations is the address of the program's operations port, for the registry.
	Operations string
	// Advertise is the host of registered addresses where Listen is all addresses of this
	// machine; see config.Advertised.
	Advertise string
	// Registry is where the host registers; nil where nowhere.
	Registry *Registry

	Runner runner.Runner
	// HostGrace is how long items in memory wait while no host serves the stage and the
	// runner of this one does not start again: the mesh's gateway.host_grace. 0 means the
	// default.
	HostGrace time.Duration
	// Inputs and Outputs add to the runner's spec, or narrow it; they are the whole spec
	// of a runner without one. See schema.Complete.
	Inputs, Outputs []runner.PartSpec

	Bus bus.Settings
	// Results are where the results of durable requests are stored, DeadLetters where
	// dead letters are, and Starts where run records are.
	Results     store.Settings
	DeadLetters store.Settings
	RunRecords  store.Settings

	Logger *slog.Logger
	Meter  metric.Meter
	// Tracer makes the spans of items that are traced; nil means that nothing is.
	Tracer trace.Tracer
}

// ModelSettings configure a stage that loads models on demand. 0 means what the runner says.
type ModelSettings struct {
	registry.StageConfig
	// Capacity is a host's memory for models, DeviceCapacity its devices' memory. 0 of
	// both is what the runner says.
	Capacity       int64 `yaml:"capacity,size"`
	DeviceCapacity int64 `yaml:"device_capacity,size"`
	// DefaultSize and DeviceDefaultSize count for a model of unknown size.
	DefaultSize       int64 `yaml:"default_size,size"`
	DeviceDefaultSize int64 `yaml:"device_default_size,size"`
	// LoadSlots is how many models load at a time, LoadTimeout bounds each load.
	LoadSlots   int           `yaml:"load_slots"`
	LoadTimeout time.Duration `yaml:"load_timeout"`
	// Root is the folder that the sources of onnx_models are below.
	Root string `yaml:"root,path"`
}

// Defaults of ModelSettings where the runner says nothing.
const (
	DefaultModelSize   = 16 << 20
	DefaultLoadSlots   = 2
	DefaultLoadTimeout = 90 * time.Second
)

func (s *ModelSettings) root() string {
	if s == nil {
		return ""
	}
	return s.Root
}

// memory is what a runner may use; nil where it has one model.
func (s *ModelSettings) memory() *model.Size {
	if s == nil {
		return nil
	}
	return &model.Size{Host: s.Capacity, Device: s.DeviceCapacity}
}

// cache returns the settings of the cache for a runner.
func (s ModelSettings) cache(of runner.ModelLimits) modelcache.Settings {
	out := modelcache.Settings{
		Capacity:    model.Size{Host: s.Capacity, Device: s.DeviceCapacity}.Within(of.Capacity),
		DefaultSize: model.Size{Host: cmp.Or(s.DefaultSize, of.DefaultSize.Host), Device: cmp.Or(s.DeviceDefaultSize, of.DefaultSize.Device)},
		LoadSlots:   cmp.Or(s.LoadSlots, of.LoadSlots, DefaultLoadSlots),
		LoadTimeout: cmp.Or(s.LoadTimeout, of.LoadTimeout, DefaultLoadTimeout),
	}
	if of.LoadSlots > 0 {
		out.LoadSlots = min(out.LoadSlots, of.LoadSlots) // more do not start
	}
	if out.DefaultSize == (model.Size{}) && out.Capacity.Host > 0 {
		out.DefaultSize.Host = DefaultModelSize
	}
	return out
}

// QueueSettings bound each of the stage's queues. 0 means the default.
type QueueSettings struct {
	// Durabilities are the queues that the stage has; none means both.
	Durabilities []pipeline.Durability `yaml:"durabilities"`
	// MaxItems and MaxBytes bound the queued and delivered items.
	MaxItems int64 `yaml:"max_items"`
	MaxBytes int64 `yaml:"max_bytes,size"`
	// MaxAge is the longest deadline of the mesh.
	MaxAge time.Duration `yaml:"-"`
	// AckWait is how long a host may be silent before its items go to
	// another.
	AckWait  time.Duration `yaml:"ack_wait"`
	Replicas int           `yaml:"replicas"`
	// Version must be raised to change the settings of a queue that exists.
	Version int `yaml:"version"`
}

// Queues returns the queues of the stage with so many hosts: its own, and one for each host where it loads
// models.
func (c Config) Queues(hosts int) []QueueSettings {
	out := []QueueSettings{c.Queue}
	if c.Models != nil {
		out = append(out, slices.Repeat([]QueueSettings{c.ownQueue()}, hosts)...)
	}
	return out
}

// ownQueue returns the settings of a host's own queue, where the stage loads models. It is in
// memory: what is on file there would wait for a host that died.
func (c Config) ownQueue() QueueSettings {
	q := c.withDefaults().Queue
	q.Durabilities = []pipeline.Durability{pipeline.Memory}
	q.MaxItems, q.MaxBytes = min(q.MaxItems, ownMaxItems), min(q.MaxBytes, ownMaxBytes)
	return q
}

// durable reports whether the stage takes durable requests.
func (q QueueSettings) durable() bool { return slices.Contains(q.Durabilities, pipeline.File) }

// Defaults of StreamSettings.
const (
	DefaultFirstChunk = 30 * time.Second
	DefaultIdle       = 30 * time.Second
)

// Defaults of Settings.
const (
	DefaultMaxItems     = 10_000
	DefaultMaxBytes     = 128 << 20
	DefaultMaxAge       = 10 * time.Minute
	DefaultAckWait      = 2500 * time.Millisecond
	DefaultCrashLimit   = 2
	DefaultStartTimeout = 10 * time.Minute
	DefaultDrainTimeout = 30 * time.Second

	// Bounds of a host's own queue.
	ownMaxItems = 2_000
	ownMaxBytes = 32 << 20

	inFlightSlack = 32
	maxBatches    = 2
)

// withDefaults returns the section with every 0 replaced but MaxInFlight, for which
// the runner has to have started.
func (c Config) withDefaults() Config {
	c.Stream.FirstChunk = cmp.Or(c.Stream.FirstChunk, DefaultFirstChunk)
	c.Stream.Idle = cmp.Or(c.Stream.Idle, DefaultIdle)
	if len(c.Queue.Durabilities) == 0 {
		c.Queue.Durabilities = []pipeline.Durability{pipeline.Memory, pipeline.File}
	}
	c.Queue.MaxItems = cmp.Or(c.Queue.MaxItems, DefaultMaxItems)
	c.Queue.MaxBytes = cmp.Or(c.Queue.MaxBytes, DefaultMaxBytes)
	c.Queue.MaxAge = cmp.Or(c.Queue.MaxAge, DefaultMaxAge)
	c.Queue.AckWait = cmp.Or(c.Queue.AckWait, DefaultAckWait)
	c.Queue.Replicas = cmp.Or(c.Queue.Replicas, 1)
	c.CrashLimit = cmp.Or(c.CrashLimit, DefaultCrashLimit)
	c.StartTimeout = cmp.Or(c.StartTimeout, DefaultStartTimeout)
	c.DrainTimeout = cmp.Or(c.DrainTimeout, DefaultDrainTimeout)
	return c
}

// defaultInFlight is how many items a host holds where max_in_flight is 0.
func (s Settings) defaultInFlight() int {
	slots := s.Runner.Concurrency()
	if s.Batch.Mode == batch.Stream {
		// What waits here for long cannot run where a slot falls idle meanwhile.
		return bus.BoundFor(slots, len(s.Queue.Durabilities))
	}
	return maxBatches*s.Batch.MaxSize*slots + inFlightSlack
}

// localPlaces bounds the items that are handed over in memory, as its queue bounds others.
// Where other hosts serve the stage, no more than one batch for each slot may wait here.
func (s Settings) localPlaces() bus.LocalPlaces {
	if s.Bus.Local == nil {
		return bus.LocalPlaces{}
	}
	batches := s.Runner.Concurrency()
	if s.Batch.Mode != batch.Stream {
		batches *= s.Batch.MaxSize
	}
	return bus.LocalPlaces{Items: s.Queue.MaxItems, Bytes: s.Queue.MaxBytes, Shared: int64(batches)}
}

// eventRoom is how many events may wait for the loop. Every item has one at most on
// its way, and so has every slot; twice that leaves room for items that were not asked
// for.
func (s Settings) eventRoom() int {
	n := 2 * (s.MaxInFlight + maxDirectCalls + 2*s.Runner.Concurrency() + 8)
	if s.Models != nil {
		n += 2*s.MaxInFlight + models.MaxWaiting
	}
	return n
}

// itemBound is how many items the loop holds at most. A host that loads models has a queue of its own,
// adopts another one as the leader, and gets durable items that other hosts forward.
func (s Settings) itemBound() int {
	perQueue := s.MaxInFlight + int(s.localPlaces().Items)
	if s.Models == nil {
		return perQueue + maxDirectCalls
	}
	return 4*perQueue + maxDirectCalls + models.MaxWaiting
}

// complete returns the spec of the stage with the runner's spec.
func (s Settings) complete(spec runner.Spec) (runner.Spec, error) {
	return schema.Complete(spec, s.Inputs, s.Outputs)
}

// checkBatchBy checks that the runner reads the parameters of batch.by.
func (c Config) checkBatchBy(spec runner.Spec) error {
	declared := parametersToProto(spec.Parameters)
	for _, name := range c.Batch.By {
		if why, isDeclared := payload.Unread(declared, name, payload.Value{}); why != "" && !isDeclared {
			return fmt.Errorf("batch.by: %s: the runner %s", name, why)
		}
	}
	return nil
}

// Validate checks what an operator can get wrong; messages name the key.
func (s Settings) Validate() error {
	if s.Runner == nil {
		return errors.New("runner: is required")
	}
	if _, ok := s.Runner.(runner.ModelLoader); s.Models != nil && !ok {
		return errors.New("models: the runner of this stage has one model; leave the section out")
	}
	if r, ok := s.Runner.(interface{ ValidateModels() error }); s.Models != nil && ok {
		if err := r.ValidateModels(); err != nil {
			return fmt.Errorf("runner: %w", err)
		}
	}
	return errors.Join(
		pipeline.ValidName("mesh", string(s.Mesh)),
		pipeline.ValidName("stage", string(s.Stage)),
		pipeline.ValidName("host", string(s.Host)),
		s.Config.Validate(),
		s.checkBatchBy(s.Runner.Spec()),
		schema.ValidParts("inputs", s.Inputs),
		schema.ValidParts("outputs", s.Outputs),
	)
}

// Validate checks the section; messages name the key in it.
func (c Config) Validate() error {
	c = c.withDefaults()
	errs := []error{
		c.Batch.Validate(),
		c.validateListen(),
		c.validateInFlight(),
		config.NotNegative("start_timeout", c.StartTimeout),
		config.NotNegative("drain_timeout", c.DrainTimeout),
		config.NotNegative("queue.max_items", c.Queue.MaxItems),
		config.NotNegative("queue.replicas", c.Queue.Replicas),
		config.NotNegative("queue.version", c.Queue.Version),
		c.validateTLS(),
		c.ExposeErrors.Validate(),
		config.NotNegative("stream.first_chunk_timeout", c.Stream.FirstChunk),
		config.NotNegative("stream.idle_timeout", c.Stream.Idle),
	}
	if m := c.Models; m != nil {
		errs = append(errs,
			config.NotNegative("models.load_slots", m.LoadSlots), config.NotNegative("models.load_timeout", m.LoadTimeout),
			config.NotNegative("models.capacity", m.Capacity), config.NotNegative("models.device_capacity", m.DeviceCapacity),
			config.NotNegative("models.default_size", m.DefaultSize), config.NotNegative("models.device_default_size", m.DeviceDefaultSize))
		if _, err := m.Settings("models."); err != nil {
			errs = append(errs, err)
		}
		if c.Batch.Mode == batch.Stream {
			errs = append(errs, errors.New("models: is for runners of batches, and batch.mode is stream"))
		}
	}
	for i, d := range c.Queue.Durabilities {
		if d != pipeline.Memory && d != pipeline.File || slices.Contains(c.Queue.Durabilities[:i], d) {
			errs = append(errs, fmt.Errorf("queue.durabilities: use memory, file or both, each once, not %q", c.Queue.Durabilities))
			break
		}
	}
	if c.CrashLimit < 1 {
		errs = append(errs, fmt.Errorf("crash_limit: %d, at least 1 is needed", c.CrashLimit))
	}
	if c.Queue.AckWait < time.Second {
		errs = append(errs, fmt.Errorf("queue.ack_wait: %s, at least 1s is needed", c.Queue.AckWait))
	}
	return errors.Join(errs...)
}

func (c Config) validateInFlight() error {
	least := bus.LeastBound(len(c.Queue.Durabilities))
	if c.Batch.Mode == batch.Stream {
		least = bus.BoundFor(1, len(c.Queue.Durabilities))
	}
	switch {
	case c.MaxInFlight < 0:
		return config.NotNegative("max_in_flight", c.MaxInFlight)
	case c.MaxInFlight != 0 && c.MaxInFlight < least:
		return fmt.Errorf("max_in_flight: %d, at least %d is needed", c.MaxInFlight, least)
	}
	return nil
}

func (c Config) exposure() config.Exposure {
	return config.Exposure{Listen: c.Listen, IsAuthenticated: c.TokenFile != "" || c.ClientCAFile != "", Insecure: c.Insecure, AnyHost: c.AnyHost}
}

func (c Config) validateListen() error {
	if err := config.Address("listen", c.Listen); err != nil {
		return err
	}
	if c.ClientCAFile != "" && c.CertFile == "" {
		return errors.New("client_ca_file: callers show certificates over TLS only; name this port's in cert_file")
	}
	return c.exposure().Check("listen", "name a file with a token in token_file, ")
}

func (c Config) pair() credentials.Pair {
	return credentials.Pair{CertFile: c.CertFile, KeyFile: c.KeyFile}
}

// validateTLS checks that the certificate can be shown, and that the registry can
// check it.
func (c Config) validateTLS() error {
	if err := c.pair().Check(""); err != nil {
		return err
	}
	switch {
	case c.ServerName != "" && c.CertFile == "":
		return errors.New("server_name: is a name in a certificate, and there is no cert_file")
	case c.CertFile != "" && c.ServerName == "" && config.IsUnspecified(c.Listen):
		return fmt.Errorf("listen: %s is not an address by which the registry can check the certificate; say the name in it in server_name, or listen on one address", c.Listen)
	}
	return nil
}
