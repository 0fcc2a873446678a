package program

import (
	"log/slog"
	"os"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/metric/noop"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/tracing"
)

// Values without sense are left out: the SDK panics with some, never rests with others, and logs
// the tokens of headers.
func TestSenselessVariablesAreLeftOut(t *testing.T) {
	const secret = "hunter2"
	for _, variable := range [][2]string{
		{"OTEL_BSP_MAX_QUEUE_SIZE", "-4"},
		{"OTEL_BSP_MAX_QUEUE_SIZE", "9000000000000000000"},
		{"OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "-1"},
		{"OTEL_BSP_SCHEDULE_DELAY", "0"},
		{"OTEL_BSP_EXPORT_TIMEOUT", "soon"},
		{"OTEL_EXPORTER_OTLP_HEADERS", "Bearer " + secret},
		{"OTEL_EXPORTER_OTLP_TRACES_HEADERS", "a=b,Bearer " + secret + "=="},
		{"OTEL_EXPORTER_OTLP_TRACES_HEADERS", "authorization=%zz" + secret},
	} {
		t.Run(variable[0]+"="+variable[1], func(t *testing.T) {
			t.Setenv(variable[0], variable[1])
			log := &testbed.Log{}
			s, err := NewTracing(t.Context(), tracing.Config{Endpoint: "http://127.0.0.1:1"}, noop.Meter{}, slog.New(slog.NewTextHandler(log, nil)))
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Shutdown(t.Context()); err != nil {
				t.Error(err)
			}
			if got := log.String(); !strings.Contains(got, variable[0]) || strings.Contains(got, secret) {
				t.Errorf("logged %q", got)
			}
			if strings.Contains(os.Getenv(variable[0]), secret) {
				t.Error("the exporter would log the token")
			}
		})
	}
	t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x, x-scope = a")
	dropWrongHeaders(slog.New(slog.DiscardHandler))
	if os.Getenv("OTEL_EXPORTER_OTLP_HEADERS") == "" {
		t.Error("valid headers are left out")
	}
}
