package worker

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

const (
	// maxSlots and maxRanks keep what is written by mistake from being tried.
	maxSlots = 1 << 10
	maxRanks = 1 << 10
	// reserved begins the names of variables that are the host's own.
	reserved = "STAGEMESH_"
)

// Validate says everything that is wrong with the settings, each with the key it
// is about. Whether this machine can do what they say is seen at the start.
func (s Settings) Validate() error {
	s = s.withDefaults()
	return errors.Join(s.validateCommand(), s.validateNumbers(), validateEnv("env", s.Env), s.validateOptions(), s.validateReplicas(), s.validateFiles())
}

func (s Settings) validateCommand() error {
	if len(s.Command) == 0 || s.Command[0] == "" {
		return errors.New("command: it is empty; say what starts a worker, such as [python3, classify.py]")
	}
	return nil
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
		{"slots", int64(s.Slots), 0, maxSlots},
		{"max_size", int64(s.MaxSize), 1, 1 << 31},
		{"max_frame", s.MaxFrame, 1, 1 << 40},
		{"start_tries", int64(s.StartTries), 1, 1 << 31},
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
		if _, err := r.cpus(); err != nil {
			errs = append(errs, fmt.Errorf("%s.cpus: %w", key, err))
		}
		errs = append(errs, validateEnv(key+".env", r.Env), s.validateDevices(key, i))
	}
	return errors.Join(errs...)
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
