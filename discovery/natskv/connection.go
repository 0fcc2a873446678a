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
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/filestream"
	"github.com/stagemesh/stagemesh/internal/process"
)

const (
	// patience is how long a call waits for a store that is unavailable.
	patience = 2 * time.Second
	// answerTimeout is how long one request waits for its answer. A call makes up to maxLost of
	// them on a connection that lasts, also after its patience: a busy broker answers late.
	answerTimeout = 2 * time.Second
	maxLost       = 3

	pingEvery    = 2 * time.Second
	maxPings     = 2
	writeTimeout = 2 * time.Second
)

// connection holds the connection to the broker. Every time it is established a
// session begins; a request of a session that has ended gets no answer.
type connection struct {
	log *slog.Logger

	mu      sync.Mutex
	nc      *nats.Conn
	session *session
	// why is the latest reason why there is no session.
	why error
	// changed closes when the session changes.
	changed chan struct{}
	// pending are the requests that wait for an answer, with what fails them.
	pending map[*nats.Msg]context.CancelCauseFunc
	// creating is read-locked while a stream is created, and locked to close the connection.
	creating sync.RWMutex
}

// session is one period in which the connection is established.
type session struct {
	connection *connection
	nc         *nats.Conn
	// ctx ends with the session.
	ctx context.Context
	end context.CancelFunc
	// files has the streams that were seen; only the table's is on file.
	files filestream.Seen
}

func newConnection(log *slog.Logger) *connection {
	return &connection{log: log, changed: make(chan struct{}), pending: map[*nats.Msg]context.CancelCauseFunc{}}
}

// run holds the connection until the context ends.
func (c *connection) run(ctx context.Context, s Settings) error {
	closed := make(chan struct{})
	files, err := s.Auth.Options()
	if err != nil {
		return fmt.Errorf("%w: %w", discovery.ErrInvalid, err)
	}
	options := append(append(c.options(s), files...), nats.ClosedHandler(func(*nats.Conn) { close(closed) }))
	nc, err := nats.Connect(s.URL, options...)
	if err != nil {
		// The client retries by itself while the broker is unreachable, so the settings
		// are wrong.
		return fmt.Errorf("%w: the broker's connection: %w", discovery.ErrInvalid, err)
	}
	c.mu.Lock()
	c.nc = nc
	c.mu.Unlock()
	<-ctx.Done()
	c.creating.Lock()
	defer c.creating.Unlock()
	nc.Close()
	<-closed
	c.setSession(nil)
	return nil
}

func (c *connection) options(s Settings) []nats.Option {
	options := []nats.Option{
		nats.Name(s.Name),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		// Keep nothing for later while the broker is unreachable.
		nats.ReconnectBufSize(-1),
		nats.PingInterval(pingEvery),
		nats.MaxPingsOutstanding(maxPings),
		nats.FlusherTimeout(writeTimeout),
		// An operator may mend credentials, and a starting broker may reject all.
		nats.IgnoreAuthErrorAbort(),
		nats.CustomReconnectDelay(c.reconnectDelay),
		nats.ConnectHandler(c.onConnect),
		nats.ReconnectHandler(c.onConnect),
		nats.DisconnectErrHandler(c.onDisconnect),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) { c.setReason(err) }),
		nats.ErrorHandler(c.onError),
	}
	if s.Server != nil {
		options = append(options, nats.InProcessServer(s.Server))
	}
	return options
}

func (c *connection) onConnect(nc *nats.Conn) {
	c.log.Info("registry connected", "broker", nc.ConnectedAddr())
	s := &session{connection: c, nc: nc}
	s.ctx, s.end = context.WithCancel(context.Background())
	c.setSession(s)
}

func (c *connection) onDisconnect(_ *nats.Conn, err error) {
	if err != nil {
		c.log.Warn("registry disconnected; reconnecting", "error", err)
	}
	c.setSession(nil)
	c.setReason(err)
}

// setReason notes why there is no session.
func (c *connection) setReason(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.why = err
}

func (c *connection) setSession(s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.session != nil {
		c.session.end()
	}
	c.session = s
	close(c.changed)
	c.changed = make(chan struct{})
}

