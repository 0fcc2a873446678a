package report

import (
	"runtime"
	"time"
)

// Version of the form of Report as JSON. A member that is added does not change it.
const Version = 1

// Report is what was measured, and on what. Times are milliseconds, unless their names
// say otherwise.
type Report struct {
	// Version is the constant of that name.
	Version int `json:"version"`
	// Product is the version of stagemesh that asked.
	Product string    `json:"product"`
	Began   time.Time `json:"began"`
	Machine Machine   `json:"machine"`
	Subject Subject   `json:"subject"`
	// Runs are one for each load, in the order they were made.
	// With a baseline they are the mesh's of the median pairs.
	Runs []Run `json:"runs"`
	// Baseline are those of the same pairs, and Comparisons are of all pairs; there are
	// none without a baseline.
	Baseline    []Run        `json:"baseline,omitempty"`
	Comparisons []Comparison `json:"comparisons,omitempty"`
}

// Machine is what the generator ran on.
type Machine struct {
	Cores int    `json:"cores"`
	OS    string `json:"os"`
	Arch  string `json:"arch"`
	Go    string `json:"go"`
}

// ThisMachine describes the machine of this process. Cores are those that it may use.
func ThisMachine() Machine {
	return Machine{Cores: runtime.GOMAXPROCS(0), OS: runtime.GOOS, Arch: runtime.GOARCH, Go: runtime.Version()}
}

// Places where what was asked ran.
const (
	// Elsewhere is a mesh that ran before, at an address.
	Elsewhere = "address"
	// InProcess is a mesh in the generator's own process.
	InProcess = "in-process"
	// Processes is a mesh whose parts are processes, on the generator's machine.
	Processes = "processes"
)

// Subject is what was asked, and with what.
type Subject struct {
	// Pipeline that was asked; Protocol it was asked in: grpc, connect, http or oip.
	Pipeline string `json:"pipeline"`
	Protocol string `json:"protocol"`
	// Place is one of the constants, and Address or File says which mesh it was.
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

// Load is how it was asked.
type Load struct {
	// Kind is closed or open.
	Kind string `json:"kind"`
	// Concurrency is the number of callers of a closed loop.
	Concurrency int `json:"concurrency,omitempty"`
	// RatePerS, Arrivals, MaxInFlight and Seed are those of an open loop.
	RatePerS    float64 `json:"rate_per_s,omitempty"`
	Arrivals    string  `json:"arrivals,omitempty"`
	MaxInFlight int     `json:"max_in_flight,omitempty"`
	Seed        uint64  `json:"seed,omitempty"`
	WarmupMS    float64 `json:"warmup_ms"`
	DurationMS  float64 `json:"duration_ms,omitempty"`
	Requests    int64   `json:"requests,omitempty"`
}

// Run is what one load came to.
type Run struct {
	Load Load `json:"load"`
	// Began is when the warm-up was over; ElapsedMS is from then until the last
	// answer.
	Began     time.Time `json:"began"`
	ElapsedMS float64   `json:"elapsed_ms"`
	// Interrupted says that somebody ended it early.
	Interrupted bool `json:"interrupted,omitempty"`

	// Sent requests were answered, have failed, or were called off by an
	// interruption; NotSent are arrivals of an open loop beyond its bound.
	Sent     int64 `json:"sent"`
	Answered int64 `json:"answered"`
	Failed   int64 `json:"failed"`
	NotSent  int64 `json:"not_sent"`
	// ThroughputPerS counts answers, not requests.
	ThroughputPerS float64  `json:"throughput_per_s"`
	Goodput        *Goodput `json:"goodput,omitempty"`

	// Latency is that of answers, and Curve the same in more detail.
	Latency Distribution `json:"latency"`
	Curve   []Point      `json:"curve"`
	// Total is the gateway's own measure of the same.
	Total Distribution `json:"total"`
	// Steps, Hops and Outside are where the time went; without timelines there are
	// none, and all is outside.
	Steps   []Step       `json:"steps"`
	Hops    Distribution `json:"hops"`
	Outside Distribution `json:"outside"`

	// Refusals are the failures that say that the mesh did not take a request on.
	Refusals Distribution `json:"refusals"`
	Failures []Failure    `json:"failures"`
	Stream   *Stream      `json:"stream,omitempty"`

	Generator Generator `json:"generator"`
	Process   Process   `json:"process"`
}

// Goodput is the answers that came in time.
type Goodput struct {
	DeadlineMS float64 `json:"deadline_ms"`
	Answers    int64   `json:"answers"`
	PerS       float64 `json:"per_s"`
	// Share is of all requests that were to be made, those that were not sent and
	// those that failed among them.
	Share float64 `json:"share"`
}

// Distribution is a set of durations. Without any all is 0.
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

// Point says which share of the durations, in percent, is at most so long.
type Point struct {
	Percentile float64 `json:"percentile"`
	MS         float64 `json:"ms"`
}

// Step is where the time of one step went.
type Step struct {
	Name  string       `json:"name"`
	Queue Distribution `json:"queue"`
	Batch Distribution `json:"batch"`
	Run   Distribution `json:"run"`
	// BatchSizes counts items by the size of the batch that they ran in, and
	// Dispatches by the reason why it was dispatched.
	BatchSizes map[uint32]int64 `json:"batch_sizes"`
	Dispatches map[string]int64 `json:"dispatches"`
	// Redelivered are items that a host had got before.
	Redelivered int64 `json:"redelivered"`
}

// Failure is the requests that failed for one reason.
type Failure struct {
	Reason  string       `json:"reason"`
	Refused bool         `json:"refused"`
	Latency Distribution `json:"latency"`
	// Example is what the first of them said.
	Example string `json:"example"`
}

// Stream is how streamed answers came.
type Stream struct {
	// FirstChunk is from the moment for which the request was planned, Gap between two
	// chunks of an answer.
	FirstChunk Distribution `json:"first_chunk"`
	Gap        Distribution `json:"gap"`
	Chunks     int64        `json:"chunks"`
	ChunksPerS float64      `json:"chunks_per_s"`
}

// Generator is what the process that asked did itself.
type Generator struct {
	// Late is from the moment for which a request was planned until it was sent.
	Late Distribution `json:"late"`
	// CPUMS is the processor time that the process had while the load ran, with its
	// warm-up; CPUShare is that of all its cores, from 0 to 1. They are 0 where the
	// system does not say.
	CPUMS    float64 `json:"cpu_ms"`
	CPUShare float64 `json:"cpu_share"`
	// Shared says that the mesh was in the same process, and is in the figure.
	Shared bool `json:"shared"`
}
