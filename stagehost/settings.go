package stagehost

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/credentials"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/store"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/schema"
)

// Settings are what a host is made of.
type Settings struct {
	Mesh  pipeline.MeshName
	Stage pipeline.StageName
	Host  pipeline.HostID
	// Version of the program, for Describe and the registry.
	Version string
	// Registry is where the host says that it is there; nil where nowhere. Labels
	// are whatever its operator says of it there.
	Registry *Registry
	Labels   map[string]string

	Runner runner.Runner
	// Inputs and Outputs add to what the runner says of itself, or narrow it; they
	// are all that is known of one that says nothing. See schema.Complete.
	Inputs, Outputs []runner.PartSpec
	Batch           batch.Settings
	// Stream bounds the silence of a runner that answers in chunks.
	Stream StreamSettings
	// BatchBy names the parameters that items of one batch must agree on.
	BatchBy []string
	// MaxInFlight bounds the items pulled and not settled; 0 means room for
	// two full batches for each slot, and some on their way; where the runner
	// answers in chunks, for an item for each slot and few on their way.
	MaxInFlight int

	Bus   bus.Settings
	Queue QueueSettings
	// CrashLimit is how many runs of an item alone may end the process that runs
	// it before the item is blamed; 0 means DefaultCrashLimit. A process may also
	// be ended by others while an innocent item runs.
	CrashLimit int
	// Results are where the answers to durable requests are kept, DeadLetters
	// what the host gave up on, and Starts which runs have begun.
	Results     store.Settings
	DeadLetters store.Settings
	Starts      store.Settings

	// Listen is the address of the gRPC StageService; empty means none. It is
	// taken before the runner starts.
	Listen string
	// CertFile and KeyFile hold its certificate chain and the key, in PEM; without
	// them it is plain. ServerName is the name in the certificate by which the
	// registry's checks ask; empty means the address's.
	CertFile, KeyFile, ServerName string
	// StartTimeout bounds the runner's start; DrainTimeout how long a stop
	// waits for what is in hand. 0 means the default.
	StartTimeout time.Duration
	DrainTimeout time.Duration

	Logger *slog.Logger
	Meter  metric.Meter
}

// QueueSettings bound each of the stage's queues. 0 means the default.
type QueueSettings struct {
	// Durabilities are the queues that the stage has; none means both.
	Durabilities []pipeline.Durability
	// MaxItems and MaxBytes bound what waits or is in hand anywhere.
	MaxItems int64
	MaxBytes int64
	// MaxAge is the longest deadline of the mesh.
	MaxAge time.Duration
	// AckWait is how long a host may be silent before its items go to
	// another.
	AckWait  time.Duration
	Replicas int
	// Version must be raised to change the settings of a queue that exists.
	Version int
}

// durable reports whether the stage takes durable requests.
func (q QueueSettings) durable() bool { return slices.Contains(q.Durabilities, pipeline.File) }

// Defaults of Settings.
const (
	DefaultMaxItems     = 10_000
	DefaultMaxBytes     = 128 << 20
	DefaultMaxAge       = 10 * time.Minute
	DefaultAckWait      = 2500 * time.Millisecond
	DefaultCrashLimit   = 3
	DefaultStartTimeout = 10 * time.Minute
	DefaultDrainTimeout = 30 * time.Second

	inFlightSlack = 32
	maxBatches    = 2
)

// withDefaults returns the settings with every 0 replaced but MaxInFlight, for which
// the runner has to have started.
func (s Settings) withDefaults() Settings {
	s.Stream = s.Stream.withDefaults()
	if len(s.Queue.Durabilities) == 0 {
		s.Queue.Durabilities = []pipeline.Durability{pipeline.Memory, pipeline.File}
	}
	orDefault(&s.Queue.MaxItems, DefaultMaxItems)
	orDefault(&s.Queue.MaxBytes, DefaultMaxBytes)
	orDefault(&s.Queue.MaxAge, DefaultMaxAge)
	orDefault(&s.Queue.AckWait, DefaultAckWait)
	orDefault(&s.Queue.Replicas, 1)
	orDefault(&s.CrashLimit, DefaultCrashLimit)
	orDefault(&s.StartTimeout, DefaultStartTimeout)
	orDefault(&s.DrainTimeout, DefaultDrainTimeout)
	return s
}

