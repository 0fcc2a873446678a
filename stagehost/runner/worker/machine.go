package worker

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"github.com/stagemesh/stagemesh/stagehost/runner/worker/spawn"
)

// here says what of the settings this machine cannot do, each with its key.
func (s Settings) here() error {
	var errs []error
	if info, err := os.Stat(s.Dir); s.Dir != "" && (err != nil || !info.IsDir()) {
		errs = append(errs, fmt.Errorf("dir: %s is no folder", s.Dir))
	} else if err := s.programs(); err != nil {
		errs = append(errs, fmt.Errorf("command: %w", err))
	}
	for i, r := range s.Replicas {
		if err := r.cpusHere(); err != nil {
			errs = append(errs, fmt.Errorf("replicas[%d].cpus: %w", i, err))
		}
	}
	return errors.Join(errs...)
}

func (s Settings) programs() error {
	for i := range s.Replicas {
		if _, err := s.program(i); err != nil {
			return err
		}
	}
	return nil
}

// cpus are nil where the replica may run on all.
func (r Replica) cpus() (spawn.CPUs, error) {
	if r.CPUs == "" {
		return nil, nil
	}
	return spawn.ParseCPUs(r.CPUs)
}

// cpusHere refuses CPUs that this machine does not have.
func (r Replica) cpusHere() error {
	cpus, err := r.cpus()
	if err != nil || cpus == nil {
		return err
	}
	online, err := spawn.Online()
	if err != nil {
		return err
	}
	if missing := cpus.Missing(online); len(missing) > 0 {
		return fmt.Errorf("there is no CPU %s; this machine has %s", missing, online)
	}
	return nil
}

// program returns the path of the command's program for a replica.
func (s Settings) program(replica int) (string, error) {
	name := s.Command[0]
	if strings.Contains(name, "/") {
		path := name
		if !filepath.IsAbs(path) {
			path = filepath.Join(s.Dir, path)
		}
		path, err := filepath.Abs(path)
		if err != nil {
			return "", err
		}
		return path, executable(path)
	}
	list := s.environment(replica)["PATH"]
	for _, dir := range filepath.SplitList(list) {
		if path := filepath.Join(dir, name); filepath.IsAbs(path) && executable(path) == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("there is no program %q in PATH, which is %q", name, list)
}

func executable(path string) error {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return fmt.Errorf("there is no program %s", path)
	case info.IsDir() || info.Mode().Perm()&0o111 == 0:
		return fmt.Errorf("%s is not executable", path)
	default:
		return nil
	}
}

// environment returns what a replica's processes get, but for what the protocol
// adds.
func (s Settings) environment(replica int) map[string]string {
	out := map[string]string{}
	for _, pair := range os.Environ() {
		// Those of the host are not the worker's, and may have a password.
		if name, value, ok := strings.Cut(pair, "="); ok && name != "" && !strings.HasPrefix(name, reserved) {
			out[name] = value
		}
	}
	delete(out, "MASTER_ADDR")
	delete(out, "MASTER_PORT")
	maps.Copy(out, s.Env)
	r := s.Replicas[replica]
	if len(r.Devices) > 0 {
		out[s.DeviceEnv] = strings.Join(r.Devices, ",")
	}
	maps.Copy(out, r.Env)
	return out
}
