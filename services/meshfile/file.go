package meshfile

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/mesh/config"
	"github.com/stagemesh/stagemesh/mesh/credentials"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/store"
)

// File is a mesh as it is written down. Zero values mean the defaults.
type File struct {
	// Mesh is the mesh's name.
	Mesh    string  `yaml:"mesh"`
	NATS    NATS    `yaml:"nats"`
	Gateway Gateway `yaml:"gateway"`
	Ops     Ops     `yaml:"ops"`
	// Registry is where hosts say that they are there, and pipelines are.
	Registry Registry `yaml:"registry"`
	// Results are the answers that are stored, DeadLetters what the mesh gave up
	// on, and Idempotency which request has an idempotency key.
	Results     Kept `yaml:"results"`
	DeadLetters Kept `yaml:"dead_letters"`
	Idempotency Kept `yaml:"idempotency"`

	Stages    map[string]Stage    `yaml:"stages"`
	Pipelines map[string]Pipeline `yaml:"pipelines"`

	doc    *config.Doc
	folder string
	kinds  []Kind
	// apart says that the stages of the pipelines are not those of the file.
	apart bool
}

// NATS says which broker to use.
type NATS struct {
	// URL of a broker; empty means one in the process.
	URL string `yaml:"url"`
	// CredentialsFile holds NATS user credentials for it.
	CredentialsFile string `yaml:"credentials_file"`
	// TokenFile holds the token that a broker demands: the one at URL, or the one in
	// the process of those that join.
	TokenFile string `yaml:"token_file"`
	// CAFile has the certificates that vouch for the broker, also for those that
	// join; it implies TLS.
	CAFile string `yaml:"ca_file"`
	// CertFile and KeyFile hold the certificate that the broker at URL is shown.
	CertFile string `yaml:"cert_file"`
	KeyFile  string `yaml:"key_file"`
	// Listen is where the broker in the process listens, so that other
	// processes may join; empty means nowhere.
	Listen string `yaml:"listen"`
	// ListenCertFile and ListenKeyFile hold its certificate; without them it has no
	// TLS.
	ListenCertFile string `yaml:"listen_cert_file"`
	ListenKeyFile  string `yaml:"listen_key_file"`
	// StoreDir holds what the broker in the process keeps on file.
	StoreDir string `yaml:"store_dir"`
	// MaxMemory bounds the queues of the broker in the process; 0 means what
	// the stages in the process reserve, and some.
	MaxMemory config.Bytes `yaml:"max_memory"`
	// MaxStore bounds what the broker in the process keeps on file; 0 means what
	// the mesh reserves there, and some.
	MaxStore config.Bytes `yaml:"max_store"`
	// MaxPayload bounds one message of the broker in the process.
	MaxPayload config.Bytes `yaml:"max_payload"`
}

// Gateway says how the gateway serves.
type Gateway struct {
	// Listen is the public address, 127.0.0.1:8080 where empty.
	Listen string `yaml:"listen"`
	// TokenFile holds the tokens that callers have to know one of; they need none
	// where empty.
	TokenFile string `yaml:"token_file"`
	// CertFile and KeyFile hold a certificate and its key; without them the port
	// is plain.
	CertFile string `yaml:"cert_file"`
	KeyFile  string `yaml:"key_file"`
	// Docs says whether /openapi.json and /docs are served; they are where it is nil.
	Docs *bool `yaml:"docs"`
	// AllowOrigins are the web origins that browsers may call from; none where
	// empty.
	AllowOrigins []string `yaml:"allow_origins"`
	// MaxPayload bounds the inputs of a request.
	MaxPayload config.Bytes `yaml:"max_payload"`
	// MaxInFlight bounds the requests in flight.
	MaxInFlight int `yaml:"max_in_flight"`
	// MaxInFlightBytes bounds the bytes of their bodies together.
	MaxInFlightBytes config.Bytes `yaml:"max_in_flight_bytes"`
	// Timeout is a request's where neither it nor its pipeline says;
	// MaxTimeout bounds all.
	Timeout    time.Duration `yaml:"timeout"`
	MaxTimeout time.Duration `yaml:"max_timeout"`
	// HostGrace is how long a request in memory waits for its first step while
	// the step's stage has no host.
	HostGrace time.Duration `yaml:"host_grace"`
	// Metadata are the keys that a request may hand to runners.
	Metadata []string `yaml:"metadata"`
	// DrainDelay is how long a gateway that is told to stop serves on.
	DrainDelay time.Duration `yaml:"drain_delay"`
	// DrainTimeout bounds how long a stop waits for calls.
	DrainTimeout time.Duration `yaml:"drain_timeout"`
	// Admin is the port for operators.
	Admin Admin `yaml:"admin"`
}

