package load

import (
	"encoding/json"
	"io"
	"runtime"
	"time"
)

// ReportVersion is the version of the JSON form of Report. Added members do not change it.
const ReportVersion = 1

// Report has the runs of one measurement, and describes where it was made. Times are in
// milliseconds, unless their names have another unit.
type Report struct {
	// Version is ReportVersion.
	Version int `json:"version"`
	// Product is the version of the program that measured.
	Product string    `json:"product"`
	Began   time.Time `json:"began"`
	Machine Machine   `json:"machine"`
	Subject Subject   `json:"subject"`
	// Runs are one per load, in order.
	Runs []Run `json:"runs"`
}

// Machine is the generator's machine.
type Machine struct {
	Cores int    `json:"cores"`
	OS    string `json:"os"`
	Arch  string `json:"arch"`
	Go    string `json:"go"`
}

// ThisMachine describes the machine of this process. Cores are those that the process may use.
func ThisMachine() Machine {
	return Machine{Cores: runtime.GOMAXPROCS(0), OS: runtime.GOOS, Arch: runtime.GOARCH, Go: runtime.Version()}
}

// Places of the target.
const (
	// Elsewhere is a running mesh, at an address.
	Elsewhere = "address"
	// InProcess is a mesh in the generator's own process.
	InProcess = "in-process"
	// Processes is a mesh whose parts are processes, on the generator's machine.
	Processes = "processes"
)

// Subject describes the target and its requests.
type Subject struct {
	// Protocol is grpc, connect, http or oip.
	Pipeline string `json:"pipeline"`
	Protocol string `json:"protocol"`
	// Place is one of the constants; Address or File names the mesh.
	Place   string `json:"place"`
	Address string `json:"address,omitempty"`
	File    string `json:"file,omitempty"`
	// Payload describes the inputs, and Bytes is their mean size.
	Payload string `json:"payload"`
	Bytes   int    `json:"bytes"`

	Streams    bool    `json:"streams,omitempty"`
	Traced     bool    `json:"traced,omitempty"`
	TimeoutMS  float64 `json:"timeout_ms,omitempty"`
	Durability string  `json:"durability,omitempty"`
	Priority   int32   `json:"priority,omitempty"`
}

// Kinds of loads.
const (
	Closed = "closed"
	Open   = "open"
)

// Load is the JSON form of Settings.
type Load struct {
	// Kind is closed or open.
	Kind string `json:"kind"`
	// Concurrency is the number of callers of a closed loop.
	Concurrency int `json:"concurrency,omitempty"`
	// RatePerS, Arrivals, MaxInFlight and Seed describe an open loop.
	RatePerS    float64 `json:"rate_per_s,omitempty"`
	Arrivals    string  `json:"arrivals,omitempty"`
	MaxInFlight int     `json:"max_in_flight,omitempty"`
	Seed        uint64  `json:"seed,omitempty"`
	WarmupMS    float64 `json:"warmup_ms"`
	DurationMS  float64 `json:"duration_ms,omitempty"`
	Requests    int64   `json:"requests,omitempty"`
}

func loadOf(s Settings) Load {
	s = s.WithDefaults()
	out := Load{
		Kind: Closed, Concurrency: s.Concurrency,
		WarmupMS: milliseconds(s.Warmup), DurationMS: milliseconds(s.Duration), Requests: s.Requests,
	}
	if s.Open() {
		out.Kind, out.RatePerS, out.Arrivals, out.MaxInFlight, out.Seed = Open, s.Rate, string(s.Arrivals), s.MaxInFlight, s.Seed
	}
	return out
}

