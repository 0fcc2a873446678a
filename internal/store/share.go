package store

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/semaphore"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Share bounds what each tenant keeps in a stream, in messages and in bytes, by the rule of
// budget.Pool: a tenant alone may fill seven eighths.
//
//	stored, f := results.Share.Reserve(ctx, tenant, true, size)
//	if f != nil {
//		return f
//	}
//	// store it
//	stored()
//
// The stream itself says what it has: each second, and before a fault. Only a stream that is seven eighths
// full can have a tenant with too much, so only then its messages are counted by tenant, by their
// headers, in a tenth of the time at most. What this process has reserved since, and is storing, counts
// too. So a bound is right after restarts. With other processes it is exceeded by what these store in
// a second, and what a tenant removes is free after the next count.
type Share struct {
	stream *stream
	key    string
	reason fault.Reason
	// spare is the part of the space that is kept for messages on their way: one in so many, or 0.
	spare int64

	// reading is held by the caller that reads.
	reading *semaphore.Weighted

	mu     sync.Mutex
	readAt time.Time
	// has is what the stream has, with what was added here since; limit bounds it, and is negative where nothing does.
	has, limit Usage
	// counted has the usage of each tenant, and recent what was added here since; it is nil below
	// seven eighths. It took so long.
	counted, recent map[string]Usage
	// storing is the part of recent that may not be stored yet, of each tenant and of all.
	storing    map[string]Usage
	allStoring Usage
	countedAt  time.Time
	took       time.Duration
}

// Usage is what is stored.
type Usage struct{ Messages, Bytes int64 }

func (u Usage) plus(v Usage) Usage  { return Usage{u.Messages + v.Messages, u.Bytes + v.Bytes} }
func (u Usage) minus(v Usage) Usage { return Usage{u.Messages - v.Messages, u.Bytes - v.Bytes} }

const (
	// shareAge is how old a reading may be without a fault.
	shareAge = time.Second
	// shareTimeout bounds a reading, countTimeout a count of messages.
	shareTimeout = 500 * time.Millisecond
	countTimeout = 10 * time.Second
	// countPause is the least pause between two counts, as a multiple of the time that one takes.
	countPause = 9
	// messageUse is about what a message takes beside its payload and its subject.
	messageUse = 128
)

// newShare returns the share of a stream, whose bound has that key in a mesh file. A fault has the reason.
func (s *stream) newShare(key string, reason fault.Reason) *Share {
	return &Share{stream: s, key: key, reason: reason, reading: semaphore.NewWeighted(1), recent: map[string]Usage{}, storing: map[string]Usage{}}
}

// Name names the stream in metrics.
func (s *Share) Name() string { return s.stream.config.Name }

// Reserve reserves space for a message of n bytes, or returns the fault that rejects it. The caller
// calls stored once the message is stored, or will not be. If the stream is not shared, tenants have
// no bounds of their own. While the broker does not answer there is space.
func (s *Share) Reserve(ctx context.Context, tenant string, isShared bool, n int64) (stored func(), f *fault.Fault) {
	if !isShared && s.spare == 0 {
		return func() {}, nil // the broker knows the bound
	}
	arrived, more := time.Now(), Usage{1, n + messageUse}
	s.mu.Lock()
	isOld := arrived.Sub(s.readAt) >= shareAge
	s.mu.Unlock()
	if isOld && s.reading.TryAcquire(1) {
		s.read(ctx)
		s.reading.Release(1)
	}
	f, isSure := s.reserve(tenant, isShared, more)
	if !isSure {
		if err := s.reading.Acquire(ctx, 1); err != nil {
			return nil, fault.From(err)
		}
		s.mu.Lock()
		isOld = s.readAt.Before(arrived)
		s.mu.Unlock()
		if isOld {
			s.read(ctx)
		}
		s.reading.Release(1)
		f, isSure = s.reserve(tenant, isShared, more)
	}
	if f != nil || !isSure {
		return func() {}, f
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.allStoring = s.allStoring.minus(more)
		if s.storing[tenant] = s.storing[tenant].minus(more); s.storing[tenant] == (Usage{}) {
			delete(s.storing, tenant)
		}
	}, nil
}

