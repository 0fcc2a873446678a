package store

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/stagemesh/stagemesh/internal/budget"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Errors of DeadLetters. All other errors have a *fault.Fault in their chain, or
// are the context's: BROKER_UNAVAILABLE at once where the broker is known to be
// disconnected, and within seconds where it does not answer.
var (
	// ErrNoDeadLetter means that there is no dead letter of that number (any more).
	ErrNoDeadLetter = errors.New("no such dead letter")
	// ErrUnreadable means that the message of that number is not a dead letter.
	ErrUnreadable = errors.New("what is stored there is no dead letter")
	// ErrNotReplayable means that the dead letter holds no item that the stage's
	// hosts would take.
	ErrNotReplayable = errors.New("the dead letter holds no item to run again")
)

// DeadLetter is a dead letter as it is stored.
type DeadLetter struct {
	// Seq is the dead letter's number in its mesh.
	Seq uint64
	*envelope.DeadLetter
}

// DeadLetters keeps the items that the mesh gave up on, so that an operator can
// list, replay or delete them.
//
//	m, err := deadLetters.DeadLetter(dead, delivery)   // by hosts: sent, acknowledged, then Term
//	page, err := deadLetters.List(ctx, store.DeadLetterQuery{Stage: "classify"})
//	dead, err := deadLetters.Get(ctx, seq)
//	replayed, err := deadLetters.Replay(ctx, seq, nil)  // a new execution of a new request
//	err = deadLetters.Delete(ctx, seq)
//
// A stream at its bound drops the oldest, because a host must always be able to
// dead-letter an item. Messages that are no dead letter are listed by number and
// can be deleted.
type DeadLetters struct{ stream }

// deadLetterDuplicates is how long a host may take to receive the acknowledgement
// of its dead letter.
const deadLetterDuplicates = 2 * time.Minute

// NewDeadLetters returns the store of dead letters. It makes no call to the
// broker.
func NewDeadLetters(b *bus.Bus, s Settings) *DeadLetters {
	d := &DeadLetters{newStream(b, "dead letters", b.DeadLetterStream(), b.DeadLetterSubject("*"), s, Settings{Retention: DefaultDeadLetterRetention, MaxBytes: DefaultMaxBytes})}
	d.config.Description, d.config.Discard, d.config.MaxMsgsPerSubject = "messages that the mesh gave up on", jetstream.DiscardOld, 0
	d.config.Duplicates = min(deadLetterDuplicates, d.config.MaxAge)
	return d
}

// DeadLetter returns the message that stores a dead letter about a delivery, without the item where
// that would make it too large. A repeated one of the same delivery is not stored twice.
func (s *DeadLetters) DeadLetter(dead *envelope.DeadLetter, of bus.Delivery) (bus.Message, error) {
	m, err := s.newMessage(s.bus.DeadLetterSubject(dead.Stage), of.Key(), dead)
	if errors.Is(err, bus.ErrTooLarge) {
		dead.Fault = dead.Fault.WithMetadata("item", fmt.Sprintf("left out: %d bytes", len(dead.Item)))
		dead.Item = nil
		m, err = s.newMessage(s.bus.DeadLetterSubject(dead.Stage), of.Key(), dead)
	}
	return m, err
}

// Get returns one dead letter: ErrNoDeadLetter where there is none of that
// number, ErrUnreadable where the message of that number is none.
func (s *DeadLetters) Get(ctx context.Context, seq uint64) (DeadLetter, error) {
	stream, err := s.open(ctx)
	if err != nil {
		return DeadLetter{}, err
	}
	msg, err := s.message(ctx, stream, seq)
	if err != nil {
		return DeadLetter{}, err
	}
	dead, err := envelope.DecodeDeadLetter(msg.Data)
	if err != nil {
		return DeadLetter{}, fmt.Errorf("%w: %w", ErrUnreadable, err)
	}
	return DeadLetter{Seq: msg.Sequence, DeadLetter: dead}, nil
}

