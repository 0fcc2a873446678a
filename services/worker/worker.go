package worker

import (
	"errors"
	"fmt"
	"strings"

	"github.com/stagemesh/stagemesh/sdk/python"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker"
)

// New returns a runner of worker processes. Stage, batches and the time for a start
// are those of the host that it serves in.
func New(s Settings) (*worker.Runner, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	options, err := s.options()
	if err != nil {
		return nil, err
	}
	return worker.New(worker.Settings{
		Command: s.Command, Dir: s.Dir, Env: s.Env, Options: options, Replicas: s.replicas(),
		Slots: s.Concurrency, DeviceEnv: s.DeviceEnv,
		Limits: worker.Limits{
			MaxFrame: int64(s.MaxFrame), RunLimit: s.RunLimit, StopLimit: s.StopLimit,
			StartTries: s.StartTries, CrashLoop: s.CrashLoop,
			Heartbeat: s.Heartbeat, HeartbeatLimit: s.HeartbeatLimit,
		},
		Files: python.Files(), FilesPath: "PYTHONPATH",
	})
}

func (s Settings) replicas() []worker.Replica {
	out := make([]worker.Replica, s.Workers)
	for _, r := range s.Replicas {
		out = append(out, worker.Replica{
			Devices: r.Devices, CPUs: strings.Join(r.CPUs, ","), Env: r.Env, Ranks: r.Ranks, Shared: r.Shared,
		})
	}
	return out
}

// Validate says what is wrong that can be told without looking at the machine.
func (s Settings) Validate() error {
	switch {
	case s.Concurrency < 0 || s.Concurrency > maxConcurrency:
		return fmt.Errorf("concurrency: %d is not between 1 and %d", s.Concurrency, maxConcurrency)
	case s.Workers < 0 || s.Workers > maxWorkers:
		return fmt.Errorf("workers: %d is not between 1 and %d", s.Workers, maxWorkers)
	case len(s.Replicas) > maxWorkers:
		return fmt.Errorf("replicas: there are %d, at most %d can be run", len(s.Replicas), maxWorkers)
	case s.Workers > 0 && len(s.Replicas) > 0:
		return errors.New("workers: is how many there are, and so is the length of replicas; leave one out")
	}
	return nil
}
