package bus

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// tooLarge is the description of codeStoreFailed for a message that never fits.
const tooLarge = "message too large"

// Error codes of the JetStream API for a reached bound.
const (
	codeAccountExceeded = 10002
	codeStoreFailed     = 10077 // maximum messages or bytes exceeded, or tooLarge
	codeNoResources     = 10023 // insufficient resources
	codeMemoryExhausted = 10028
	codeStorageExceeded = 10047
	codeTooLarge        = 10054
)

// codeNotLast: the subject's last message is not the expected one. codeInProcess: a cluster has
// another write of the subject in process, and does not know yet which message is the last.
const (
	codeNotLast   = 10071
	codeInProcess = 10164
)

// Codes of the JetStream API for a message that is not there.
const (
	codeNoMessage      = 10037
	codeNoSequence     = 10043
	codeDeleteFailed   = 10057 // of one that is not there, or of a stream that denies it
	codeStreamNotFound = 10059
)

// apiError is the error in an answer of the JetStream API.
type apiError struct {
	Code        int    `json:"code"`
	ErrCode     uint16 `json:"err_code"`
	Description string `json:"description"`
}

// errMissing means that the stream or the message does not exist.
var errMissing = errors.New("it does not exist")

func (e *apiError) classify() error {
	switch e.ErrCode {
	case codeStreamNotFound, codeNoMessage, codeNoSequence, codeDeleteFailed:
		return errMissing
	case codeStoreFailed, codeNoResources, codeMemoryExhausted, codeStorageExceeded, codeAccountExceeded:
		if e.Description == tooLarge {
			return fmt.Errorf("%w: %s: a stream on file holds up to 32 MiB a message", ErrTooLarge, e.Description)
		}
		return fmt.Errorf("%w: %s", ErrQueueFull, e.Description)
	case codeTooLarge:
		return fmt.Errorf("%w: %s", ErrTooLarge, e.Description)
	case codeInProcess:
		return ErrInProcess
	}
	return fmt.Errorf("%w: %s (%d)", ErrUnknown, e.Description, e.ErrCode)
}

// api sends a request to the JetStream API. A stream or message that does not exist
// is errMissing, a broker without JetStream ErrNoQueue.
func (b *Bus) api(ctx context.Context, name string, question, answer any) error {
	data, err := json.Marshal(question)
	if err != nil {
		return err
	}
	msg, err := b.request(ctx, "$JS.API."+name, data)
	switch {
	case err != nil:
		return err
	case noResponders(msg):
		return ErrNoQueue
	}
	var failed struct {
		Error *apiError `json:"error"`
	}
	if err = json.Unmarshal(msg.Data, &failed); err == nil {
		if failed.Error != nil {
			return failed.Error.classify()
		}
		err = json.Unmarshal(msg.Data, answer)
	}
	if err != nil {
		return fmt.Errorf("%w: answer to %s: %w", ErrUnknown, name, err)
	}
	return nil
}

// request sends a request and waits for the answer.
func (b *Bus) request(ctx context.Context, subject string, question []byte) (*nats.Msg, error) {
	return await(ctx, func(done func(*nats.Msg, error)) { b.requests.send(&nats.Msg{Subject: subject, Data: question}, done) })
}

// noResponders reports whether the broker answered that there is no subscriber.
func noResponders(msg *nats.Msg) bool {
	return len(msg.Data) == 0 && msg.Header.Get("Status") == "503"
}

// explainTimeout bounds the request why a stream did not take a message.
const explainTimeout = 500 * time.Millisecond

// explainNoResponders calls done with the reason why nobody took a message for a stream,
// or a read of it. If the stream does not exist, that is the error for a missing stream.
// Else a cluster of brokers has no leader for the stream at the moment, which is
// ErrUnknown. Only the leader of the cluster knows that a stream does not exist.
func (b *Bus) explainNoResponders(stream string, missing error, done func(error)) {
	b.explainStream(stream, func(info streamAnswer, ok bool) {
		if ok && info.Error != nil && info.Error.ErrCode == codeStreamNotFound {
			done(missing)
			return
		}
		done(fmt.Errorf("%w: stream %s has no leader", ErrUnknown, stream))
	})
}

// streamAnswer is the broker's answer about a stream.
type streamAnswer struct {
	Error   *apiError              `json:"error"`
	Cluster *jetstream.ClusterInfo `json:"cluster"`
}