// Delete deletes a dead letter, or a message in its place that is none.
func (s *DeadLetters) Delete(ctx context.Context, seq uint64) error {
	stream, err := s.open(ctx)
	if err != nil {
		return err
	}
	if _, err := s.message(ctx, stream, seq); err != nil {
		return err
	}
	bounded, cancel := context.WithTimeout(ctx, deadLetterTimeout)
	defer cancel()
	err = stream.DeleteMsg(bounded, seq)
	if errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
		// The client does not return the cause: another caller may have deleted it.
		if _, missing := s.message(ctx, stream, seq); errors.Is(missing, ErrNoDeadLetter) {
			return ErrNoDeadLetter
		}
	}
	return s.unavailable(ctx, err)
}

// deadLetterTimeout bounds one request to the broker.
const deadLetterTimeout = 5 * time.Second

func (s *DeadLetters) open(ctx context.Context) (jetstream.Stream, error) {
	if !s.bus.Connected() {
		return nil, s.unavailable(ctx, bus.ErrDisconnected)
	}
	bounded, cancel := context.WithTimeout(ctx, deadLetterTimeout)
	defer cancel()
	stream, err := s.bus.JetStream().Stream(bounded, s.bus.DeadLetterStream())
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, ErrNoDeadLetter
	}
	return stream, s.unavailable(ctx, err)
}

// message returns the message of that number, or ErrNoDeadLetter.
func (s *DeadLetters) message(ctx context.Context, stream jetstream.Stream, seq uint64, options ...jetstream.GetMsgOpt) (*jetstream.RawStreamMsg, error) {
	if seq == 0 {
		// Sequence numbers start at 1; the broker rejects 0 as a malformed request.
		return nil, ErrNoDeadLetter
	}
	release, err := s.bus.AcquireRead(ctx, s.bus.DeadLetterStream())
	if err != nil {
		return nil, err
	}
	defer release()
	bounded, cancel := context.WithTimeout(ctx, deadLetterTimeout)
	defer cancel()
	msg, err := stream.GetMsg(bounded, seq, options...)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, ErrNoDeadLetter
	}
	return msg, s.unavailable(ctx, err)
}

// unavailable turns an error of the broker or of its client into a fault. The end
// of the caller's context stays the context's error.
func (s *DeadLetters) unavailable(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	}
	if f := bus.StoreFault(err); f != nil {
		return f
	}
	return fault.New(fault.BrokerUnavailable, "the broker does not answer about dead letters").
		WithRetryAfter(budget.RetryAfter).Caused(s.wrap(err))
}

// DeadLetterQuery selects the dead letters to list.
type DeadLetterQuery struct {
	// Stage, or queue of jobs, whose dead letters to list; both empty means all.
	Stage pipeline.StageName
	Queue pipeline.QueueName
	// From is the least number to list.
	From uint64
	// Limit is the most dead letters to list; 0 means DefaultPageSize, and
	// MaxPageSize is the most.
	Limit int
}

// Bounds of a page.
const (
	DefaultPageSize = 50
	// MaxPageSize bounds the messages that one call reads, dead letters or not.
	MaxPageSize = 1000
	// MaxPageBytes ends a page, of jobs too; the last dead letter may be beyond it.
	MaxPageBytes = 32 << 20
)

// DeadLetterPage is a part of a list, the oldest first.
type DeadLetterPage struct {
	DeadLetters []DeadLetter
	// Next is the number to go on from; 0 at the end.
	Next uint64
	// Unreadable are the numbers of messages in between that are no dead letters.
	Unreadable []uint64

	bytes int
}

// List returns dead letters from the query's first number on.
func (s *DeadLetters) List(ctx context.Context, q DeadLetterQuery) (DeadLetterPage, error) {
	stream, err := s.open(ctx)
	if errors.Is(err, ErrNoDeadLetter) {
		return DeadLetterPage{}, nil
	}
	if err != nil {
		return DeadLetterPage{}, err
	}
	limit := min(q.Limit, MaxPageSize)
	if q.Limit <= 0 {
		limit = DefaultPageSize
	}
	subject := s.bus.DeadLetterSubject("*")
	switch {
	case q.Queue != "":
		subject = s.bus.DeadJobSubject(q.Queue)
	case q.Stage != "":
		subject = s.bus.DeadLetterSubject(q.Stage)
	}
	var page DeadLetterPage
	for seq := max(1, q.From); ; {
		msg, err := s.message(ctx, stream, seq, jetstream.WithGetMsgSubject(subject))
		if errors.Is(err, ErrNoDeadLetter) {
			return page, nil
		}
		if err != nil {
			return page, err
		}
		if page.isFull(limit) {
			page.Next = msg.Sequence
			return page, nil
		}
		page.add(msg)
		seq = msg.Sequence + 1
	}
}

