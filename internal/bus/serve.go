package bus

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// backlog bounds the messages that wait for the handler of a subscription.
const backlog = 1 << 16

// subscribe passes the messages on a subject to handle until the returned function
// is called; of those who subscribe with a group, to one. The bytes that wait for it
// are bounded, less than 0 is no bound. It returns once the broker knows the
// subscription.
func (b *Bus) subscribe(subject, group string, maxBytes int, handle nats.MsgHandler) (stop func() error, err error) {
	sub, err := b.subscription(subject, group, maxBytes, handle)
	if err != nil {
		return nil, err
	}
	return sub.Unsubscribe, nil
}

// subscription is subscribe for a caller that ends the subscription in another way.
func (b *Bus) subscription(subject, group string, maxBytes int, handle nats.MsgHandler) (subscription, error) {
	sub, err := b.nc.subscribe(subject, group, handle)
	if err != nil {
		return nil, sendError(err)
	}
	if err = sub.SetPendingLimits(backlog, maxBytes); err == nil {
		err = b.flush()
	}
	if err != nil {
		// A subscription that the broker does not know may fail to end there too.
		_ = sub.Unsubscribe()
		return nil, sendError(err)
	}
	return sub, nil
}

// answer publishes the reply to each request on a subject, from one of the
// processes that do, until the returned function is called.
func (b *Bus) answer(subject string, reply func() []byte) (stop func() error, err error) {
	return b.subscribe(subject, aliveGroup, -1, func(msg *nats.Msg) {
		if err := b.nc.Publish(msg.Reply, reply()); err != nil {
			b.settings.Logger.Debug("answer not sent", "subject", subject, "error", err)
		}
	})
}

// Watch passes every message on a subject to handle, which must not block, until
// the returned function is called. It receives whatever is published after Watch
// has returned.
func (b *Bus) Watch(subject string, handle func([]byte)) (stop func() error, err error) {
	return b.subscribe(subject, "", -1, func(msg *nats.Msg) { handle(msg.Data) })
}

// flush waits until the broker has processed a subscription. While the broker is
// disconnected the subscription is made on reconnect.
func (b *Bus) flush() error {
	if !b.Connected() {
		return nil
	}
	return b.nc.FlushTimeout(b.apiTimeout())
}

// replyBacklogBytes bounds the replies that wait for the handler.
const replyBacklogBytes = 512 << 20

// ServeReplies passes every reply for the gateway to handle, which returns its
// disposition and must not block, until the returned function is called.
func (b *Bus) ServeReplies(gateway pipeline.GatewayID, handle func(pipeline.ExecutionID, []byte) meshv1.ReplyDisposition) (stop func() error, err error) {
	return b.subscribe(b.Replies(gateway), "", replyBacklogBytes, func(msg *nats.Msg) {
		disposition := handle(b.Execution(gateway, msg.Subject), msg.Data)
		if msg.Reply == "" {
			return
		}
		// A ReplyAck cannot fail to marshal: it is one enum.
		ack, _ := proto.Marshal(&meshv1.ReplyAck{Disposition: disposition})
		if err := b.nc.Publish(msg.Reply, ack); err != nil {
			b.settings.Logger.Debug("reply not acknowledged", "error", err)
		}
	})
}

// Cancel notifies every host and gateway that a request is cancelled. It is best
// effort: a process that does not receive it goes on.
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

// ServeCancels passes every message on the mesh's cancel subject to handle, which
// must not block, until the returned function is called. Any client may have sent
// it.
func (b *Bus) ServeCancels(handle func([]byte)) (stop func() error, err error) {
	return b.Watch(b.Subjects.Cancel(), handle)
}

// NotifyJobCancel tells dispatchers that a job was cancelled, whose record says so. It is best
// effort.
func (b *Bus) NotifyJobCancel(id pipeline.JobID) {
	_ = b.nc.Publish(b.JobCancel(), []byte(id.String()))
}

