// Package telemetry makes the metrics of a process, in Prometheus' format, and the
// port on which operators read them and the process's health. All other packages
// take a Meter as a parameter; nothing is global.
package telemetry

import (
	"context"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
)

// Telemetry is the telemetry of one process.
type Telemetry struct {
	registry *prometheus.Registry
	provider *sdkmetric.MeterProvider
}

// New returns telemetry with the metrics of Go and of the process.
func New() (*Telemetry, error) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry), otelprometheus.WithoutScopeInfo(), otelprometheus.WithoutTargetInfo())
	if err != nil {
		return nil, err
	}
	return &Telemetry{registry: registry, provider: sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))}, nil
}

// Meter returns the meter of one part of the process.
func (t *Telemetry) Meter(name string) metric.Meter { return t.provider.Meter(name) }

// Handler serves the metrics.
func (t *Telemetry) Handler() http.Handler {
	return promhttp.HandlerFor(t.registry, promhttp.HandlerOpts{})
}

// Shutdown ends the telemetry.
func (t *Telemetry) Shutdown(ctx context.Context) error { return t.provider.Shutdown(ctx) }
