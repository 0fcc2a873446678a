package load

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Flags are the flags of a command that measures a pipeline. Their errors name them.
type Flags struct {
	// load and client lack the values below.
	load   Settings
	client ClientSettings

	concurrency []int
	rates       []float64
	payload     string
	tensors     []string
	durability  string

	deadline time.Duration
	json     string
}

// defaultDuration is how long a run without a number of requests takes.
const defaultDuration = 10 * time.Second

// Add adds the flags to a command's.
func (f *Flags) Add(flags *pflag.FlagSet) {
	flags.IntSliceVar(&f.concurrency, "concurrency", []int{8}, "the number of callers that wait for their answer before they send again; several values for several runs")
	flags.Float64SliceVar(&f.rates, "rate", nil, "the requests that arrive per second, whatever the answers; several values for several runs")
	flags.StringVar((*string)(&f.load.Arrivals), "arrivals", string(Constant), "the spacing of --rate: constant or poisson")
	flags.IntVar(&f.load.MaxInFlight, "max-in-flight", DefaultMaxInFlight, "the most requests of --rate in flight; further ones are counted and not sent")
	flags.DurationVar(&f.load.Warmup, "warmup", 2*time.Second, "the time before the measurement begins")
	flags.DurationVar(&f.load.Duration, "duration", 0, "the length of the measurement (default 10s without --requests)")
	flags.Int64Var(&f.load.Requests, "requests", 0, "the number of requests to measure; 0 for no limit")
	flags.Uint64Var(&f.load.Seed, "seed", 1, "the seed of poisson arrivals; equal seeds give equal arrivals")

	flags.StringVar(&f.payload, "payload", "", "send this many random bytes, such as 1KiB")
	flags.StringArrayVar(&f.tensors, "tensor", nil, "send a random tensor, such as FP32[1,64] or pixels=UINT8[1,28,28]; several are the inputs of one request")
	flags.StringVar((*string)(&f.client.Protocol), "protocol", string(GRPC), "grpc, connect, http, or oip for the Open Inference Protocol over gRPC")
	flags.BoolVar(&f.client.Streams, "streams", false, "request answers in chunks and measure when they arrive; for grpc and connect")
	flags.BoolVar(&f.client.Traced, "traced", false, "send each request with a sampled traceparent of its own")
	flags.DurationVar(&f.client.Timeout, "timeout", 0, "the timeout of each request; the pipeline's own if 0")
	flags.StringVar(&f.durability, "durability", "", "where requests wait between stages, memory or file; the pipeline's own if empty")
	flags.Int32Var(&f.client.Priority, "priority", 0, "above 0 is served first, below 0 last")

	flags.DurationVar(&f.deadline, "deadline", 0, "report the answers within this time as goodput")
	flags.StringVar(&f.json, "json", "", "write the report as JSON to this file; - is standard output, instead of the text")
}

// Check returns an error for flags that contradict each other, or if there is not one
// kind of input.
func (f *Flags) Check(flags *pflag.FlagSet, files int) error {
	inputs := 0
	for _, given := range []bool{files > 0, f.payload != "", len(f.tensors) > 0} {
		if given {
			inputs++
		}
	}
	rate := flags.Changed("rate")
	switch {
	case rate && flags.Changed("concurrency"):
		return errors.New("--rate: is for an open loop, and --concurrency for a closed one; give one of them")
	case !rate && flags.Changed("arrivals"):
		return errors.New("--arrivals: is for --rate")
	case !rate && flags.Changed("max-in-flight"):
		return errors.New("--max-in-flight: is for --rate; a closed loop has --concurrency")
	case f.deadline < 0:
		return fmt.Errorf("--deadline: %s is negative", f.deadline)
	case inputs != 1:
		return errors.New("give one input: FILEs, --payload or --tensor")
	}
	return nil
}

