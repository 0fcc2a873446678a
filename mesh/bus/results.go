package bus

import (
	"context"
	"fmt"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Result returns the message that stores a request's terminal answer, unless it
// has one.
func (b *Bus) Result(r *envelope.Result) (Message, error) {
	data, err := r.Encode()
	if err != nil {
		return Message{}, err
	}
	if err := b.fits(data); err != nil {
		return Message{}, err
	}
	return Message{
		subject: b.Subjects.Result(r.Reply.RequestID),
		stream:  b.ResultStream(),
		first:   true,
		data:    data,
		missing: ErrNoResults,
	}, nil
}

const statusNotFound = "404"

// StoredResult returns the bytes of a request's stored answer: nil where there
// is none, ErrNoResults where the mesh keeps no results.
func (b *Bus) StoredResult(ctx context.Context, request pipeline.RequestID) ([]byte, error) {
	msg, err := b.ask(ctx, "$JS.API.DIRECT.GET."+b.ResultStream()+"."+b.Subjects.Result(request), nil)
	if err != nil {
		return nil, err
	}
	switch status := msg.Header.Get("Status"); {
	case noResponders(msg):
		return nil, ErrNoResults
	case status == statusNotFound:
		return nil, nil
	case status != "":
		return nil, fmt.Errorf("%w: stored result: %s %s", ErrUnknown, status, msg.Header.Get("Description"))
	}
	return msg.Data, nil
}
