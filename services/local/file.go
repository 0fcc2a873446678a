package local

import (
	"errors"
	"log/slog"

	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/gatewayfile"
	"github.com/stagemesh/stagemesh/services/meshfile"
)

// FileSettings are what a file does not say about a mesh.
type FileSettings struct {
	// Stages are those of the file's that this process runs; nil means all.
	Stages []string
	// Logger, Meter and Version are as in Settings.
	Logger  *slog.Logger
	Meter   metric.Meter
	Version string
}

// ErrAlone says that some stages of the file are left out, and no other process
// can join the mesh to serve them.
var ErrAlone = errors.New("no other process can join this mesh to serve the other stages; its file needs nats.url or nats.listen")

// FromFile returns the mesh that a file describes. More stages and pipelines
// may be added to it.
func FromFile(f *meshfile.File, s FileSettings) (*Mesh, error) {
	front, err := gatewayfile.Settings(f)
	if err != nil {
		return nil, err
	}
	cert, key, token := f.ListenerFiles()
	m, err := New(Settings{
		Mesh: pipeline.MeshName(f.Mesh),
		NATS: f.NATS.URL,
		Auth: f.BrokerAuth(),
		Broker: BrokerSettings{
			Listen: f.NATS.Listen, CertFile: cert, KeyFile: key, TokenFile: token, StoreDir: f.StoreDir(),
			MaxMemory: int64(f.NATS.MaxMemory), MaxStore: int64(f.NATS.MaxStore), MaxPayload: int(f.NATS.MaxPayload),
		},
		Results: f.ResultSettings(), DeadLetters: f.DeadLetterSettings(), Idempotency: f.IdempotencySettings(),
		Registry: f.RegistrySettings(), Gateway: front,
		Logger: s.Logger, Meter: s.Meter, Version: s.Version,
	})
	if err != nil {
		return nil, err
	}
	if s.Stages == nil {
		s.Stages = f.StageNames()
	} else if !f.Joinable() {
		return nil, ErrAlone
	}
	return m, errors.Join(m.addStages(f, s.Stages), m.addRoutes(f))
}

func (m *Mesh) addStages(f *meshfile.File, names []string) error {
	for _, name := range names {
		stage, err := stageIn(f, name)
		if err != nil {
			return err
		}
		if err := m.AddStage(stage); err != nil {
			return err
		}
	}
	return nil
}

func (m *Mesh) addRoutes(f *meshfile.File) error {
	routes, err := f.Routes()
	if err != nil {
		return err
	}
	for _, route := range routes {
		if err := m.AddPipeline(route); err != nil {
			return err
		}
	}
	return nil
}

// stageIn returns a stage of the file, with a runner for each of its hosts.
func stageIn(f *meshfile.File, name string) (Stage, error) {
	host, err := f.Host(name)
	if err != nil {
		return Stage{}, err
	}
	out := stageOf(host)
	for len(out.Runners) < f.Stages[name].Hosts {
		another, err := f.Host(name)
		if err != nil {
			return Stage{}, err
		}
		out.Runners = append(out.Runners, another.Runner)
	}
	return out, nil
}