// session returns the measurement that the flags describe. Without inputs it generates
// them. Progress gets a progress bar if it is a terminal.
func (f *Flags) session(name string, inputs [][]payload.Part, progress io.Writer) (*Session, error) {
	loads, err := f.loads()
	if err != nil {
		return nil, err
	}
	client := f.client
	if client.Durability, err = pipeline.ParseDurability(f.durability); err != nil {
		return nil, fmt.Errorf("--durability: %q: use memory or file", f.durability)
	}
	if len(inputs) == 0 {
		if inputs, err = f.generate(); err != nil {
			return nil, err
		}
	}
	client.Pipeline, client.Inputs = name, inputs
	client.Address = "http://unknown" // required, and not known yet
	for _, s := range loads {
		client.Connections = max(client.Connections, s.Concurrency, s.MaxInFlight)
	}
	if err := client.Validate(); err != nil {
		return nil, flagError(err)
	}
	return &Session{
		Loads: loads, Client: client, deadline: f.deadline, progress: progress,
		Report: Report{
			Version: ReportVersion, Product: process.Version(), Began: time.Now(), Machine: ThisMachine(),
			Subject: f.subject(client), Runs: []Run{},
		},
	}, nil
}

func (f *Flags) loads() ([]Settings, error) {
	base := f.load
	base.Fine = true
	if base.Duration == 0 && base.Requests == 0 {
		base.Duration = defaultDuration
	}
	var out []Settings
	for _, rate := range f.rates {
		base.Rate = rate
		out = append(out, base)
	}
	if len(f.rates) == 0 {
		base.Arrivals, base.MaxInFlight = "", 0
		for _, callers := range f.concurrency {
			if callers < 1 {
				return nil, fmt.Errorf("--concurrency: %d is not between 1 and %d", callers, MaxConcurrency)
			}
			base.Concurrency = callers
			out = append(out, base)
		}
	}
	for _, s := range out {
		if err := s.Validate(); err != nil {
			return nil, flagError(err)
		}
	}
	return out, nil
}

// flagError turns an error about a setting into one about its flag.
func flagError(err error) error {
	name, rest, ok := strings.Cut(err.Error(), ":")
	if !ok {
		return err
	}
	return fmt.Errorf("--%s:%s", strings.ReplaceAll(name, "_", "-"), rest)
}

func (f *Flags) generate() ([][]payload.Part, error) {
	if f.payload != "" {
		size, err := config.ParseBytes(f.payload)
		if err != nil {
			return nil, fmt.Errorf("--payload: %w", err)
		}
		if size < 0 || size > MaxGenerated {
			return nil, fmt.Errorf("--payload: %s is not between 0 and %s", size, config.Bytes(MaxGenerated))
		}
		return [][]payload.Part{{RandomBlob(int(size))}}, nil
	}
	parts := make([]payload.Part, len(f.tensors))
	for i, text := range f.tensors {
		var err error
		if parts[i], err = RandomTensor(text); err != nil {
			return nil, fmt.Errorf("--tensor: %w", err)
		}
	}
	return [][]payload.Part{parts}, nil
}

func (f *Flags) subject(c ClientSettings) Subject {
	bytes := 0
	for _, parts := range c.Inputs {
		bytes += payload.Size(parts)
	}
	mean := bytes / len(c.Inputs)
	size := config.Bytes(mean).String()
	if !strings.HasSuffix(size, "B") {
		size = fmt.Sprintf("%d bytes", mean)
	}
	text := fmt.Sprintf("%d files of some %s", len(c.Inputs), size)
	switch {
	case len(f.tensors) > 0:
		text = strings.Join(f.tensors, " ")
	case f.payload != "":
		text = size + ", generated"
	case len(c.Inputs) == 1:
		text = "a file of " + size
	}
	return Subject{
		Pipeline: c.Pipeline, Protocol: string(c.Protocol), Payload: text, Bytes: mean, Streams: c.Streams, Traced: c.Traced,
		TimeoutMS: float64(c.Timeout) / float64(time.Millisecond), Durability: string(c.Durability), Priority: c.Priority,
	}
}
