package natskv

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
)

// names are the streams and subjects of a mesh.
type names struct{ mesh string }

func (n names) tableStream() string     { return n.mesh + "_registry" }
func (n names) instancesStream() string { return n.mesh + "_instances" }
func (n names) table() string           { return n.mesh + ".table." }
func (n names) instances() string       { return n.mesh + ".instances." }

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
		// A later version may need other settings, and update what this one has made.
		Metadata: map[string]string{"stagemesh-version": "1"},
	}
}

// info returns the state of a stream.
func (s *session) info(ctx context.Context, stream string) (*jetstream.StreamInfo, error) {
	info := &jetstream.StreamInfo{}
	err := s.api(ctx, "STREAM.INFO."+stream, struct{}{}, info)
	if err == nil {
		s.files.Found(stream)
	}
	return info, err
}

// stream returns the state of a stream. It creates one that is missing.
func (s *session) stream(ctx context.Context, config jetstream.StreamConfig) (*jetstream.StreamInfo, error) {
	info, err := s.info(ctx, config.Name)
	if !errors.Is(err, errMissing) {
		return info, err
	}
	if err := s.create(ctx, config); err != nil {
		return nil, err
	}
	return s.info(ctx, config.Name)
}

// create creates a stream, unless another process is faster. Where a stream on file may be in deletion, it
// waits until that has ended, or the caller's context. From then on it does not end with the context: a
// broker that shuts down while it creates a stream leaves a part of it behind.
//
// Sequences of instances begin at the clock's microseconds, so that none comes twice after the
// stream was lost. Those on file may not: after a write error the broker lists all below a
// block's first message.
func (s *session) create(ctx context.Context, config jetstream.StreamConfig) error {
	if config.Storage == jetstream.MemoryStorage {
		config.FirstSeq = uint64(time.Now().UnixMicro())
	} else if s.files.AwaitDeleted(ctx, config.Name) != nil {
		return timeoutError(ctx)
	}
	if !s.connection.creating.TryRLock() {
		return errUnsent
	}
	defer s.connection.creating.RUnlock()
	err := s.api(context.WithoutCancel(ctx), "STREAM.CREATE."+config.Name, config, &jetstream.StreamInfo{})
	if hasCode(err, jetstream.JSErrCodeStreamNameInUse) {
		return nil
	}
	return err
}
