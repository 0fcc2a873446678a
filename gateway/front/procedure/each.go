package procedure

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/stagemesh/stagemesh/gateway/front/body"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Each makes f the procedure of that name, whose caller sends any number of
// messages on one stream and is answered on it, while it sends. f runs once for
// each message, for at most so many of them at once; the next is read when there is
// room. It may send any number of answers, which stay in their order; those to
// different messages come as they are sent.
//
// An error of f ends the stream for all of its messages, and so does one of send,
// which f returns. What fails one message alone f tells in an answer. The context of f
// ends with the stream; where that breaks, the cause is a fault that says why.
func Each[M any, P message[M], Out any](s *Service, name protoreflect.Name, atOnce int, f func(ctx context.Context, in Request[P], send func(*Out) error) error) {
	s.handle(name, limitEach, func(procedure string, options connect.HandlerOption) http.Handler {
		return connect.NewBidiStreamHandler(procedure, func(ctx context.Context, stream *connect.BidiStream[incoming[M, P], Out]) error {
			t := &talk[M, P, Out]{stream: stream, answer: f, stopping: s.settings.Stopping}
			if err := t.run(ctx, atOnce); err != nil {
				return Failure(err)
			}
			return nil
		}, options)
	})
}

// interrupter is, in the context of a stream, what makes its reading fail.
type interrupter struct{}

// limitEach is limit for a body of many messages.
func limitEach(next http.Handler, s Settings) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn := http.NewResponseController(w)
		ctx := context.WithValue(r.Context(), interrupter{}, func() { _ = conn.SetReadDeadline(time.Unix(0, 0)) })
		bounded := r.WithContext(ctx)
		bounded.Body = &messages{
			Closer: r.Body, from: r.Body, patient: body.Patient(w, r, s.Patience), patience: s.Patience, limit: int64(s.MaxMessageBytes),
			next: func() { body.Settle(r) },
		}
		next.ServeHTTP(body.PatientWriter(w, s.Patience), bounded)
	})
}

// talk is one stream of many messages.
type talk[M any, P message[M], Out any] struct {
	stream   *connect.BidiStream[incoming[M, P], Out]
	answer   func(context.Context, Request[P], func(*Out) error) error
	stopping <-chan struct{}
	// sending is held while an answer is sent.
	sending sync.Mutex
}

// run reads messages until the caller has no more, and returns when all of them
// are answered.
func (t *talk[M, P, Out]) run(ctx context.Context, atOnce int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	release := t.interruptible(ctx)
	err := t.receive(ctx, group)
	release()
	if err == nil {
		return group.Wait()
	}
	if t.stops() {
		// What is in hand is answered; there is nothing to add to it.
		_ = group.Wait()
		return fault.New(fault.ShuttingDown, "the gateway is stopping; open another stream")
	}
	if cause := context.Cause(ctx); cause != nil {
		err = cause // reading ended because all did
	}
	cancel(broken(err))
	_ = group.Wait() // what ended because the stream did
	return err
}

// broken is why what a stream has in hand is called off, of the error that ended it.
// It is no fault of the requests, whatever it was of the message that could not be read.
func broken(err error) error {
	text := fault.From(err).Message
	if status, ok := errors.AsType[*connect.Error](err); ok {
		text = status.Message()
	}
	return fault.Newf(fault.Cancelled, "the stream ended: %.*s", shown, text).Caused(err)
}

// receive starts the answers to all messages, and returns nil after the last.
func (t *talk[M, P, Out]) receive(ctx context.Context, group *errgroup.Group) error {
	for {
		in, err := t.stream.Receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = in.err
		}
		if err != nil {
			return err
		}
		asked := Request[P]{Message: &in.message, Header: t.stream.RequestHeader(), Connect: t.stream.Peer().Protocol == connect.ProtocolConnect}
		group.Go(func() error { return t.answer(ctx, asked, t.send) })
	}
}

// interruptible makes reading fail when the context ends or the gateway stops, until
// it is released: Receive listens to neither.
func (t *talk[M, P, Out]) interruptible(ctx context.Context) (release func()) {
	interrupt, _ := ctx.Value(interrupter{}).(func())
	released := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-ctx.Done():
			interrupt()
		case <-t.stopping:
			interrupt()
		case <-released:
		}
	})
	return func() {
		close(released)
		watch.Wait()
	}
}

// stops reports whether the gateway does.
func (t *talk[M, P, Out]) stops() bool {
	select {
	case <-t.stopping:
		return true
	default:
		return false
	}
}

func (t *talk[M, P, Out]) send(out *Out) error {
	t.sending.Lock()
	defer t.sending.Unlock()
	if err := t.stream.Send(out); err != nil {
		return fault.Newf(fault.Cancelled, "the answer could not be sent: %w", err)
	}
	return nil
}
