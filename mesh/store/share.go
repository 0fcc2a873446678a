package store

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/semaphore"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Share bounds what each tenant keeps in a stream, in messages and in bytes, by the rule of
// budget.Pool: a tenant alone may fill seven eighths.
//
//	if f := results.Share.Reserve(ctx, tenant, true, size); f != nil {
//		return f
//	}
//	// store it
//
// The stream itself says what it has: each second, and before a fault. Only a stream that is seven eighths
// full can have a tenant with too much, so only then its messages are counted by tenant, by their
// headers, in a tenth of the time at most. What this process has reserved since counts too. So a bound
// is right after restarts. It is exceeded by what is on its way at a reading, and by what other
// processes store in a second. What a tenant removes is free after the next count.
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
	// tenants has the usage of each tenant: by the last count with what was added here since, and only
	// the latter while isCounted is false, below seven eighths. The count took so long.
	tenants   map[string]Usage
	isCounted bool
	countedAt time.Time
	took      time.Duration
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
	return &Share{stream: s, key: key, reason: reason, reading: semaphore.NewWeighted(1), tenants: map[string]Usage{}}
}

// Name names the stream in metrics.
func (s *Share) Name() string { return s.stream.config.Name }

// Reserve reserves space for a message of n bytes, or returns the fault that rejects it. If the stream
// is not shared, tenants have no bounds of their own. While the broker does not answer there is space.
func (s *Share) Reserve(ctx context.Context, tenant string, isShared bool, n int64) *fault.Fault {
	if !isShared && s.spare == 0 {
		return nil // the broker knows the bound
	}
	arrived, more := time.Now(), Usage{1, n + messageUse}
	if s.isReadBefore(arrived.Add(-shareAge)) && s.reading.TryAcquire(1) {
		s.read(ctx)
		s.reading.Release(1)
	}
	if _, isSure := s.reserve(tenant, isShared, more); isSure {
		return nil
	}
	if err := s.reading.Acquire(ctx, 1); err != nil {
		return fault.From(err)
	}
	defer s.reading.Release(1)
	if s.isReadBefore(arrived) {
		s.read(ctx)
	}
	f, _ := s.reserve(tenant, isShared, more)
	return f
}

func (s *Share) isReadBefore(at time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.readAt.Before(at)
}

// reserve decides by what is known. It is sure if nothing newer can change that.
func (s *Share) reserve(tenant string, isShared bool, more Usage) (f *fault.Fault, isSure bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	has, own := s.has.plus(more), s.tenants[tenant].plus(more)
	switch {
	case s.limit == Usage{}: // nothing was read yet
		return nil, false
	case s.spare > 0 && s.limit.Bytes > 0 && has.Bytes > s.limit.Bytes:
		return fault.Newf(s.reason, "the stream %s is full, see %s", s.Name(), s.key).WithRetryAfter(budget.RetryAfter), false
	case !isShared:
	case isGreedy(own.Messages, has.Messages, s.limit.Messages), isGreedy(own.Bytes, has.Bytes, s.limit.Bytes):
		return fault.Newf(s.reason, "this tenant keeps %d messages and %d bytes in the stream %s, which leaves too little of it to others, see %s; delete some, or wait until they have ended or expired",
			own.Messages-more.Messages, own.Bytes-more.Bytes, s.Name(), s.key).WithRetryAfter(budget.RetryAfter), false
	case !s.isCounted && s.isNear(has):
		return nil, false
	}
	s.has, s.tenants[tenant] = has, own
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
	before := s.has
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
	s.has = s.has.minus(before).plus(Usage{int64(info.State.Msgs), int64(info.State.Bytes)})
	s.limit = Usage{info.Config.MaxMsgs, info.Config.MaxBytes}
	if s.spare > 0 {
		s.limit.Bytes -= s.limit.Bytes / s.spare
	}
	isNear, isDue := s.isNear(s.has.plus(Usage{1, messageUse})), began.Sub(s.countedAt) > countPause*s.took
	if !isNear && isDue {
		s.tenants, s.isCounted = map[string]Usage{}, false
	}
	s.mu.Unlock()
	if isNear && isDue {
		s.count(ctx)
	}
}

// count counts what each tenant has.
func (s *Share) count(ctx context.Context) {
	s.mu.Lock()
	before := maps.Clone(s.tenants)
	s.mu.Unlock()
	began := time.Now()
	counted, err := s.Count(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.countedAt, s.took = time.Now(), time.Since(began)
	if err != nil {
		return
	}
	for tenant, u := range s.tenants {
		if added := u.minus(before[tenant]); added != (Usage{}) {
			counted[tenant] = counted[tenant].plus(added)
		}
	}
	s.tenants, s.isCounted = counted, true
}

// Count counts what each tenant has in the stream; "" is for messages that name none.
func (s *Share) Count(ctx context.Context) (map[string]Usage, error) {
	ctx, cancel := context.WithTimeout(ctx, countTimeout)
	defer cancel()
	out, isDone := map[string]Usage{}, false
	config := jetstream.OrderedConsumerConfig{HeadersOnly: true, InactiveThreshold: countTimeout}
	err := s.stream.follow(ctx, s.stream.config.Name, config, func() { isDone = true; cancel() }, func(msg jetstream.Msg, _ *jetstream.MsgMetadata) {
		tenant := s.stream.bus.TenantOf(msg.Subject(), msg.Headers())
		out[tenant] = out[tenant].plus(Usage{1, bus.PayloadSize(msg.Headers()) + int64(len(msg.Subject())) + messageUse})
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
	if !s.isCounted {
		return nil
	}
	return maps.Clone(s.tenants)
}
