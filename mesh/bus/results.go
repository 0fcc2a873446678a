package bus

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Result returns the message that stores a request's terminal answer, unless it
// has one.
func (b *Bus) Result(r *envelope.Result) (Message, error) {
	data, err := b.encode(r)
	if err != nil {
		return Message{}, err
	}
	return Message{
		subject: b.Subjects.Result(r.Reply.RequestID),
		stream:  b.ResultStream(),
		placed:  true,
		data:    data,
		missing: ErrNoResults,
	}, nil
}

// StoredResult returns the bytes of a request's stored answer: nil where there
// is none, ErrNoResults where the mesh keeps no results.
func (b *Bus) StoredResult(ctx context.Context, request pipeline.RequestID) ([]byte, error) {
	msg, err := b.Last(ctx, b.ResultStream(), b.Subjects.Result(request))
	switch {
	case errors.Is(err, ErrNoQueue):
		return nil, ErrNoResults
	case err != nil || msg == nil:
		return nil, err
	}
	return msg.Data, nil
}

// Stored is a message that a stream holds.
type Stored struct {
	Seq  uint64
	Data []byte
}

const (
	statusNotFound = "404"
	sequenceHeader = "Nats-Sequence"
)

// Last returns the last message of a subject in a stream that allows direct
// reads: nil where there is none, ErrNoQueue where there is no stream.
func (b *Bus) Last(ctx context.Context, stream, subject string) (*Stored, error) {
	msg, err := b.ask(ctx, "$JS.API.DIRECT.GET."+stream+"."+subject, nil)
	if err != nil {
		return nil, err
	}
	switch status := msg.Header.Get("Status"); {
	case noResponders(msg):
		return nil, ErrNoQueue
	case status == statusNotFound:
		return nil, nil
	case status != "":
		return nil, fmt.Errorf("%w: %s of stream %s: %s %s", ErrUnknown, subject, stream, status, msg.Header.Get("Description"))
	}
	seq, err := strconv.ParseUint(msg.Header.Get(sequenceHeader), 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%w: %s of stream %s has no place: %w", ErrUnknown, subject, stream, err)
	}
	return &Stored{Seq: seq, Data: msg.Data}, nil
}
