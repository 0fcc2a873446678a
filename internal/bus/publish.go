package bus

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Message is a message that is ready to be sent, and may be sent again.
type Message struct {
	Subject string
	// Stream holds the message once it is sent; empty for a reply.
	Stream string
	// ID is the broker's deduplication id; empty for a reply and where Conditional.
	ID string
	// Conditional: the broker takes the message only while the subject's last message is
	// the one at After; 0 means that the subject has none.
	Conditional bool
	After       uint64
	Header      nats.Header
	Data        []byte
	// Missing is the error where no subscriber takes messages for the subject; nil means ErrNoQueue.
	Missing error
	// memory is true where the message is in no file.
	memory bool
}

// isFile reports whether the message is for a stream in files.
func (m Message) isFile() bool { return m.Stream != "" && !m.memory }

// Receipt is the acknowledgement of a message.
type Receipt struct {
	// Seq is the message's sequence number in its stream; 0 for a reply.
	Seq uint64
	// Duplicate means that nothing was stored: the queue had an item of that id, or
	// the request a result, or another request the key.
	Duplicate bool
	// Disposition is what the gateway did with a reply.
	Disposition meshv1.ReplyDisposition
}

// headerSlack is the space for subject and headers of a message, in bytes.
const headerSlack = 1024

// Item returns the message that puts the envelope into its stage's or host's queue.
// ErrTooLarge means that the broker would not take it.
func (b *Bus) Item(e *envelope.Envelope) (Message, error) {
	encode := b.encode
	if e.Durability == pipeline.File {
		encode = b.encodeOnFile
	}
	data, err := encode(e)
	queue := e.Hop().Queue()
	return Message{
		Subject: b.Stage(queue, e.Durability, e.Class()), Stream: b.Stream(queue, e.Durability),
		ID: e.MsgID(), Data: data, memory: e.Durability != pipeline.File,
	}, err
}

// Forward returns the message that gives a delivered item to the host of its hop. An item in
// memory goes to that host's own queue. One on file stays in its queue, and the host gets the
// delivery: it settles that as if it had pulled the item, so the sender may not. Should the host
// die, or the message get lost, the item is redelivered. The message fails as in
// a queue; ErrNoQueue is a host that is gone.
func (b *Bus) Forward(e *envelope.Envelope, d Delivery) (Message, error) {
	m, err := b.Item(e)
	if e.Durability == pipeline.File {
		m.ID, m.Header, m.memory = "", nats.Header{deliveryHeader: {d.reply}}, true
	}
	return m, err
}

// Reply returns the message that delivers the reply to its gateway.
func (b *Bus) Reply(gateway pipeline.GatewayID, r *envelope.Reply) (Message, error) {
	data, err := b.encode(r)
	return Message{Subject: b.Subjects.Reply(gateway, r.ExecutionID), Data: data, Missing: ErrNoGateway}, err
}

// Record returns the message that makes m the last one of a subject of a stream on file, while
// that is the one at sequence number after; 0 means that there is none.
func (b *Bus) Record(subject, stream string, after uint64, m interface{ Encode() ([]byte, error) }) (Message, error) {
	data, err := b.encodeOnFile(m)
	return Message{Subject: subject, Stream: stream, Conditional: true, After: after, Data: data}, err
}

// Proto encodes a message of the contract.
type Proto struct{ proto.Message }

// Encode returns its bytes.
func (m Proto) Encode() ([]byte, error) { return proto.Marshal(m.Message) }

// encode returns the body of a message, or ErrTooLarge.
func (b *Bus) encode(e interface{ Encode() ([]byte, error) }) ([]byte, error) {
	data, err := e.Encode()
	if limit := b.MaxPayload() - headerSlack; err == nil && limit > 0 && len(data) > limit {
		return nil, fmt.Errorf("%w: %d bytes, the limit is %d (max_payload of the broker)", ErrTooLarge, len(data), limit)
	}
	return data, err
}

// maxFileMessage is what a stream on file takes, whatever the broker's max_payload: its records
// have at most 32 MiB, with subject and headers.
const maxFileMessage = 32<<20 - 64<<10

// encodeOnFile is encode for a message that a stream on file stores.
func (b *Bus) encodeOnFile(e interface{ Encode() ([]byte, error) }) ([]byte, error) {
	data, err := b.encode(e)
	if err == nil && len(data) > maxFileMessage {
		return nil, fmt.Errorf("%w: %d bytes, the limit of what is stored on file is %d", ErrTooLarge, len(data), maxFileMessage)
	}
	return data, err
}

// Publish sends the message and calls done exactly once, from another goroutine or
// before it returns: with a receipt when the queue or the gateway has it, else
// with one of this package's errors. done must not block.
func (b *Bus) Publish(m Message, done func(Receipt, error)) {
	if err := b.refuseWrite(m); err != nil {
		done(Receipt{}, err)
		return
	}
	b.publish(m, done)
}

