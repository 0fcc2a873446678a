package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	// sendsFor is how long an owner sends after its last confirmed renewal began. takenOverAfter
	// is how long others see no change before they take over.
	sendsFor       = 2500 * time.Millisecond
	takenOverAfter = 5 * time.Second
)

// leaseValue is a lease on the broker; an empty owner means that nobody has it.
type leaseValue struct {
	Owner string `json:"owner"`
	// Renewed tells two renewals apart.
	Renewed int64 `json:"renewed"`
	// Low is, of a pool, the first number of a job's record that a new owner has to read.
	Low uint64 `json:"low"`
}

// Lease is the right to own something, such as a pool, which one process has at a time.
type Lease struct {
	jobs              *Jobs
	kind, name, owner string

	mu  sync.Mutex
	seq uint64
	// confirmed is when the last confirmed renewal began.
	confirmed time.Time
	value     leaseValue
}

// Kinds of leases.
const (
	PoolLease  = "lease"
	BatchLease = "batches"
)

// leaseEvery is the pause between renewals, and before another try.
const leaseEvery = time.Second

// ErrLeaseLost is why an owner stops.
var ErrLeaseLost = errors.New("the lease was lost")

// NewLease returns a lease that the owner does not have yet.
func NewLease(jobs *Jobs, kind, name, owner string) *Lease {
	return &Lease{jobs: jobs, kind: kind, name: name, owner: owner}
}

// Acquire waits for the lease; false means that the context has ended. ensure creates the streams
// that are missing.
func (l *Lease) Acquire(ctx context.Context, log *slog.Logger, ensure func(context.Context) error) bool {
	var seen uint64
	var since time.Time
	for isLogged := false; ; {
		began := time.Now()
		value, seq, err := l.read(ctx)
		if seq != seen || since.IsZero() {
			seen, since = seq, began
		}
		if err == nil && (value.Owner == "" || value.Owner == l.owner || began.Sub(since) >= takenOverAfter) {
			if err = l.write(ctx, seq, leaseValue{Owner: l.owner, Low: value.Low}, began); err == nil {
				return true
			}
		}
		if errors.Is(err, bus.ErrNoQueue) {
			err = ensure(ctx)
		}
		if err != nil && !errors.Is(err, ErrJobChanged) && ctx.Err() == nil && !isLogged {
			log.Warn("a lease cannot be read; retrying", "error", err)
			isLogged = true
		}
		if process.Sleep(ctx, leaseEvery) != nil {
			return false
		}
	}
}

func (l *Lease) read(ctx context.Context) (value leaseValue, seq uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, leaseEvery)
	defer cancel()
	data, seq, err := l.jobs.Control(ctx, l.kind, l.name)
	if err == nil && seq > 0 && !decodeObject(data, &value) {
		// Its owner may live, and renews it, or it is taken over.
		value = leaseValue{Owner: unknownOwner}
		l.jobs.bus.ReportUnreadable("lease", l.jobs.bus.JobControl(l.kind, l.name), seq, "its owner, or the next one, replaces it", ErrNotControl)
	}
	return value, seq, err
}

// unknownOwner owns a lease that cannot be read.
const unknownOwner = "?"

// ErrNotControl means that a value that dispatchers share cannot be read.
var ErrNotControl = errors.New("it is not the object of JSON that is expected")

// decodeObject reads an object of JSON. Other JSON, such as null, would make no map.
func decodeObject(data []byte, into any) bool {
	return bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) && json.Unmarshal(data, into) == nil
}

func (l *Lease) write(ctx context.Context, after uint64, value leaseValue, began time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, leaseEvery)
	defer cancel()
	value.Renewed = began.UnixNano()
	data, err := json.Marshal(value)
	if err != nil {
		return err
	}
	seq, err := l.jobs.SetControl(ctx, l.kind, l.name, after, data)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seq, l.confirmed, l.value = seq, began, value
	return nil
}

// Keep renews the lease until the context ends, or the lease is lost: ErrLeaseLost. low returns
// the first number of a record that a new owner has to read.
func (l *Lease) Keep(ctx context.Context, low func() uint64) error {
	for process.Sleep(ctx, leaseEvery) == nil {
		began := time.Now()
		l.mu.Lock()
		after, value := l.seq, l.value
		l.mu.Unlock()
		value.Low = max(value.Low, low())
		err := l.write(ctx, after, value, began)
		if errors.Is(err, ErrJobChanged) {
			// It may be the own renewal before this one, whose answer was lost.
			var now leaseValue
			if now, after, err = l.read(ctx); err == nil && now.Owner != l.owner && now.Owner != unknownOwner {
				return ErrLeaseLost
			}
			if err == nil {
				err = l.write(ctx, after, value, began)
			}
		}
		if err != nil && !l.IsHeld(time.Now().Add(sendsFor-takenOverAfter)) {
			return ErrLeaseLost
		}
	}
	return nil
}