// Admin says how the gateway serves operators.
type Admin struct {
	// Listen is the address, 127.0.0.1:9080 where empty.
	Listen string `yaml:"listen"`
	// TokenFile holds the tokens that callers have to know one of.
	TokenFile string `yaml:"token_file"`
	// CertFile and KeyFile hold a certificate and its key; without them the port
	// is plain.
	CertFile string `yaml:"cert_file"`
	KeyFile  string `yaml:"key_file"`
}

// Registry says where hosts say that they are there, and pipelines are: one of the
// three, on the mesh's own broker where it says nothing.
type Registry struct {
	// None is that there is no registry.
	None   bool            `yaml:"none"`
	Consul *Consul         `yaml:"consul"`
	NATS   *BrokerRegistry `yaml:"nats"`
}

// Consul says where Consul is, and how it is spoken to.
type Consul struct {
	// Address is an agent's, 127.0.0.1:8500 where empty.
	Address string `yaml:"address"`
	// TokenFile holds the ACL token.
	TokenFile string `yaml:"token_file"`
	// TLS is for agents whose certificate the system trusts; a CAFile implies it.
	TLS        bool   `yaml:"tls"`
	CAFile     string `yaml:"ca_file"`
	CertFile   string `yaml:"cert_file"`
	KeyFile    string `yaml:"key_file"`
	ServerName string `yaml:"server_name"`
	Datacenter string `yaml:"datacenter"`
	Namespace  string `yaml:"namespace"`
	Partition  string `yaml:"partition"`
	// Stale lets any server answer reads.
	Stale bool `yaml:"stale"`
}

// BrokerRegistry is a registry on the mesh's own broker.
type BrokerRegistry struct {
	// Replicas is on how many servers of the broker it is.
	Replicas int `yaml:"replicas"`
}

// Ops says where operators ask.
type Ops struct {
	// Listen is the address of /livez, /readyz, /metrics and /debug/pprof,
	// 127.0.0.1:9090 where empty.
	Listen string `yaml:"listen"`
}

// Kept says how the broker keeps something on file.
type Kept struct {
	// Retention is how long it is kept.
	Retention time.Duration `yaml:"retention"`
	// MaxBytes bounds all of it together.
	MaxBytes config.Bytes `yaml:"max_bytes"`
	Replicas int          `yaml:"replicas"`
	Version  int          `yaml:"version"`
}

// Stage is a stage and its hosts.
type Stage struct {
	// Runner has one key: the kind, with that kind's settings.
	Runner map[string]config.Section `yaml:"runner"`
	// Hosts is how many hosts of the stage a process that runs the whole mesh
	// has, 1 where 0.
	Hosts int `yaml:"hosts"`
	// Inputs and Outputs add to what the runner says that it takes and gives.
	Inputs  []Part `yaml:"inputs"`
	Outputs []Part `yaml:"outputs"`
	Batch   Batch  `yaml:"batch"`
	// Stream bounds the silence of a runner that answers in chunks.
	Stream Stream `yaml:"stream"`
	// MaxInFlight bounds the items that a host holds.
	MaxInFlight int   `yaml:"max_in_flight"`
	Queue       Queue `yaml:"queue"`
	// CrashLimit is how many runs of an item alone may end their process.
	CrashLimit int `yaml:"crash_limit"`
	// Listen is the address of the gRPC StageService; empty means none.
	Listen string `yaml:"listen"`
	// CertFile and KeyFile hold its certificate and the key; without them it is
	// plain. ServerName is the name in the certificate that the registry's checks
	// ask for, the address's where empty.
	CertFile   string `yaml:"cert_file"`
	KeyFile    string `yaml:"key_file"`
	ServerName string `yaml:"server_name"`
	// Labels are shown in the registry.
	Labels map[string]string `yaml:"labels"`
	// StartTimeout bounds how long the runner may take to be ready, DrainTimeout
	// how long a stop waits for what is in hand.
	StartTimeout time.Duration `yaml:"start_timeout"`
	DrainTimeout time.Duration `yaml:"drain_timeout"`
}

