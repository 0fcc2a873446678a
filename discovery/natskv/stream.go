package natskv

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
)

// names are those of a mesh on the broker.
type names struct{ mesh string }

func (n names) tableStream() string     { return n.mesh + "_table" }
func (n names) instancesStream() string { return n.mesh + "_instances" }
func (n names) table() string           { return n.mesh + ".table." }
func (n names) instances() string       { return n.mesh + ".instances." }

// entry is the subject of a key.
func (n names) entry(key discovery.Key) string {
	return n.table() + strings.ReplaceAll(string(key), "/", ".")
}

// below matches what is below a key, an empty one all.
func (n names) below(key discovery.Key) string {
	if key == "" {
		return n.table() + ">"
	}
	return n.entry(key) + ".>"
}

// key is what an entry's subject says.
func (n names) key(subject string) discovery.Key {
	return discovery.Key(strings.ReplaceAll(strings.TrimPrefix(subject, n.table()), ".", "/"))
}

func (n names) service(service string) string { return n.instances() + service + ".*" }

func (n names) instance(service, id string) string { return n.instances() + service + "." + id }

const (
	metadataVersion = "stagemesh-version"
	// settingsVersion grows when the settings below change.
	settingsVersion = 1

	// markerTTL is how long it is known that an entry was deleted. It outlives every
	// commit that expects the entry to be there.
	markerTTL = time.Hour
	// expiredTTL is how long it is known that an instance was not renewed.
	expiredTTL = 10 * time.Second
)

func (s Settings) tableConfig() jetstream.StreamConfig {
	config := s.config(names{s.Mesh}.tableStream(), names{s.Mesh}.table()+">")
	config.Description = "the table of mesh " + s.Mesh
	config.Storage = jetstream.FileStorage
	config.MaxBytes = s.MaxTableBytes
	// An observer could not see what these remove.
	config.DenyDelete, config.DenyPurge = true, true
	config.AllowAtomicPublish = true
	return config
}

func (s Settings) instancesConfig() jetstream.StreamConfig {
	config := s.config(names{s.Mesh}.instancesStream(), names{s.Mesh}.instances()+">")
	config.Description = "the instances of mesh " + s.Mesh
	config.Storage = jetstream.MemoryStorage
	config.MaxBytes = s.MaxInstancesBytes
	config.SubjectDeleteMarkerTTL = expiredTTL
	// The broker wants this for its markers.
	config.AllowRollup = true
	return config
}

func (s Settings) config(name, subjects string) jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name:              name,
		Subjects:          []string{subjects},
		Retention:         jetstream.LimitsPolicy,
		MaxMsgs:           -1,
		MaxConsumers:      -1,
		MaxMsgsPerSubject: 1,
		Discard:           jetstream.DiscardNew,
		Replicas:          s.Replicas,
		AllowDirect:       true,
		AllowMsgTTL:       true,
		Metadata:          map[string]string{metadataVersion: strconv.Itoa(settingsVersion)},
	}
}

// stream returns what there is of a stream, which it makes where it is missing.
func (s *session) stream(ctx context.Context, config jetstream.StreamConfig) (*jetstream.StreamInfo, error) {
	info := &jetstream.StreamInfo{}
	err := s.api(ctx, "STREAM.INFO."+config.Name, nil, info)
	switch {
	case errors.Is(err, errMissing):
		info, err = s.create(ctx, config)
	case err == nil && version(info.Config) < settingsVersion:
		config.FirstSeq = info.Config.FirstSeq
		err = s.api(ctx, "STREAM.UPDATE."+config.Name, config, info)
	}
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known[config.Name] = true
	return info, nil
}

// create makes a stream. Another may be quicker.
func (s *session) create(ctx context.Context, config jetstream.StreamConfig) (*jetstream.StreamInfo, error) {
	config.FirstSeq = uint64(time.Now().UnixMicro())
	info := &jetstream.StreamInfo{}
	err := s.link.make(ctx, func(ctx context.Context) error { return s.api(ctx, "STREAM.CREATE."+config.Name, config, info) })
	var e *jetstream.APIError
	if errors.As(err, &e) && e.ErrorCode == codeStreamInUse {
		err = s.api(ctx, "STREAM.INFO."+config.Name, nil, info)
	}
	return info, err
}

// ensure makes a stream that this session does not know to be there.
func (s *session) ensure(ctx context.Context, config jetstream.StreamConfig) error {
	s.mu.Lock()
	known := s.known[config.Name]
	s.mu.Unlock()
	if known {
		return nil
	}
	_, err := s.stream(ctx, config)
	return err
}

// forget notes that a stream is not there after all.
func (s *session) forget(config jetstream.StreamConfig) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.known, config.Name)
}

// version is that of a stream's settings; one that names none is not ours to change.
func version(config jetstream.StreamConfig) int {
	if v, err := strconv.Atoi(config.Metadata[metadataVersion]); err == nil {
		return v
	}
	return settingsVersion
}