// ServeJobCancels passes the ID of each job that was cancelled to handle, which must not block,
// until the returned function is called. Any client may have sent it.
func (b *Bus) ServeJobCancels(handle func(pipeline.JobID)) (stop func() error, err error) {
	return b.Watch(b.JobCancel(), func(data []byte) {
		if id, err := pipeline.ParseJobID(string(data)); err == nil {
			handle(id)
		}
	})
}

// NotifyJobEnd publishes the end of a job, which is stored. It is best effort.
func (b *Bus) NotifyJobEnd(queue pipeline.QueueName, tenant string, end []byte) {
	_ = b.nc.Publish(b.JobEnd(queue, tenant), end)
}

// JobRequest is a request of a tenant about its jobs.
type JobRequest struct {
	// Tenant and Method are what the subject says; Method is as submit.nightly, get or cancel.
	Tenant, Method string
	Data           []byte

	msg *nats.Msg
}

// Respond answers the request: with a message, or with the code and the message of a failure and a
// document about it. ErrTooLarge means that the answer is over the broker's limit.
func (r JobRequest) Respond(answer []byte, code int, failure string) error {
	if r.msg.Reply == "" {
		return nil
	}
	out := &nats.Msg{Subject: r.msg.Reply, Data: answer}
	if code != 0 {
		// The headers of NATS services. A header is one line.
		out.Header = nats.Header{"Nats-Service-Error-Code": {strconv.Itoa(code)}, "Nats-Service-Error": {strings.Map(func(r rune) rune {
			if r < ' ' {
				return ' '
			}
			return r
		}, failure)}}
	}
	if err := r.msg.RespondMsg(out); err != nil {
		return sendError(err)
	}
	return nil
}

const (
	jobRequestGroup = "jobs"
	// jobRequestBytes bounds the requests that wait for the handler.
	jobRequestBytes = 64 << 20
)

// ServeJobRequests passes each request about jobs to one of the processes that serve them, until
// stop is called; ended closes once handle is not called any more. handle may block; requests
// beyond what may wait are dropped.
func (b *Bus) ServeJobRequests(handle func(JobRequest)) (stop func(), ended <-chan struct{}, err error) {
	sub, err := b.subscription(b.JobRequests(), jobRequestGroup, jobRequestBytes, func(msg *nats.Msg) {
		r := JobRequest{Data: msg.Data, msg: msg}
		r.Tenant, r.Method = b.JobRequestOf(msg.Subject)
		handle(r)
	})
	if err != nil {
		return nil, nil, err
	}
	on, isOnBroker := sub.(*nats.Subscription)
	if !isOnBroker {
		return nil, nil, errors.Join(ErrNoBroker, sub.Unsubscribe())
	}
	closed := make(chan struct{})
	on.SetClosedHandler(func(string) { close(closed) })
	return func() {
		if !b.Connected() || on.Drain() != nil { // a drain waits for the broker
			_ = on.Unsubscribe()
		}
	}, closed, nil
}

// aliveWait is how long a host may take to answer. A slow host is still a host:
// only the broker's no-responders status means that there is none.
const aliveWait = 100 * time.Millisecond

const aliveGroup = "alive"

// Availability is a host's answer about its stage.
type Availability struct {
	// Answered is true where a host has answered.
	Answered bool
	// Durabilities are the stage's queues; none where no host has answered in time.
	Durabilities []pipeline.Durability
	// Cause is why the host does not serve the other queues of the stage, or the stage; empty if
	// there are no others.
	Cause string
	// Busy is true while items of the host wait for a slot.
	Busy bool
}

// Alive asks a host of the stage about its availability: ErrNoHost when no host
// serves it, ErrDisconnected when the broker is disconnected. Where a host lives whose
// runner cannot run, the error has the reason.
func (b *Bus) Alive(ctx context.Context, stage pipeline.StageName) (Availability, error) {
	out, err := b.queryHosts(ctx, b.Subjects.Alive(stage))
	if errors.Is(err, ErrNoHost) {
		if failing, _ := b.queryHosts(ctx, b.Subjects.Failing(stage)); failing.Cause != "" {
			err = &failingError{failing.Cause}
		}
	}
	return out, err
}

