package bus

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// QueueSettings are one stage's queue of one durability: a stream, and a
// consumer for each priority class that all hosts of the stage share.
type QueueSettings struct {
	Stage      pipeline.StageName
	Durability pipeline.Durability
	// MaxItems and MaxBytes bound the queued and delivered items; a publish beyond
	// them is ErrQueueFull. MaxBytes is reserved on the broker.
	MaxItems int64
	MaxBytes int64
	// MaxAge is the longest that an item may wait: the longest deadline.
	MaxAge time.Duration
	// AckWait is how long a delivery may be neither settled nor extended before the
	// broker redelivers the item.
	AckWait time.Duration
	// MaxDeliver is how often the broker delivers an item of memory at most; then it
	// stays in its queue, undelivered, until it is too old. 0 means no limit. Items on
	// file have none, because they would stay for ever.
	MaxDeliver int
	Replicas   int
	// Version of these settings: an existing stream is changed only by hosts
	// with a higher one, so that a rolling upgrade does not flip it to and
	// fro.
	Version int
}

// DefaultHostGrace is how long items in memory wait for a host of their stage.
const DefaultHostGrace = 10 * time.Second

// maxWaiting bounds the open pull requests of a consumer; minWindow is the shortest
// deduplication window of a queue.
const (
	maxWaiting = 4096
	minWindow  = time.Second
)

// Keys of a stream's metadata.
const (
	metadataVersion = "stagemesh-version"
	metadataAckWait = "stagemesh-ack-wait"
)

// Epoch tells a queue from its replacement: the creation time of its stream.
type Epoch string

// QueueInfo is the broker's state of a queue.
type QueueInfo struct {
	Epoch Epoch
	// Created is when the stream was made, on this process's clock.
	Created time.Time
	// Version of the queue's settings, and their AckWait.
	Version int
	AckWait time.Duration
	// Consumers is how many the queue has; Whole reports whether these are all.
	Consumers int
	// Items and Bytes are queued or delivered.
	Items uint64
	Bytes uint64
	// RoundTrip is how long the broker took to answer: Created is exact to half of it.
	RoundTrip time.Duration
}

// Whole reports whether the queue has all of its consumers.
func (i QueueInfo) Whole() bool { return i.Consumers == pipeline.ClassCount }

// EnsureQueue creates what is missing of the queue, changes it where the settings
// are of a higher version than its own, and returns its state. All hosts may call
// it at once, at any time.
func (b *Bus) EnsureQueue(ctx context.Context, s QueueSettings) (QueueInfo, error) {
	if b.settings.Loopback != nil {
		return queueHere(s.Durability)
	}
	info, err := b.Queue(ctx, s.Stage, s.Durability)
	if errors.Is(err, ErrNoQueue) {
		if err := b.createStream(ctx, b.streamConfig(s)); err != nil {
			return QueueInfo{}, queueError(s.Stage, err)
		}
		info, err = b.Queue(ctx, s.Stage, s.Durability)
	}
	if err != nil {
		return QueueInfo{}, err
	}
	if info.Version < s.Version {
		if err := b.upgrade(ctx, s, &info); err != nil {
			return QueueInfo{}, err
		}
	}
	for _, class := range pipeline.Classes() {
		if err := b.ensureConsumer(ctx, s, class, info.Epoch); err != nil {
			return QueueInfo{}, err
		}
	}
	return info, nil
}

// upgrade changes the stream and its consumers to these settings.
func (b *Bus) upgrade(ctx context.Context, s QueueSettings, info *QueueInfo) error {
	// The stream's version is set last, so an interrupted upgrade is repeated.
	for _, class := range pipeline.Classes() {
		if _, err := b.js.CreateOrUpdateConsumer(ctx, b.Stream(s.Stage, s.Durability), b.consumerConfig(s, class, info.Epoch)); err != nil {
			return queueError(s.Stage, err)
		}
	}
	if _, err := b.js.UpdateStream(ctx, b.streamConfig(s)); err != nil {
		return queueError(s.Stage, err)
	}
	b.settings.Logger.Info("queue changed", "stage", s.Stage, "version", s.Version, "was", info.Version)
	info.Version, info.AckWait = s.Version, s.AckWait
	return nil
}

func (b *Bus) streamConfig(s QueueSettings) jetstream.StreamConfig {
	storage := jetstream.MemoryStorage
	if s.Durability == pipeline.File {
		storage = jetstream.FileStorage
	}
	config := jetstream.StreamConfig{
		Name:        b.Stream(s.Stage, s.Durability),
		Description: fmt.Sprintf("items of mesh %s that wait for stage %s", b.settings.Mesh, s.Stage),
		Subjects:    []string{b.Stage(s.Stage, s.Durability, "*")},
		Retention:   jetstream.WorkQueuePolicy,
		Discard:     jetstream.DiscardNew,
		MaxMsgs:     s.MaxItems,
		MaxBytes:    s.MaxBytes,
		Storage:     storage,
		Replicas:    max(1, s.Replicas),
		Duplicates:  max(minWindow, time.Duration(s.MaxDeliver)*s.AckWait),
		Metadata:    map[string]string{metadataVersion: strconv.Itoa(s.Version), metadataAckWait: s.AckWait.String()},
	}
	if s.Durability == pipeline.Memory && s.MaxAge > 0 {
		config.MaxAge = max(s.MaxAge, config.Duplicates)
	}
	return config
}

