package bus

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"

	"github.com/nats-io/nats.go/jetstream"
)

// EnsureStream creates a stream, or changes it where the version is higher than
// its own, so that a rolling upgrade does not flip it to and fro. It is safe to
// call from everybody at once. ErrDisconnected says that the broker is away.
func (b *Bus) EnsureStream(ctx context.Context, config jetstream.StreamConfig, version int) error {
	config.Metadata = maps.Clone(config.Metadata)
	if config.Metadata == nil {
		config.Metadata = map[string]string{}
	}
	config.Metadata[metadataVersion] = strconv.Itoa(version)
	err := b.ensureStream(ctx, config, version)
	if err == nil {
		return nil
	}
	if sent := sendError(err); errors.Is(sent, ErrDisconnected) || errors.Is(sent, ErrClosed) {
		return sent
	}
	return fmt.Errorf("stream %s: %w", config.Name, err)
}

func (b *Bus) ensureStream(ctx context.Context, config jetstream.StreamConfig, version int) error {
	stream, err := b.js.Stream(ctx, config.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		_, err = b.js.CreateStream(ctx, config)
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			return nil // another was quicker, with the same settings or others
		}
		return err
	}
	if err != nil {
		return err
	}
	if versionOf(stream.CachedInfo()) >= version {
		return nil
	}
	_, err = b.js.UpdateStream(ctx, config)
	return err
}

// versionOf is the version of a stream's settings; a stream that names none has
// the first.
func versionOf(info *jetstream.StreamInfo) int {
	version, _ := strconv.Atoi(info.Config.Metadata[metadataVersion])
	return version
}
