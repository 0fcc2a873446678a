package bus

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// link carries the messages of a bus: a connection to the broker, or a loopback.
type link interface {
	Publish(subject string, data []byte) error
	PublishMsg(m *nats.Msg) error
	// subscribe passes messages on a subject to handle, or to one subscription of a group.
	subscribe(subject, group string, handle nats.MsgHandler) (subscription, error)
	IsConnected() bool
	IsReconnecting() bool
	Stats() nats.Statistics
	LastError() error
	MaxPayload() int64
	FlushTimeout(time.Duration) error
	Close()
}

type subscription interface {
	SetPendingLimits(messages, bytes int) error
	Unsubscribe() error
}

// connection is the link to a broker.
type connection struct{ *nats.Conn }

func (c connection) subscribe(subject, group string, handle nats.MsgHandler) (subscription, error) {
	return c.QueueSubscribe(subject, group, handle)
}

// Loopback stands for the broker in a process that has none. Buses that share it reach each other:
// questions, answers and cancel messages pass within the process. Items are handed over in memory, see
// Settings.Local, or rejected with ErrQueueFull. What needs a stream is ErrNoBroker.
// The zero value is a loopback without buses.
type Loopback struct {
	mu            sync.Mutex
	subscriptions []*loopbackSubscription
}

// errNoOther is of an item that no host in the process has taken, and there are no others.
var errNoOther = fmt.Errorf("%w: %w", ErrQueueFull, ErrNoBroker)

// loopbackEpoch is the epoch of all queues: none is ever lost.
const loopbackEpoch Epoch = "loopback"

// queueHere returns the state of a queue of the process.
func queueHere(d pipeline.Durability) (QueueInfo, error) {
	if d != pipeline.Memory {
		return QueueInfo{}, ErrNoQueue
	}
	return QueueInfo{Epoch: loopbackEpoch, Consumers: pipeline.ClassCount}, nil
}

const (
	// loopbackPayload is the largest item, in bytes: as of a broker in the process by default.
	loopbackPayload = 8 << 20
	// loopbackPending bounds the messages that wait for a subscription. More are dropped, as a broker does.
	loopbackPending = 1 << 10
	streamPrefix    = "$JS."
)

// loopbackLink is one bus on a loopback, whose lock guards isClosed.
type loopbackLink struct {
	*Loopback

	onClosed func()
	handlers sync.WaitGroup
	isClosed bool
}

var _ link = (*loopbackLink)(nil)

// loopbackSubscription has a goroutine: a publisher may hold locks that the handler takes.
type loopbackSubscription struct {
	link           *loopbackLink
	subject, group string
	messages       chan *nats.Msg
	quit           chan struct{}
}

func (k *loopbackLink) Publish(subject string, data []byte) error {
	return k.PublishMsg(&nats.Msg{Subject: subject, Data: data})
}

// PublishMsg answers a request that has no subscriber as a broker does.
func (k *loopbackLink) PublishMsg(m *nats.Msg) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.isClosed:
		return nats.ErrConnectionClosed
	case strings.HasPrefix(m.Subject, streamPrefix):
		return ErrNoBroker
	case len(m.Data) > loopbackPayload:
		return nats.ErrMaxPayload
	case !k.deliverLocked(m) && m.Reply != "":
		k.deliverLocked(&nats.Msg{Subject: m.Reply, Header: nats.Header{"Status": {statusNoResponders}}})
	}
	return nil
}

// deliverLocked passes a message to its subscribers, if it has any.
func (l *Loopback) deliverLocked(m *nats.Msg) (isTaken bool) {
	isServed := map[string]bool{} // by group
	for _, s := range l.subscriptions {
		if isServed[s.group] || !matches(s.subject, m.Subject) {
			continue
		}
		isServed[s.group], isTaken = s.group != "", true
		select {
		case s.messages <- m:
		default:
		}
	}
	return isTaken
}

func (k *loopbackLink) subscribe(subject, group string, handle nats.MsgHandler) (subscription, error) {
	s := &loopbackSubscription{k, subject, group, make(chan *nats.Msg, loopbackPending), make(chan struct{})}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.isClosed {
		return nil, nats.ErrConnectionClosed
	}
	k.subscriptions = append(k.subscriptions, s)
	k.handlers.Go(func() {
		for {
			select {
			case m := <-s.messages:
				handle(m)
			case <-s.quit:
				return
			}
		}
	})
	return s, nil
}

func (s *loopbackSubscription) SetPendingLimits(int, int) error { return nil }

func (s *loopbackSubscription) Unsubscribe() error {
	s.link.mu.Lock()
	defer s.link.mu.Unlock()
	if i := slices.Index(s.link.subscriptions, s); i >= 0 {
		s.link.subscriptions = slices.Delete(s.link.subscriptions, i, i+1)
		close(s.quit)
	}
	return nil
}

// Close ends the subscriptions of the bus and waits for their handlers.
func (k *loopbackLink) Close() {
	k.mu.Lock()
	k.isClosed = true
	all := slices.Clone(k.subscriptions)
	k.mu.Unlock()
	for _, s := range all {
		if s.link == k {
			_ = s.Unsubscribe()
		}
	}
	k.handlers.Wait()
	k.onClosed()
}

// A loopback is always connected.
func (k *loopbackLink) IsConnected() bool                { return true }
func (k *loopbackLink) IsReconnecting() bool             { return false }
func (k *loopbackLink) Stats() nats.Statistics           { return nats.Statistics{} }
func (k *loopbackLink) LastError() error                 { return nil }
func (k *loopbackLink) MaxPayload() int64                { return loopbackPayload }
func (k *loopbackLink) FlushTimeout(time.Duration) error { return nil }

// noStreams is the client of streams in a process without a broker, with the methods that the mesh uses
// before it uses others.
type noStreams struct{ jetstream.JetStream }

func (noStreams) Stream(context.Context, string) (jetstream.Stream, error) { return nil, ErrNoBroker }

func (noStreams) DeleteStream(context.Context, string) error { return ErrNoBroker }

func (noStreams) OrderedConsumer(context.Context, string, jetstream.OrderedConsumerConfig) (jetstream.Consumer, error) {
	return nil, ErrNoBroker
}

func (noStreams) Publish(context.Context, string, []byte, ...jetstream.PublishOpt) (*jetstream.PubAck, error) {
	return nil, ErrNoBroker
}
