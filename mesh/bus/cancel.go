package bus

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/mesh/envelope"
)

// Codes of the JetStream API for a message that is not there.
const (
	codeNoMessage      = 10037
	codeNoSequence     = 10043
	codeDeleteFailed   = 10057 // of one that is not there, or of a stream that denies it
	codeStreamNotFound = 10059
)

// Withdraw removes an item from the queue that it was sent to, at the place that
// its receipt names, and reports whether it was there. An item that still waited
// is never delivered. One that a host has in hand already is finished there: only
// Cancel reaches it.
func (b *Bus) Withdraw(ctx context.Context, m Message, seq uint64) (bool, error) {
	if same, err := b.holds(ctx, m, seq); err != nil || !same {
		return false, err
	}
	return b.delete(ctx, m.stream, seq)
}

// delete removes a message from a stream, and reports whether it was there.
func (b *Bus) delete(ctx context.Context, stream string, seq uint64) (bool, error) {
	var answer struct {
		Success bool      `json:"success"`
		Error   *apiError `json:"error"`
	}
	err := b.api(ctx, "STREAM.MSG.DELETE."+stream, struct {
		Seq     uint64 `json:"seq"`
		NoErase bool   `json:"no_erase"`
	}{seq, true}, &answer)
	switch {
	case err != nil:
		return false, err
	case answer.Error.gone():
		return false, nil
	case answer.Error != nil:
		return false, answer.Error.classify()
	}
	return answer.Success, nil
}

// holds reports whether the message is what the queue has at that place: after
// a memory queue was lost with its broker, somebody else's may be.
func (b *Bus) holds(ctx context.Context, m Message, seq uint64) (bool, error) {
	var answer struct {
		Message struct {
			Header []byte `json:"hdrs"`
		} `json:"message"`
		Error *apiError `json:"error"`
	}
	err := b.api(ctx, "STREAM.MSG.GET."+m.stream, struct {
		Seq uint64 `json:"seq"`
	}{seq}, &answer)
	switch {
	case err != nil:
		return false, err
	case answer.Error.gone():
		return false, nil
	case answer.Error != nil:
		return false, answer.Error.classify()
	}
	return bytes.Contains(answer.Message.Header, []byte("\r\n"+nats.MsgIdHdr+": "+m.id+"\r\n")), nil
}

// gone reports whether the broker said that there is no such message.
func (e *apiError) gone() bool {
	if e == nil {
		return false
	}
	switch e.ErrCode {
	case codeStreamNotFound, codeNoMessage, codeNoSequence, codeDeleteFailed:
		return true
	}
	return false
}

// api asks the broker's JetStream API. A broker without the stream, or without
// JetStream, is ErrNoQueue.
func (b *Bus) api(ctx context.Context, name string, question, answer any) error {
	data, err := json.Marshal(question)
	if err != nil {
		return err
	}
	msg, err := b.ask(ctx, "$JS.API."+name, data)
	switch {
	case err != nil:
		return err
	case noResponders(msg):
		return ErrNoQueue
	}
	if err := json.Unmarshal(msg.Data, answer); err != nil {
		return fmt.Errorf("%w: answer to %s: %w", ErrUnknown, name, err)
	}
	return nil
}

// Cancel tells every host and gateway that nobody wants a request any more. It is
// a notice: who does not hear it goes on.
func (b *Bus) Cancel(c *envelope.Cancel) error {
	data, err := c.Encode()
	if err != nil {
		return err
	}
	if err := b.nc.Publish(b.Subjects.Cancel(), data); err != nil {
		return sendError(err)
	}
	return nil
}

// ServeCancels hands every message on the mesh's subject of notices to handle,
// which must not block, until the returned function is called. Anybody may have
// sent it.
func (b *Bus) ServeCancels(handle func([]byte)) (stop func() error, err error) {
	return b.Watch(b.Subjects.Cancel(), handle)
}
