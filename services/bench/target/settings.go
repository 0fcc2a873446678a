package target

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"time"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/bench/load"
)

// Protocol is what a mesh is asked in.
type Protocol string

// The protocols.
const (
	GRPC    Protocol = "grpc"
	Connect Protocol = "connect"
	HTTP    Protocol = "http"
	OIP     Protocol = "oip"
)

// Settings say which mesh is asked, and for what.
type Settings struct {
	Protocol Protocol
	// Address is the base URL of a gateway, without a path.
	Address string
	// TLS is for https; nil means the system's own roots.
	TLS *tls.Config
	// Token is sent with every request; none where empty.
	Token    string
	Pipeline string
	// Inputs are those of the requests, which take turns.
	Inputs [][]*inferencev1.Part
	// Timeout of a request; 0 means the pipeline's own.
	Timeout    time.Duration
	Durability pipeline.Durability
	Priority   int32
	// Streams asks for the answer in chunks, by GRPC or Connect.
	Streams bool
	// Traced has each request begin a trace that is recorded, as a W3C traceparent.
	Traced bool
	// Connections are how many are kept open where one has one request at a time;
	// 0 means load.DefaultMaxInFlight.
	Connections int
}

// ErrProtocol says that the protocol has no words for what is wanted.
var ErrProtocol = errors.New("the protocol cannot say it")

// Validate returns what is wrong with the settings.
func (s Settings) Validate() error {
	u, err := url.Parse(s.Address)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return fmt.Errorf("address: %q is no URL such as http://127.0.0.1:8080", s.Address)
	}
	switch {
	case len(s.Inputs) == 0:
		return errors.New("inputs: there are none")
	case s.Timeout < 0:
		return fmt.Errorf("timeout: %s is negative", s.Timeout)
	}
	switch s.Protocol {
	case GRPC, Connect:
		return nil
	case HTTP:
		return s.validateHTTP()
	case OIP:
		return s.validateOIP()
	}
	return fmt.Errorf("protocol: %q is none of grpc, connect, http and oip", s.Protocol)
}

func (s Settings) validateHTTP() error {
	if s.Streams {
		return fmt.Errorf("streams: %w in %s: use grpc or connect", ErrProtocol, s.Protocol)
	}
	return nil
}

func (s Settings) validateOIP() error {
	switch {
	case s.Streams:
		return fmt.Errorf("streams: %w in %s: use grpc or connect", ErrProtocol, s.Protocol)
	case s.Durability != "":
		return fmt.Errorf("durability: %w in %s: use another, or let the pipeline say it", ErrProtocol, s.Protocol)
	case s.Priority != 0:
		return fmt.Errorf("priority: %w in %s: use another", ErrProtocol, s.Protocol)
	}
	return nil
}

// Patience bounds a request that has no timeout of its own.
const Patience = 10 * time.Minute

// grace is how much longer than its timeout a request is waited for: the mesh ends it.
const grace = 10 * time.Second

func (s Settings) patience() time.Duration {
	if s.Timeout > 0 {
		return s.Timeout + grace
	}
	return Patience
}

func (s Settings) connections() int {
	if s.Connections > 0 {
		return s.Connections
	}
	return load.DefaultMaxInFlight
}
