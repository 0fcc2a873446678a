package tracing

import (
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/internal/config"
)

// Config is the section tracing of the mesh file. 0 means the default.
type Config struct {
	// Endpoint is the URL of an OTLP receiver, such as http://127.0.0.1:4317. If it is empty,
	// nothing is traced.
	Endpoint string `yaml:"endpoint"`
	// Protocol is grpc or http; empty means grpc.
	Protocol string `yaml:"protocol"`
	// CAFile has the certificates, in PEM, that the receiver's is checked against; empty means
	// the system's.
	CAFile string `yaml:"ca_file,path"`
	// HeadersFile has headers for the receiver, such as a token: "name: value" on each line.
	HeadersFile string `yaml:"headers_file,path"`
	Sampling

	// inEnvironment is true where the exporter reads the endpoint from the environment.
	inEnvironment bool
}

// Sampling decides which requests a gateway traces.
type Sampling struct {
	// Sample is the share of requests that are traced, of those whose callers say nothing; nil
	// means DefaultSample.
	Sample *float64 `yaml:"sample"`
	// ParentsPerSecond bounds the requests that are traced because their callers' are.
	ParentsPerSecond int `yaml:"parents_per_second"`
	// Keep has requests traced that were not sampled, once they have ended: without the spans of
	// workers.
	Keep Keep `yaml:"keep"`
}

// Keep are the requests that a gateway traces once they have ended.
type Keep struct {
	// Errors are those that failed by the mesh's fault; nil means that they are kept.
	Errors *bool `yaml:"errors"`
	// SlowerThan is for those that took longer; 0 means none.
	SlowerThan time.Duration `yaml:"slower_than"`
	// PerSecond bounds both.
	PerSecond int `yaml:"per_second"`
}

// Defaults of Sampling.
const (
	DefaultSample           = 0.01
	DefaultParentsPerSecond = 100
	DefaultKeptPerSecond    = 10
)

// Protocols of OTLP.
const (
	GRPC = "grpc"
	HTTP = "http"
)

// Share returns the share of requests that are sampled.
func (s Sampling) Share() float64 {
	if s.Sample == nil {
		return DefaultSample
	}
	return *s.Sample
}

// KeepsErrors reports whether failed requests are kept.
func (k Keep) KeepsErrors() bool { return k.Errors == nil || *k.Errors }

// Validate checks the section without reading files. Messages begin with the key.
func (c Config) Validate() error {
	errs := []error{
		config.NotNegative("parents_per_second", c.ParentsPerSecond),
		config.NotNegative("keep.slower_than", c.Keep.SlowerThan),
		config.NotNegative("keep.per_second", c.Keep.PerSecond),
	}
	if share := c.Share(); !(share >= 0 && share <= 1) {
		errs = append(errs, fmt.Errorf("sample: %v is not a share from 0 to 1", share))
	}
	if c.Endpoint != "" {
		errs = append(errs, checkEndpoint("endpoint", c.Endpoint))
	}
	if c.Protocol != "" {
		if _, err := protocolOf("protocol", c.Protocol); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func checkEndpoint(key, text string) error {
	if strings.Contains(text, "@") {
		return fmt.Errorf("%s: a password does not belong into the URL; put a header into headers_file", key)
	}
	if u, err := url.Parse(text); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return fmt.Errorf("%s: %q is not a URL of http or https, such as http://127.0.0.1:4317", key, text)
	}
	return nil
}

func protocolOf(key, text string) (string, error) {
	switch text {
	case GRPC, HTTP:
		return text, nil
	case "http/protobuf": // the name that OpenTelemetry has
		return HTTP, nil
	}
	return "", fmt.Errorf("%s: %q is not grpc or http", key, text)
}

// WithEnvironment returns the configuration with what OpenTelemetry's standard variables
// override, and what is wrong with those that are left out. The exporter itself reads the variables of
// headers, certificates, timeouts, batches and the resource.
func (c Config) WithEnvironment(getenv func(string) string) (out Config, wrong []error) {
	warn := func(err error) bool {
		if err != nil {
			wrong = append(wrong, err)
		}
		return err == nil
	}
	for _, key := range []string{"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"} {
		if value := getenv(key); value != "" {
			// The exporter would read a wrong one too, unless it gets another.
			if c.inEnvironment = warn(checkEndpoint(key, value)); c.inEnvironment {
				c.Endpoint = value
			}
		}
	}
	for _, key := range []string{"OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"} {
		if value := getenv(key); value != "" {
			if protocol, err := protocolOf(key, value); warn(err) {
				c.Protocol = protocol
			}
		}
	}
	if value := getenv("OTEL_TRACES_SAMPLER"); value != "" {
		if share, err := shareOf(value, getenv("OTEL_TRACES_SAMPLER_ARG")); warn(err) {
			c.Sample = &share
		}
	}
	switch value := getenv("OTEL_TRACES_EXPORTER"); value {
	case "", "otlp":
	case "none":
		c.Endpoint = ""
	default:
		warn(fmt.Errorf("OTEL_TRACES_EXPORTER: %q is not otlp or none", value))
	}
	if value := getenv("OTEL_SDK_DISABLED"); value != "" {
		if disabled, err := strconv.ParseBool(value); err != nil {
			warn(fmt.Errorf("OTEL_SDK_DISABLED: %q is not true or false", value))
		} else if disabled {
			c.Endpoint = ""
		}
	}
	return c, wrong
}

// shareOf returns the share that a standard sampler samples. All of them mean requests whose
// callers say nothing: the others have bounds of their own.
func shareOf(sampler, arg string) (float64, error) {
	switch strings.TrimPrefix(sampler, "parentbased_") {
	case "always_on":
		return 1, nil
	case "always_off":
		return 0, nil
	case "traceidratio":
		share, err := strconv.ParseFloat(arg, 64)
		if err != nil || !(share >= 0 && share <= 1) {
			return 0, fmt.Errorf("OTEL_TRACES_SAMPLER_ARG: %q is not a share from 0 to 1", arg)
		}
		return share, nil
	}
	return 0, fmt.Errorf("OTEL_TRACES_SAMPLER: %q is not always_on, always_off or traceidratio", sampler)
}

// URL returns where spans go, or "" where the exporter knows that from the environment.
func (c Config) URL() string {
	const path = "/v1/traces"
	switch {
	case c.inEnvironment:
		return ""
	case c.Protocol == HTTP && !strings.HasSuffix(c.Endpoint, path):
		return strings.TrimSuffix(c.Endpoint, "/") + path
	}
	return c.Endpoint
}