func (p *DeadLetterPage) isFull(limit int) bool {
	return len(p.DeadLetters) == limit || len(p.DeadLetters)+len(p.Unreadable) == MaxPageSize || p.bytes >= MaxPageBytes
}

func (p *DeadLetterPage) add(msg *jetstream.RawStreamMsg) {
	p.bytes += len(msg.Data)
	dead, err := envelope.DecodeDeadLetter(msg.Data)
	if err != nil {
		p.Unreadable = append(p.Unreadable, msg.Sequence)
		return
	}
	p.DeadLetters = append(p.DeadLetters, DeadLetter{Seq: msg.Sequence, DeadLetter: dead})
}

// Replayed identifies the request that a replay made.
type Replayed struct {
	RequestID   pipeline.RequestID
	ExecutionID pipeline.ExecutionID
	Deadline    time.Time
	// JobID is set instead of them for a job.
	JobID string
}

// Replay puts the dead letter's item into its queue again, at the step where it
// was dead-lettered, as a new execution of a new request with as much time as the
// first had, and deletes the dead letter. Its reply is a stored result, because
// no caller waits. Repeated soon after a failure it does not run the item twice.
//
// A job is submitted again, under a new ID. A body other than nil replaces the payload, which is
// the body of a call of HTTP or a single blob.
//
// An error beside a Replayed that has a request or a job says that it is queued and
// the dead letter still there.
func (s *DeadLetters) Replay(ctx context.Context, seq uint64, body []byte) (Replayed, error) {
	dead, err := s.Get(ctx, seq)
	if errors.Is(err, ErrUnreadable) {
		return Replayed{}, fmt.Errorf("%w: %w", ErrNotReplayable, err)
	}
	if err != nil {
		return Replayed{}, err
	}
	if dead.Queue != "" {
		return s.replayJob(ctx, dead, body)
	}
	item, err := dead.Replayable()
	if err != nil {
		return Replayed{}, err
	}
	if body != nil {
		replaced := ItemBody(item)
		if replaced == nil {
			return Replayed{}, errNoBody()
		}
		*replaced = body
	}
	if err := s.bus.ClockError(); err != nil {
		return Replayed{}, fault.Newf(fault.NoCapacity, "no dead letter can be replayed: %w", err).WithRetryAfter(budget.RetryAfter)
	}
	renew(item, dead, body, time.Now())
	if err := s.requeue(ctx, item); err != nil {
		return Replayed{}, err
	}
	return Replayed{RequestID: item.RequestID, ExecutionID: item.ExecutionID, Deadline: item.Deadline}, s.deleteReplayed(ctx, seq)
}

func (s *DeadLetters) deleteReplayed(ctx context.Context, seq uint64) error {
	if err := s.Delete(ctx, seq); err != nil && !errors.Is(err, ErrNoDeadLetter) {
		return fmt.Errorf("replayed, but the dead letter is still there: %w", err)
	}
	return nil
}

// Replayable returns the dead letter's item, or ErrNotReplayable: the message is
// no item, or is one that the hosts of the stage would refuse.
func (l DeadLetter) Replayable() (*envelope.Envelope, error) {
	item, err := envelope.Decode(l.Item)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrNotReplayable, err)
	case item.Mesh != l.Mesh:
		return nil, fmt.Errorf("%w: it is of mesh %s", ErrNotReplayable, item.Mesh)
	case item.Hop().Stage != l.Stage:
		return nil, fmt.Errorf("%w: it is for stage %s", ErrNotReplayable, item.Hop().Stage)
	case !item.AdmittedAt.Before(item.Deadline):
		return nil, fmt.Errorf("%w: it never had any time", ErrNotReplayable)
	}
	return item, nil
}

