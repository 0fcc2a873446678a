package adminapi

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

const (
	// maxCalls is how many calls of a service run at a time, and callTimeout the time
	// limit of each.
	maxCalls    = 8
	callTimeout = 30 * time.Second
	// maxModelCalls is maxCalls of services about models, whose calls may wait for loads.
	maxModelCalls = 64
	retryAfter    = time.Second
	// maxWatches is how many watches of a service run at a time.
	maxWatches = 64
	// pollInterval is how often a watch polls for changes without notification, and
	// minInterval the least time between two messages.
	pollInterval = time.Second
	minInterval  = 500 * time.Millisecond
)

// service is one RPC service, which bounds the calls that it serves at a time.
type service struct {
	*transport.Service

	// subject of the calls, for messages.
	subject        string
	calls, watches chan struct{}
	stopping       context.Context
	log            *slog.Logger
}

// mount adds a service to the mux. The caller adds its methods.
func (h *handler) mount(mux *http.ServeMux, file protoreflect.FileDescriptor, subject string, maxMessageBytes int) *service {
	out := h.newService(file, subject, maxMessageBytes, maxCalls)
	mux.Handle(out.Path(), out)
	return out
}

func (h *handler) newService(file protoreflect.FileDescriptor, subject string, maxMessageBytes, calls int) *service {
	return &service{
		Service: transport.NewService(file.Services().Get(0), transport.Settings{MaxMessageBytes: maxMessageBytes}),
		subject: subject, calls: make(chan struct{}, calls), watches: make(chan struct{}, maxWatches), stopping: h.Stopping, log: h.Logger,
	}
}

// acquire takes a slot, or returns OVERLOADED.
func acquire(slots chan struct{}, subject string) (release func(), err error) {
	select {
	case slots <- struct{}{}:
		return func() { <-slots }, nil
	default:
		return nil, fault.Newf(fault.Overloaded, "%d calls about %s are being served, as many as may be", cap(slots), subject).WithRetryAfter(retryAfter)
	}
}

// logInternal logs the cause of INTERNAL, which callers do not see.
func (s *service) logInternal(err error) {
	if f := fault.From(err); err != nil && f.Reason == fault.Internal {
		s.log.Error(s.subject, "error", f.Unwrap())
	}
}

// message is a pointer to a generated message.
type message[M any] interface {
	*M
	proto.Message
}

// unary serves f as a method that the role read may not call; otherwise it is query.
func unary[M any, P message[M], Out any](s *service, name protoreflect.Name, f func(context.Context, P) (*Out, error)) {
	query(s, name, func(ctx context.Context, in P) (*Out, error) {
		if err := refuseReader(ctx, "call "+string(name)); err != nil {
			return nil, err
		}
		return f(ctx, in)
	})
}

// refuseReader returns the fault of a caller with the role read; nil for others.
func refuseReader(ctx context.Context, to string) error {
	if !transport.IsReader(ctx) {
		return nil
	}
	return fault.Newf(fault.PermissionDenied, "this token has the role read, which may not %s; use a token of gateway.admin.token_file without a role", to)
}

// query serves f as a method that changes nothing, takes a slot and has a time limit.
func query[M any, P message[M], Out any](s *service, name protoreflect.Name, f func(context.Context, P) (*Out, error)) {
	transport.Unary(s.Service, name, func(ctx context.Context, _ *transport.Call, in P) (*Out, error) {
		release, err := acquire(s.calls, s.subject)
		if err != nil {
			return nil, err
		}
		defer release()
		ctx, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		out, err := f(ctx, in)
		s.logInternal(err)
		return out, err
	})
}

// watch serves a method that changes nothing and sends the result of get, and again on every change, until
// the caller disconnects or the gateway stops.
func watch[M any, P message[M], Out any, O message[Out]](s *service, name protoreflect.Name, changed func() <-chan struct{}, get func(context.Context, P) (O, error)) {
	transport.ServerStream(s.Service, name, func(ctx context.Context, _ *transport.Call, in P, send func(*Out) error) error {
		release, err := acquire(s.watches, "changes of "+s.subject)
		if err != nil {
			return err
		}
		defer release()
		var last O
		err = s.poll(ctx, changed, func(ctx context.Context) error {
			now, err := get(ctx, in)
			if err != nil || last != nil && proto.Equal(now, last) {
				return err
			}
			last = now
			return send(now)
		})
		s.logInternal(err)
		return err
	})
}

// poll calls sendChange at first and after every change, until it fails or the watch ends.
func (s *service) poll(ctx context.Context, changed func() <-chan struct{}, sendChange func(context.Context) error) error {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	gap := time.NewTimer(minInterval)
	defer gap.Stop()
	for {
		change := changed()
		limited, cancel := context.WithTimeout(ctx, callTimeout)
		err := sendChange(limited)
		cancel()
		if err != nil {
			return err
		}
		gap.Reset(minInterval)
		if err := s.wait(ctx, nil, gap.C); err != nil {
			return err
		}
		if err := s.wait(ctx, change, ticker.C); err != nil {
			return err
		}
	}
}

// wait returns nil with the first of changed and due, or the cause if the watch ends.
func (s *service) wait(ctx context.Context, changed <-chan struct{}, due <-chan time.Time) error {
	select {
	case <-changed:
	case <-due:
	case <-s.stopping.Done():
		return fault.New(fault.ShuttingDown, "the gateway is stopping; watch another one")
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}
