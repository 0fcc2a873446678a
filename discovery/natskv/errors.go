package natskv

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/mesh/credentials"
)

// What became of a question to the broker. errUnsent says that it did not reach it,
// errLost that it may have, errMissing that there is no such stream.
var (
	errUnsent  = fmt.Errorf("%w: there is no connection", discovery.ErrUnavailable)
	errLost    = fmt.Errorf("%w: no answer came", discovery.ErrUnavailable)
	errMissing = fmt.Errorf("%w: there is no stream", discovery.ErrUnavailable)
	// errRefused says that an entry was not what a commit expected, or was being
	// changed.
	errRefused = errors.New("an entry is not of the sequence that was expected")
	// errGarbled says that an answer cannot be read.
	errGarbled = errors.New("the broker's answer")
	errBroken  = fmt.Errorf("%w: messages are missing", discovery.ErrUnavailable)
	errSilent  = fmt.Errorf("%w: it is silent", discovery.ErrUnavailable)
)

// Error codes of the broker that the client has no names for.
const (
	codeNoMessage       jetstream.ErrorCode = 10037
	codeStreamNotFound  jetstream.ErrorCode = 10059
	codeStreamInUse     jetstream.ErrorCode = 10058
	codeWrongSequence   jetstream.ErrorCode = 10071
	codeBeingChanged    jetstream.ErrorCode = 10164
	codeIncompleteBatch jetstream.ErrorCode = 10176
	codeTooManyBatches  jetstream.ErrorCode = 10210
	codeNoPeers         jetstream.ErrorCode = 10005
	codeNotLeader       jetstream.ErrorCode = 10009
	codeStoreFailed     jetstream.ErrorCode = 10077
	codeNoResources     jetstream.ErrorCode = 10023
	codeNoMemory        jetstream.ErrorCode = 10028
	codeNoStorage       jetstream.ErrorCode = 10047
)

// apiError is what the broker's answer says.
func apiError(e *jetstream.APIError) error {
	switch e.ErrorCode {
	case codeStreamNotFound:
		return errMissing
	case codeWrongSequence, codeBeingChanged:
		return errRefused
	case codeStoreFailed, codeNoResources, codeNoMemory, codeNoStorage:
		return fmt.Errorf("%w: %s", discovery.ErrFull, e.Description)
	// A cluster that starts does not know all of its servers yet.
	case codeNoPeers, codeNotLeader, codeIncompleteBatch, codeTooManyBatches:
		return fmt.Errorf("%w: %s", discovery.ErrUnavailable, e.Description)
	}
	// 408 to 503 are all that may be otherwise a moment later: no leader, a server
	// that is starting, too many questions.
	if e.Code == 408 || e.Code == 429 || e.Code == 503 {
		return fmt.Errorf("%w: %s", discovery.ErrUnavailable, e.Description)
	}
	return fmt.Errorf("the broker says: %w", e)
}

// away is why there is no connection.
func away(err error) error {
	switch {
	case err == nil:
		return errUnsent
	case credentials.IsRefused(err):
		return fmt.Errorf("%w: %w", discovery.ErrDenied, credentials.Explain(err))
	default:
		return fmt.Errorf("%w: %w", discovery.ErrUnavailable, credentials.Explain(err))
	}
}

// ended is a context that ended before there was an answer.
func ended(ctx context.Context) error {
	return fmt.Errorf("%w: %w", discovery.ErrUnavailable, ctx.Err())
}
