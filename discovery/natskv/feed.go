package natskv

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
)

const (
	// idleEvery is how often a consumer says that there is nothing new; silence is
	// how long it is trusted without.
	idleEvery = 500 * time.Millisecond
	silence   = 3 * time.Second
	// forgotten is how long the broker keeps the consumer of one who has left.
	forgotten = 5 * time.Second
)

// follower is told what a feed brings.
type follower interface {
	// begin says that all messages come anew, from a stream as it is now.
	begin(stream *jetstream.StreamInfo)
	// take gets a message.
	take(msg *nats.Msg, sequence uint64)
	// settle says that there is no more for the moment, all of what there was at the
	// beginning included.
	settle()
	// lose says why nothing comes.
	lose(err error)
}

// follow tells a follower what comes to a stream until the context ends. The error is
// nil then, or why no waiting helps.
func (s *Store) follow(ctx context.Context, stream jetstream.StreamConfig, filter string, f follower) error {
	for ctx.Err() == nil {
		on, err := s.link.wait(ctx)
		if err == nil {
			err = on.feed(ctx, stream, filter, f)
		}
		switch {
		case ctx.Err() != nil:
		case errors.Is(err, discovery.ErrDenied):
			return err
		default:
			f.lose(err)
			pause(ctx)
		}
	}
	return nil
}

// feed tells a follower what comes to a stream until it breaks.
func (s *session) feed(ctx context.Context, stream jetstream.StreamConfig, filter string, f follower) error {
	ctx, cancel := s.bind(ctx)
	defer cancel(nil)
	// Silence ends it too.
	watchdog := time.AfterFunc(silence+4*answerTimeout, func() { cancel(errSilent) })
	defer watchdog.Stop()
	sub, err := s.subscribe()
	if err != nil {
		return err
	}
	defer s.unsubscribe(sub)
	info, err := s.stream(ctx, stream)
	if err != nil {
		return err
	}
	pending, err := s.consume(ctx, stream.Name, filter, sub.Subject)
	if err != nil {
		return err
	}
	watchdog.Reset(silence)
	f.begin(info)
	p := progress{follower: f, end: info.State.LastSeq}
	if pending == 0 {
		p.settle()
	}
	for {
		msg, err := sub.NextMsgWithContext(ctx)
		if err != nil {
			return brokenBy(ctx)
		}
		watchdog.Reset(silence)
		if err := s.deliver(msg, &p); err != nil {
			return err
		}
	}
}

// progress is how far a feed has come: to which message of its consumer, whether all
// that there was up to the end at its beginning has come, and how many have since it
// settled.
type progress struct {
	follower
	end     uint64
	last    uint64
	settled bool
	since   int
}

// mostAtOnce is how many messages come before it is settled though there are more.
const mostAtOnce = 1024

func (p *progress) settle() {
	p.settled, p.since = true, 0
	p.follower.settle()
}

// brokenBy is why a feed has ended.
func brokenBy(ctx context.Context) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return errBroken
}

// consume has the broker push what there is, and what comes, to a mailbox, and
// returns how much there is.
func (s *session) consume(ctx context.Context, stream, filter, inbox string) (uint64, error) {
	question := struct {
		Stream string                   `json:"stream_name"`
		Config jetstream.ConsumerConfig `json:"config"`
	}{stream, jetstream.ConsumerConfig{
		DeliverSubject:    inbox,
		DeliverPolicy:     jetstream.DeliverAllPolicy,
		AckPolicy:         jetstream.AckNonePolicy,
		FilterSubject:     filter,
		FlowControl:       true,
		IdleHeartbeat:     idleEvery,
		InactiveThreshold: forgotten,
		MemoryStorage:     true,
		Replicas:          1,
	}}
	var info jetstream.ConsumerInfo
	if err := s.api(ctx, "CONSUMER.CREATE."+stream, question, &info); err != nil {
		return 0, err
	}
	return info.NumPending, nil
}

// deliver hands over one message, where it is the one after the last.
func (s *session) deliver(msg *nats.Msg, p *progress) error {
	if msg.Header.Get(headerStatus) == "100" {
		return s.control(msg, p)
	}
	meta, err := msg.Metadata()
	if err != nil || meta.Sequence.Consumer != p.last+1 {
		return errBroken
	}
	p.last = meta.Sequence.Consumer
	p.since++
	p.take(msg, meta.Sequence.Stream)
	if meta.NumPending == 0 || p.settled && p.since >= mostAtOnce {
		p.settle()
	}
	return nil
}

// control answers what the broker asks about its flow, and hears that it is idle.
func (s *session) control(msg *nats.Msg, p *progress) error {
	if msg.Reply != "" {
		return s.answer(msg.Reply)
	}
	if stalled := msg.Header.Get(headerStalled); stalled != "" {
		return s.answer(stalled)
	}
	if text := msg.Header.Get(headerLastConsumer); text != strconv.FormatUint(p.last, 10) {
		return errBroken
	}
	// It may be slow at the beginning, and what was pending may have gone.
	if at, err := strconv.ParseUint(msg.Header.Get(headerLastStream), 10, 64); err == nil && (p.settled || at >= p.end) {
		p.settle()
	}
	return nil
}

const (
	headerStalled      = "Nats-Consumer-Stalled"
	headerLastConsumer = "Nats-Last-Consumer"
	headerLastStream   = "Nats-Last-Stream"
)

func (s *session) answer(subject string) error {
	if err := s.nc.Publish(subject, nil); err != nil {
		return errUnsent
	}
	return nil
}