// room is how many items a host holds where nobody says.
func (s Settings) room() int {
	slots := s.Runner.Concurrency()
	if s.Batch.Mode == batch.Stream {
		// What waits here for long cannot run where a slot falls idle meanwhile.
		return bus.BoundFor(slots, len(s.Queue.Durabilities))
	}
	return maxBatches*s.Batch.MaxSize*slots + inFlightSlack
}

// eventRoom is how many events may wait for the loop. Every item has one at most on
// its way, and so has every slot; twice that leaves room for items that were not asked
// for.
func (s Settings) eventRoom() int {
	return 2 * (s.MaxInFlight + maxDirectCalls + 2*s.Runner.Concurrency() + 8)
}

// complete is what a stage takes and gives whose runner says that.
func (s Settings) complete(said runner.Spec) (runner.Spec, error) {
	return schema.Complete(said, s.Inputs, s.Outputs)
}

func orDefault[T comparable](value *T, otherwise T) {
	var zero T
	if *value == zero {
		*value = otherwise
	}
}

// Validate checks what an operator can get wrong; messages name the key.
func (s Settings) Validate() error {
	if s.Runner == nil {
		return errors.New("runner: there is none")
	}
	s = s.withDefaults()
	return errors.Join(
		pipeline.ValidName("mesh", string(s.Mesh)),
		pipeline.ValidName("stage", string(s.Stage)),
		pipeline.ValidName("host", string(s.Host)),
		s.Batch.Validate(),
		schema.ValidParts("inputs", s.Inputs),
		schema.ValidParts("outputs", s.Outputs),
		s.validateBounds(),
	)
}

func (s Settings) validateBounds() error {
	least := bus.LeastBound(len(s.Queue.Durabilities))
	if s.Batch.Mode == batch.Stream {
		least = bus.BoundFor(1, len(s.Queue.Durabilities))
	}
	if s.MaxInFlight != 0 && s.MaxInFlight < least {
		return fmt.Errorf("max_in_flight: %d, at least %d is needed", s.MaxInFlight, least)
	}
	for i, d := range s.Queue.Durabilities {
		if d != pipeline.Memory && d != pipeline.File || slices.Contains(s.Queue.Durabilities[:i], d) {
			return fmt.Errorf("queue.durabilities: use memory, file or both, each once, not %q", s.Queue.Durabilities)
		}
	}
	if err := s.validateTLS(); err != nil {
		return err
	}
	if err := s.Stream.validate(); err != nil {
		return err
	}
	if s.CrashLimit < 1 {
		return fmt.Errorf("crash_limit: %d, at least 1 is needed", s.CrashLimit)
	}
	if s.Queue.AckWait < time.Second {
		return fmt.Errorf("queue.ack_wait: %s, at least 1s is needed", s.Queue.AckWait)
	}
	return nil
}

func (s Settings) pair() credentials.Pair {
	return credentials.Pair{CertFile: s.CertFile, KeyFile: s.KeyFile}
}

// validateTLS checks that the certificate can be shown, and that the registry can
// check it.
func (s Settings) validateTLS() error {
	if err := s.pair().Check(""); err != nil {
		return err
	}
	switch {
	case s.ServerName != "" && s.CertFile == "":
		return errors.New("server_name: is a name in a certificate, and there is no cert_file")
	case s.CertFile != "" && s.ServerName == "" && unspecified(s.Listen):
		return fmt.Errorf("listen: %s is no address by which the registry can check the certificate; say the name in it in server_name, or listen on one address", s.Listen)
	}
	return nil
}

// unspecified reports whether an address means all of the machine's.
func unspecified(listen string) bool {
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "" || ip != nil && ip.IsUnspecified()
}
