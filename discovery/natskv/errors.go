package natskv

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/credentials"
)

// Outcomes of a request to the broker. errUnsent means that it did not reach the broker,
// errLost that it may have, errMissing that there is no such stream.
var (
	errUnsent  = fmt.Errorf("%w: there is no connection", discovery.ErrUnavailable)
	errLost    = fmt.Errorf("%w: no answer came", discovery.ErrUnavailable)
	errMissing = fmt.Errorf("%w: there is no stream", discovery.ErrUnavailable)
	// errWrongSequence means that an entry did not have the expected sequence, or was
	// being changed.
	errWrongSequence = errors.New("the entry does not have the expected sequence")
	errGap           = fmt.Errorf("%w: messages are missing", discovery.ErrUnavailable)
	errNoAnswer      = fmt.Errorf("%w: the broker does not answer", discovery.ErrUnavailable)
)

// Error codes of the broker that the client has no names for.
const (
	codeNoPeers     jetstream.ErrorCode = 10005
	codeNotLeader   jetstream.ErrorCode = 10009
	codeStoreFailed jetstream.ErrorCode = 10077
	codeNoResources jetstream.ErrorCode = 10023
	codeAccountFull jetstream.ErrorCode = 10002
	codeNoMemory    jetstream.ErrorCode = 10028
	codeNoStorage   jetstream.ErrorCode = 10047
	codeNotCreated  jetstream.ErrorCode = 10049
)

// hasCode reports whether the broker has answered with an error code.
func hasCode(err error, code jetstream.ErrorCode) bool {
	e, ok := errors.AsType[*jetstream.APIError](err)
	return ok && e.ErrorCode == code
}

// apiError classifies an error that the broker answered with.
func apiError(e *jetstream.APIError) error {
	switch e.ErrorCode {
	case jetstream.JSErrCodeStreamNotFound:
		return errMissing
	case jetstream.JSErrCodeStreamWrongLastSequence, jetstream.JSErrCodeStreamWrongLastSequenceConstant:
		return errWrongSequence
	case codeStoreFailed, codeNoResources, codeAccountFull, codeNoMemory, codeNoStorage:
		return fmt.Errorf("%w: %s", discovery.ErrFull, e.Description)
	// A starting cluster does not know all of its servers yet. A broker that has deleted its last
	// stream may remove the folder of a new one; where it never can create one, its log says why.
	case codeNoPeers, codeNotLeader, codeNotCreated:
		return fmt.Errorf("%w: %s", discovery.ErrUnavailable, e.Description)
	}
	// These may succeed a moment later: there is no leader, a server is starting, or
	// there are too many requests.
	if e.Code == 408 || e.Code == 429 || e.Code == 503 {
		return fmt.Errorf("%w: %s", discovery.ErrUnavailable, e.Description)
	}
	return fmt.Errorf("the broker answers: %w", e)
}

// connectionError classifies why there is no connection.
func connectionError(err error) error {
	switch {
	case err == nil:
		return errUnsent
	case credentials.IsRefused(err):
		return fmt.Errorf("%w: %w", discovery.ErrDenied, credentials.Explain(err))
	default:
		return fmt.Errorf("%w: %w", discovery.ErrUnavailable, credentials.Explain(err))
	}
}

// timeoutError is the error of a context that ended before an answer came.
func timeoutError(ctx context.Context) error {
	return fmt.Errorf("%w: %w", discovery.ErrUnavailable, ctx.Err())
}