// Run is the result of one load.
type Run struct {
	Load Load `json:"load"`
	// Began is the end of the warm-up; ElapsedMS is from then until the last answer.
	Began     time.Time `json:"began"`
	ElapsedMS float64   `json:"elapsed_ms"`
	// Interrupted is true if the run was ended early.
	Interrupted bool `json:"interrupted,omitempty"`

	// Sent requests were answered, failed, or were cancelled by an interruption.
	// NotSent counts arrivals that exceeded the bound of an open loop.
	Sent     int64 `json:"sent"`
	Answered int64 `json:"answered"`
	Failed   int64 `json:"failed"`
	NotSent  int64 `json:"not_sent"`
	// ThroughputPerS counts answers, not requests.
	ThroughputPerS float64  `json:"throughput_per_s"`
	Goodput        *Goodput `json:"goodput,omitempty"`

	// Latency covers the answers; Curve is the same in more detail.
	Latency Distribution `json:"latency"`
	Curve   []Point      `json:"curve"`
	// Total is the gateway's own measurement of the latency.
	Total Distribution `json:"total"`
	// Steps, Hops and Outside divide the latency; see Parts. Without timelines all of
	// it is outside.
	Steps   []Step       `json:"steps"`
	Hops    Distribution `json:"hops"`
	Outside Distribution `json:"outside"`

	// Refusals are the failures of requests that the mesh did not admit.
	Refusals Distribution `json:"refusals"`
	Failures []Failure    `json:"failures"`
	Stream   *Stream      `json:"stream,omitempty"`

	Generator Generator `json:"generator"`
	Process   Process   `json:"process"`
}

// Goodput counts the answers within a deadline.
type Goodput struct {
	DeadlineMS float64 `json:"deadline_ms"`
	Answers    int64   `json:"answers"`
	PerS       float64 `json:"per_s"`
	// Share is of all offered requests, including those that failed or were not sent.
	Share float64 `json:"share"`
}

// Distribution summarizes durations. All fields are 0 if there are none.
type Distribution struct {
	Count  int64   `json:"count"`
	MeanMS float64 `json:"mean_ms"`
	MinMS  float64 `json:"min_ms"`
	P50MS  float64 `json:"p50_ms"`
	P90MS  float64 `json:"p90_ms"`
	P99MS  float64 `json:"p99_ms"`
	P999MS float64 `json:"p999_ms"`
	MaxMS  float64 `json:"max_ms"`
}

// Point is a percentile of a distribution.
type Point struct {
	Percentile float64 `json:"percentile"`
	MS         float64 `json:"ms"`
}

// Step divides the time of one step.
type Step struct {
	Name  string       `json:"name"`
	Queue Distribution `json:"queue"`
	Batch Distribution `json:"batch"`
	Run   Distribution `json:"run"`
	// BatchSizes counts items by the size of their batch, Dispatches by the reason of
	// its dispatch.
	BatchSizes map[uint32]int64 `json:"batch_sizes"`
	Dispatches map[string]int64 `json:"dispatches"`
	// Redelivered counts items that were delivered more than once.
	Redelivered int64 `json:"redelivered"`
}

// Failure summarizes the requests that failed for one reason.
type Failure struct {
	Reason  string       `json:"reason"`
	Refused bool         `json:"refused"`
	Latency Distribution `json:"latency"`
	// Example is the error text of the first of them.
	Example string `json:"example"`
}

// Stream has the times of the chunks of streamed answers.
type Stream struct {
	// FirstChunk is since the planned time of the request, Gap between two chunks of an
	// answer.
	FirstChunk Distribution `json:"first_chunk"`
	Gap        Distribution `json:"gap"`
	Chunks     int64        `json:"chunks"`
	ChunksPerS float64      `json:"chunks_per_s"`
}

// Generator describes the load of the generator's own process.
type Generator struct {
	// Late is from the planned time of a request until it was sent.
	Late Distribution `json:"late"`
	// CPUMS is the processor time of the process during the load and its warm-up;
	// CPUShare is its share of all cores, from 0 to 1. Both are 0 on systems that do not
	// report it.
	CPUMS    float64 `json:"cpu_ms"`
	CPUShare float64 `json:"cpu_share"`
	// Shared is true if the mesh was in the same process, so that CPUMS includes it.
	Shared bool `json:"shared"`
}

// WriteJSON writes a report as indented JSON.
func WriteJSON(out io.Writer, r any) error {
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(r)
}
