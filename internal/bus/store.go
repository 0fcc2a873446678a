package bus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// ErrStoreFull means that the broker stores nothing more in files; the message was not stored.
// The error says what is full.
var ErrStoreFull = errors.New("the broker stores nothing more")

// StoreRetry is how long a store that is believed broken is left alone between two writes.
const StoreRetry = 5 * time.Second

// StoreFault returns the caller's fault for an error about a store that is full, or that is
// missing because the process has no broker, else nil.
func StoreFault(err error) *fault.Fault {
	switch {
	case errors.Is(err, ErrNoBroker):
		return fault.Newf(fault.NotSupported, "%w", ErrNoBroker)
	case !IsFull(err):
		return nil
	}
	return fault.Newf(fault.StoreFull, "%w", err).WithRetryAfter(StoreRetry)
}

// BrokerFault returns why the broker stores nothing; nil where it does.
func (b *Bus) BrokerFault() *fault.Fault { return StoreFault(b.BrokerError()) }

// IsFull reports whether a queue or store has no space.
func IsFull(err error) bool { return errors.Is(err, ErrQueueFull) || errors.Is(err, ErrStoreFull) }

// storeError returns the error of an answer that reports a reached limit of a file store, else nil.
func (e *apiError) storeError() error {
	switch {
	case e.ErrCode == codeNoResources, e.ErrCode == codeStorageExceeded:
		return fmt.Errorf("%w: its max_store is full: %s", ErrStoreFull, e.Description)
	case e.ErrCode == codeAccountExceeded:
		return fmt.Errorf("%w: its disk is full, or its account is at the limit: %s", ErrStoreFull, e.Description)
	case strings.Contains(e.Description, "no space left"):
		return fmt.Errorf("%w: its disk is full: %s", ErrStoreFull, e.Description)
	}
	return nil
}

// stores is what the writes of this process say about the broker's file streams.
type stores struct {
	mu sync.Mutex
	// failing are the streams that confirm no write, until the broker is connected again.
	// The stream "" stands for a limit of all of them, which any write that succeeds ends.
	failing map[string]*failingStore
	wrote   time.Time
	errors  atomic.Int64
}

type failingStore struct {
	err error
	// next is when a write is let through again.
	next time.Time
}

// maxFailing bounds the streams that are known to fail.
const maxFailing = 1024

// refuse returns why a write is not sent: the stream, or the probes' stream, fails. Each StoreRetry it lets
// one through.
func (s *stores) refuse(stream, probe string, now time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.failing[probe]; f != nil {
		return f.err
	}
	f := s.failing[stream]
	if f == nil {
		return nil
	}
	if now.Before(f.next) {
		return f.err
	}
	f.next = now.Add(StoreRetry)
	return nil
}

// record records the outcome of a write; "" is a limit of all streams.
func (s *stores) record(stream string, err error, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		s.wrote = now
		delete(s.failing, "")
		delete(s.failing, stream)
		return
	}
	s.errors.Add(1)
	if s.failing == nil {
		s.failing = map[string]*failingStore{}
	}
	if len(s.failing) < maxFailing {
		s.failing[stream] = &failingStore{err: err, next: now.Add(StoreRetry)}
	}
}

// reset forgets the streams that failed: the broker may have been started again.
func (s *stores) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failing = nil
}

// state returns when a write last succeeded, and why a stream fails. One that is due for another
// try counts no more, except for the stream of probes: nobody would try.
func (s *stores) state(probe string, now time.Time) (wrote time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for stream, f := range s.failing {
		if stream == "" || stream == probe || now.Before(f.next) {
			err = f.err
		}
	}
	return s.wrote, err
}

// StoreError returns why this process believes that the broker does not store what is sent to file
// streams; nil where it does. Requests in memory do not need it.
func (b *Bus) StoreError() error {
	if b.settings.Store == nil {
		_, err := b.stores.state(b.StoreProbeStream(), time.Now())
		return err
	}
	// The broker in this process knows of each stream that fails.
	if err := b.settings.Store(); err != nil {
		return fmt.Errorf("%w: %w", ErrStoreFull, err)
	}
	return nil
}

// StoreErrors is how many writes to file streams have failed.
func (b *Bus) StoreErrors() int64 { return b.stores.errors.Load() }

