package stagemesh

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"go.opentelemetry.io/otel/metric"
	"golang.org/x/sys/unix"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/process"
)

// brokerStore watches the files of the broker in this process. Before the disk is full it has the
// broker refuse messages for file streams, by the limit of the account: after one write that failed,
// nats-server refuses all writes to that stream until it is opened again. Should a write fail all the
// same, it opens all streams again once there is space for that. That loses what memory queues hold, so it waits
// for a moment until they are empty.
type brokerStore struct {
	broker *broker
	folder string

	mu sync.Mutex
	// broken is the first write that failed since the streams were opened; isOpening is true while
	// they open again.
	broken            string
	isOpening         bool
	isFull, isLimited bool

	free, total        int64
	failures, reopened int64
}

const (
	// watchStore is how often the disk is looked at; each write of this process to a file stream looks too,
	// so that none begins on a full disk.
	watchStore = 250 * time.Millisecond
	// reservedPart of the disk, but no more than maxReserved, stays free of messages: the broker
	// needs space to delete them.
	reservedPart = 16
	maxReserved  = 64 << 20
	// leastSpace is what the broker needs to start.
	leastSpace = 1 << 20
	// quietWait is the most that the streams wait for empty memory queues before they open again.
	quietWait = 3 * time.Second
	quietPoll = 10 * time.Millisecond
)

// storeError looks at the disk and returns why nothing is stored in files; nil while messages are.
func (s *brokerStore) storeError() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.check()
}

// check is storeError for callers that hold mu.
func (s *brokerStore) check() error {
	wasFull := s.isFull
	if free, total, err := diskSpace(s.folder); err == nil {
		s.free, s.total = free, total
		needed := s.reserved()
		if s.isFull {
			needed += needed / 2
		}
		s.isFull = s.free < needed
	}
	if s.isFull != wasFull {
		s.broker.log.log.Log(context.Background(), levelOf(s.isFull), "space for the broker's files", "full", s.isFull, "free", config.Bytes(s.free), "needed", config.Bytes(s.reserved()))
	}
	switch {
	case s.isFull, s.isLimited:
		return fmt.Errorf("the disk of its nats.store_dir has %s free, and needs %s", config.Bytes(s.free), config.Bytes(s.reserved()))
	case s.broken != "", s.isOpening:
		return fmt.Errorf("a write to nats.store_dir has failed, and its streams are not open again yet: %s", cmp.Or(s.broken, "they open now"))
	}
	return nil
}

func levelOf(isFull bool) slog.Level {
	if isFull {
		return slog.LevelError
	}
	return slog.LevelInfo
}

func (s *brokerStore) reserved() int64 { return min(maxReserved, s.total/reservedPart) }

// fail records a write that failed.
func (s *brokerStore) fail(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failures++
	if s.broken == "" {
		s.broken = text
	}
}

// checkStart returns an error if there is too little space to start, and warns if there is less
// than the streams may take.
func (s *brokerStore) checkStart(streams int64) error {
	free, _, err := diskSpace(s.folder)
	if err != nil {
		return nil //nolint:nilerr // the broker makes the folder, or reports why it cannot
	}
	if free < leastSpace {
		return fmt.Errorf("nats.store_dir: the disk of %s has %s free, and the broker needs %s to start; make space, or name another folder", s.folder, config.Bytes(free), config.Bytes(leastSpace))
	}
	var used int64
	// What cannot be read counts as nothing.
	_ = filepath.WalkDir(s.folder, func(_ string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type().IsRegular() {
			if info, err := entry.Info(); err == nil {
				used += info.Size()
			}
		}
		return nil
	})
	if free+used < streams {
		s.broker.log.log.Warn("the disk of nats.store_dir is smaller than what the streams may take: requests are STORE_FULL once it is full; lower max_bytes of queues and stores, or name a folder on a larger disk",
			"folder", s.folder, "free", config.Bytes(free), "used", config.Bytes(used), "streams", config.Bytes(streams))
	}
	return nil
}

// diskSpace returns the free and all bytes of the file system that has the folder.
func diskSpace(folder string) (free, total int64, err error) {
	var s unix.Statfs_t
	err = unix.Statfs(folder, &s)
	return int64(s.Bavail) * int64(s.Bsize), int64(s.Blocks) * int64(s.Bsize), err
}

// watch limits the broker while the disk is full, and opens the streams again after a failed write,
// until the context ends.
func (s *brokerStore) watch(ctx context.Context) {
	ticks := time.NewTicker(watchStore)
	defer ticks.Stop()
	var next time.Time
	for {
		select {
		case now := <-ticks.C:
			if s.look(); !s.canReopen() || now.Before(next) {
				continue
			}
			next = now.Add(bus.StoreRetry)
			if err := s.reopen(ctx); err != nil {
				s.broker.log.log.Error("the broker's streams cannot be opened again; trying again", "error", err, "after", bus.StoreRetry)
			}
		case <-ctx.Done():
			return
		}
	}
}

