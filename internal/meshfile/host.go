package meshfile

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/schema"
)

// Host returns the settings of one host of a stage, with a runner of its own.
// The host's id, its version, logger and meter are for the caller to fill in.
func (f *File) Host(stage string) (stagehost.Settings, error) {
	s, ok := f.Stages[stage]
	if !ok {
		return stagehost.Settings{}, f.At(fmt.Errorf("there is no stage %q; there are %s", stage, strings.Join(f.StageNames(), ", ")), "stages")
	}
	out := stagehost.Settings{
		Config: s.Config,
		Mesh:   pipeline.MeshName(f.Mesh), Stage: pipeline.StageName(stage),
		Bus:     bus.Settings{URL: f.NATS.URL, Auth: f.NATS.Broker},
		Results: f.Results, DeadLetters: f.DeadLetters,
	}
	// A number that is 0 means the default.
	standard := stagehost.DefaultBatch()
	out.Batch.MaxSize, out.Batch.MaxBytes = cmp.Or(out.Batch.MaxSize, standard.MaxSize), cmp.Or(out.Batch.MaxBytes, standard.MaxBytes)
	out.Queue.MaxAge = f.Gateway.MaxTimeout
	var err, inputs, outputs, hosts error
	out.Inputs, inputs = parts("inputs", s.Inputs)
	out.Outputs, outputs = parts("outputs", s.Outputs)
	if s.Hosts < 0 || s.Hosts > maxHosts {
		hosts = fmt.Errorf("hosts: %d is not between 1 and %d", s.Hosts, maxHosts)
	}
	written := errors.Join(inputs, outputs, hosts)
	if out.Runner, err = f.runner(stage); err != nil {
		return out, errors.Join(err, f.At(errors.Join(written, out.Config.Validate()), "stages", stage))
	}
	return out, f.At(errors.Join(written, validateHost(out)), "stages", stage)
}

// maxHosts bounds the hosts of one stage in one process.
const maxHosts = 64

// validateHost checks a host's settings but for those of the mesh, which are checked
// elsewhere.
func validateHost(s stagehost.Settings) error {
	s.Mesh, s.Host = "any", "any"
	if err := s.Validate(); err != nil {
		return err
	}
	// Many runners describe themselves only once they have started.
	_, err := schema.Complete(s.Runner.Spec(), s.Inputs, s.Outputs)
	return err
}