// ProbeStore judges a broker of its own process by one small write, to a stream for that alone,
// unless another write has succeeded within StoreRetry. nats-server refuses all writes to a stream
// after one that failed, so a probe stream that failed is replaced.
func (b *Bus) ProbeStore(ctx context.Context) {
	wrote, _ := b.stores.state(b.StoreProbeStream(), time.Now())
	if b.settings.Store != nil || time.Since(wrote) < StoreRetry || !b.Connected() {
		return
	}
	probe := func(size int) error {
		m := Message{Subject: b.storeProbe(), Stream: b.StoreProbeStream(), Data: make([]byte, min(size, b.MaxPayload()-headerSlack))}
		_, err := await(ctx, func(done func(Receipt, error)) { b.publish(m, done) })
		return err
	}
	err := probe(storeProbeSize)
	if err == nil {
		b.files.Found(b.StoreProbeStream())
		return
	}
	if !errors.Is(err, ErrNoQueue) && !errors.Is(err, ErrStoreFull) && !errors.Is(err, ErrUnknown) {
		return
	}
	name := b.StoreProbeStream()
	if !errors.Is(err, ErrNoQueue) { // another gateway may be creating it
		b.files.Found(name)
		if err := b.js.DeleteStream(ctx, name); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return
		}
	}
	err = apiErrorOf("stream "+name, b.createStream(ctx, jetstream.StreamConfig{
		Name: name, Subjects: []string{b.storeProbe()}, Description: "Shows whether the broker stores files",
		Storage: jetstream.FileStorage, MaxMsgs: 1, MaxBytes: storeProbeBytes,
	}))
	if err == nil && probe(newProbeSize) == nil {
		_ = b.nc.Publish("$JS.API.STREAM.PURGE."+name, nil) // best effort
	}
	if errors.Is(err, ErrStoreFull) {
		b.stores.record(name, err, time.Now())
	}
}

const (
	// storeProbeSize is more than the last block of a file has left; newProbeSize is more than the
	// removal of a stream with such a probe frees.
	storeProbeSize = 16 << 10
	newProbeSize   = 256 << 10
	// storeProbeBytes bounds the stream of probes.
	storeProbeBytes = 1 << 20
)

// refuseWrite returns why a message is not sent to its file stream.
func (b *Bus) refuseWrite(m Message) error {
	if !m.isFile() {
		return nil
	}
	if b.settings.Store != nil {
		return b.StoreError()
	}
	return b.stores.refuse(m.Stream, b.StoreProbeStream(), time.Now())
}

// recordWrite records what became of a message for a file stream. No acknowledgement of a stream
// that answers other questions means that its store has failed: nats-server reports no such error.
func (b *Bus) recordWrite(m Message, err error) {
	switch {
	case !m.isFile() || errors.Is(err, ErrQueueFull):
	case err == nil:
		b.stores.record(m.Stream, nil, time.Now())
	case errors.Is(err, ErrStoreFull):
		b.stores.record("", err, time.Now())
	case errors.Is(err, errTimeout) && b.Connected() && b.settings.Store == nil:
		b.explainStream(m.Stream, func(info streamAnswer, ok bool) {
			if !ok || info.Error != nil {
				return
			}
			if c := info.Cluster; c != nil && len(c.Replicas) > 0 {
				return // it may wait for its replicas
			}
			b.stores.record(m.Stream, fmt.Errorf("%w: stream %s confirms no write: the disk of its server is full or broken; once it has space restart that nats-server, which refuses writes until then", ErrStoreFull, m.Stream), time.Now())
		})
	}
}

// StreamSize is the size of a file stream.
type StreamSize struct {
	Name string
	// MaxBytes bounds Bytes; less than 1 means no bound.
	Bytes, MaxBytes int64
}

// maxStreamSizes bounds the answer of FileStreams.
const maxStreamSizes = 256

// FileStreams returns the sizes of the mesh's file streams, of 256 at most.
func (b *Bus) FileStreams(ctx context.Context) (out []StreamSize, err error) {
	list := b.js.ListStreams(ctx, jetstream.WithStreamListSubject(string(b.settings.Mesh)+".>"))
	for info := range list.Info() {
		if info.Config.Storage == jetstream.FileStorage && len(out) < maxStreamSizes {
			out = append(out, StreamSize{Name: info.Config.Name, Bytes: int64(info.State.Bytes), MaxBytes: info.Config.MaxBytes})
		}
	}
	return out, list.Err()
}
