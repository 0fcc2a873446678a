package stagemesh

import (
	"errors"
	"log/slog"

	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// FileSettings are the settings of a mesh that its file does not have.
type FileSettings struct {
	// Stages are those of the file's that this process runs; nil means all.
	Stages []string
	// NoGateway is true for a process that only serves stages.
	NoGateway bool
	// Host is the id of the host, for one stage with one host; empty means a new one.
	Host pipeline.HostID
	// Logger, Meter and Version are as in Settings.
	Logger  *slog.Logger
	Meter   metric.Meter
	Version string
}

// ErrAlone is returned when some stages of the file are left out, and no other process
// can join the mesh to serve them.
var ErrAlone = errors.New("no other process can join this mesh to serve the other stages; its file needs nats.url or nats.listen")

// FromFile returns the mesh that a file describes. More stages and pipelines
// may be added to it.
func FromFile(f *meshfile.File, s FileSettings) (*Mesh, error) {
	front, err := f.GatewaySettings()
	if err != nil && !s.NoGateway {
		return nil, err
	}
	m, err := New(Settings{
		Mesh: pipeline.MeshName(f.Mesh), NATS: f.NATS, Gateway: front, NoGateway: s.NoGateway,
		Results: f.Results, DeadLetters: f.DeadLetters, Idempotency: f.Idempotency, Registry: &f.Registry,
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
	m.pipelines = front.Pipelines
	return m, m.addStages(f, s)
}

func (m *Mesh) addStages(f *meshfile.File, s FileSettings) error {
	for _, name := range s.Stages {
		stage, err := stageIn(f, name)
		if err != nil {
			return err
		}
		stage.Host = s.Host
		if err := m.AddStage(stage); err != nil {
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
	out := Stage{Name: host.Stage, Runner: host.Runner, Inputs: host.Inputs, Outputs: host.Outputs, Config: host.Config}
	for len(out.Runners)+1 < f.Stages[name].Hosts {
		another, err := f.Host(name)
		if err != nil {
			return Stage{}, err
		}
		out.Runners = append(out.Runners, another.Runner)
	}
	return out, nil
}
