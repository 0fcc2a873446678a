package tracing_test

import (
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/tracing"
)

func TestEnvironmentOverridesTheFile(t *testing.T) {
	t.Parallel()
	file := tracing.Config{Endpoint: "http://file:4317", Protocol: tracing.GRPC}
	for name, test := range map[string]struct {
		env      map[string]string
		url      string
		protocol string
		share    float64
		wrong    string
	}{
		"nothing":     {nil, "http://file:4317", "grpc", tracing.DefaultSample, ""},
		"an endpoint": {map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://env:4317"}, "", "grpc", tracing.DefaultSample, ""},
		"no URL":      {map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "env:4317"}, "http://file:4317", "grpc", tracing.DefaultSample, "OTEL_EXPORTER_OTLP_ENDPOINT: "},
		"no URL for traces": {
			map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://env:4317", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "env:4317"},
			"http://env:4317", "grpc", tracing.DefaultSample, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: ",
		},
		"HTTP":               {map[string]string{"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://file:4317/v1/traces", "http", tracing.DefaultSample, ""},
		"a protocol unknown": {map[string]string{"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "carrier pigeon"}, "http://file:4317", "grpc", tracing.DefaultSample, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: "},
		"always":             {map[string]string{"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, "http://file:4317", "grpc", 1, ""},
		"never":              {map[string]string{"OTEL_TRACES_SAMPLER": "always_off"}, "http://file:4317", "grpc", 0, ""},
		"a share":            {map[string]string{"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}, "http://file:4317", "grpc", 0.25, ""},
		"no share":           {map[string]string{"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"}, "http://file:4317", "grpc", tracing.DefaultSample, "OTEL_TRACES_SAMPLER_ARG: "},
		"a sampler unknown":  {map[string]string{"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "http://file:4317", "grpc", tracing.DefaultSample, "OTEL_TRACES_SAMPLER: "},
		"disabled":           {map[string]string{"OTEL_SDK_DISABLED": "true"}, "", "grpc", tracing.DefaultSample, ""},
		"disabled perhaps":   {map[string]string{"OTEL_SDK_DISABLED": "perhaps"}, "http://file:4317", "grpc", tracing.DefaultSample, "OTEL_SDK_DISABLED: "},
		"no exporter":        {map[string]string{"OTEL_TRACES_EXPORTER": "none"}, "", "grpc", tracing.DefaultSample, ""},
		"another exporter":   {map[string]string{"OTEL_TRACES_EXPORTER": "zipkin"}, "http://file:4317", "grpc", tracing.DefaultSample, "OTEL_TRACES_EXPORTER: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, wrong := file.WithEnvironment(func(key string) string { return test.env[key] })
			if got.URL() != test.url || got.Protocol != test.protocol || got.Share() != test.share {
				t.Errorf("url %q, protocol %q, share %v", got.URL(), got.Protocol, got.Share())
			}
			switch {
			case test.wrong == "" && len(wrong) == 0:
			case test.wrong != "" && len(wrong) == 1 && strings.HasPrefix(wrong[0].Error(), test.wrong):
			default:
				t.Errorf("warnings %v, want one of %q", wrong, test.wrong)
			}
		})
	}
}

func TestTraceContextIsParsedAndFormatted(t *testing.T) {
	t.Parallel()
	in := envelope.Trace{Parent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", State: "a=1,b=2"}
	sc := tracing.Parse(in)
	if !sc.IsValid() || !sc.IsSampled() || !sc.IsRemote() || sc.TraceID().String() != in.ID() || !in.Sampled() {
		t.Errorf("got %+v", sc)
	}
	if out := tracing.Format(sc); out != in {
		t.Errorf("got %+v", out)
	}
	for _, bad := range []string{"", "00", "00-" + strings.Repeat("g", 32) + "-b7ad6b7169203331-01", strings.Repeat("x", 55)} {
		if sc := tracing.Parse(envelope.Trace{Parent: bad}); sc.IsValid() {
			t.Errorf("%q is %+v", bad, sc)
		}
	}
}

func TestPasswordOfEndpointIsNotRepeated(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"http://user:hunter2@host", "grpc://user:hunter2@host", "http://user:hunter2 @host"} {
		if err := (tracing.Config{Endpoint: url}).Validate(); err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", url, err)
		}
	}
}
