package meshfile

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/schema"
)

// DefaultBatch is the batching of a stage that says nothing: in eager mode, or in
// stream mode where the runner answers in chunks.
func DefaultBatch() batch.Settings {
	return batch.Settings{MaxSize: 32, MaxBytes: 16 << 20, MaxWait: 5 * time.Millisecond}
}

// Host returns the settings of one host of a stage, with a runner of its own.
// The host's id, its version, logger and meter are for the caller to fill in.
func (f *File) Host(stage string) (stagehost.Settings, error) {
	s, ok := f.Stages[stage]
	if !ok {
		return stagehost.Settings{}, f.At(fmt.Errorf("there is no stage %q; there are %s", stage, strings.Join(f.StageNames(), ", ")), "stages")
	}
	out := stagehost.Settings{
		Mesh: pipeline.MeshName(f.Mesh), Stage: pipeline.StageName(stage),
		Batch: s.Batch.settings(), Stream: stagehost.StreamSettings{FirstChunk: s.Stream.FirstChunk, Idle: s.Stream.Idle}, BatchBy: s.Batch.By, MaxInFlight: s.MaxInFlight,
		Bus:   bus.Settings{URL: f.NATS.URL, Auth: f.BrokerAuth()},
		Queue: s.Queue.settings(), CrashLimit: s.CrashLimit, Results: f.ResultSettings(), DeadLetters: f.DeadLetterSettings(),
		Listen: s.Listen, CertFile: f.relative(s.CertFile), KeyFile: f.relative(s.KeyFile), ServerName: s.ServerName, Labels: s.Labels, StartTimeout: s.StartTimeout, DrainTimeout: s.DrainTimeout,
	}
	out.Queue.MaxAge = f.Gateway.MaxTimeout
	var err, inputs, outputs error
	out.Inputs, inputs = f.parts("inputs", s.Inputs)
	out.Outputs, outputs = f.parts("outputs", s.Outputs)
	written := errors.Join(inputs, outputs, s.validate())
	if out.Runner, err = f.runner(stage); err != nil {
		return out, errors.Join(err, f.At(errors.Join(written, out.Batch.Validate()), "stages", stage))
	}
	return out, f.At(errors.Join(written, validateHost(out)), "stages", stage)
}

func (q Queue) settings() stagehost.QueueSettings {
	return stagehost.QueueSettings{
		Durabilities: q.Durabilities, MaxItems: q.MaxItems, MaxBytes: int64(q.MaxBytes),
		AckWait: q.AckWait, Replicas: q.Replicas, Version: q.Version,
	}
}

// validateHost checks what the file says about a host. What it says about the
// mesh is checked elsewhere.
func validateHost(s stagehost.Settings) error {
	s.Mesh, s.Host = "any", "any"
	if err := s.Validate(); err != nil {
		return err
	}
	// Many runners say only once they have started what they take and give.
	_, err := schema.Complete(s.Runner.Spec(), s.Inputs, s.Outputs)
	return err
}

func (b Batch) settings() batch.Settings {
	out := DefaultBatch()
	if b.Mode != "" {
		out.Mode = batch.Mode(b.Mode)
	}
	if b.MaxSize != 0 {
		out.MaxSize = b.MaxSize
	}
	if b.MaxBytes != 0 {
		out.MaxBytes = int(b.MaxBytes)
	}
	if b.MaxWait != nil {
		out.MaxWait = *b.MaxWait
	}
	return out
}