// explainStream asks the broker about a stream. ok is false without an answer that can be read.
func (b *Bus) explainStream(stream string, done func(info streamAnswer, ok bool)) {
	b.requests.sendWithin(explainTimeout, &nats.Msg{Subject: "$JS.API.STREAM.INFO." + stream}, func(answer *nats.Msg, err error) {
		var info streamAnswer
		ok := err == nil && json.Unmarshal(answer.Data, &info) == nil
		done(info, ok)
	})
}

// StoredMessage is a message that a stream holds.
type StoredMessage struct {
	Seq     uint64
	Subject string
	// At is when the broker stored it.
	At     time.Time
	Header nats.Header
	Data   []byte
}

const (
	subjectHeader  = "Nats-Subject"
	timeHeader     = "Nats-Time-Stamp"
	statusNotFound = "404"
	sequenceHeader = "Nats-Sequence"
)

// Last returns the last message of a subject in a stream that allows direct
// reads: nil where there is none, ErrNoQueue where there is no stream.
func (b *Bus) Last(ctx context.Context, stream, subject string) (*StoredMessage, error) {
	return b.read(ctx, stream, b.largest(stream), "$JS.API.DIRECT.GET."+stream+"."+subject, nil)
}

// KeyValue is Last of the entry of a key in a bucket of the broker's key-value store.
func (b *Bus) KeyValue(ctx context.Context, bucket, key string) (*StoredMessage, error) {
	return b.Last(ctx, keyValueStream(bucket), keyValueEntry(bucket, key))
}

// At is Last of the message at a sequence number. Size is the length of its data in bytes, 0 where it is
// not known. Reads in flight share a budget, so more messages of a small size are read at once.
func (b *Bus) At(ctx context.Context, stream string, seq uint64, size int64) (*StoredMessage, error) {
	most := b.largest(stream)
	if size > 0 {
		most = min(most, size+maxStoredHeader)
	}
	return b.read(ctx, stream, most, "$JS.API.DIRECT.GET."+stream, fmt.Appendf(nil, `{"seq":%d}`, seq))
}

// Next is Last of the first message of a subject, whose tokens may be *, from a sequence number
// on.
func (b *Bus) Next(ctx context.Context, stream, subject string, from uint64) (*StoredMessage, error) {
	next := func(subject string, from uint64) (*StoredMessage, error) {
		return b.read(ctx, stream, b.largest(stream), "$JS.API.DIRECT.GET."+stream, fmt.Appendf(nil, `{"seq":%d,"next_by_subj":%q}`, from, subject))
	}
	// From a stream's first message on, the broker looks for a subject among all that the stream
	// has, so that message is read without one.
	out, err := next(">", from)
	if err != nil || out == nil || matches(subject, out.Subject) {
		return out, err
	}
	return next(subject, out.Seq+1)
}

// matches reports whether a subject matches a pattern with the wildcard *.
func matches(pattern, subject string) bool {
	wanted, tokens := strings.Split(pattern, "."), strings.Split(subject, ".")
	return slices.EqualFunc(wanted, tokens, func(want, token string) bool { return want == "*" || want == token })
}

// read reads a message, and holds most bytes of the budget for reads meanwhile.
func (b *Bus) read(ctx context.Context, stream string, most int64, subject string, question []byte) (*StoredMessage, error) {
	msg, err := b.requestStored(ctx, most, subject, question)
	if err != nil {
		return nil, err
	}
	switch status := msg.Header.Get("Status"); {
	case noResponders(msg):
		return await(ctx, func(done func(*StoredMessage, error)) {
			b.explainNoResponders(stream, ErrNoQueue, func(err error) { done(nil, err) })
		})
	case status == statusNotFound:
		return nil, nil
	case status != "":
		return nil, fmt.Errorf("%w: %s of stream %s: %s %s", ErrUnknown, subject, stream, status, msg.Header.Get("Description"))
	}
	seq, err := strconv.ParseUint(msg.Header.Get(sequenceHeader), 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%w: %s of stream %s has no place: %w", ErrUnknown, subject, stream, err)
	}
	if err := CheckVersion(msg.Header); err != nil {
		b.ReportUnreadable("newer", msg.Header.Get(subjectHeader), seq, "it stays", err)
		return nil, err
	}
	out := &StoredMessage{Seq: seq, Subject: msg.Header.Get(subjectHeader), Header: msg.Header, Data: msg.Data}
	out.At, _ = time.Parse(time.RFC3339Nano, msg.Header.Get(timeHeader))
	return out, nil
}

const (
	// maxReadBytes bounds the stored messages that are on their way from the broker, which
	// disconnects a client that is behind by 64 MiB.
	maxReadBytes = 32 << 20
	// smallRecord is more than a message of a stream that keeps small records.
	smallRecord = 1 << 20
	// maxStoredHeader is more than the header of a message that this program stores.
	maxStoredHeader = 32 << 10
)