// canReopen reports whether a write has failed and there is space for opening the streams again. A full
// disk may have it: messages that have expired are deleted only once their stream is open.
func (s *brokerStore) canReopen() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.broken != "" && (!s.isFull || s.free >= 2*leastSpace)
}

// look limits the account of the mesh while the disk is full.
func (s *brokerStore) look() {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.check()
	if s.isFull != s.isLimited && s.broker.limit(s.isFull) == nil {
		s.isLimited = s.isFull
	}
}

// reopen opens all streams again if the folder can be written.
func (s *brokerStore) reopen(ctx context.Context) error {
	if err := s.probe(); err != nil {
		return err
	}
	queues, isEmpty := s.memoryQueues()
	for late := time.Now().Add(quietWait); !isEmpty && time.Now().Before(late); queues, isEmpty = s.memoryQueues() {
		if err := process.Sleep(ctx, quietPoll); err != nil {
			return err
		}
	}
	began := time.Now()
	set := func(isOpening bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.isOpening = isOpening
	}
	set(true)
	defer set(false)
	options, err := s.broker.auth().Options()
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.broken, s.isLimited = "", false // a write may fail while the streams are opened
	s.reopened++
	s.mu.Unlock()
	if err := s.broker.reopenStreams(); err != nil {
		s.fail(err.Error())
		return err
	}
	s.look()
	s.disconnectReaders()
	err = bus.CreateStreams(s.broker, queues, options...)
	s.broker.log.log.Warn("the broker's streams were opened again after a write had failed", "took", time.Since(began))
	return err
}

// probe writes a file, because a quota does not show in the free space.
func (s *brokerStore) probe() error {
	name := filepath.Join(s.folder, "probe")
	err := os.WriteFile(name, make([]byte, leastSpace), 0o600)
	return errors.Join(err, os.Remove(name))
}

// disconnectReaders has registries and dispatchers connect again: the consumers by which they follow
// streams are lost, which they would notice after ten seconds.
func (s *brokerStore) disconnectReaders() {
	clients, err := s.broker.Connz(nil)
	if err != nil {
		return
	}
	for _, c := range clients.Conns {
		if !strings.HasPrefix(c.Name, "gateway ") && !strings.HasPrefix(c.Name, "stagehost ") {
			_ = s.broker.DisconnectClientByID(c.Cid) // it may be gone
		}
	}
}

// memoryQueues returns the memory queues of stages, and whether none has an item that waits or is in flight.
func (s *brokerStore) memoryQueues() (out map[string]any, isEmpty bool) {
	info, err := s.broker.Jsz(&server.JSzOptions{Accounts: true, Streams: true, Config: true})
	if err != nil {
		return nil, true
	}
	out, isEmpty = map[string]any{}, true
	for _, account := range info.AccountDetails {
		for _, stream := range account.Streams {
			if stream.Config.Storage == server.MemoryStorage && stream.Config.Retention == server.WorkQueuePolicy {
				out[stream.Name], isEmpty = stream.Config, isEmpty && stream.State.Msgs == 0
			}
		}
	}
	return out, isEmpty
}

// report registers the metrics of the broker in this process.
func (s *brokerStore) report(meter metric.Meter) error {
	var errs []error
	gauge := func(name, help string) metric.Int64ObservableGauge {
		out, err := meter.Int64ObservableGauge("stagemesh.broker."+name, metric.WithUnit("By"), metric.WithDescription(help))
		errs = append(errs, err)
		return out
	}
	free := gauge("disk_free", "Free bytes of the disk of nats.store_dir.")
	stored := gauge("store_size", "Bytes in all file streams of the broker in this process.")
	storeMax := gauge("store_limit", "The most bytes in file streams, nats.max_store.")
	memory := gauge("memory_size", "Bytes in all memory streams of the broker in this process.")
	memoryMax := gauge("memory_limit", "The most bytes in memory streams, nats.max_memory.")
	failures, err1 := meter.Int64ObservableCounter("stagemesh.broker.write_failures", metric.WithDescription("Streams of the broker in this process that a failed write has closed."))
	reopened, err2 := meter.Int64ObservableCounter("stagemesh.broker.streams_reopened", metric.WithDescription("How often the broker in this process has opened its streams again after a failed write."))
	if err := errors.Join(append(errs, err1, err2)...); err != nil {
		return err
	}
	_, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		s.mu.Lock()
		o.ObserveInt64(free, s.free)
		o.ObserveInt64(failures, s.failures)
		o.ObserveInt64(reopened, s.reopened)
		s.mu.Unlock()
		select {
		case <-s.broker.ready:
		default:
			return nil
		}
		used, most := s.broker.GlobalAccount().JetStreamUsage(), s.broker.limits()
		o.ObserveInt64(stored, int64(used.Store))
		o.ObserveInt64(memory, int64(used.Memory))
		o.ObserveInt64(storeMax, most.MaxStore)
		o.ObserveInt64(memoryMax, most.MaxMemory)
		return nil
	}, free, failures, reopened, stored, memory, storeMax, memoryMax)
	return err
}
