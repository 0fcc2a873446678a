package transport

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// InFlight says which messages of one stream run at a time.
type InFlight[P any] struct {
	// Limit is how many messages run at a time.
	Limit int
	// Sequence returns the sequence of a message, or nil if it has none. The messages of one
	// sequence run one after the other, in their order. It may be nil.
	Sequence func(P) any
}

// ManyInFlight is how many requests of one stream of many, or of a body of many lines, run at a time, at most.
const ManyInFlight = 64

// maxWaitingBytes bounds the messages of one stream that wait for others of their sequence. Each
// counts as waitingCost at least. Then no more messages are read.
const maxWaitingBytes, waitingCost = 16 << 20, 8 << 10

// BidiStream serves f as the method of that name, whose caller sends any number of messages
// on one stream and gets responses while it sends. f runs once for each message, at most
// limit.Limit of them at a time; the next message is read when one has ended. The responses that
// f sends for a message keep their order; those to different messages interleave, unless the
// messages are of one sequence.
//
// An error of f ends the stream for all of its messages, and so does an error of send, which
// f returns. A failure of one message alone is a response. The context of f ends with the
// stream; where the stream breaks, its cause is a fault with the reason.
func BidiStream[M any, P message[M], Out any](s *Service, name protoreflect.Name, limit InFlight[P], f func(ctx context.Context, c *Call, in P, send func(*Out) error) error) {
	s.handle(name, limitMessages, func(path string, options connect.HandlerOption) http.Handler {
		return connect.NewBidiStreamHandler(path, func(ctx context.Context, stream *connect.BidiStream[incoming[M, P], Out]) error {
			b := &bidiStream[M, P, Out]{
				receive: stream.Receive, send: stream.Send, interrupt: ctx.Value(callBodyKey{}).(*callBody).interrupt,
				call: func() *Call { return newCall(ctx, stream.RequestHeader(), stream.Peer(), path) }, method: f, stopping: s.settings.Stopping, sequence: limit.Sequence,
			}
			if err := b.run(ctx, limit.Limit); err != nil {
				return RPCError(err)
			}
			return nil
		}, options)
	})
	s.handleGRPC(name, func(ss grpc.ServerStream) error {
		stream, c, err := newGRPCCall(ss)
		if err != nil {
			return err
		}
		calls := &grpcBidi[M, P, Out]{stream: stream, ss: ss, interrupted: make(chan struct{})}
		b := &bidiStream[M, P, Out]{
			receive: calls.receive, send: calls.send, interrupt: calls.interrupt,
			call: func() *Call { return &Call{Trace: c.Trace, Origin: c.Origin, header: c.header} }, method: f, stopping: s.settings.Stopping, sequence: limit.Sequence,
		}
		// The messages in flight are answered before the stream fails.
		if err = stream.interruptBy(calls.interrupt); err == nil {
			err = b.run(ss.Context(), limit.Limit)
		}
		calls.finish(err)
		return err
	})
}

// limitMessages is limitMessage for a body of many messages.
func limitMessages(next http.Handler, s Settings) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn := http.NewResponseController(w)
		messages := StallReader(w, r, s)
		bounded := withCallBody(r, r.Body, messages, s)
		body := bounded.Body.(*callBody)
		body.interrupt = func() { _ = conn.SetReadDeadline(time.Unix(0, 0)) }
		if stall, ok := messages.(*stallReader); ok {
			body.beforeMessage = stall.next
		}
		next.ServeHTTP(StallWriter(w, s.StallTimeout), bounded)
	})
}

// bidiStream is one stream of many messages.
type bidiStream[M any, P message[M], Out any] struct {
	// receive returns an error after interrupt was called.
	receive   func() (*incoming[M, P], error)
	send      func(*Out) error
	interrupt func()
	call      func() *Call
	method    func(context.Context, *Call, P, func(*Out) error) error
	stopping  <-chan struct{}
	// sending is held while a response is sent.
	sending sync.Mutex

	// sequence belongs to InFlight. waiting has a key for each sequence of which a message runs,
	// and room is what more may wait, in bytes.
	sequence func(P) any
	mu       sync.Mutex
	waiting  map[any][]*streamMessage[M, P]
	room     *semaphore.Weighted
	order    order
}

// order knows which messages of a stream have been answered. Its maps have as many entries as messages
// run.
type order struct {
	mu sync.Mutex
	// low is the first message that has not been answered, ended are later ones that have been.
	low   uint64
	ended map[uint64]bool
	turns map[uint64]chan struct{}
}

