package worker

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/stagehost/runner/worker/spawn"
)

const (
	// maxSlots and maxRanks keep what is written by mistake from being tried.
	maxSlots = 1 << 10
	maxRanks = 1 << 10
	// reserved begins the names of variables that are the host's own.
	reserved = "STAGEMESH_"
)

// Validate says everything that is wrong with the settings, each with the key it
// is about.
func (s Settings) Validate() error {
	s = s.withDefaults()
	errs := []error{s.validateNumbers(), validateEnv("env", s.Env), s.validateOptions(), s.validateReplicas(), s.validateFiles()}
	if err := s.validateCommand(); err != nil {
		errs = append(errs, fmt.Errorf("command: %w", err))
	}
	return errors.Join(errs...)
}

// validateFiles refuses files that nobody would find.
func (s Settings) validateFiles() error {
	if (s.Files == nil) != (s.FilesPath == "") {
		return errors.New("files: give files and the variable that says where they are, or neither")
	}
	return nil
}

func (s Settings) validateNumbers() error {
	var errs []error
	for _, n := range []struct {
		key       string
		value     int64
		low, high int64
	}{
		{"slots", int64(s.Slots), 1, maxSlots},
		{"max_size", int64(s.MaxSize), 1, 1 << 31},
		{"max_frame", s.MaxFrame, 1, 1 << 40},
		{"crash_loop", int64(s.CrashLoop), 1, 1 << 31},
	} {
		if n.value < n.low || n.value > n.high {
			errs = append(errs, fmt.Errorf("%s: %d is not between %d and %d", n.key, n.value, n.low, n.high))
		}
	}
	for _, d := range []struct {
		key   string
		value int64
	}{
		{"start_limit", int64(s.StartLimit)},
		{"run_limit", int64(s.RunLimit)},
		{"heartbeat", int64(s.Heartbeat)},
		{"heartbeat_limit", int64(s.HeartbeatLimit)},
		{"stop_limit", int64(s.StopLimit)},
		{"backoff", int64(s.Backoff)},
		{"settled", int64(s.Settled)},
	} {
		if d.value < 0 {
			errs = append(errs, fmt.Errorf("%s: it is negative", d.key))
		}
	}
	if s.MaxBackoff < s.Backoff {
		errs = append(errs, fmt.Errorf("max_backoff: %s is less than backoff, %s", s.MaxBackoff, s.Backoff))
	}
	return errors.Join(errs...)
}

func (s Settings) validateOptions() error {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(s.Options, &object); err != nil || bytes.Equal(bytes.TrimSpace(s.Options), []byte("null")) {
		return errors.New("options: it is no JSON object")
	}
	return nil
}

func validateEnv(key string, env map[string]string) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(env)) {
		switch {
		case name == "" || strings.ContainsAny(name, "=\x00"):
			errs = append(errs, fmt.Errorf("%s: %q is no name of a variable", key, name))
		case strings.HasPrefix(name, reserved):
			errs = append(errs, fmt.Errorf("%s.%s: variables that begin with %s are the host's own", key, name, reserved))
		case strings.Contains(env[name], "\x00"):
			errs = append(errs, fmt.Errorf("%s.%s: it has a NUL byte", key, name))
		}
	}
	return errors.Join(errs...)
}

func (s Settings) validateReplicas() error {
	var errs []error
	for i, r := range s.Replicas {
		key := fmt.Sprintf("replicas[%d]", i)
		if r.Ranks < 0 || r.Ranks > maxRanks {
			errs = append(errs, fmt.Errorf("%s.ranks: %d is not between 1 and %d", key, r.Ranks, maxRanks))
		}
		if err := r.validateCPUs(); err != nil {
			errs = append(errs, fmt.Errorf("%s.cpus: %w", key, err))
		}
		errs = append(errs, validateEnv(key+".env", r.Env), s.validateDevices(key, i))
	}
	return errors.Join(errs...)
}

// cpus are nil where the replica may run on all.
func (r Replica) cpus() (spawn.CPUs, error) {
	if r.CPUs == "" {
		return nil, nil
	}
	return spawn.ParseCPUs(r.CPUs)
}

// validateCPUs refuses CPUs that this machine does not have.
func (r Replica) validateCPUs() error {
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

// validateDevices refuses devices that an earlier replica has, unless both share.
func (s Settings) validateDevices(key string, at int) error {
	for _, device := range s.Replicas[at].Devices {
		if device == "" || strings.ContainsAny(device, ",\x00") {
			return fmt.Errorf("%s.devices: %q is no device; list each by itself", key, device)
		}
		for j, other := range s.Replicas[:at] {
			if slices.Contains(other.Devices, device) && (!other.Shared || !s.Replicas[at].Shared) {
				return fmt.Errorf("%s.devices: replicas[%d] has device %s too; set shared: true for both if they fit on it together", key, j, device)
			}
		}
	}
	return nil
}

func (s Settings) validateCommand() error {
	if len(s.Command) == 0 || s.Command[0] == "" {
		return errors.New("it is empty; say what starts a worker, such as [python3, classify.py]")
	}
	if s.Dir != "" {
		if info, err := os.Stat(s.Dir); err != nil || !info.IsDir() {
			return fmt.Errorf("dir: %s is no folder", s.Dir)
		}
	}
	for i := range s.Replicas {
		if _, err := s.program(i); err != nil {
			return err
		}
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
		if name, value, ok := strings.Cut(pair, "="); ok && name != "" {
			out[name] = value
		}
	}
	maps.Copy(out, s.Env)
	r := s.Replicas[replica]
	if len(r.Devices) > 0 {
		out[s.DeviceEnv] = strings.Join(r.Devices, ",")
	}
	maps.Copy(out, r.Env)
	return out
}