// ensureConsumer creates the consumer. It does not change one that other settings
// made, and replaces one of another epoch.
func (b *Bus) ensureConsumer(ctx context.Context, s QueueSettings, class pipeline.Class, epoch Epoch) error {
	err := b.createConsumer(ctx, s, class, epoch)
	if isNotUnique(err) {
		if err := b.removeStray(ctx, s, class, epoch); err != nil {
			return err
		}
		err = b.createConsumer(ctx, s, class, epoch)
	}
	return queueError(s.Stage, err)
}

// createConsumer creates the consumer, unless there is one. The broker writes the files of one that
// is there, and fails for ever where they are gone: after a delete by hand, which removes its
// successor's, or on a full disk. Such a consumer works until the broker ends.
func (b *Bus) createConsumer(ctx context.Context, s QueueSettings, class pipeline.Class, epoch Epoch) error {
	_, err := b.js.CreateConsumer(ctx, b.Stream(s.Stage, s.Durability), b.consumerConfig(s, class, epoch))
	if err == nil || errors.Is(err, jetstream.ErrConsumerExists) {
		return nil
	}
	if _, missing := b.js.Consumer(ctx, b.Stream(s.Stage, s.Durability), consumerName(class, epoch)); missing == nil {
		b.settings.Logger.Warn("the broker has no files of a consumer; it keeps the consumer until it ends", "stage", s.Stage, "durability", s.Durability, "class", class, "error", err)
		return nil
	}
	return err
}

// codeNotUnique: the WorkQueue stream has a consumer for that filter.
const codeNotUnique jetstream.ErrorCode = 10100

func isNotUnique(err error) bool {
	api, ok := errors.AsType[jetstream.JetStreamError](err)
	return ok && api.APIError() != nil && api.APIError().ErrorCode == codeNotUnique
}

// removeStray removes consumers of the class that a host made for an old epoch,
// because it was suspended while the queue was replaced. They would keep this
// epoch's consumers out for ever.
func (b *Bus) removeStray(ctx context.Context, s QueueSettings, class pipeline.Class, epoch Epoch) error {
	stream, err := b.stream(ctx, b.Stream(s.Stage, s.Durability))
	if err != nil {
		return queueError(s.Stage, err)
	}
	if epochOf(stream.CachedInfo()) != epoch {
		return fmt.Errorf("queue of stage %s: it was replaced meanwhile", s.Stage)
	}
	names := stream.ConsumerNames(ctx)
	for name := range names.Name() {
		if !strings.HasPrefix(name, string(class)+"-") || name == consumerName(class, epoch) {
			continue
		}
		b.settings.Logger.Warn("removing a consumer of a replaced queue", "stage", s.Stage, "consumer", name)
		if err := stream.DeleteConsumer(ctx, name); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
			return queueError(s.Stage, err)
		}
	}
	return queueError(s.Stage, names.Err())
}

func (b *Bus) consumerConfig(s QueueSettings, class pipeline.Class, epoch Epoch) jetstream.ConsumerConfig {
	deliveries := s.MaxDeliver
	if s.Durability == pipeline.File || deliveries == 0 {
		deliveries = -1
	}
	return jetstream.ConsumerConfig{
		Durable:       consumerName(class, epoch),
		FilterSubject: b.Stage(s.Stage, s.Durability, class),
		AckPolicy:     jetstream.AckExplicitPolicy,
		AckWait:       s.AckWait,
		MaxDeliver:    deliveries,
		MaxAckPending: -1,
		MaxWaiting:    maxWaiting,
	}
}

func consumerName(class pipeline.Class, epoch Epoch) string {
	return string(class) + "-" + string(epoch)
}

// Queue returns the broker's state of a queue: ErrNoQueue where there is none,
// ErrDisconnected when the broker is disconnected.
func (b *Bus) Queue(ctx context.Context, stage pipeline.StageName, d pipeline.Durability) (QueueInfo, error) {
	if b.settings.Loopback != nil {
		return queueHere(d)
	}
	sent := b.settings.Now()
	stream, err := b.stream(ctx, b.Stream(stage, d))
	if err != nil {
		return QueueInfo{}, queueError(stage, err)
	}
	info := stream.CachedInfo()
	measured := b.measure(sent, info.TimeStamp)
	return QueueInfo{
		Version:   versionOf(info),
		AckWait:   ackWaitOf(info),
		Epoch:     epochOf(info),
		Created:   info.Created.Add(-measured.offset),
		Consumers: info.State.Consumers,
		Items:     info.State.Msgs,
		Bytes:     info.State.Bytes,
		RoundTrip: measured.roundTrip,
	}, nil
}

