package program

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/mesh/telemetry"
)

// Settings are the address of the operations port.
type Settings struct {
	// Listen is its address.
	Listen string
	// Key names that address in messages: "ops.listen", "--ops".
	Key    string
	Logger *slog.Logger
}

// Port is the operations port of a program that works. Its methods are safe for
// concurrent use.
type Port struct {
	addr  net.Addr
	meter metric.Meter
	check atomic.Pointer[func() error]
}

// Meter returns the meter whose figures the port shows.
func (p *Port) Meter() metric.Meter { return p.meter }

// Addr returns where the port listens.
func (p *Port) Addr() net.Addr { return p.addr }

// Watch makes the program ready when the function returns nil, and else not for
// the reason it gives.
func (p *Port) Watch(ready func() error) { p.check.Store(&ready) }

var errStarting = errors.New("the program is starting")

func (p *Port) ready() error {
	if check := p.check.Load(); check != nil {
		return (*check)()
	}
	return errStarting
}

// meterName is the name of the meter; there is one in a program.
const meterName = "stagemesh"

// Run opens the port, works, and closes it when the work has ended. It returns
// what went wrong with either.
func Run(ctx context.Context, s Settings, work func(context.Context, *Port) error) error {
	metrics, err := telemetry.New()
	if err != nil {
		return err
	}
	defer end(ctx, metrics, s.Logger)
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", s.Listen)
	if err != nil {
		return fmt.Errorf("%s: %w", s.Key, err)
	}
	port := &Port{addr: listener.Addr(), meter: metrics.Meter(meterName)}
	handler := telemetry.PortHandler(telemetry.PortSettings{Ready: port.ready, Metrics: metrics.Handler()})
	// The port is there until the work has ended, which is after ctx has.
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	served := make(chan error, 1)
	go func() { served <- telemetry.ServePort(serving, listener, handler) }()
	s.Logger.Info("operations port listens", "address", port.addr.String())
	err = work(ctx, port)
	stop()
	return errors.Join(err, <-served)
}

// endWait bounds the end of telemetry.
const endWait = 5 * time.Second

func end(ctx context.Context, metrics *telemetry.Telemetry, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endWait)
	defer cancel()
	if err := metrics.Shutdown(ctx); err != nil {
		log.Warn("end of telemetry", "error", err)
	}
}
