package bus

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Message is a message that is ready to be sent, and may be sent again.
type Message struct {
	subject string
	// stream holds the message once it is sent; empty for a reply.
	stream string
	// id is the broker's deduplication id; empty for a reply and where conditional.
	id string
	// conditional: the broker takes the message only while the subject's last message is
	// the one at expectedLastSeq; 0 means that the subject has none.
	conditional     bool
	expectedLastSeq uint64
	header          nats.Header
	data            []byte
	// missing is the error where no subscriber takes messages for the subject.
	missing error
	// memory is true where the message is in no file.
	memory bool
}

// isFile reports whether the message is for a stream in files.
func (m Message) isFile() bool { return m.stream != "" && !m.memory }

// Size returns the bytes of the message's body.
func (m Message) Size() int { return len(m.data) }

// Body returns the message's encoded body.
func (m Message) Body() []byte { return m.data }

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
		subject: b.Stage(queue, e.Durability, e.Class()), stream: b.Stream(queue, e.Durability),
		id: e.MsgID(), data: data, missing: ErrNoQueue, memory: e.Durability != pipeline.File,
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
		m.id, m.header, m.memory = "", nats.Header{deliveryHeader: {d.reply}}, true
	}
	return m, err
}

// Reply returns the message that delivers the reply to its gateway.
func (b *Bus) Reply(gateway pipeline.GatewayID, r *envelope.Reply) (Message, error) {
	data, err := b.encode(r)
	return Message{subject: b.Subjects.Reply(gateway, r.ExecutionID), data: data, missing: ErrNoGateway}, err
}

// Result returns the message that stores a request's final reply, unless it has
// one.
func (b *Bus) Result(r *envelope.Result) (Message, error) {
	data, err := b.encodeOnFile(r)
	return Message{
		subject: b.Subjects.Result(r.Reply.RequestID), stream: b.ResultStream(), conditional: true, header: headerOf(r.Tenant), data: data, missing: ErrNoResults,
	}, err
}

// Claim returns the message that makes the claim the record of its key, while the
// record is the one at sequence number after; 0 means that there is none.
func (b *Bus) Claim(key string, c *envelope.Claim, after uint64) (Message, error) {
	data, err := b.encode(c)
	return Message{
		subject: b.Subjects.Claim(c.Tenant, c.Pipeline, key), stream: b.ClaimStream(),
		conditional: true, expectedLastSeq: after, header: headerOf(c.Tenant), data: data, missing: ErrNoClaims,
	}, err
}

// JobHeader is what orders a job in its queue, and its size.
type JobHeader struct {
	Deadline time.Time
	Priority int32
	// Tokens are what the job may use of a language model; 0 where that is not known.
	Tokens int64
	// Size is the job's, in bytes.
	Size int64
	// Attributes are the job's, for limits.
	Attributes map[string]string
}

const (
	jobDeadlineHeader = "Job-Deadline"
	jobPriorityHeader = "Job-Priority"
	jobTokensHeader   = "Job-Tokens"
	// jobAttributesHeader has the attributes as the query of a URL.
	jobAttributesHeader = "Job-Attributes"
)

func (h JobHeader) encode() nats.Header {
	out := nats.Header{jobDeadlineHeader: {strconv.FormatInt(h.Deadline.UnixNano(), 10)}}
	if h.Priority != 0 {
		out[jobPriorityHeader] = []string{strconv.Itoa(int(h.Priority))}
	}
	if h.Tokens != 0 {
		out[jobTokensHeader] = []string{strconv.FormatInt(h.Tokens, 10)}
	}
	if len(h.Attributes) > 0 {
		values := url.Values{}
		for name, value := range h.Attributes {
			values.Set(name, value)
		}
		out[jobAttributesHeader] = []string{values.Encode()}
	}
	return out
}

// DecodeJobHeader reads the header of a job's message; false where it is none.
func DecodeJobHeader(h nats.Header) (out JobHeader, ok bool) {
	number := func(name string) int64 {
		n, _ := strconv.ParseInt(h.Get(name), 10, 64)
		return n
	}
	deadline := number(jobDeadlineHeader)
	out = JobHeader{Deadline: time.Unix(0, deadline), Priority: int32(number(jobPriorityHeader)), Tokens: max(0, number(jobTokensHeader)), Size: PayloadSize(h)}
	if text := h.Get(jobAttributesHeader); text != "" {
		values, _ := url.ParseQuery(text)
		out.Attributes = map[string]string{}
		for name := range values {
			out.Attributes[name] = values.Get(name)
		}
	}
	return out, deadline > 0
}

// PayloadSize returns the size of a payload that the broker has left out, in bytes.
func PayloadSize(h nats.Header) int64 {
	n, _ := strconv.ParseInt(h.Get(nats.MsgSize), 10, 64)
	return n
}

// stateHeader is the state of a job's record, so that readers can leave out the ends.
const stateHeader = "Job-State"

// Job returns the message that puts a job into its queue, unless it is there.
func (b *Bus) Job(id pipeline.JobID, tenant string, h JobHeader, job proto.Message) (Message, error) {
	m, err := b.stored(b.Subjects.Job(id, tenant), b.JobStream(id.Queue), 0, job)
	m.header = h.encode()
	return m, err
}