// largest returns the size of the largest message that a stream may have.
func (b *Bus) largest(stream string) int64 {
	switch stream {
	case b.ClaimStream(), b.RunRecordStream(), b.JobControlStream(), b.BatchRecordStream(), b.FileDataStream():
		return smallRecord
	}
	return int64(b.MaxPayload())
}

// AcquireRead waits for the turn of the context's tenant to read a message of a stream by other means
// than this package's. The caller calls release once it has the message.
func (b *Bus) AcquireRead(ctx context.Context, stream string) (release func(), err error) {
	return b.acquireRead(ctx, b.largest(stream))
}

func (b *Bus) acquireRead(ctx context.Context, n int64) (release func(), err error) {
	tenant := budget.TenantOf(ctx)
	if err := b.reads.Acquire(ctx, tenant, n); err != nil {
		return nil, err
	}
	return func() { b.reads.Release(tenant, n) }, nil
}

// requestStored is request for a stored message, in turns by tenant. What arrives counts against the
// account of the context. The turn lasts until the message is counted or, if the
// context ends before, until it arrives: the broker sends it all the same.
func (b *Bus) requestStored(ctx context.Context, most int64, subject string, question []byte) (*nats.Msg, error) {
	release, err := b.acquireRead(ctx, most)
	if err != nil {
		return nil, err
	}
	var isTaken atomic.Bool // by the first of the caller that leaves and the message
	msg, err := await(ctx, func(done func(*nats.Msg, error)) {
		b.requests.send(&nats.Msg{Subject: subject, Data: question}, func(msg *nats.Msg, err error) {
			done(msg, err)
			if !isTaken.CompareAndSwap(false, true) {
				release()
			}
		})
	})
	if msg == nil && ctx.Err() != nil && isTaken.CompareAndSwap(false, true) {
		return nil, err
	}
	defer release()
	if err == nil {
		if err := budget.FromContext(ctx).ReserveResponse(int64(len(msg.Data))); err != nil {
			return nil, err
		}
	}
	return msg, err
}

// DeleteResult deletes a request's stored result, if it has one. It is best effort and does not
// wait for the broker, where a request with an answer costs twice as much.
func (b *Bus) DeleteResult(request pipeline.RequestID) error {
	return b.nc.Publish("$JS.API.STREAM.PURGE."+b.ResultStream(), fmt.Appendf(nil, `{"filter":%q}`, b.Result(request)))
}

// SubjectsOf returns the subjects of a stream's messages that match a filter, a hundred thousand at
// most: ErrNoQueue where there is no stream.
func (b *Bus) SubjectsOf(ctx context.Context, stream, filter string) ([]string, error) {
	var answer jetstream.StreamInfo
	err := b.streamInfo(ctx, stream, struct {
		Filter string `json:"subjects_filter"`
	}{filter}, &answer)
	if errors.Is(err, errMissing) {
		err = ErrNoQueue
	}
	return slices.Collect(maps.Keys(answer.State.Subjects)), err
}

// Backlog is the content of a queue, with the items in flight, also those that were handed
// to hosts in this process.
type Backlog struct {
	Epoch Epoch
	// Taken is the time of the snapshot on the broker's clock.
	Taken time.Time
	// Items and Bytes are all items'; Last is the number of items since the queue was
	// created. They are of one moment.
	Items, Bytes, Last uint64
	// Classes are the items by their class, a moment later.
	Classes map[pipeline.Class]uint64
	// MaxItems and MaxBytes bound the queue; less than 1 means no bound.
	MaxItems, MaxBytes int64
	// Oldest is when the oldest item came, on the broker's clock; zero for an empty queue.
	Oldest time.Time
}

