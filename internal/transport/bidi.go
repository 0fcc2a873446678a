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
	"google.golang.org/grpc"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// BidiStream serves f as the method of that name, whose caller sends any number of messages
// on one stream and gets responses while it sends. f runs once for each message, at most
// limit of them at a time; the next message is read when one has ended. The responses that f
// sends for a message keep their order; those to different messages interleave.
//
// An error of f ends the stream for all of its messages, and so does an error of send, which
// f returns. A failure of one message alone is a response. The context of f ends with the
// stream; where the stream breaks, its cause is a fault with the reason.
func BidiStream[M any, P message[M], Out any](s *Service, name protoreflect.Name, limit int, f func(ctx context.Context, c *Call, in P, send func(*Out) error) error) {
	s.handle(name, limitMessages, func(path string, options connect.HandlerOption) http.Handler {
		return connect.NewBidiStreamHandler(path, func(ctx context.Context, stream *connect.BidiStream[incoming[M, P], Out]) error {
			interrupt, _ := ctx.Value(interruptKey{}).(func())
			b := &bidiStream[M, P, Out]{
				receive: stream.Receive, send: stream.Send, interrupt: interrupt,
				call: func() *Call { return newCall(ctx, stream.RequestHeader(), stream.Peer(), path) }, method: f, stopping: s.settings.Stopping,
			}
			if err := b.run(ctx, limit); err != nil {
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
			call: func() *Call { return &Call{Trace: c.Trace, Origin: c.Origin} }, method: f, stopping: s.settings.Stopping,
		}
		// The messages in flight are answered before the stream fails.
		if err = stream.begin(calls.interrupt); err == nil {
			err = b.run(ss.Context(), limit)
		}
		calls.finish(err)
		return err
	})
}

// interruptKey is the context key of a function that makes reading the stream fail.
type interruptKey struct{}

// limitMessages is limitMessage for a body of many messages.
func limitMessages(next http.Handler, s Settings) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn := http.NewResponseController(w)
		ctx := context.WithValue(r.Context(), interruptKey{}, func() { _ = conn.SetReadDeadline(time.Unix(0, 0)) })
		messages := StallReader(w, r, s)
		bounded := withCallBody(r.WithContext(ctx), r.Body, messages, s)
		bounded.Body.(*callBody).beforeMessage = func() {
			if stall, ok := messages.(*stallReader); ok {
				stall.next()
			}
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
}

// run reads messages until the caller sends no more, and returns when all are answered.
func (b *bidiStream[M, P, Out]) run(ctx context.Context, limit int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(limit)
	release := b.interruptReads(ctx)
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
	for {
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
		c := b.call()
		group.Go(func() error {
			ctx := budget.NewContext(ctx, in.memory)
			defer in.memory.Close()
			return b.method(ctx, c, &in.message, func(out *Out) error {
				b.sending.Lock()
				defer b.sending.Unlock()
				return sendFault(ctx, b.send(out))
			})
		})
	}
}

// interruptReads makes reading fail when the context ends or the gateway stops, until it is
// released. Receiving itself watches neither.
func (b *bidiStream[M, P, Out]) interruptReads(ctx context.Context) (release func()) {
	released := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-ctx.Done():
		case <-b.stopping:
		case <-released:
			return
		}
		b.interrupt()
	})
	return func() {
		close(released)
		watch.Wait()
	}
}