// Batch says how a stage's hosts batch.
type Batch struct {
	// Mode is eager, window or stream; empty is eager, or stream where the runner
	// answers in chunks.
	Mode string `yaml:"mode"`
	// MaxSize counts rows, MaxBytes bytes of payload.
	MaxSize  int            `yaml:"max_size"`
	MaxBytes config.Bytes   `yaml:"max_bytes"`
	MaxWait  *time.Duration `yaml:"max_wait"`
	// By names parameters that items of one batch must agree on.
	By []string `yaml:"by"`
}

// Stream says how long a runner that answers in chunks may say nothing.
type Stream struct {
	// FirstChunk is until the first chunk, Idle between two.
	FirstChunk time.Duration `yaml:"first_chunk_timeout"`
	Idle       time.Duration `yaml:"idle_timeout"`
}

// Queue bounds each of a stage's queues.
type Queue struct {
	// Durabilities are the queues that there are; both where empty.
	Durabilities []pipeline.Durability `yaml:"durabilities"`

	MaxItems int64         `yaml:"max_items"`
	MaxBytes config.Bytes  `yaml:"max_bytes"`
	AckWait  time.Duration `yaml:"ack_wait"`
	Replicas int           `yaml:"replicas"`
	Version  int           `yaml:"version"`
}

// Pipeline is a route.
type Pipeline struct {
	Steps      []Step        `yaml:"steps"`
	Timeout    time.Duration `yaml:"timeout"`
	Durability string        `yaml:"durability"`
	Keep       []string      `yaml:"keep"`
	// MaxInFlight bounds the requests in flight for the pipeline; 0 means as
	// many as for all.
	MaxInFlight int `yaml:"max_in_flight"`
	// WaitForCapacity makes requests wait, until their deadline, where a stage has
	// no room for them.
	WaitForCapacity bool `yaml:"wait_for_capacity"`
}

// Step is a place in a pipeline.
type Step struct {
	Name  string `yaml:"name"`
	Stage string `yaml:"stage"`
	// Model is the id, or Alias a movable name, of the model to use.
	Model   string `yaml:"model"`
	Alias   string `yaml:"alias"`
	Version string `yaml:"version"`
	// Parameters go to the stage.
	Parameters map[string]any `yaml:"parameters"`
	// Inputs renames: input of the stage -> name of the part that feeds it.
	Inputs map[string]string `yaml:"inputs"`
}

// Load reads a mesh's file and validates all of it, for a process that runs the
// whole mesh. The kinds are those of the runners that it has. Paths in the file
// are relative to its folder.
func Load(path string, kinds ...Kind) (*File, error) {
	f := &File{folder: filepath.Dir(path), kinds: kinds}
	doc, err := config.Load(path, f)
	return f.checked(doc, err, (*File).Validate)
}

// Parse is Load of bytes; the name is for messages, and paths are relative to
// the folder.
func Parse(name string, data []byte, folder string, kinds ...Kind) (*File, error) {
	f := &File{folder: folder, kinds: kinds}
	doc, err := config.Parse(name, data, f)
	return f.checked(doc, err, (*File).Validate)
}

// Read is Load for a program that runs a part of the mesh, and may have only the
// kinds for that: stages are validated when they are asked for, and all else
// but the mesh's name and its broker by ValidatePart.
func Read(path string, kinds ...Kind) (*File, error) {
	return ReadAt(path, "", kinds...)
}

// ReadAt is Read for a program that was told where the broker is: what the file says of
// a broker in a process is then of another process. Without a URL it is Read.
func ReadAt(path, broker string, kinds ...Kind) (*File, error) {
	f := &File{folder: filepath.Dir(path), kinds: kinds}
	doc, err := config.Load(path, f)
	if n := f.NATS; broker != "" {
		f.NATS = NATS{
			URL: broker, CredentialsFile: n.CredentialsFile, TokenFile: n.TokenFile,
			CAFile: n.CAFile, CertFile: n.CertFile, KeyFile: n.KeyFile,
		}
	}
	return f.checked(doc, err, (*File).validateShared)
}