// HostQueues returns the hosts of a stage that have a queue of their own.
func (b *Bus) HostQueues(ctx context.Context, stage pipeline.StageName) (out []pipeline.HostID, err error) {
	question := struct {
		Subject string `json:"subject"`
		Offset  int    `json:"offset"`
	}{Subject: b.Stage("*", pipeline.Memory, "*")}
	for {
		var answer struct {
			Streams []string `json:"streams"`
			Total   int      `json:"total"`
		}
		if err := b.api(ctx, "STREAM.NAMES", question, &answer); err != nil {
			return nil, fmt.Errorf("queues of stage %s: %w", stage, err)
		}
		for _, name := range answer.Streams {
			before, after, _ := strings.Cut(b.Stream(pipeline.HostQueue(stage, "/"), pipeline.Memory), "/")
			host, isHost := strings.CutPrefix(name, before)
			if host, isMemory := strings.CutSuffix(host, after); isHost && isMemory {
				out = append(out, pipeline.HostID(host))
			}
		}
		if question.Offset += len(answer.Streams); len(answer.Streams) == 0 || question.Offset >= answer.Total {
			return out, nil
		}
	}
}

// DeleteQueue deletes a queue with what waits there. Gateways fail those requests with
// QUEUE_LOST.
func (b *Bus) DeleteQueue(ctx context.Context, stage pipeline.StageName, d pipeline.Durability) error {
	err := b.js.DeleteStream(ctx, b.Stream(stage, d))
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil
	}
	return queueError(stage, err)
}

// ackWaitOf returns the ack wait of the stream's consumers; 0 where it is not
// recorded.
func ackWaitOf(info *jetstream.StreamInfo) time.Duration {
	wait, err := time.ParseDuration(info.Config.Metadata[metadataAckWait])
	if err != nil {
		return 0
	}
	return wait
}

func epochOf(info *jetstream.StreamInfo) Epoch {
	return Epoch(strconv.FormatInt(info.Created.UnixNano(), 36))
}

func queueError(stage pipeline.StageName, err error) error {
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return ErrNoQueue
	}
	return apiErrorOf(fmt.Sprintf("queue of stage %s", stage), err)
}

// EnsureStream creates a stream, or changes it where the version is higher than
// its own, so that a rolling upgrade does not flip it to and fro. Any number of
// processes may call it at once. ErrDisconnected means that the broker is disconnected.
func (b *Bus) EnsureStream(ctx context.Context, config jetstream.StreamConfig, version int) error {
	config.Metadata = map[string]string{metadataVersion: strconv.Itoa(version)}
	return apiErrorOf("stream "+config.Name, b.ensureStream(ctx, config, version))
}

func (b *Bus) ensureStream(ctx context.Context, config jetstream.StreamConfig, version int) error {
	stream, err := b.stream(ctx, config.Name)
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

// stream returns a stream with its state.
func (b *Bus) stream(ctx context.Context, name string) (jetstream.Stream, error) {
	stream, err := b.js.Stream(ctx, name)
	if err == nil && stream.CachedInfo().Config.Storage == jetstream.FileStorage {
		b.files.Found(name)
	}
	return stream, err
}

// createStream creates a stream, unless another process was faster. Where a stream on file may be in
// deletion, it waits until that has ended, or the context. From then on the end of the context does not
// stop it, and Close waits for it: a broker that stops while it creates a stream leaves a part of it
// behind.
func (b *Bus) createStream(ctx context.Context, config jetstream.StreamConfig) error {
	if err := b.files.AwaitDeleted(ctx, config.Name); err != nil {
		return err
	}
	if !b.creating.TryRLock() {
		return ErrClosed
	}
	defer b.creating.RUnlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.apiTimeout())
	defer cancel()
	_, err := b.js.CreateStream(ctx, config)
	if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
		err = nil
	}
	if err == nil && config.Storage == jetstream.FileStorage {
		b.files.Found(config.Name)
	}
	return err
}

// apiErrorOf adds the subject to an error of the JetStream client, unless the
// broker is disconnected.
func apiErrorOf(what string, err error) error {
	if err == nil {
		return nil
	}
	if sent := sendError(err); errors.Is(sent, ErrDisconnected) || errors.Is(sent, ErrClosed) {
		return sent
	}
	if api, ok := errors.AsType[jetstream.JetStreamError](err); ok && api.APIError() != nil {
		e := apiError{ErrCode: uint16(api.APIError().ErrorCode), Description: api.APIError().Description}
		if full := e.storeError(); full != nil {
			err = full
		}
	}
	return fmt.Errorf("%s: %w", what, err)
}

// versionOf returns the version of a stream's settings; a stream without one has
// the first.
func versionOf(info *jetstream.StreamInfo) int {
	version, _ := strconv.Atoi(info.Config.Metadata[metadataVersion])
	return version
}
