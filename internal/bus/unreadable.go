package bus

import (
	"context"
	"fmt"
	"strconv"
	"sync"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/stagemesh/stagemesh/internal/envelope"
)

// ErrNewer means that a stored value has a form that only newer versions of this program know. It
// is neither replaced nor deleted.
var ErrNewer = fmt.Errorf("%w: a newer version of this program has stored it", envelope.ErrMalformed)

// A value without the header has the form that valueVersion knows.
const (
	versionHeader = "Stagemesh-Version"
	valueVersion  = 1
)

// CheckVersion returns ErrNewer for the header of a value that this program does not know.
func CheckVersion(h nats.Header) error {
	text := h.Get(versionHeader)
	if version, err := strconv.Atoi(text); text != "" && (err != nil || version > valueVersion) {
		return fmt.Errorf("%w: it has version %.16q, and this program knows %d", ErrNewer, text, valueVersion)
	}
	return nil
}

// unreadable counts the stored values that cannot be read.
type unreadable struct {
	counter metric.Int64Counter

	mu sync.Mutex
	// seen are the numbers of those that were reported, by subject; it is bounded.
	seen map[string]uint64
}

const maxUnreadable = 1 << 10

func newUnreadable(m metric.Meter) (*unreadable, error) {
	if m == nil {
		m = noop.Meter{}
	}
	counter, err := m.Int64Counter("stagemesh.unreadable.values", metric.WithDescription("Stored values on the broker that this process could not read, by kind."))
	return &unreadable{counter: counter, seen: map[string]uint64{}}, err
}

// ReportUnreadable logs and counts a stored value that cannot be read, once while it is remembered.
// then is what becomes of it.
func (b *Bus) ReportUnreadable(kind, subject string, seq uint64, then string, err error) {
	u := b.unreadable
	u.mu.Lock()
	isKnown := u.seen[subject] == seq
	if len(u.seen) >= maxUnreadable {
		clear(u.seen)
	}
	u.seen[subject] = seq
	u.mu.Unlock()
	if isKnown {
		return
	}
	u.counter.Add(context.Background(), 1, metric.WithAttributes(attribute.String("kind", kind)))
	b.settings.Logger.Warn("a stored value cannot be read; "+then, "kind", kind, "subject", subject, "seq", seq, "error", err)
}