// await returns once all messages before this one have been answered.
func (o *order) await(ctx context.Context, index uint64) error {
	o.mu.Lock()
	if o.low == index {
		o.mu.Unlock()
		return nil
	}
	turn := make(chan struct{})
	if o.turns == nil {
		o.turns = map[uint64]chan struct{}{}
	}
	o.turns[index] = turn
	o.mu.Unlock()
	select {
	case <-turn:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// end records that a message has been answered.
func (o *order) end(index uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended == nil {
		o.ended = map[uint64]bool{}
	}
	o.ended[index] = true
	for o.ended[o.low] {
		delete(o.ended, o.low)
		o.low++
	}
	if turn := o.turns[o.low]; turn != nil {
		close(turn)
		delete(o.turns, o.low)
	}
}

// streamMessage is one message of a stream. size is what it takes of room.
type streamMessage[M any, P message[M]] struct {
	call *Call
	in   *incoming[M, P]
	size int64
}

// run reads messages until the caller sends no more, and returns when all are answered.
func (b *bidiStream[M, P, Out]) run(ctx context.Context, limit int) error {
	budget.FromContext(ctx).HasMany()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(limit)
	b.waiting, b.room = map[any][]*streamMessage[M, P]{}, semaphore.NewWeighted(maxWaitingBytes)
	release := InterruptReads(ctx, b.stopping, b.interrupt)
	err := b.receiveAll(ctx, group)
	release()
	if err == nil {
		return group.Wait()
	}
	select {
	case <-b.stopping:
		// The messages in flight are answered; there is nothing to add to them.
		_ = group.Wait()
		return fault.New(fault.ShuttingDown, "the gateway is stopping; open another stream")
	default:
	}
	if cause := context.Cause(ctx); cause != nil {
		err = cause // the read failed because the stream's context ended
	}
	cancel(streamFault(err))
	_ = group.Wait() // these errors follow from err
	return err
}

// streamFault is the cause with which the messages in flight are cancelled when err ends
// their stream. They are not at fault, whatever was wrong with the message that was not read.
func streamFault(err error) error {
	text := fault.From(err).Message
	if status, ok := errors.AsType[*connect.Error](err); ok {
		text = status.Message()
	}
	return fault.Newf(fault.Cancelled, "the stream ended: %.*s", maxErrorText, text).Caused(err)
}

// receiveAll starts the method for all messages, and returns nil after the last.
func (b *bidiStream[M, P, Out]) receiveAll(ctx context.Context, group *errgroup.Group) error {
	for index := uint64(0); ; index++ {
		in, err := b.receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = in.open(ctx)
		}
		if err != nil {
			return err
		}
		m, sequence := &streamMessage[M, P]{call: b.call(), in: in}, any(nil)
		m.call.Index, m.call.earlier = index, &b.order
		if b.sequence != nil {
			sequence = b.sequence(&in.message)
		}
		if waits, err := b.wait(ctx, sequence, m); err != nil || waits {
			if err != nil {
				return err
			}
			continue
		}
		group.Go(func() error {
			err := b.answer(ctx, m)
			for m := b.next(sequence); m != nil && err == nil && ctx.Err() == nil; m = b.next(sequence) {
				err = b.answer(ctx, m)
			}
			return err
		})
	}
}

// answer runs the method for a message.
func (b *bidiStream[M, P, Out]) answer(ctx context.Context, m *streamMessage[M, P]) error {
	ctx = budget.NewContext(ctx, m.in.memory)
	defer m.in.memory.Close()
	defer b.order.end(m.call.Index)
	return b.method(ctx, m.call, &m.in.message, func(out *Out) error {
		b.sending.Lock()
		defer b.sending.Unlock()
		return sendFault(ctx, b.send(out))
	})
}

// wait has a message wait if another one of its sequence runs, once there is room.
func (b *bidiStream[M, P, Out]) wait(ctx context.Context, sequence any, m *streamMessage[M, P]) (waits bool, _ error) {
	if sequence == nil {
		return false, nil
	}
	m.size = min(waitingCost+m.in.memory.Held(), maxWaitingBytes)
	if err := b.room.Acquire(ctx, m.size); err != nil {
		return false, context.Cause(ctx)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	queue, waits := b.waiting[sequence]
	if !waits {
		b.room.Release(m.size)
		b.waiting[sequence] = nil
		return false, nil
	}
	b.waiting[sequence] = append(queue, m)
	return true, nil
}

// next returns the message that waits for the one of its sequence that has ended, or nil.
func (b *bidiStream[M, P, Out]) next(sequence any) *streamMessage[M, P] {
	b.mu.Lock()
	defer b.mu.Unlock()
	queue := b.waiting[sequence]
	if len(queue) == 0 {
		delete(b.waiting, sequence)
		return nil
	}
	m := queue[0]
	queue[0] = nil
	b.waiting[sequence] = queue[1:]
	b.room.Release(m.size)
	return m
}

// InterruptReads makes reading fail, by interrupt, when the context ends or the gateway stops, until it
// is released. Receiving itself watches neither.
func InterruptReads(ctx context.Context, stopping <-chan struct{}, interrupt func()) (release func()) {
	released := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-ctx.Done():
		case <-stopping:
		case <-released:
			return
		}
		interrupt()
	})
	return func() {
		close(released)
		watch.Wait()
	}
}
