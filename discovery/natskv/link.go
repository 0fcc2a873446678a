package natskv

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/mesh/credentials"
)

const (
	// patience is how long a call waits for a store that is away.
	patience = 2 * time.Second
	// answerTimeout is how long one question waits for its answer.
	answerTimeout = 2 * time.Second

	dialTimeout  = 2 * time.Second
	pingEvery    = 2 * time.Second
	maxPings     = 2
	writeTimeout = 2 * time.Second
)

// link is the connection. Each time that it is there is a session, and what was
// asked in one that has ended gets no answer.
type link struct {
	log *slog.Logger

	mu      sync.Mutex
	nc      *nats.Conn
	session *session
	// why is why there is none, as far as is known.
	why error
	// changed is closed when the session has changed.
	changed chan struct{}
	asked   map[*question]struct{}
	// making are the streams that are being made; none are any more once closing.
	making  sync.WaitGroup
	closing bool
}

// session is a connection while it is there.
type session struct {
	link *link
	nc   *nats.Conn
	// gone ends with the connection.
	gone context.Context
	end  context.CancelFunc

	mu sync.Mutex
	// known are the streams that there are.
	known map[string]bool
}

// question is one that waits for its answer.
type question struct {
	subject string
	refuse  context.CancelCauseFunc
}

func newLink(log *slog.Logger) *link {
	return &link{log: log, changed: make(chan struct{}), asked: map[*question]struct{}{}}
}

// run holds the connection until the context ends.
func (l *link) run(ctx context.Context, s Settings) error {
	closed := make(chan struct{})
	files, err := s.Auth.Options()
	if err != nil {
		return fmt.Errorf("%w: %w", discovery.ErrInvalid, err)
	}
	options := append(append(l.options(s), files...), nats.ClosedHandler(func(*nats.Conn) { close(closed) }))
	nc, err := nats.Connect(s.URL, options...)
	if err != nil {
		// It goes on by itself where the broker is away, so the settings are wrong.
		return fmt.Errorf("%w: the broker's connection: %w", discovery.ErrInvalid, err)
	}
	l.mu.Lock()
	l.nc = nc
	l.mu.Unlock()
	<-ctx.Done()
	l.made()
	nc.Close()
	<-closed
	l.change(nil)
	return nil
}

// make has a stream made, which a caller who leaves does not end: a broker that is told
// to stop while it makes one leaves a part of it behind.
func (l *link) make(ctx context.Context, create func(ctx context.Context) error) error {
	l.mu.Lock()
	if l.closing {
		l.mu.Unlock()
		return errUnsent
	}
	l.making.Add(1)
	l.mu.Unlock()
	defer l.making.Done()
	return create(context.WithoutCancel(ctx))
}

// made waits for the streams that are being made.
func (l *link) made() {
	l.mu.Lock()
	l.closing = true
	l.mu.Unlock()
	l.making.Wait()
}

func (l *link) options(s Settings) []nats.Option {
	options := []nats.Option{
		nats.Name(s.Name),
		nats.Timeout(dialTimeout),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		// Nothing is kept for later while the broker is away.
		nats.ReconnectBufSize(-1),
		nats.PingInterval(pingEvery),
		nats.MaxPingsOutstanding(maxPings),
		nats.FlusherTimeout(writeTimeout),
		// Credentials may be mended, and brokers that start may refuse all.
		nats.IgnoreAuthErrorAbort(),
		nats.CustomReconnectDelay(func(int) time.Duration { return credentials.ReconnectDelay(l.refused()) }),
		nats.ConnectHandler(l.connected),
		nats.ReconnectHandler(l.connected),
		nats.DisconnectErrHandler(l.disconnected),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) { l.explain(err) }),
		nats.ErrorHandler(l.asyncError),
	}
	if s.Server != nil {
		options = append(options, nats.InProcessServer(s.Server))
	}
	return options
}

func (l *link) connected(nc *nats.Conn) {
	l.log.Info("registry connected", "broker", nc.ConnectedAddr())
	s := &session{link: l, nc: nc, known: map[string]bool{}}
	s.gone, s.end = context.WithCancel(context.Background())
	l.change(s)
}

func (l *link) disconnected(_ *nats.Conn, err error) {
	if err != nil {
		l.log.Warn("registry lost; reconnecting", "error", err)
	}
	l.change(nil)
	l.explain(err)
}

// explain notes why there is no connection.
func (l *link) explain(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.why = err
}

func (l *link) change(to *session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.session != nil {
		l.session.end()
	}
	l.session = to
	close(l.changed)
	l.changed = make(chan struct{})
}