// requeue sends the item to its queue. A fault names the stage and step, unless
// the broker itself is disconnected, and when to retry.
func (s *DeadLetters) requeue(ctx context.Context, item *envelope.Envelope) error {
	m, err := s.bus.Item(item)
	if err == nil {
		_, err = s.bus.PublishAndWait(ctx, m)
	}
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return bus.Rejection(err, item.Hop())
}

// digestOf is "" without a body, so that replays of several bodies have several IDs.
func digestOf(body []byte) string {
	if body == nil {
		return ""
	}
	return fmt.Sprintf("/%x", sha256.Sum256(body))
}

// renew makes the item a new request. Its ids are made from the dead letter's and the new body, so
// that the broker drops a repeated replay as a duplicate.
func renew(item *envelope.Envelope, dead DeadLetter, body []byte, now time.Time) {
	timeout := item.Timeout()
	space := uuid.NewSHA1(uuid.NameSpaceOID, []byte(dead.Mesh))
	id := func(kind string) string {
		return uuid.NewSHA1(space, fmt.Appendf(nil, "%s/%s/%d/%d%s", kind, item.ExecutionID, dead.DeadLetteredAt.UnixNano(), dead.Seq, digestOf(body))).String()
	}
	item.RequestID = pipeline.RequestID(id("request"))
	item.ExecutionID = pipeline.ExecutionID(id("execution"))
	item.Generation = 0
	item.Hop().Host, item.Hop().Visited = "", nil
	item.IdempotencyKey, item.TakesChunks = "", false
	item.Durability = pipeline.File
	item.AdmittedAt, item.Deadline = now, now.Add(timeout)
}

func (s *DeadLetters) newMessage(subject, id string, d *envelope.DeadLetter) (bus.Message, error) {
	m, err := s.bus.Record(subject, s.config.Name, 0, d)
	m.Conditional, m.ID, m.Missing = false, id, bus.ErrNoDeadLetters
	if err == nil && int64(len(m.Data)) > s.maxMessage() { // it would take the place of others
		err = fmt.Errorf("%w: %d bytes", bus.ErrTooLarge, len(m.Data))
	}
	return m, err
}

// PutJob stores a dead letter about the message at a number of a queue of jobs, with that
// message as its item if it fits. It may be repeated. Where the message is none any more,
// there is no dead letter.
func (s *DeadLetters) PutJob(ctx context.Context, seq uint64, d envelope.DeadLetter) error {
	msg, err := s.bus.At(ctx, s.bus.JobStream(d.Queue), seq, 0)
	if err != nil || msg == nil {
		return s.wrap(err)
	}
	d.Item, d.QueuedAt, d.DeadLetteredAt, d.Durability = msg.Data, msg.At, time.Now(), pipeline.File
	if id, tenant, ok := s.bus.JobOf(msg.Subject); ok {
		d.Job, d.Tenant = id.String(), tenant
	}
	id := fmt.Sprintf("%s/%d/%d", s.bus.JobStream(d.Queue), msg.At.UnixNano(), d.Deliveries)
	m, err := s.newMessage(s.bus.DeadJobSubject(d.Queue), id, &d)
	if errors.Is(err, bus.ErrTooLarge) {
		d.Item = nil
		m, err = s.newMessage(s.bus.DeadJobSubject(d.Queue), id, &d)
	}
	if err == nil {
		_, err = s.bus.PublishAndWait(ctx, m)
	}
	return s.wrap(err)
}

// ReplayableJob returns the dead letter's job, or ErrNotReplayable.
func (l DeadLetter) ReplayableJob() (*meshv1.QueuedJob, error) {
	out := new(meshv1.QueuedJob)
	err := proto.Unmarshal(l.Item, out)
	switch job := out.GetJob(); {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrNotReplayable, err)
	case l.Job == "" || job == nil || out.GetPayload() == nil:
		return nil, fmt.Errorf("%w: it is not a job", ErrNotReplayable)
	case !job.GetDeadline().IsValid() || !job.GetAcceptedAt().AsTime().Before(job.GetDeadline().AsTime()):
		return nil, fmt.Errorf("%w: it never had any time", ErrNotReplayable)
	}
	return out, nil
}