// ReadPipelines reads the pipelines of a file, sorted by name: of a mesh's, or of one
// that has nothing else. Whether their stages are there is not looked at.
func ReadPipelines(path string) ([]pipeline.Pipeline, error) {
	f := &File{folder: filepath.Dir(path), apart: true}
	doc, err := config.Load(path, f)
	if err != nil {
		return nil, err
	}
	f.doc = doc
	if len(f.Pipelines) == 0 {
		return nil, f.At(errors.New("there are none"), "pipelines")
	}
	return f.Routes()
}

// FlagError is an error of Load or Read with the flag that named the file, where
// it is the flag that is wrong: there is no such file.
func FlagError(flag string, err error) error {
	if _, inside := errors.AsType[*config.PositionError](err); !inside && errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: %w; this is the file that describes the mesh", flag, err)
	}
	return err
}

func (f *File) checked(doc *config.Doc, err error, validate func(*File) error) (*File, error) {
	if err != nil {
		return nil, err
	}
	f.doc = doc
	if err := validate(f); err != nil {
		return nil, err
	}
	return f, nil
}

// Addresses where the file names none.
const (
	DefaultListen = "127.0.0.1:8080"
	DefaultAdmin  = "127.0.0.1:9080"
	DefaultOps    = "127.0.0.1:9090"
)

// OpsListen is the address of the operations port.
func (f *File) OpsListen() string { return cmp.Or(f.Ops.Listen, DefaultOps) }

// PublicPort is the gateway's section with its address, and the paths of its files.
func (f *File) PublicPort() Gateway {
	g := f.Gateway
	g.Listen = cmp.Or(g.Listen, DefaultListen)
	g.TokenFile, g.CertFile, g.KeyFile = f.relative(g.TokenFile), f.relative(g.CertFile), f.relative(g.KeyFile)
	return g
}

// AdminPort is the gateway's port for operators, with its address and the paths
// of its files.
func (f *File) AdminPort() Admin {
	a := f.Gateway.Admin
	return Admin{
		Listen: cmp.Or(a.Listen, DefaultAdmin), TokenFile: f.relative(a.TokenFile),
		CertFile: f.relative(a.CertFile), KeyFile: f.relative(a.KeyFile),
	}
}

// BrokerAuth are the paths of the files for a broker that is reached by a URL.
func (f *File) BrokerAuth() credentials.Broker {
	n := f.NATS
	return credentials.Broker{
		CredentialsFile: f.relative(n.CredentialsFile), TokenFile: f.relative(n.TokenFile),
		CAFile: f.relative(n.CAFile), CertFile: f.relative(n.CertFile), KeyFile: f.relative(n.KeyFile),
	}
}

// ListenerFiles are the paths of the certificate of the broker in the process and of
// its key, and of the token that it demands, or "".
func (f *File) ListenerFiles() (cert, key, token string) {
	n := f.NATS
	return f.relative(n.ListenCertFile), f.relative(n.ListenKeyFile), f.relative(n.TokenFile)
}

// StoreDir is the path of the folder of the broker in the process, or "".
func (f *File) StoreDir() string { return f.relative(f.NATS.StoreDir) }

// Joinable says whether other processes may serve stages of the mesh.
func (f *File) Joinable() bool { return f.NATS.URL != "" || f.NATS.Listen != "" }

// StageNames returns the names of the stages, sorted.
func (f *File) StageNames() []string { return slices.Sorted(maps.Keys(f.Stages)) }

// ResultSettings are what every gateway and host is told about results.
func (f *File) ResultSettings() store.Settings { return f.Results.settings() }

// DeadLetterSettings are what every host is told about dead letters.
func (f *File) DeadLetterSettings() store.Settings { return f.DeadLetters.settings() }

// IdempotencySettings are what every gateway is told about idempotency keys. They
// are remembered for as long as results are kept, unless the file says less.
func (f *File) IdempotencySettings() store.Settings {
	out := f.Idempotency.settings()
	out.Retention = cmp.Or(out.Retention, f.Results.Retention)
	return out
}

func (k Kept) settings() store.Settings {
	return store.Settings{Retention: k.Retention, MaxBytes: int64(k.MaxBytes), Replicas: k.Replicas, Version: k.Version}
}

// At points an error at a key of the file, which is given element by element.
func (f *File) At(err error, path ...string) error { return f.doc.At(path, err) }

// relative returns a path of the file as one of the process.
func (f *File) relative(path string) string {
	if path == "" || filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(f.folder, path)
}
