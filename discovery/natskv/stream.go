package natskv

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/mesh/bus"
)

// names are the streams and subjects of a mesh.
type names struct{ mesh string }

func (n names) tableStream() string     { return n.mesh + "_registry" }
func (n names) instancesStream() string { return n.mesh + "_instances" }
func (n names) table() string           { return n.mesh + ".table." }
func (n names) instances() string       { return n.mesh + ".instances." }

// formerTable returns the name that the stream of a table had while its sequences were revisions.
func formerTable(table string) string {
	return strings.TrimSuffix(table, names{}.tableStream()) + "_table"
}

// entry returns the subject of a key.
func (n names) entry(key discovery.Key) string {
	return n.table() + strings.ReplaceAll(string(key), "/", ".")
}

// below returns the filter for the subjects below a key; the empty key is above all.
func (n names) below(key discovery.Key) string {
	if key == "" {
		return n.table() + ">"
	}
	return n.entry(key) + ".>"
}

// key returns the key of an entry's subject.
func (n names) key(subject string) discovery.Key {
	return discovery.Key(strings.ReplaceAll(strings.TrimPrefix(subject, n.table()), ".", "/"))
}

func (n names) service(service string) string { return n.instances() + service + ".*" }

func (n names) instance(service, id string) string { return n.instances() + service + "." + id }

const (
	metadataVersion = "stagemesh-version"
	// settingsVersion grows when existing streams need other settings.
	settingsVersion = 1

	// markerTTL is how long the broker keeps the marker of a deleted entry. It outlives
	// every change that expects the entry.
	markerTTL = time.Hour
	// expiredTTL is how long the broker keeps the marker of an instance that was not
	// renewed.
	expiredTTL = 10 * time.Second
)

func (s Settings) tableConfig() jetstream.StreamConfig {
	config := s.config(names{s.Mesh}.tableStream(), names{s.Mesh}.table()+">")
	config.Description = "the table of mesh " + s.Mesh
	config.Storage = jetstream.FileStorage
	config.MaxBytes = s.MaxTableBytes
	// Observers could not see what these remove.
	config.DenyDelete, config.DenyPurge = true, true
	return config
}

func (s Settings) instancesConfig() jetstream.StreamConfig {
	config := s.config(names{s.Mesh}.instancesStream(), names{s.Mesh}.instances()+">")
	config.Description = "the instances of mesh " + s.Mesh
	config.Storage = jetstream.MemoryStorage
	config.MaxBytes = s.MaxInstancesBytes
	config.SubjectDeleteMarkerTTL = expiredTTL
	// The broker needs this for its markers.
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
		AllowMsgTTL:       true,
		Metadata:          map[string]string{metadataVersion: strconv.Itoa(settingsVersion)},
	}
}

// stream returns the state of a stream. It creates a stream that is missing, moves a table to it
// that an earlier version has made, and updates one with older settings.
func (s *session) stream(ctx context.Context, config jetstream.StreamConfig) (*jetstream.StreamInfo, error) {
	info := &jetstream.StreamInfo{}
	err := s.api(ctx, "STREAM.INFO."+config.Name, nil, info)
	switch table := config.Storage == jetstream.FileStorage; {
	case table && (errors.Is(err, errMissing) || err == nil && len(info.Config.Sources) > 0):
		move := bus.Move{From: formerTable(config.Name), To: config, Call: s.api, IsMissing: isMissing, Create: s.create}
		if err = move.Run(ctx); err == nil {
			err = s.api(ctx, "STREAM.INFO."+config.Name, nil, info)
		}
	case errors.Is(err, errMissing):
		if err = s.create(ctx, config); err == nil {
			err = s.api(ctx, "STREAM.INFO."+config.Name, nil, info)
		}
	case err == nil && version(info.Config) < settingsVersion:
		config.FirstSeq = info.Config.FirstSeq
		err = s.api(ctx, "STREAM.UPDATE."+config.Name, config, info)
	}
	return info, err
}

// create creates a stream, unless another process is faster. Sequences of instances begin at the
// clock's microseconds, so that none comes twice after the stream was lost. Those on file may not:
// after a write error the broker lists all below a block's first message.
func (s *session) create(ctx context.Context, config jetstream.StreamConfig) error {
	if config.Storage == jetstream.MemoryStorage {
		config.FirstSeq = uint64(time.Now().UnixMicro())
	}
	err := s.connection.create(ctx, func(ctx context.Context) error {
		return s.api(ctx, "STREAM.CREATE."+config.Name, config, &jetstream.StreamInfo{})
	})
	if e, ok := errors.AsType[*jetstream.APIError](err); ok && e.ErrorCode == codeStreamInUse {
		return nil
	}
	return err
}

// version returns the version of a stream's settings. A stream without one was made by
// an operator and stays as it is.
func version(config jetstream.StreamConfig) int {
	if v, err := strconv.Atoi(config.Metadata[metadataVersion]); err == nil {
		return v
	}
	return settingsVersion
}