// replayJob submits a job again, with as much time as it had. The new ID is made from the dead
// letter and the new body, so that a repeated replay submits it once.
func (s *DeadLetters) replayJob(ctx context.Context, dead DeadLetter, body []byte) (Replayed, error) {
	queued, err := dead.ReplayableJob()
	if err != nil {
		return Replayed{}, err
	}
	id := pipeline.JobID{Queue: dead.Queue, UUID: uuid.NewSHA1(uuid.NameSpaceOID, fmt.Appendf(nil, "%s/%d/%s%s", dead.Mesh, dead.Seq, dead.Job, digestOf(body)))}
	first := queued.GetJob()
	deadline := time.Now().Add(first.GetDeadline().AsTime().Sub(first.GetAcceptedAt().AsTime()))
	job := queuedJob(id, deadline, first)
	job.Payload, job.Webhook = queued.GetPayload(), queued.GetWebhook()
	if body != nil {
		replaced := JobBody(job)
		if replaced == nil {
			return Replayed{}, errNoBody()
		}
		*replaced = body
	}
	header := JobHeader{Deadline: deadline, Priority: first.GetPriority(), Attributes: first.GetAttributes(), Tokens: pipeline.TokensOfCall(job.GetHttp())}
	m, err := jobMessage(s.bus, id, dead.Tenant, header, job)
	if err == nil {
		_, err = s.bus.PublishAndWait(ctx, m)
	}
	switch {
	case err == nil:
		return Replayed{JobID: id.String(), Deadline: deadline}, s.deleteReplayed(ctx, dead.Seq)
	case errors.Is(err, bus.ErrTooLarge):
		return Replayed{}, fault.Newf(fault.PayloadTooLarge, "the job is too large: %w", err)
	case errors.Is(err, bus.ErrQueueFull):
		return Replayed{}, fault.Newf(fault.QueueFull, "queue %s is full", dead.Queue).WithRetryAfter(budget.RetryAfter).Caused(err)
	case errors.Is(err, bus.ErrNoQueue):
		return Replayed{}, fault.Newf(fault.UnknownQueue, "there is no queue %s", dead.Queue).Caused(err)
	}
	return Replayed{}, s.unavailable(ctx, err)
}

// queuedJob returns a job that is accepted now, like another one.
func queuedJob(id pipeline.JobID, deadline time.Time, like *inferencev1.Job) *meshv1.QueuedJob {
	return &meshv1.QueuedJob{Job: &inferencev1.Job{
		Id: id.String(), Queue: string(id.Queue), Pipeline: like.GetPipeline(), State: inferencev1.JobState_JOB_STATE_QUEUED,
		Priority: like.GetPriority(), Attributes: like.GetAttributes(), AcceptedAt: timestamppb.Now(), Deadline: timestamppb.New(deadline),
	}}
}

// ItemBody returns the payload of an item that Replay can replace, nil if it is not a single blob.
func ItemBody(item *envelope.Envelope) *[]byte {
	if len(item.Parts) != 1 || item.Parts[0].Tensor != nil {
		return nil
	}
	return &item.Parts[0].Blob.Data
}

// JobBody returns the payload of a job that Replay can replace, nil if it is neither the body of an HTTP
// call nor a single blob.
func JobBody(job *meshv1.QueuedJob) *[]byte {
	if call := job.GetHttp(); call != nil {
		return &call.Body
	}
	inputs := job.GetInfer().GetInputs()
	if len(inputs) != 1 || inputs[0].GetBlob() == nil {
		return nil
	}
	return &inputs[0].GetBlob().Data
}

func errNoBody() *fault.Fault {
	return fault.InField(fault.InvalidRequest, "body", "can only replace the one input of a job or an item, a blob; this one has others")
}