func (b *Bus) publish(m Message, done func(Receipt, error)) {
	if b.settings.Loopback != nil && m.Stream != "" {
		err := errNoOther
		if m.isFile() {
			err = ErrNoBroker
		}
		done(Receipt{}, err)
		return
	}
	m.Missing = cmp.Or(m.Missing, ErrNoQueue)
	msg := &nats.Msg{Subject: m.Subject, Data: m.Data, Header: m.Header}
	switch {
	case m.ID != "":
		msg.Header = nats.Header{nats.MsgIdHdr: []string{m.ID}}
	case m.Conditional:
		msg.Header = nats.Header{nats.ExpectedLastSubjSeqHdr: []string{strconv.FormatUint(m.After, 10)}}
		maps.Copy(msg.Header, m.Header)
	}
	b.requests.send(msg, func(answer *nats.Msg, err error) {
		switch {
		case err != nil:
			b.recordWrite(m, err)
			done(Receipt{}, err)
		case noResponders(answer) && m.Stream != "":
			b.explainNoResponders(m.Stream, b.absent(m.Missing), func(err error) { done(Receipt{}, err) })
		default:
			receipt, err := m.receipt(answer)
			b.recordWrite(m, err)
			done(receipt, err)
		}
	})
}

// PublishAndWait publishes the message and waits for the receipt.
func (b *Bus) PublishAndWait(ctx context.Context, m Message) (Receipt, error) {
	receipt, err := await(ctx, func(done func(Receipt, error)) { b.Publish(m, done) })
	if err != nil && ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		err = fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	return receipt, err
}

// await returns what start passes to its callback, or the context's error.
func await[T any](ctx context.Context, start func(done func(T, error))) (T, error) {
	type outcome struct {
		value T
		err   error
	}
	ended := make(chan outcome, 1)
	start(func(value T, err error) { ended <- outcome{value, err} })
	select {
	case o := <-ended:
		return o.value, o.err
	case <-ctx.Done():
		var none T
		return none, ctx.Err()
	}
}

// PublishUnacked sends the message without an acknowledgement. An error means that
// it was not sent.
func (b *Bus) PublishUnacked(m Message) error {
	if err := b.nc.Publish(m.Subject, m.Data); err != nil {
		return sendError(err)
	}
	return nil
}

func (m Message) receipt(answer *nats.Msg) (Receipt, error) {
	switch {
	case noResponders(answer):
		return Receipt{}, m.Missing
	case m.Stream == "":
		return replyReceipt(answer.Data)
	default:
		return m.storedReceipt(answer.Data)
	}
}

