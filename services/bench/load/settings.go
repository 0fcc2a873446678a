package load

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Arrivals say how the requests of an open loop come.
type Arrivals string

const (
	// Constant arrivals are evenly spaced.
	Constant Arrivals = "constant"
	// Poisson arrivals know nothing of each other: the gaps between them are
	// distributed exponentially.
	Poisson Arrivals = "poisson"
)

// Bounds on a load.
const (
	MaxConcurrency = 100_000
	MaxRate        = 10_000_000
)

// DefaultMaxInFlight is the bound of an open loop that names none.
const DefaultMaxInFlight = 4096

// Settings say how a target is asked: by Concurrency callers, or at a Rate, for a
// Duration or with a number of Requests.
type Settings struct {
	// Concurrency is the number of callers of a closed loop; 0 means an open one.
	Concurrency int
	// Rate is the requests a second of an open loop.
	Rate float64
	// Arrivals are constant where empty.
	Arrivals Arrivals
	// MaxInFlight bounds the requests in flight of an open loop; 0 means
	// DefaultMaxInFlight.
	MaxInFlight int
	// Warmup is asked before anything is recorded; 0 means nothing is.
	Warmup time.Duration
	// Duration of what is recorded; 0 where Requests is more.
	Duration time.Duration
	// Requests to record, at most; 0 means as many as the Duration has.
	Requests int64
	// Seed of the Poisson arrivals, so that two runs have the same.
	Seed uint64
	// Fine waits for an arrival by the system's own timer too, as Go's may be a
	// millisecond late. A bubble of testing/synctest has no such timer.
	Fine bool
}

// Open says whether the loop is open.
func (s Settings) Open() bool { return s.Concurrency == 0 }

// WithDefaults returns the settings with what they leave out.
func (s Settings) WithDefaults() Settings {
	if !s.Open() {
		return s
	}
	if s.Arrivals == "" {
		s.Arrivals = Constant
	}
	if s.MaxInFlight == 0 {
		s.MaxInFlight = DefaultMaxInFlight
	}
	return s
}

// Validate returns what is wrong with the settings.
func (s Settings) Validate() error {
	switch {
	case s.Warmup < 0:
		return fmt.Errorf("warmup: %s is negative", s.Warmup)
	case s.Duration < 0:
		return fmt.Errorf("duration: %s is negative", s.Duration)
	case s.Requests < 0:
		return fmt.Errorf("requests: %d is negative", s.Requests)
	case s.Duration == 0 && s.Requests == 0:
		return errors.New("duration: is missing, and so is the number of requests; give one of them")
	case s.Concurrency != 0 && s.Rate != 0:
		return errors.New("rate: is for an open loop, and concurrency for a closed one; give one of them")
	case s.Open():
		return s.validateOpen()
	case s.Concurrency < 0 || s.Concurrency > MaxConcurrency:
		return fmt.Errorf("concurrency: %d is not between 1 and %d", s.Concurrency, MaxConcurrency)
	}
	return nil
}

func (s Settings) validateOpen() error {
	switch {
	case math.IsNaN(s.Rate) || s.Rate <= 0 || s.Rate > MaxRate:
		return fmt.Errorf("rate: %v is not above 0, and at most %d a second", s.Rate, MaxRate)
	case s.Arrivals != "" && s.Arrivals != Constant && s.Arrivals != Poisson:
		return fmt.Errorf("arrivals: %q is neither constant nor poisson", s.Arrivals)
	case s.MaxInFlight < 0 || s.MaxInFlight > MaxConcurrency:
		return fmt.Errorf("max_in_flight: %d is not between 1 and %d", s.MaxInFlight, MaxConcurrency)
	}
	return nil
}