// reserve decides by what is known. It is sure if nothing newer can change that.
func (s *Share) reserve(tenant string, isShared bool, more Usage) (f *fault.Fault, isSure bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	has, own := s.has.plus(more), s.recent[tenant].plus(s.counted[tenant]).plus(more)
	switch {
	case s.limit == Usage{}: // nothing was read yet
		return nil, false
	case s.spare > 0 && s.limit.Bytes > 0 && has.Bytes > s.limit.Bytes:
		return fault.Newf(s.reason, "the stream %s is full, see %s", s.Name(), s.key).WithRetryAfter(budget.RetryAfter), false
	case !isShared:
	case isGreedy(own.Messages, has.Messages, s.limit.Messages), isGreedy(own.Bytes, has.Bytes, s.limit.Bytes):
		return fault.Newf(s.reason, "this tenant keeps %d messages and %d bytes in the stream %s, which leaves too little of it to others, see %s; delete some, or wait until they have ended or expired",
			own.Messages-more.Messages, own.Bytes-more.Bytes, s.Name(), s.key).WithRetryAfter(budget.RetryAfter), false
	case s.counted == nil && s.isNear(has):
		return nil, false
	}
	s.has, s.allStoring = has, s.allStoring.plus(more)
	s.recent[tenant], s.storing[tenant] = s.recent[tenant].plus(more), s.storing[tenant].plus(more)
	return nil, true
}

func isGreedy(own, has, limit int64) bool {
	return limit > 0 && budget.IsGreedy(min(own, has), limit-has) // what was counted may be gone
}

// isNear reports whether one tenant may have too much.
func (s *Share) isNear(has Usage) bool {
	return isGreedy(has.Messages, has.Messages, s.limit.Messages) || isGreedy(has.Bytes, has.Bytes, s.limit.Bytes)
}

// read asks the broker what the stream has. The caller holds reading.
func (s *Share) read(ctx context.Context) {
	began := time.Now()
	s.mu.Lock()
	before := s.has.minus(s.allStoring)
	s.mu.Unlock()
	limited, cancel := context.WithTimeout(ctx, shareTimeout)
	defer cancel()
	found, err := s.stream.bus.JetStream().Stream(limited, s.stream.config.Name)
	s.mu.Lock()
	s.readAt = began
	if err != nil {
		s.mu.Unlock()
		return
	}
	info := found.CachedInfo()
	added := s.has.minus(before) // what the broker may not know
	s.has = Usage{int64(info.State.Msgs), int64(info.State.Bytes)}.plus(added)
	s.limit = Usage{info.Config.MaxMsgs, info.Config.MaxBytes}
	if s.spare > 0 {
		s.limit.Bytes -= s.limit.Bytes / s.spare
	}
	isNear, isDue := s.isNear(s.has.plus(Usage{1, messageUse})), began.Sub(s.countedAt) > countPause*s.took
	if !isNear && isDue {
		s.counted, s.recent = nil, maps.Clone(s.storing)
	}
	s.mu.Unlock()
	if isNear && isDue {
		s.count(ctx)
	}
}

// count counts what each tenant has.
func (s *Share) count(ctx context.Context) {
	s.mu.Lock()
	before := maps.Clone(s.recent)
	for tenant, u := range s.storing {
		before[tenant] = before[tenant].minus(u)
	}
	s.mu.Unlock()
	began := time.Now()
	counted, err := s.Count(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.countedAt, s.took = time.Now(), time.Since(began)
	if err != nil {
		return
	}
	for tenant, u := range before { // the rest was added meanwhile
		if s.recent[tenant] = s.recent[tenant].minus(u); s.recent[tenant] == (Usage{}) {
			delete(s.recent, tenant)
		}
	}
	s.counted = counted
}

// Count counts what each tenant has in the stream; "" is for messages that name none.
func (s *Share) Count(ctx context.Context) (map[string]Usage, error) {
	ctx, cancel := context.WithTimeout(ctx, countTimeout)
	defer cancel()
	out, isDone := map[string]Usage{}, false
	config := jetstream.OrderedConsumerConfig{HeadersOnly: true, InactiveThreshold: countTimeout}
	err := s.stream.follow(ctx, s.stream.config.Name, config, func() { isDone = true; cancel() }, func(msg jetstream.Msg, _ *jetstream.MsgMetadata) {
		tenant := s.stream.bus.TenantOf(msg.Subject(), msg.Headers())
		out[tenant] = out[tenant].plus(Usage{1, payloadSize(msg.Headers()) + int64(len(msg.Subject())) + messageUse})
	})
	if isDone {
		err = nil
	}
	return out, err
}

// Counted returns what each tenant has by the last count; nil while the stream is far from full.
func (s *Share) Counted() map[string]Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.counted)
}
