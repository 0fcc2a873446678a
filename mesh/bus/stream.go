package bus

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go/jetstream"
)

// EnsureStream creates a stream, or changes it where the version is higher than
// its own, so that a rolling upgrade does not flip it to and fro. It is safe to
// call from everybody at once. ErrDisconnected says that the broker is away.
func (b *Bus) EnsureStream(ctx context.Context, config jetstream.StreamConfig, version int) error {
	config.Metadata = map[string]string{metadataVersion: strconv.Itoa(version)}
	return apiErrorOf("stream "+config.Name, b.ensureStream(ctx, config, version))
}

func (b *Bus) ensureStream(ctx context.Context, config jetstream.StreamConfig, version int) error {
	stream, err := b.js.Stream(ctx, config.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return b.createStream(ctx, config)
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

// createStream creates a stream. Another may be quicker, with the same settings or
// others. A caller who leaves does not end it, and Close waits for it: a broker that is
// told to stop while it makes a stream leaves a part of it behind.
func (b *Bus) createStream(ctx context.Context, config jetstream.StreamConfig) error {
	if !b.begin() {
		return ErrClosed
	}
	defer b.making.Done()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), apiTimeout)
	defer cancel()
	_, err := b.js.CreateStream(ctx, config)
	if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
		return nil
	}
	return err
}

// begin reports whether a stream may be made still, and books that one is.
func (b *Bus) begin() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.leaving {
		b.making.Add(1)
	}
	return !b.leaving
}

// apiErrorOf says what an error of the JetStream client was about, unless it is
// that the broker is away.
func apiErrorOf(what string, err error) error {
	if err == nil {
		return nil
	}
	if sent := sendError(err); errors.Is(sent, ErrDisconnected) || errors.Is(sent, ErrClosed) {
		return sent
	}
	return fmt.Errorf("%s: %w", what, err)
}

// versionOf is the version of a stream's settings; a stream that names none has
// the first.
func versionOf(info *jetstream.StreamInfo) int {
	version, _ := strconv.Atoi(info.Config.Metadata[metadataVersion])
	return version
}