// IsHeld reports whether the owner may send.
func (l *Lease) IsHeld(now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return now.Sub(l.confirmed) < sendsFor
}

// Low returns the first number of a record that has to be read.
func (l *Lease) Low() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.value.Low
}

// Release lets others take over at once.
func (l *Lease) Release() {
	ctx, cancel := context.WithTimeout(context.Background(), leaseEvery)
	defer cancel()
	l.mu.Lock()
	seq, value := l.seq, l.value
	l.mu.Unlock()
	value.Owner = ""
	_ = l.write(ctx, seq, value, time.Now()) // else it is taken over later
}

// Control returns a value that dispatchers share, and its number; nil and 0 if there is none.
func (s *Jobs) Control(ctx context.Context, kind, name string) ([]byte, uint64, error) {
	msg, err := s.bus.Last(ctx, s.bus.JobControlStream(), s.bus.JobControl(kind, name))
	if err != nil || msg == nil {
		return nil, 0, s.wrap(err)
	}
	return msg.Data, msg.Seq, nil
}

// SetControl replaces the value at number after, 0 for none, and returns the new one's number:
// ErrJobChanged if the value is another one.
func (s *Jobs) SetControl(ctx context.Context, kind, name string, after uint64, value []byte) (uint64, error) {
	return s.replace(ctx, bus.Message{
		Subject: s.bus.JobControl(kind, name), Stream: s.bus.JobControlStream(), Conditional: true, After: after, Data: value,
	})
}

// UpdateControl has edit change a value that dispatchers share, an object of JSON: an empty one if
// there is none, or none that can be read. edit may be called again, and returns false if there is
// nothing to store. It returns the value as it is then.
func UpdateControl[T any](ctx context.Context, s *Jobs, kind, name string, edit func(*T) bool) (T, error) {
	for {
		out, seq, err := readControl[T](ctx, s, kind, name)
		isUnreadable := errors.Is(err, ErrNotControl)
		if err != nil && !isUnreadable || !edit(&out) && !isUnreadable {
			return out, err
		}
		data, err := json.Marshal(out)
		if err == nil {
			_, err = s.SetControl(ctx, kind, name, seq, data)
		}
		if !errors.Is(err, ErrJobChanged) {
			return out, err
		}
	}
}

// readControl returns a value, and its number: an empty one beside ErrNotControl.
func readControl[T any](ctx context.Context, s *Jobs, kind, name string) (out T, seq uint64, err error) {
	data, seq, err := s.Control(ctx, kind, name)
	if err != nil {
		return out, 0, err
	}
	if seq > 0 && decodeObject(data, &out) {
		return out, seq, nil
	}
	if seq > 0 {
		s.bus.ReportUnreadable(kind, s.bus.JobControl(kind, name), seq, "the next change replaces it", ErrNotControl)
		err = s.wrap(ErrNotControl)
	}
	var empty T
	_ = json.Unmarshal([]byte("{}"), &empty) // which makes a map
	return empty, seq, err
}

// Pauses are the queues that operators have paused, and since when.
type Pauses map[pipeline.QueueName]time.Time

const (
	pausedKind, pausedName = "paused", "queues"
	// pausesCheck is how often FollowPauses reads at least.
	pausesCheck = time.Second
)

// Pauses returns the queues that are paused: none beside ErrNotControl.
func (s *Jobs) Pauses(ctx context.Context) (Pauses, error) {
	p, _, err := readControl[Pauses](ctx, s, pausedKind, pausedName)
	return p, err
}

// SetPaused pauses a queue, or resumes it.
func (s *Jobs) SetPaused(ctx context.Context, queue pipeline.QueueName, isPaused bool) error {
	_, err := UpdateControl(ctx, s, pausedKind, pausedName, func(p *Pauses) bool {
		if isPaused != (*p)[queue].IsZero() {
			return false
		}
		if delete(*p, queue); isPaused {
			(*p)[queue] = time.Now().UTC()
		}
		return true
	})
	return err
}

// FollowPauses calls changed at first, after a change of what is paused, and each second, until
// the context ends.
func (s *Jobs) FollowPauses(ctx context.Context, changed func()) error {
	return s.wait(ctx, s.bus.JobControl(pausedKind, pausedName), pausesCheck/16, pausesCheck, func() (bool, error) {
		changed()
		return false, nil
	})
}