// JobRecord returns the message that makes r the record of a job, while its record is the one
// at sequence number after; 0 means that there is none.
func (b *Bus) JobRecord(id pipeline.JobID, tenant string, after uint64, r *meshv1.JobRecord) (Message, error) {
	m, err := b.stored(b.Subjects.JobRecord(id, tenant), b.JobRecordStream(), after, r)
	m.header = nats.Header{stateHeader: {strconv.Itoa(int(r.GetJob().GetState()))}}
	return m, err
}

// JobChunks returns the message that keeps a chunk of a job's answer.
func (b *Bus) JobChunks(id pipeline.JobID, tenant string, chunk *inferencev1.JobChunk) (Message, error) {
	m, err := b.stored(b.Subjects.JobChunks(id, tenant), b.JobChunkStream(), 0, chunk)
	m.conditional = false
	return m, err
}

// RecordState returns the state that the header of a record has.
func RecordState(h nats.Header) inferencev1.JobState {
	n, _ := strconv.Atoi(h.Get(stateHeader))
	return inferencev1.JobState(n)
}

// JobControl returns the message that sets a value that dispatchers share, while the value is
// the one at sequence number after; 0 means that there is none.
func (b *Bus) JobControl(kind, name string, after uint64, value []byte) Message {
	return Message{subject: b.Subjects.JobControl(kind, name), stream: b.JobControlStream(), conditional: true, expectedLastSeq: after, data: value, missing: ErrNoQueue}
}

// BatchRecord returns the message that makes data the record of a batch or a file, while its
// record is the one at sequence number after; 0 means that there is none.
func (b *Bus) BatchRecord(kind, tenant, id string, after uint64, data []byte) Message {
	return Message{subject: b.Subjects.BatchRecord(kind, tenant, id), stream: b.BatchRecordStream(), conditional: true, expectedLastSeq: after, data: data, missing: ErrNoQueue}
}

// FileData returns the message with the next bytes of a tenant's file.
func (b *Bus) FileData(id, tenant string, data []byte) Message {
	return Message{subject: b.Subjects.FileData(id), stream: b.FileDataStream(), header: headerOf(tenant), data: data, missing: ErrNoQueue}
}

// headerOf returns the header that names a tenant; nil for none.
func headerOf(tenant string) nats.Header {
	if tenant == "" {
		return nil
	}
	return nats.Header{tenantHeader: {tenant}}
}

func (b *Bus) stored(subject, stream string, after uint64, m proto.Message) (Message, error) {
	data, err := b.encodeOnFile(protoMessage{m})
	return Message{subject: subject, stream: stream, conditional: true, expectedLastSeq: after, data: data, missing: ErrNoQueue}, err
}

// protoMessage encodes a message of the contract.
type protoMessage struct{ proto.Message }

// Encode returns its bytes.
func (m protoMessage) Encode() ([]byte, error) { return proto.Marshal(m.Message) }

// DeadLetter returns the message that stores a dead letter about a delivery. Its
// deduplication id is the delivery's, so a repeated one is not stored twice.
func (b *Bus) DeadLetter(d *envelope.DeadLetter, of Delivery) (Message, error) {
	data, err := b.encodeOnFile(d)
	return Message{
		subject: b.DeadLetterSubject(d.Stage), stream: b.DeadLetterStream(), id: of.key(), data: data, missing: ErrNoDeadLetters,
	}, err
}

// DeadJob returns the message that stores a dead letter about a message in a queue of jobs. A
// repeated one of the same ID is not stored twice.
func (b *Bus) DeadJob(d *envelope.DeadLetter, id string) (Message, error) {
	data, err := b.encodeOnFile(d)
	return Message{subject: b.DeadJobSubject(d.Queue), stream: b.DeadLetterStream(), id: id, data: data, missing: ErrNoDeadLetters}, err
}

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
	if b.settings.Loopback != nil && m.stream != "" {
		err := errNoOther
		if m.isFile() {
			err = ErrNoBroker
		}
		done(Receipt{}, err)
		return
	}
	msg := &nats.Msg{Subject: m.subject, Data: m.data, Header: m.header}
	switch {
	case m.id != "":
		msg.Header = nats.Header{nats.MsgIdHdr: []string{m.id}}
	case m.conditional:
		msg.Header = nats.Header{nats.ExpectedLastSubjSeqHdr: []string{strconv.FormatUint(m.expectedLastSeq, 10)}}
		maps.Copy(msg.Header, m.header)
	}
	b.requests.send(msg, func(answer *nats.Msg, err error) {
		switch {
		case err != nil:
			b.recordWrite(m, err)
			done(Receipt{}, err)
		case noResponders(answer) && m.stream != "":
			b.explainNoResponders(m.stream, m.missing, func(err error) { done(Receipt{}, err) })
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
	if err := b.nc.Publish(m.subject, m.data); err != nil {
		return sendError(err)
	}
	return nil
}

func (m Message) receipt(answer *nats.Msg) (Receipt, error) {
	switch {
	case noResponders(answer):
		return Receipt{}, m.missing
	case m.stream == "":
		return replyReceipt(answer.Data)
	default:
		return storedReceipt(answer.Data, m.isFile())
	}
}

func storedReceipt(data []byte, isFile bool) (Receipt, error) {
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
		if err := ack.Error.storeError(); err != nil && isFile {
			return Receipt{}, err
		}
		return Receipt{}, ack.Error.classify()
	}
	return Receipt{Seq: ack.Seq, Duplicate: ack.Duplicate}, nil
}

// plainSeq reads the broker's most frequent acknowledgement, such as
// {"stream":"S","seq":7}, without a JSON decoder: there is one for each hop.
// Stream names have no quotes.
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