// onError fails requests to subjects that the user may not use: they get no answer.
func (c *connection) onError(nc *nats.Conn, _ *nats.Subscription, err error) {
	if credentials.IsRefused(err) && !nc.IsConnected() {
		// The client reports each failed attempt to connect; callers receive the reason.
		return
	}
	c.log.Warn("registry's broker", "error", err)
	if !errors.Is(err, nats.ErrPermissionViolation) {
		return
	}
	denied := fmt.Errorf("%w: %w", discovery.ErrDenied, err)
	answers := strings.Contains(err.Error(), "Subscription")
	c.mu.Lock()
	defer c.mu.Unlock()
	for msg, fail := range c.pending {
		if answers || strings.Contains(err.Error(), `"`+msg.Subject+`"`) {
			fail(denied)
		}
	}
}

// attempts decides how long a call repeats a request. It is for one goroutine.
type attempts struct {
	late time.Time
	lost int
}

func newAttempts() *attempts { return &attempts{late: time.Now().Add(patience)} }

// areOver reports whether an error that says that the store is unavailable is the call's.
func (a *attempts) areOver(err error) bool {
	if errors.Is(err, errLost) {
		a.lost++
	}
	return time.Now().After(a.late) && (a.lost >= maxLost || !errors.Is(err, errLost))
}

// await returns the session, and waits up to patience for one.
func (c *connection) await(ctx context.Context) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		c.mu.Lock()
		s, changed := c.session, c.changed
		c.mu.Unlock()
		if s != nil {
			return s, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			c.mu.Lock()
			defer c.mu.Unlock()
			return nil, connectionError(c.why)
		}
	}
}

// reconnectDelay returns the pause before the next attempt to connect. The client reports
// the broker's answer to the latest attempt to no handler.
func (c *connection) reconnectDelay(int) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.nc == nil {
		return credentials.ReconnectDelay(nil)
	}
	err := c.nc.LastError()
	if err != nil {
		c.why = err
	}
	return credentials.ReconnectDelay(err)
}

// bind returns a context that also ends with the session.
func (s *session) bind(ctx context.Context) (context.Context, context.CancelCauseFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(s.ctx, func() { cancel(errLost) })
	return ctx, func(err error) {
		stop()
		cancel(err)
	}
}

// request sends a request and returns its answer. errUnsent means that it did not reach
// the broker, errMissing that nobody subscribes to its subject, errLost that no answer
// came.
func (s *session) request(ctx context.Context, msg *nats.Msg) (*nats.Msg, error) {
	ctx, cancel := s.bind(ctx)
	defer cancel(nil)
	defer s.connection.addPending(msg, cancel)()
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
		return nil, fmt.Errorf("%w: the broker takes messages of at most %d bytes", discovery.ErrInvalid, s.nc.MaxPayload())
	case errors.Is(context.Cause(ctx), discovery.ErrDenied):
		return nil, context.Cause(ctx)
	default:
		return nil, errLost
	}
}

// addPending adds a request until the returned function is called.
func (c *connection) addPending(msg *nats.Msg, fail context.CancelCauseFunc) (remove func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending[msg] = fail
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.pending, msg)
	}
}

// publish stores a message in a stream, and returns its sequence.
func (s *session) publish(ctx context.Context, msg *nats.Msg) (uint64, error) {
	answer, err := s.request(ctx, msg)
	if err != nil {
		return 0, err
	}
	var ack jetstream.PubAck
	if err := decode(answer.Data, &ack); err != nil {
		return 0, err
	}
	if ack.Sequence == 0 {
		return 0, fmt.Errorf("%w: %q is not an ack", errLost, answer.Data)
	}
	return ack.Sequence, nil
}

// api sends a request to the broker's API that may be repeated.
func (s *session) api(ctx context.Context, subject string, in, out any) error {
	data, err := json.Marshal(in)
	if err != nil {
		return err
	}
	answer, err := s.request(ctx, &nats.Msg{Subject: "$JS.API." + subject, Data: data})
	if errors.Is(err, errMissing) {
		return fmt.Errorf("%w: there is no JetStream", discovery.ErrUnavailable)
	}
	if err != nil {
		return err
	}
	return decode(answer.Data, out)
}

// decode reads an answer, or the error in it.
func decode(data []byte, out any) error {
	var failed struct {
		Error *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(data, &failed); err != nil {
		return fmt.Errorf("%w that is readable: %w", errLost, err)
	}
	if failed.Error != nil {
		return apiError(failed.Error)
	}
	if err := json.Unmarshal(data, out); err != nil {
		return fmt.Errorf("%w that is readable: %w", errLost, err)
	}
	return nil
}

// pause waits a moment, or until the context ends.
func pause(ctx context.Context) {
	_ = process.Sleep(ctx, pauseBase+rand.N(pauseJitter))
}

const (
	pauseBase   = 20 * time.Millisecond
	pauseJitter = 60 * time.Millisecond
)