// Backlog requests the content of a queue: ErrNoQueue where there is none.
func (b *Bus) Backlog(ctx context.Context, stage pipeline.StageName, d pipeline.Durability) (Backlog, error) {
	if b.settings.Loopback != nil {
		queue, err := queueHere(d)
		out := Backlog{Epoch: queue.Epoch, Taken: time.Now(), Classes: map[pipeline.Class]uint64{}}
		b.settings.Local.addTo(stage, &out)
		return out, err
	}
	var answer jetstream.StreamInfo
	err := b.streamInfo(ctx, b.Stream(stage, d), struct {
		Filter string `json:"subjects_filter"`
	}{b.Stage(stage, d, "*")}, &answer)
	switch {
	case errors.Is(err, errMissing):
		return Backlog{}, ErrNoQueue
	case err != nil:
		return Backlog{}, fmt.Errorf("queue of stage %s: %w", stage, err)
	}
	out := Backlog{
		Epoch: epochOf(&answer), Taken: answer.TimeStamp, Classes: make(map[pipeline.Class]uint64, pipeline.ClassCount),
		Items: answer.State.Msgs, Bytes: answer.State.Bytes,
		Last: answer.State.LastSeq, MaxItems: answer.Config.MaxMsgs, MaxBytes: answer.Config.MaxBytes,
	}
	if out.Items > 0 {
		out.Oldest = answer.State.FirstTime
	}
	for _, class := range pipeline.Classes() {
		out.Classes[class] = answer.State.Subjects[b.Stage(stage, d, class)]
	}
	if b.settings.Local != nil && d == pipeline.Memory {
		b.settings.Local.addTo(stage, &out)
	}
	return out, nil
}

// DeleteQueued deletes an item from its queue, at the sequence number of its
// receipt, and reports whether it was there. A queued item is then never
// delivered. An item in flight on a host is finished there: only Cancel reaches
// it.
func (b *Bus) DeleteQueued(ctx context.Context, m Message, seq uint64) (bool, error) {
	// After a memory queue was lost with its broker, another item may be there.
	stored, err := b.messageAt(ctx, m.Stream, seq)
	if errors.Is(err, errMissing) || err == nil && !bytes.Contains(stored.Header, []byte("\r\n"+nats.MsgIdHdr+": "+m.ID+"\r\n")) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return b.Delete(ctx, m.Stream, seq)
}

// apiMessage is a message in an answer of the JetStream API.
type apiMessage struct {
	Header []byte `json:"hdrs"`
	Data   []byte `json:"data"`
}

// messageAt returns the message at a sequence number of a stream.
func (b *Bus) messageAt(ctx context.Context, stream string, seq uint64) (apiMessage, error) {
	var answer struct {
		Message apiMessage `json:"message"`
	}
	err := b.api(ctx, "STREAM.MSG.GET."+stream, struct {
		Seq uint64 `json:"seq"`
	}{seq}, &answer)
	return answer.Message, err
}

// Delete removes a message from a stream, and reports whether it was there.
func (b *Bus) Delete(ctx context.Context, stream string, seq uint64) (bool, error) {
	var answer struct {
		Success bool `json:"success"`
	}
	err := b.api(ctx, "STREAM.MSG.DELETE."+stream, struct {
		Seq     uint64 `json:"seq"`
		NoErase bool   `json:"no_erase"`
	}{seq, true}, &answer)
	if errors.Is(err, errMissing) {
		return false, nil
	}
	return answer.Success, err
}

// Exhausted is an item that the broker delivers no more: it was delivered
// MaxDeliver times and never settled. It stays in its queue until it is removed,
// or too old.
type Exhausted struct {
	Data       []byte
	Deliveries int

	stream string
	seq    uint64
}

// exhaustedTimeout bounds the request for an item.
const exhaustedTimeout = 2 * time.Second

// ServeExhausted passes each exhausted item of the stage's memory queue to one of
// the hosts that serve it, until the returned function is called. On file there
// are none. The handler may block.
func (b *Bus) ServeExhausted(stage pipeline.StageName, handle func(Exhausted)) (stop func() error, err error) {
	stream := b.Stream(stage, pipeline.Memory)
	advisories := "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES." + stream + ".*"
	return b.subscribe(advisories, aliveGroup, -1, func(msg *nats.Msg) {
		g, err := b.fetchExhausted(stream, msg.Data)
		if err != nil {
			b.settings.Logger.Debug("an item that the broker gave up on is not there", "stage", stage, "error", err)
			return
		}
		handle(g)
	})
}

// fetchExhausted fetches the item of the broker's advisory.
func (b *Bus) fetchExhausted(stream string, advisory []byte) (Exhausted, error) {
	var about struct {
		Seq        uint64 `json:"stream_seq"`
		Deliveries int    `json:"deliveries"`
	}
	if err := json.Unmarshal(advisory, &about); err != nil {
		return Exhausted{}, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), exhaustedTimeout)
	defer cancel()
	stored, err := b.messageAt(ctx, stream, about.Seq)
	return Exhausted{Data: stored.Data, Deliveries: about.Deliveries, stream: stream, seq: about.Seq}, err
}

// Remove deletes an exhausted item from its queue.
func (b *Bus) Remove(ctx context.Context, g Exhausted) error {
	_, err := b.Delete(ctx, g.stream, g.seq)
	return err
}
