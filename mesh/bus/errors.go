package bus

import (
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// What can become of a send or a question.
var (
	// ErrDisconnected says that the broker is away; nothing was sent.
	ErrDisconnected = errors.New("the broker is away")
	// ErrUnknown says that no acknowledgement came; it may have been delivered.
	ErrUnknown = errors.New("no acknowledgement from the broker")
	// ErrNoQueue says that the stage has no queue; nothing was delivered.
	ErrNoQueue = errors.New("the stage has no queue")
	// ErrNoResults says that the mesh has no stream of results.
	ErrNoResults = errors.New("the mesh has no stream of results")
	// ErrNoClaims says that the mesh has no stream of claims.
	ErrNoClaims = errors.New("the mesh has no stream of idempotency keys")
	// ErrNoDeadLetters says that the mesh has no stream of dead letters.
	ErrNoDeadLetters = errors.New("the mesh has no stream of dead letters")
	// ErrNoGateway says that the gateway that waits is gone.
	ErrNoGateway = errors.New("the gateway is gone")
	// ErrNoHost says that nobody serves the stage.
	ErrNoHost = errors.New("the stage has no live host")
	// ErrQueueFull says that the queue is at its bound; nothing was delivered.
	ErrQueueFull = errors.New("the queue is full")
	// ErrTooLarge says that the message is over the broker's limit.
	ErrTooLarge = errors.New("the message is over the broker's limit")
	// ErrClosed says that the bus has been closed.
	ErrClosed = errors.New("the bus is closed")
)

// FaultOf returns what a bus error about a stage tells a caller.
func FaultOf(err error, stage pipeline.StageName) *fault.Fault {
	switch {
	case errors.Is(err, ErrDisconnected), errors.Is(err, ErrClosed):
		return fault.New(fault.BrokerUnavailable, "the broker cannot be reached; the request was not queued").Caused(err)
	case errors.Is(err, ErrUnknown):
		return fault.Newf(fault.BrokerUnavailable, "the broker did not confirm the request for stage %s", stage).Caused(err)
	case errors.Is(err, ErrNoQueue), errors.Is(err, ErrNoHost):
		return fault.Newf(fault.NoCapacity, "stage %s has no live host; start one, or check the pipeline's stage names", stage).Caused(err)
	case errors.Is(err, ErrQueueFull):
		return fault.Newf(fault.QueueFull, "the queue of stage %s is full", stage).Caused(err)
	case errors.Is(err, ErrTooLarge):
		return fault.Newf(fault.PayloadTooLarge, "the request for stage %s is too large: %w", stage, err)
	}
	return fault.From(fmt.Errorf("stage %s: %w", stage, err))
}

// sendError classifies what a local publish said.
func sendError(err error) error {
	switch {
	case errors.Is(err, nats.ErrMaxPayload):
		return ErrTooLarge
	case errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrConnectionDraining):
		return ErrClosed
	case errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, nats.ErrDisconnected), errors.Is(err, nats.ErrConnectionReconnecting):
		return ErrDisconnected
	}
	return fmt.Errorf("%w: %w", ErrUnknown, err)
}

// Error codes of the JetStream API that say a bound was hit.
const (
	codeStoreFailed     = 10077 // maximum messages or bytes exceeded
	codeNoResources     = 10023 // insufficient resources
	codeMemoryExhausted = 10028
	codeStorageExceeded = 10047
	codeTooLarge        = 10054
)

// codeNotLast says that the subject's last message is another than was expected:
// where none was, that it had one before.
const codeNotLast = 10071

// apiError is the error in an answer of the JetStream API.
type apiError struct {
	Code        int    `json:"code"`
	ErrCode     uint16 `json:"err_code"`
	Description string `json:"description"`
}

func (e *apiError) classify() error {
	switch e.ErrCode {
	case codeStoreFailed, codeNoResources, codeMemoryExhausted, codeStorageExceeded:
		return fmt.Errorf("%w: %s", ErrQueueFull, e.Description)
	case codeTooLarge:
		return fmt.Errorf("%w: %s", ErrTooLarge, e.Description)
	}
	return fmt.Errorf("%w: %s (%d)", ErrUnknown, e.Description, e.ErrCode)
}