// asyncError hears of subjects that the user may not use: those who asked there get
// no answer.
func (l *link) asyncError(nc *nats.Conn, _ *nats.Subscription, err error) {
	if credentials.IsRefused(err) && !nc.IsConnected() {
		// It is heard at each attempt to connect; away tells those who ask.
		return
	}
	l.log.Warn("registry's broker", "error", err)
	if !errors.Is(err, nats.ErrPermissionViolation) {
		return
	}
	refusal := fmt.Errorf("%w: %w", discovery.ErrDenied, err)
	answers := strings.Contains(err.Error(), "Subscription")
	l.mu.Lock()
	defer l.mu.Unlock()
	for q := range l.asked {
		if answers || strings.Contains(err.Error(), `"`+q.subject+`"`) {
			q.refuse(refusal)
		}
	}
}

// wait returns the session, for which it waits a moment.
func (l *link) wait(ctx context.Context) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		l.mu.Lock()
		s, changed := l.session, l.changed
		l.mu.Unlock()
		if s != nil {
			return s, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, l.away()
		}
	}
}

// away is why there is no connection. The client has the latest reason, but not at
// every moment.
func (l *link) away() error {
	if err := l.refused(); err != nil {
		return away(err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return away(l.why)
}

// refused returns what the latest attempt to connect has failed with once the broker
// had answered, or nil.
func (l *link) refused() error {
	l.mu.Lock()
	nc := l.nc
	l.mu.Unlock()
	if nc == nil {
		return nil
	}
	return nc.LastError()
}

// bind returns a context that ends with the session too.
func (s *session) bind(ctx context.Context) (context.Context, context.CancelCauseFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(s.gone, func() { cancel(errLost) })
	return ctx, func(err error) {
		stop()
		cancel(err)
	}
}

// ask sends a question and returns its answer. errUnsent says that it has not reached
// the broker, errMissing that nobody is there to answer, errLost that no answer came.
func (s *session) ask(ctx context.Context, msg *nats.Msg) (*nats.Msg, error) {
	ctx, cancel := s.bind(ctx)
	defer cancel(nil)
	q := &question{subject: msg.Subject, refuse: cancel}
	s.link.enter(q)
	defer s.link.leave(q)
	within, stop := context.WithTimeout(ctx, answerTimeout)
	defer stop()
	answer, err := s.nc.RequestMsgWithContext(within, msg)
	switch {
	case err == nil:
		return answer, nil
	case errors.Is(err, nats.ErrNoResponders):
		return nil, errMissing
	case errors.Is(err, nats.ErrReconnectBufExceeded):
		return nil, errUnsent
	case errors.Is(err, nats.ErrMaxPayload):
		return nil, fmt.Errorf("%w: the broker takes messages of %d bytes", discovery.ErrInvalid, s.nc.MaxPayload())
	case errors.Is(context.Cause(ctx), discovery.ErrDenied):
		return nil, context.Cause(ctx)
	default:
		return nil, errLost
	}
}

func (l *link) enter(q *question) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked[q] = struct{}{}
}

func (l *link) leave(q *question) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.asked, q)
}

// api asks the broker's API a question that may be asked again.
func (s *session) api(ctx context.Context, subject string, in, out any) error {
	var data []byte
	if in != nil {
		var err error
		if data, err = json.Marshal(in); err != nil {
			return err
		}
	}
	answer, err := s.ask(ctx, &nats.Msg{Subject: apiPrefix + subject, Data: data})
	if errors.Is(err, errMissing) {
		return fmt.Errorf("%w: there is no JetStream", discovery.ErrUnavailable)
	}
	if errors.Is(err, errLost) {
		return errSilent
	}
	if err != nil {
		return err
	}
	return decode(answer.Data, out)
}

const apiPrefix = "$JS.API."

// decode reads an answer, or the error that it is.
func decode(data []byte, out any) error {
	var failed struct {
		Error *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(data, &failed); err != nil {
		return fmt.Errorf("%w: %w", errGarbled, err)
	}
	if failed.Error != nil {
		return apiError(failed.Error)
	}
	if err := json.Unmarshal(data, out); err != nil {
		return fmt.Errorf("%w: %w", errGarbled, err)
	}
	return nil
}

// pause waits a moment, and reports whether the context goes on.
func pause(ctx context.Context) bool {
	timer := time.NewTimer(pauseBase + rand.N(pauseJitter))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

const (
	pauseBase   = 20 * time.Millisecond
	pauseJitter = 60 * time.Millisecond
)
