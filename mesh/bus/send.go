package bus

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Message is a message that is ready to be sent, and may be sent again.
type Message struct {
	subject string
	// stream holds the message once it is sent; empty for a reply.
	stream string
	// id is what the broker tells duplicates by; empty for a reply and for what
	// is placed.
	id string
	// placed says that the broker takes the message only while the subject's last
	// is the one at place after; 0 means that there is none.
	placed bool
	after  uint64
	data   []byte
	// missing is the error where nobody takes messages for the subject.
	missing error
}

// Size returns the bytes of the message's body.
func (m Message) Size() int { return len(m.data) }

// Receipt says what became of a message that was acknowledged.
type Receipt struct {
	// Seq is the item's place in its queue; 0 for a reply.
	Seq uint64
	// Duplicate says that the queue had an item of that id, or that somebody else
	// was quicker to store the request's result or claim the key, and nothing was
	// stored.
	Duplicate bool
	// Disposition is what the gateway did with a reply.
	Disposition meshv1.ReplyDisposition
}

// headerSlack is what subject and headers of a message may take.
const headerSlack = 1024

// Item returns the message that puts the envelope into its stage's queue.
// ErrTooLarge says that the broker would not take it.
func (b *Bus) Item(e *envelope.Envelope) (Message, error) {
	data, err := b.encode(e)
	if err != nil {
		return Message{}, err
	}
	return Message{
		subject: b.Next(e.Hop(), e.Durability, e.Class()),
		stream:  b.Stream(e.Hop().Stage, e.Durability),
		id:      e.MsgID(),
		data:    data,
		missing: ErrNoQueue,
	}, nil
}

// Reply returns the message that takes the reply to its gateway.
func (b *Bus) Reply(gateway pipeline.GatewayID, r *envelope.Reply) (Message, error) {
	data, err := b.encode(r)
	if err != nil {
		return Message{}, err
	}
	return Message{subject: b.Subjects.Reply(gateway, r.ExecutionID), data: data, missing: ErrNoGateway}, nil
}

// encode returns the bytes of a message's body, which the broker must take.
func (b *Bus) encode(e interface{ Encode() ([]byte, error) }) ([]byte, error) {
	data, err := e.Encode()
	if err != nil {
		return nil, err
	}
	if limit := b.MaxPayload() - headerSlack; limit > 0 && len(data) > limit {
		return nil, fmt.Errorf("%w: %d bytes, the limit is %d (max_payload of the broker)", ErrTooLarge, len(data), limit)
	}
	return data, nil
}

// Send sends the message and calls done exactly once, from another goroutine or
// before it returns: with a receipt when the queue or the gateway has it, else
// with one of this package's errors. done must not block.
func (b *Bus) Send(m Message, done func(Receipt, error)) {
	msg := &nats.Msg{Subject: m.subject, Data: m.data}
	switch {
	case m.id != "":
		msg.Header = nats.Header{nats.MsgIdHdr: []string{m.id}}
	case m.placed:
		msg.Header = nats.Header{nats.ExpectedLastSubjSeqHdr: []string{strconv.FormatUint(m.after, 10)}}
	}
	b.requests.send(msg, func(answer *nats.Msg, err error) {
		if err != nil {
			done(Receipt{}, err)
			return
		}
		done(m.receipt(answer))
	})
}

// SendAndWait sends the message and waits until it is stored, or was before.
func (b *Bus) SendAndWait(ctx context.Context, m Message) (Receipt, error) {
	type outcome struct {
		receipt Receipt
		err     error
	}
	sent := make(chan outcome, 1)
	b.Send(m, func(r Receipt, err error) { sent <- outcome{r, err} })
	select {
	case o := <-sent:
		return o.receipt, o.err
	case <-ctx.Done():
		return Receipt{}, fmt.Errorf("%w: %w", ErrUnknown, ctx.Err())
	}
}

func (m Message) receipt(answer *nats.Msg) (Receipt, error) {
	switch {
	case noResponders(answer):
		return Receipt{}, m.missing
	case m.stream == "":
		return replyReceipt(answer.Data)
	default:
		return storedReceipt(answer.Data)
	}
}

func storedReceipt(data []byte) (Receipt, error) {
	if seq, ok := plainSeq(data); ok {
		return Receipt{Seq: seq}, nil
	}
	var ack struct {
		Error     *apiError `json:"error"`
		Seq       uint64    `json:"seq"`
		Duplicate bool      `json:"duplicate"`
	}
	if err := json.Unmarshal(data, &ack); err != nil {
		return Receipt{}, fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	switch {
	case ack.Error != nil && ack.Error.ErrCode == codeNotLast:
		return Receipt{Duplicate: true}, nil
	case ack.Error != nil:
		return Receipt{}, ack.Error.classify()
	}
	return Receipt{Seq: ack.Seq, Duplicate: ack.Duplicate}, nil
}

// plainSeq reads what the broker says of nearly every message, such as
// {"stream":"S","seq":7}, where it says nothing else: one comes for each hop. Stream
// names have no quotes.
func plainSeq(data []byte) (seq uint64, ok bool) {
	rest, ok := bytes.CutPrefix(data, []byte(`{"stream":"`))
	if !ok {
		return 0, false
	}
	_, rest, _ = bytes.Cut(rest, []byte(`"`))
	rest, ok = bytes.CutPrefix(rest, []byte(`,"seq":`))
	digits, closed := bytes.CutSuffix(rest, []byte(`}`))
	if !ok || !closed {
		return 0, false
	}
	seq, err := strconv.ParseUint(string(digits), 10, 64)
	return seq, err == nil
}

func replyReceipt(data []byte) (Receipt, error) {
	var ack meshv1.ReplyAck
	if err := proto.Unmarshal(data, &ack); err != nil {
		return Receipt{}, fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	return Receipt{Disposition: ack.GetDisposition()}, nil
}

// SendOnce sends the message without asking for an acknowledgement. An error
// says that it was not sent.
func (b *Bus) SendOnce(m Message) error {
	if err := b.nc.Publish(m.subject, m.data); err != nil {
		return sendError(err)
	}
	return nil
}

// ask sends a question and waits for its answer.
func (b *Bus) ask(ctx context.Context, subject string, question []byte) (*nats.Msg, error) {
	type answer struct {
		msg *nats.Msg
		err error
	}
	ch := make(chan answer, 1)
	b.requests.send(&nats.Msg{Subject: subject, Data: question}, func(msg *nats.Msg, err error) { ch <- answer{msg, err} })
	select {
	case a := <-ch:
		return a.msg, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