// CauseOf returns why the hosts of a stage cannot run, from an error of Alive; empty where
// no host lives.
func CauseOf(err error) string {
	if failing, ok := errors.AsType[*failingError](err); ok {
		return failing.cause
	}
	return ""
}

// failingError is ErrNoHost of a stage whose hosts live and have a runner that cannot run.
type failingError struct{ cause string }

// Error implements error.
func (e *failingError) Error() string { return e.cause }

// Unwrap returns ErrNoHost.
func (e *failingError) Unwrap() error { return ErrNoHost }

// InFlight checks whether any host may have items of the stage in flight, also one
// that pulls no more: nil when one may, ErrNoHost when none can, ErrDisconnected
// when the broker is disconnected.
func (b *Bus) InFlight(ctx context.Context, stage pipeline.StageName) error {
	_, err := b.queryHosts(ctx, b.Subjects.InFlightSubject(stage))
	return err
}

// queryHosts requests an answer from any host on the subject.
func (b *Bus) queryHosts(ctx context.Context, subject string) (Availability, error) {
	ctx, cancel := context.WithTimeout(ctx, aliveWait)
	defer cancel()
	answer, err := b.request(ctx, subject, nil)
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, ErrUnknown) && b.Connected():
		return Availability{}, nil
	case errors.Is(err, ErrUnknown):
		return Availability{}, ErrDisconnected
	case err != nil:
		return Availability{}, err
	case noResponders(answer):
		return Availability{}, b.absent(ErrNoHost)
	}
	return decodeAvailability(answer.Data), nil
}

// decodeAvailability reads a host's answer. Any client may have sent it, so
// malformed bytes count as no answer.
func decodeAvailability(data []byte) Availability {
	var answer meshv1.AliveResponse
	if proto.Unmarshal(data, &answer) != nil {
		return Availability{}
	}
	out := Availability{Answered: true, Busy: answer.GetBusy(), Cause: answer.GetCause()}
	for _, d := range answer.GetDurabilities() {
		if durability, err := pipeline.DurabilityFromProto(d); err == nil && durability != pipeline.DurabilityUnset && len(out.Durabilities) < durabilities {
			out.Durabilities = append(out.Durabilities, durability)
		}
	}
	return out
}

// durabilities is the number of durabilities.
const durabilities = 2

// ServeAlive answers for the stage until the returned function is called: with the
// queues it serves, the cause if those are not all of the stage's, and whether the
// host is busy. Once it has returned, Alive finds the host.
func (b *Bus) ServeAlive(stage pipeline.StageName, host pipeline.HostID, queues []pipeline.Durability, cause string, busy func() bool) (stop func() error, err error) {
	response := &meshv1.AliveResponse{Host: string(host), Stage: string(stage), Cause: boundedCause(cause)}
	for _, d := range queues {
		response.Durabilities = append(response.Durabilities, d.ToProto())
	}
	idle, err := proto.Marshal(response)
	if err != nil {
		return nil, err
	}
	response.Busy = true
	loaded, err := proto.Marshal(response)
	if err != nil {
		return nil, err
	}
	return b.answer(b.Subjects.Alive(stage), func() []byte {
		if busy() {
			return loaded
		}
		return idle
	})
}

// maxCause bounds the cause in an answer, in bytes: it travels on in headers.
const maxCause = 1 << 10

// ServeFailing answers why the host does not serve the stage, until the returned function
// is called.
func (b *Bus) ServeFailing(stage pipeline.StageName, host pipeline.HostID, cause func() string) (stop func() error, err error) {
	return b.answer(b.Subjects.Failing(stage), func() []byte {
		data, _ := proto.Marshal(&meshv1.AliveResponse{Host: string(host), Stage: string(stage), Cause: boundedCause(cause())})
		return data
	})
}

// boundedCause returns valid UTF-8, which always encodes.
func boundedCause(text string) string {
	return strings.ToValidUTF8(text[:min(len(text), maxCause)], "")
}

// ServeInFlight answers for the stage that items may be in flight, until the
// returned function is called.
func (b *Bus) ServeInFlight(stage pipeline.StageName) (stop func() error, err error) {
	return b.answer(b.Subjects.InFlightSubject(stage), func() []byte { return nil })
}
