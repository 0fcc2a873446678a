package natskv

import (
	"cmp"
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
)

const (
	// heartbeatInterval is how often the broker reports an idle consumer, and
	// heartbeatTimeout how long a consumer may be silent.
	heartbeatInterval = 500 * time.Millisecond
	heartbeatTimeout  = 3 * time.Second
	// inactiveThreshold is how long the broker keeps a consumer that nobody uses.
	inactiveThreshold = 5 * time.Second
	// maxPendingBytes bounds the messages that wait for a follower.
	maxPendingBytes = 64 << 20
	// maxUnflushed is how many messages a follower takes at most before a flush.
	maxUnflushed = 1024
)

// follower receives the messages of a feed.
type follower interface {
	// begin reports that all messages come again, from a stream in this state.
	begin(stream *jetstream.StreamInfo)
	// take receives a message.
	take(msg *nats.Msg, sequence uint64)
	// flush reports that there is no more for the moment, and that everything which was
	// in the stream at the beginning has come.
	flush()
	// disconnect reports why nothing comes.
	disconnect(err error)
}

// disconnects reports a disconnect once, until the next update.
type disconnects struct {
	report       func(error)
	disconnected bool
}

func (d *disconnects) disconnect(err error) {
	if !d.disconnected {
		d.disconnected = true
		d.report(err)
	}
}

// follow feeds a follower until the context ends. The error is nil then, else one that
// no retry mends.
func (s *Store) follow(ctx context.Context, stream jetstream.StreamConfig, filter string, f follower) error {
	for ctx.Err() == nil {
		on, err := s.connection.await(ctx)
		if err == nil {
			err = on.feed(ctx, stream, filter, f)
		}
		switch {
		case ctx.Err() != nil:
		case errors.Is(err, discovery.ErrDenied):
			return err
		default:
			f.disconnect(err)
			pause(ctx)
		}
	}
	return nil
}

// feed passes the messages of a stream to a follower until the feed breaks. A consumer
// is never trusted beyond its session, nor when it is silent.
func (s *session) feed(ctx context.Context, stream jetstream.StreamConfig, filter string, f follower) error {
	ctx, cancel := s.bind(ctx)
	defer cancel(nil)
	watchdog := time.AfterFunc(heartbeatTimeout+4*answerTimeout, func() { cancel(errNoAnswer) })
	defer watchdog.Stop()
	sub, err := s.nc.SubscribeSync(s.nc.NewInbox())
	if err != nil {
		return errUnsent
	}
	defer func() { _ = sub.Unsubscribe() }() // a lost connection has closed it
	if err := sub.SetPendingLimits(-1, maxPendingBytes); err != nil {
		return err
	}
	info, err := s.stream(ctx, stream)
	if err != nil {
		return err
	}
	pending, err := s.consume(ctx, stream.Name, filter, sub.Subject)
	if err != nil {
		return err
	}
	watchdog.Reset(heartbeatTimeout)
	f.begin(info)
	p := progress{follower: f, end: info.State.LastSeq}
	if pending == 0 {
		p.flush()
	}
	for {
		msg, err := sub.NextMsgWithContext(ctx)
		if err != nil {
			return cmp.Or(context.Cause(ctx), errGap)
		}
		watchdog.Reset(heartbeatTimeout)
		if err := s.deliver(msg, &p); err != nil {
			return err
		}
	}
}

// progress is how far a feed has come.
type progress struct {
	follower
	// end is the last sequence of the stream when the feed began, and complete is true
	// once everything up to there has come.
	end      uint64
	complete bool
	// last is the consumer sequence of the latest message, and unflushed counts the
	// messages since the last flush.
	last      uint64
	unflushed int
}

func (p *progress) flush() {
	p.complete, p.unflushed = true, 0
	p.follower.flush()
}

// consume creates a consumer that pushes the messages of a stream, and those to come, to
// an inbox. It returns how many there are. The consumer has a name because a broker that has started
// JetStream again handles each request twice, and would create two of them.
func (s *session) consume(ctx context.Context, stream, filter, inbox string) (uint64, error) {
	name := uuid.NewString()
	request := struct {
		Stream string                   `json:"stream_name"`
		Config jetstream.ConsumerConfig `json:"config"`
	}{stream, jetstream.ConsumerConfig{
		Name:              name,
		DeliverSubject:    inbox,
		DeliverPolicy:     jetstream.DeliverAllPolicy,
		AckPolicy:         jetstream.AckNonePolicy,
		FilterSubject:     filter,
		FlowControl:       true,
		IdleHeartbeat:     heartbeatInterval,
		InactiveThreshold: inactiveThreshold,
		MemoryStorage:     true,
		Replicas:          1,
	}}
	var info jetstream.ConsumerInfo
	if err := s.api(ctx, "CONSUMER.CREATE."+stream+"."+name, request, &info); err != nil {
		return 0, err
	}
	return info.NumPending, nil
}

// deliver passes on a message if it is the next one.
func (s *session) deliver(msg *nats.Msg, p *progress) error {
	if msg.Header.Get(headerStatus) == "100" {
		return s.control(msg, p)
	}
	meta, err := msg.Metadata()
	if err != nil || meta.Sequence.Consumer != p.last+1 {
		return errGap
	}
	p.last = meta.Sequence.Consumer
	p.unflushed++
	p.take(msg, meta.Sequence.Stream)
	if meta.NumPending == 0 || p.complete && p.unflushed >= maxUnflushed {
		p.flush()
	}
	return nil
}

// control answers flow control, and takes heartbeats.
func (s *session) control(msg *nats.Msg, p *progress) error {
	if reply := cmp.Or(msg.Reply, msg.Header.Get(headerStalled)); reply != "" {
		if err := s.nc.Publish(reply, nil); err != nil {
			return errUnsent
		}
		return nil
	}
	if text := msg.Header.Get(headerLastConsumer); text != strconv.FormatUint(p.last, 10) {
		return errGap
	}
	// The feed may be slow at the beginning, and pending messages may have expired.
	if at, err := strconv.ParseUint(msg.Header.Get(headerLastStream), 10, 64); err == nil && (p.complete || at >= p.end) {
		p.flush()
	}
	return nil
}

const (
	headerStatus       = "Status"
	headerStalled      = "Nats-Consumer-Stalled"
	headerLastConsumer = "Nats-Last-Consumer"
	headerLastStream   = "Nats-Last-Stream"
)
