package stagehost

import (
	"context"
	"errors"
	"fmt"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/store"
)

// records are the host's Records, on the broker.
type records struct {
	bus        *bus.Bus
	results    *store.Results
	dead       *store.DeadLetters
	runRecords *store.Runs
	// missing has the host look for the streams.
	missing func()
}

var _ Records = records{}

// Result implements Records.
func (r records) Result(result *envelope.Result) (bus.Message, error) {
	m, err := r.bus.Result(result)
	if limit := r.results.MaxMessage(); err == nil && int64(m.Size()) > limit {
		err = fmt.Errorf("%w: %d bytes, the limit of a stored result is %d (results.max_bytes)", bus.ErrTooLarge, m.Size(), limit)
	}
	return m, err
}

// DeadLetter implements Records.
func (r records) DeadLetter(dead *envelope.DeadLetter, d bus.Delivery) (bus.Message, error) {
	m, err := r.bus.DeadLetter(dead, d)
	if errors.Is(err, bus.ErrTooLarge) || err == nil && int64(m.Size()) > r.dead.MaxMessage() {
		dead.Fault = dead.Fault.WithMetadata("item", fmt.Sprintf("left out: %d bytes", len(dead.Item)))
		dead.Item = nil
		m, err = r.bus.DeadLetter(dead, d)
	}
	return m, err
}

// AddRun implements Records.
func (r records) AddRun(ctx context.Context, item *envelope.Envelope, run envelope.RunRecord) ([]envelope.RunRecord, error) {
	return r.runRecords.Add(ctx, item, run)
}

// Runs implements Records.
func (r records) Runs(ctx context.Context, item *envelope.Envelope) ([]envelope.RunRecord, error) {
	return r.runRecords.Get(ctx, item)
}

// EndRun implements Records.
func (r records) EndRun(ctx context.Context, item *envelope.Envelope) error {
	return r.runRecords.End(ctx, item)
}

// Missing implements Records.
func (r records) Missing() { r.missing() }
