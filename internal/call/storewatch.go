package call

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// StoreFault returns STORE_FULL while the broker is believed to store nothing in files, else nil:
// durable requests, jobs and batches fail then, and requests in memory go on.
func (s *Service) StoreFault() *fault.Fault {
	if err := s.bus.StoreError(); err != nil {
		return bus.StoreFault(err)
	}
	return nil
}

// BrokerFault returns NOT_SUPPORTED in a process without a broker, else nil.
func (s *Service) BrokerFault() *fault.Fault { return s.bus.BrokerFault() }

const (
	storeTick = time.Second
	// storeProbes and storeReports are how often, in ticks, the store may be probed and the sizes of
	// streams are asked for; storeGrace is how long it may be full until callers hear of that.
	storeProbes, storeReports, storeGrace = int(bus.StoreRetry / storeTick), 30, 2
)

// storeWatch is what the gateway knows of the broker's file streams.
type storeWatch struct {
	streams atomic.Pointer[[]bus.StreamSize]
}

// watchStore judges the broker's store while nobody writes, and ends the wait of callers of durable
// requests that cannot be answered: the requests go on once there is space.
func (s *Service) watchStore(ctx context.Context) {
	ticks := time.NewTicker(storeTick)
	defer ticks.Stop()
	for tick, full := 0, 0; ; tick++ {
		// Longer than a probe waits for its acknowledgement, without which its stream is replaced.
		bounded, cancel := context.WithTimeout(ctx, 2*bus.StoreRetry)
		if tick%storeProbes == storeProbes-1 {
			s.bus.ProbeStore(bounded)
		}
		if tick%storeReports == 0 {
			if sizes, err := s.bus.FileStreams(bounded); err == nil {
				s.store.streams.Store(&sizes)
			}
		}
		cancel()
		f := s.StoreFault()
		if full++; f == nil {
			full = 0
		}
		if full == storeGrace {
			s.settings.Logger.Error("the broker stores nothing more: durable requests, jobs and batches fail with STORE_FULL", "cause", f.Message)
		}
		if full >= storeGrace {
			s.failDurable(f)
		}
		select {
		case <-ticks.C:
		case <-ctx.Done():
			return
		}
	}
}

// failDurable ends the wait of callers of durable requests. Attempts of jobs go on.
func (s *Service) failDurable(f *fault.Fault) {
	f = fault.Newf(fault.StoreFull, "the answer cannot be stored now: %w; the request goes on once there is space: get its result by its request ID", f).WithRetryAfter(bus.StoreRetry)
	s.table.each(func(p *pending) {
		if p.env != nil && p.env.Durability == pipeline.File && !p.env.StoreResult {
			p.failLocked(f)
		}
	})
}

// report registers the metrics of the store.
func (w *storeWatch) report(meter metric.Meter, b *bus.Bus) error {
	ready, err1 := meter.Int64ObservableGauge("stagemesh.store.ready", metric.WithDescription("1 while the broker stores files, as this gateway knows; 0 while durable requests and jobs are STORE_FULL."))
	failed, err2 := meter.Int64ObservableCounter("stagemesh.store.write_errors", metric.WithDescription("Writes of this gateway to file streams that failed because the broker stores nothing more."))
	size, err3 := meter.Int64ObservableGauge("stagemesh.store.size", metric.WithUnit("By"), metric.WithDescription("Bytes in a file stream of the mesh."))
	limit, err4 := meter.Int64ObservableGauge("stagemesh.store.limit", metric.WithUnit("By"), metric.WithDescription("The most bytes that a file stream of the mesh takes."))
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return err
	}
	_, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		o.ObserveInt64(failed, b.StoreErrors())
		isReady := int64(1)
		if b.StoreError() != nil {
			isReady = 0
		}
		o.ObserveInt64(ready, isReady)
		if streams := w.streams.Load(); streams != nil {
			for _, stream := range *streams {
				of := metric.WithAttributeSet(attribute.NewSet(attribute.String("stream", stream.Name)))
				o.ObserveInt64(size, stream.Bytes, of)
				o.ObserveInt64(limit, stream.MaxBytes, of)
			}
		}
		return nil
	}, ready, failed, size, limit)
	return err
}