// storedReceipt reads a stream's acknowledgement. If the queue is missing, another stream with its subjects
// may have stored the message, and no host reads it there.
func (m Message) storedReceipt(data []byte) (Receipt, error) {
	if stream, seq, ok := plainAck(data); ok && string(stream) == m.Stream {
		return Receipt{Seq: seq}, nil
	}
	var ack struct {
		Error     *apiError `json:"error"`
		Stream    string    `json:"stream"`
		Seq       uint64    `json:"seq"`
		Duplicate bool      `json:"duplicate"`
	}
	if err := json.Unmarshal(data, &ack); err != nil {
		return Receipt{}, fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	switch {
	case ack.Stream != "" && ack.Stream != m.Stream && ack.Stream != forwardedStream:
		return Receipt{}, fmt.Errorf("%w: stream %q has the queue's subjects and took the message", m.Missing, ack.Stream)
	case ack.Error != nil && ack.Error.ErrCode == codeNotLast:
		return Receipt{Duplicate: true}, nil
	case ack.Error != nil:
		if err := ack.Error.storeError(); err != nil && m.isFile() {
			return Receipt{}, err
		}
		return Receipt{}, ack.Error.classify()
	}
	return Receipt{Seq: ack.Seq, Duplicate: ack.Duplicate}, nil
}

// plainAck reads the broker's most frequent acknowledgement, such as
// {"stream":"S","seq":7}, without a JSON decoder: there is one for each hop.
// Stream names have no quotes.
func plainAck(data []byte) (stream []byte, seq uint64, ok bool) {
	rest, ok := bytes.CutPrefix(data, []byte(`{"stream":"`))
	if !ok {
		return nil, 0, false
	}
	stream, rest, _ = bytes.Cut(rest, []byte(`"`))
	rest, ok = bytes.CutPrefix(rest, []byte(`,"seq":`))
	digits, closed := bytes.CutSuffix(rest, []byte(`}`))
	if !ok || !closed {
		return nil, 0, false
	}
	seq, err := strconv.ParseUint(string(digits), 10, 64)
	return stream, seq, err == nil
}

func replyReceipt(data []byte) (Receipt, error) {
	var ack meshv1.ReplyAck
	if err := proto.Unmarshal(data, &ack); err != nil {
		return Receipt{}, fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	return Receipt{Disposition: ack.GetDisposition()}, nil
}

// requester sends messages that are acknowledged, many at a time, and passes each
// acknowledgement to its message's callback. One subscription serves all.
type requester struct {
	timeout time.Duration
	nc      link
	prefix  string
	next    atomic.Uint64
	shards  [requestShards]requestShard
	// resting is true while no expiry is due; the next request signals first.
	resting atomic.Bool
	first   chan struct{}
	quit    chan struct{}
	done    chan struct{}
}

const (
	requestShards = 16
	expireEvery   = 100 * time.Millisecond
)

type requestShard struct {
	mu      sync.Mutex
	pending map[uint64]pendingRequest
	closed  bool
}

type pendingRequest struct {
	done  func(*nats.Msg, error)
	until time.Time
}

func newRequester(timeout time.Duration) *requester {
	r := &requester{timeout: timeout, prefix: nats.NewInbox() + ".", first: make(chan struct{}, 1), quit: make(chan struct{}), done: make(chan struct{})}
	r.resting.Store(true)
	for i := range r.shards {
		r.shards[i].pending = map[uint64]pendingRequest{}
	}
	return r
}

func (r *requester) start(nc link) error {
	r.nc = nc
	sub, err := nc.subscribe(r.prefix+"*", "", r.receive)
	if err == nil {
		err = sub.SetPendingLimits(backlog, -1)
	}
	if err == nil {
		go r.expire()
	}
	return err
}

// stop waits for the expiry goroutine and fails what is pending.
func (r *requester) stop() {
	close(r.quit)
	<-r.done
	for i := range r.shards {
		r.shards[i].mu.Lock()
		r.shards[i].closed = true
		r.shards[i].mu.Unlock()
	}
	r.fail(ErrClosed, time.Time{})
}

// send publishes the message and calls done exactly once: with the answer, or with
// the reason why there is none. It may call done before it returns.
func (r *requester) send(msg *nats.Msg, done func(*nats.Msg, error)) {
	r.sendWithin(r.timeout, msg, done)
}

// sendWithin is send with a timeout of its own.
func (r *requester) sendWithin(timeout time.Duration, msg *nats.Msg, done func(*nats.Msg, error)) {
	if r.nc.IsReconnecting() {
		// The handler of the lost connection might find this message before its publish
		// has failed, and report as unknown what was never sent.
		done(nil, ErrDisconnected)
		return
	}
	token := r.next.Add(1)
	msg.Reply = r.prefix + strconv.FormatUint(token, 36)
	shard := &r.shards[token%requestShards]
	shard.mu.Lock()
	if shard.closed {
		shard.mu.Unlock()
		done(nil, ErrClosed)
		return
	}
	shard.pending[token] = pendingRequest{done: done, until: time.Now().Add(timeout)}
	shard.mu.Unlock()
	if r.resting.Load() && r.resting.CompareAndSwap(true, false) {
		r.first <- struct{}{}
	}
	if err := r.nc.PublishMsg(msg); err != nil {
		if p, ok := shard.take(token); ok {
			p.done(nil, sendError(err))
		}
	}
}

func (s *requestShard) take(token uint64) (pendingRequest, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.pending[token]
	delete(s.pending, token)
	return p, ok
}

func (r *requester) receive(msg *nats.Msg) {
	token, err := strconv.ParseUint(strings.TrimPrefix(msg.Subject, r.prefix), 36, 64)
	if err != nil {
		return
	}
	if p, ok := r.shards[token%requestShards].take(token); ok {
		p.done(msg, nil)
	}
}

func (r *requester) expire() {
	defer close(r.done)
	timer := time.NewTimer(expireEvery)
	defer timer.Stop()
	for {
		select {
		case <-r.first:
			timer.Reset(expireEvery)
		case now := <-timer.C:
			// Before the look, so that a request which comes after it signals.
			r.resting.Store(true)
			if r.fail(errTimeout, now) > 0 && r.resting.CompareAndSwap(true, false) {
				timer.Reset(expireEvery)
			}
		case <-r.quit:
			return
		}
	}
}

// fail ends the pending requests whose time is over by then, and returns how many are
// left; the zero time means all.
func (r *requester) fail(err error, by time.Time) (left int) {
	for i := range r.shards {
		out, more := r.shards[i].takeAll(by)
		for _, p := range out {
			p.done(nil, err)
		}
		left += more
	}
	return left
}

func (s *requestShard) takeAll(by time.Time) (out []pendingRequest, left int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for token, p := range s.pending {
		if by.IsZero() || by.After(p.until) {
			out = append(out, p)
			delete(s.pending, token)
		}
	}
	return out, len(s.pending)
}
