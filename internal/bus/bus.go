// Package bus is the mesh's use of NATS JetStream: its subjects and streams, how
// items are published, pulled and settled, and how replies reach their gateway. No
// other package builds subjects.
//
// A Bus is one connection. A gateway uses
//
//	b.Publish(item, done)             publish an item to its stage's queue
//	b.DeleteQueued(ctx, item, seq)    delete it while it waits there
//	b.Alive(ctx, stage)               check whether any host serves a stage
//	b.ServeReplies(gateway, handle)   receive the replies of hosts
//	b.ClockError()                    check its clock, which deadlines are minted by
//	b.ListMetrics(ctx)                get the metrics of all processes of the mesh
//
// and a stage host
//
//	b.EnsureQueue(ctx, settings)      create stream and consumers
//	b.Pull(settings, handle)          pull items, within a bound
//	b.Publish(item or reply, done)    forward an item or reply to it
//	d.Ack(), d.Nak(delay), d.Term()   settle the delivery
//	b.ServeAlive(stage, host)         answer the gateways' check
//
// # Promises
//
// Nothing is buffered while the broker is disconnected: Publish fails at once with
// ErrDisconnected, and the message is never delivered later. A message whose
// acknowledgement does not arrive is ErrUnknown: it may have been delivered, and
// is repeated with the same message id. ErrQueueFull, ErrNoQueue, ErrNoGateway
// and ErrTooLarge mean that nothing was delivered.
//
// A memory stream is lost when its broker restarts. A queue's Epoch is its
// stream's creation time and part of its consumers' names, so a delivery of a lost
// queue cannot settle an item of the queue that replaced it.
//
// Handlers given to a Bus run on its subscriptions' goroutines and must not
// block on the network. All methods are safe for concurrent use.
//
// Tests use internal/testbed, which runs a real broker in the process.
package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/filestream"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Settings name the broker, and the process to it.
type Settings struct {
	Mesh pipeline.MeshName
	// URL of the broker, or several with commas between them.
	URL string
	// Server, where set, is a broker in this process; URL is then ignored.
	Server nats.InProcessConnProvider
	// Loopback, where set, stands for the broker in a process that has none; URL is then ignored.
	Loopback *Loopback
	// Name is the connection's name on the broker.
	Name string
	// Auth are the files by which the broker and this process authenticate each
	// other.
	Auth credentials.Broker
	// AckTimeout is how long Publish waits for the acknowledgement before it is
	// ErrUnknown; 0 means 5 s. Other requests to the broker wait at least 5 s.
	AckTimeout time.Duration
	// Store, for a broker in this process, returns why it stores nothing in files; nil where it does.
	Store func() error
	// Local are the hosts in this process that items are handed to in memory; nil for none.
	Local *Local
	// Metrics, where set, returns the metrics of this process, as ProcessMetrics has them.
	// Process is its ID then, which is new with each start: one of its buses answers ListMetrics.
	Metrics func() (families []byte, err error)
	Process string
	// Meter has the metric of stored values that cannot be read; nil for none.
	Meter metric.Meter
	// Now is the clock of this process, compared with the broker's; nil means time.Now.
	Now    func() time.Time
	Logger *slog.Logger
}

// Bus is one connection to the broker.
type Bus struct {
	Subjects
	settings Settings
	nc       link
	js       jetstream.JetStream
	requests *requester
	// reads are the stored messages that are on their way.
	reads *budget.Pool
	clock clock
	// unreadable are the stored values that cannot be read.
	unreadable *unreadable
	stores     stores
	closing    sync.Once
	closed     chan struct{}

	// creating is read-locked while a stream is created, and locked to close the connection.
	creating sync.RWMutex
	// files are the streams on file that this connection has seen.
	files filestream.Seen

	// reconnected is when the connection was last made again, as UnixNano; 0 if it never was.
	reconnected atomic.Int64

	mu        sync.Mutex
	listeners []chan struct{}
	// cause is why there is no connection, as far as is known; logged has the advice
	// logged since there was one.
	cause  error
	logged map[string]bool
}

const (
	defaultAckTimeout = 5 * time.Second
	minAPITimeout     = 5 * time.Second
	pingEvery         = 2 * time.Second
	maxPings          = 2
	// writeTimeout bounds the write of each steadyBytes: a message that is cut
	// off costs the connection, and is sent again.
	writeTimeout = 5 * time.Second
)

func (b *Bus) apiTimeout() time.Duration { return max(minAPITimeout, b.settings.AckTimeout) }

// Connect returns a bus that connects, and reconnects for ever, in the
// background; see WaitConnected.
func Connect(s Settings) (*Bus, error) {
	if err := pipeline.ValidName("mesh", string(s.Mesh)); err != nil {
		return nil, err
	}
	if s.AckTimeout <= 0 {
		s.AckTimeout = defaultAckTimeout
	}
	if s.Now == nil {
		s.Now = time.Now
	}
	b := &Bus{Subjects: SubjectsOf(s.Mesh), settings: s, closed: make(chan struct{}), reads: budget.NewPool(budget.Settings{Limit: maxReadBytes, Name: "bytes of stored messages"})}
	b.requests = newRequester(s.AckTimeout)
	var err error
	if b.unreadable, err = newUnreadable(s.Meter); err != nil {
		return nil, err
	}
	if s.Loopback != nil {
		b.nc, b.js = &loopbackLink{Loopback: s.Loopback, onClosed: func() { close(b.closed) }}, noStreams{}
	} else if err := b.dial(); err != nil {
		return nil, fmt.Errorf("broker: %w", err)
	}
	if err := b.start(); err != nil {
		b.nc.Close()
		return nil, err
	}
	return b, nil
}

// dial connects to the broker. Its errors do not have the URL, which may have a password.
func (b *Bus) dial() error {
	files, err := b.settings.Auth.Options()
	if err != nil {
		return err
	}
	nc, err := nats.Connect(b.settings.URL, append(b.options(), files...)...)
	if err != nil {
		return err
	}
	b.mu.Lock()
	b.nc = connection{nc}
	b.mu.Unlock()
	if b.js, err = jetstream.New(nc, jetstream.WithDefaultTimeout(b.apiTimeout())); err != nil {
		nc.Close()
	}
	return err
}

// WarmUp asks a broker in this process for an answer of its JetStream API. Call it before
// the broker has other clients: of the first requests to the API, those that come while
// the broker prepares its first answer are never answered (nats-server 2.15.2,
// Account.newServiceReply).
func WarmUp(server nats.InProcessConnProvider, options ...nats.Option) error {
	return askInProcess(server, map[string]any{"INFO": nil}, options)
}

// CreateStreams creates streams on a broker in this process, by their names; a configuration is what
// the JetStream API takes.
func CreateStreams(server nats.InProcessConnProvider, configs map[string]any, options ...nats.Option) error {
	questions := map[string]any{}
	for name, config := range configs {
		questions["STREAM.CREATE."+name] = config
	}
	return askInProcess(server, questions, options)
}

// askInProcess sends requests to the JetStream API, and waits for their answers.
func askInProcess(server nats.InProcessConnProvider, questions map[string]any, options []nats.Option) error {
	nc, err := nats.Connect("", append(options, nats.InProcessServer(server))...)
	if err != nil {
		return err
	}
	defer nc.Close()
	for name, question := range questions {
		var data []byte
		if question != nil {
			if data, err = json.Marshal(question); err != nil {
				return err
			}
		}
		if _, err = nc.Request("$JS.API."+name, data, minAPITimeout); err != nil {
			return err
		}
	}
	return nil
}

func (b *Bus) start() error {
	if err := b.requests.start(b.nc); err != nil || b.settings.Metrics == nil {
		return err
	}
	return b.serveMetrics()
}

func (b *Bus) options() []nats.Option {
	options := []nats.Option{
		nats.Name(b.settings.Name),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		nats.ReconnectBufSize(-1),
		// A silent broker counts as disconnected after two pings.
		nats.PingInterval(pingEvery),
		nats.MaxPingsOutstanding(maxPings),
		nats.FlusherTimeout(writeTimeout),
		nats.SetCustomDialer(steadyDialer{}),
		nats.CustomReconnectDelay(func(int) time.Duration { return credentials.ReconnectDelay(b.lastRefusal()) }),
		nats.ConnectHandler(func(*nats.Conn) { b.onConnect() }),
		nats.ReconnectHandler(func(*nats.Conn) {
			b.reconnected.Store(time.Now().UnixNano())
			b.onConnect()
		}),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) { b.onDisconnect(err) }),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) { b.logFailedConnect(err) }),
		// Credentials may be corrected, and a starting broker may refuse all.
		nats.IgnoreAuthErrorAbort(),
		nats.ErrorHandler(b.asyncError),
		nats.ClosedHandler(func(*nats.Conn) { close(b.closed) }),
	}
	if b.settings.Server != nil {
		options = append(options, nats.InProcessServer(b.settings.Server))
	}
	return options
}

// returnGrace is how long hosts may take longer than this process to reach a broker that comes
// back: the timeout of an attempt to connect, the pause before the next, and their queues.
const returnGrace = 5 * time.Second

// absent adds ErrReturned to the error of a host, a queue or a stream that is missing, right after a reconnect.
func (b *Bus) absent(err error) error {
	if at := b.reconnected.Load(); at != 0 && time.Since(time.Unix(0, at)) < returnGrace {
		return fmt.Errorf("%w: %w", ErrReturned, err)
	}
	return err
}

func (b *Bus) onConnect() {
	b.settings.Logger.Info("broker connected", "connection", b.settings.Name)
	b.stores.reset()
	b.files.Clear()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.cause, b.logged = nil, nil
	for _, listener := range b.listeners {
		select {
		case listener <- struct{}{}:
		default:
		}
	}
}

func (b *Bus) onDisconnect(err error) {
	if err != nil {
		b.settings.Logger.Warn("broker lost; reconnecting", "connection", b.settings.Name, "error", err)
	}
	b.requests.fail(ErrUnknown, time.Time{})
}

// lastRefusal returns the error of the latest attempt to connect after the broker
// had answered, or nil. The client reports it to no handler.
func (b *Bus) lastRefusal() error {
	b.mu.Lock()
	nc := b.nc
	b.mu.Unlock()
	if nc == nil {
		return nil
	}
	err := nc.LastError()
	if err != nil {
		b.logFailedConnect(err)
	}
	return err
}

// logFailedConnect records a failed attempt to connect, and logs each cause once
// that somebody can fix. Servers of one broker may have different causes.
func (b *Bus) logFailedConnect(err error) {
	if errors.Is(err, nats.ErrNoServers) {
		// The next attempt has the cause.
		return
	}
	advice := credentials.Advice(err)
	b.mu.Lock()
	known := b.logged[advice]
	if b.logged == nil {
		b.logged = map[string]bool{}
	}
	b.cause, b.logged[advice] = err, true
	b.mu.Unlock()
	if !known {
		b.settings.Logger.Warn("the broker is not reached; trying again", "connection", b.settings.Name, "error", credentials.Explain(err))
	}
}

func (b *Bus) asyncError(nc *nats.Conn, sub *nats.Subscription, err error) {
	if credentials.IsRefused(err) && !nc.IsConnected() {
		// It is reported at each attempt to connect; logFailedConnect logs it once.
		return
	}
	subject := ""
	if sub != nil {
		subject = sub.Subject
	}
	b.settings.Logger.Error("broker error", "connection", b.settings.Name, "subject", subject, "error", err)
}

// Reconnects returns a channel that holds a value after every (re)connection
// since it was last read.
func (b *Bus) Reconnects() <-chan struct{} {
	ch := make(chan struct{}, 1)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.listeners = append(b.listeners, ch)
	return ch
}

// Connection returns the number of the connection to the broker: each reconnect raises it.
func (b *Bus) Connection() uint64 { return b.nc.Stats().Reconnects }

// Connected reports whether the broker can be reached right now.
func (b *Bus) Connected() bool { return b.nc.IsConnected() }

// ConnectionError returns nil while the broker is connected, else an ErrDisconnected with
// the cause, and how to fix it, as far as they are known.
func (b *Bus) ConnectionError() error {
	if b.Connected() {
		return nil
	}
	return b.disconnectedError()
}

func (b *Bus) disconnectedError() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.cause == nil {
		return ErrDisconnected
	}
	return fmt.Errorf("%w: %w", ErrDisconnected, credentials.Explain(b.cause))
}

const connectPoll = 10 * time.Millisecond

// WaitConnected returns when the broker is reached.
func (b *Bus) WaitConnected(ctx context.Context) error {
	poll := time.NewTicker(connectPoll)
	defer poll.Stop()
	for !b.nc.IsConnected() {
		select {
		case <-poll.C:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", b.disconnectedError(), ctx.Err())
		}
	}
	return nil
}

// MaxPayload returns the largest message that the broker takes, in bytes,
// headers included.
func (b *Bus) MaxPayload() int { return int(b.nc.MaxPayload()) }

// JetStream returns the client of the broker's streams, for the packages of the
// mesh that keep streams of their own.
func (b *Bus) JetStream() jetstream.JetStream { return b.js }

// BrokerError returns ErrNoBroker in a process without a broker, else nil.
func (b *Bus) BrokerError() error {
	if b.settings.Loopback != nil {
		return ErrNoBroker
	}
	return nil
}

const closeFlush = 2 * time.Second

// Close sends what is buffered, ends the connection and waits for it. Pending
// publishes are ErrUnknown. A second call does nothing.
func (b *Bus) Close() { b.closing.Do(b.close) }

func (b *Bus) close() {
	b.creating.Lock()
	defer b.creating.Unlock()
	if b.nc.IsConnected() {
		if err := b.nc.FlushTimeout(closeFlush); err != nil {
			b.settings.Logger.Warn("flush before close", "error", err)
		}
	}
	b.nc.Close()
	<-b.closed
	b.requests.stop()
}

// Errors of publishes and requests.
var (
	// ErrDisconnected means that there is no connection to the broker; nothing was sent.
	ErrDisconnected = errors.New("the broker is disconnected")
	// ErrUnknown means that no acknowledgement came; it may have been delivered.
	ErrUnknown = errors.New("no acknowledgement from the broker")
	errTimeout = fmt.Errorf("%w in time", ErrUnknown)
	// ErrInProcess means that another write of the subject is in process; this one was not stored.
	// It wraps ErrUnknown, as a retry finds out which message is the last.
	ErrInProcess = fmt.Errorf("%w: another write of the subject is in process", ErrUnknown)
	// ErrNoQueue means that the stage has no queue; nothing was delivered.
	ErrNoQueue = errors.New("the stage has no queue")
	// ErrNoResults means that the mesh has no stream of results.
	ErrNoResults = errors.New("the mesh has no stream of results")
	// ErrNoClaims means that the mesh has no stream of claims.
	ErrNoClaims = errors.New("the mesh has no stream of idempotency keys")
	// ErrNoDeadLetters means that the mesh has no stream of dead letters.
	ErrNoDeadLetters = errors.New("the mesh has no stream of dead letters")
	// ErrNoGateway means that the gateway of the reply is not connected.
	ErrNoGateway = errors.New("the gateway is not connected")
	// ErrNoHost means that no host serves the stage.
	ErrNoHost = errors.New("the stage has no live host")
	// ErrReturned means that this process has just reached the broker again, and the hosts of the
	// stage may not have. It comes with ErrNoHost or ErrNoQueue.
	ErrReturned = errors.New("the broker has just come back")
	// ErrQueueFull means that the queue is at its bound; nothing was delivered.
	ErrQueueFull = errors.New("the queue is full")
	// ErrTooLarge means that the message is over the broker's limit.
	ErrTooLarge = errors.New("the message is over the broker's limit")
	// ErrClosed means that the bus has been closed.
	ErrClosed = errors.New("the bus is closed")
	// ErrNoBroker means that the process has no broker, and what was asked for needs one.
	ErrNoBroker = errors.New("stagemesh serve has no broker, and durable requests, results, idempotency keys, jobs, batches, files and dead letters need one; stagemesh up has one")
)

// FaultOf returns a caller's fault for a bus error about a stage.
func FaultOf(err error, stage pipeline.StageName) *fault.Fault {
	switch cause := CauseOf(err); {
	case cause != "":
		return fault.Newf(fault.NoCapacity, "stage %s has no ready host: %s", stage, cause)
	case errors.Is(err, ErrDisconnected), errors.Is(err, ErrClosed):
		return fault.New(fault.BrokerUnavailable, "the broker cannot be reached; the request was not queued").Caused(err)
	case errors.Is(err, ErrUnknown):
		return fault.Newf(fault.BrokerUnavailable, "the broker did not confirm the request for stage %s", stage).Caused(err)
	case errors.Is(err, ErrReturned):
		return fault.Newf(fault.BrokerUnavailable, "the broker has just come back, and no host of stage %s is connected to it again yet; the request was not queued", stage).Caused(err)
	case errors.Is(err, ErrNoQueue), errors.Is(err, ErrNoHost):
		return fault.Newf(fault.NoCapacity, "stage %s has no live host; start one, or check the pipeline's stage names", stage).Caused(err)
	case errors.Is(err, ErrQueueFull):
		return fault.Newf(fault.QueueFull, "the queue of stage %s is full", stage).Caused(err)
	case errors.Is(err, ErrStoreFull), errors.Is(err, ErrNoBroker):
		return StoreFault(err)
	case errors.Is(err, ErrTooLarge):
		return fault.Newf(fault.PayloadTooLarge, "the request for stage %s is too large: %w", stage, err)
	}
	return fault.From(fmt.Errorf("stage %s: %w", stage, err))
}

// Rejection turns an error about a hop into the caller's fault. The fault names the step, unless
// the broker itself is disconnected, and when to retry.
func Rejection(err error, hop *pipeline.Hop) *fault.Fault {
	f := FaultOf(err, hop.Stage)
	if f.Reason != fault.BrokerUnavailable {
		f = f.At(string(hop.Stage), string(hop.Step), "")
	}
	if f.Retryable() {
		f = f.WithRetryAfter(budget.RetryAfter)
	}
	return f
}

// sendError classifies the client's error of a local publish.
func sendError(err error) error {
	switch {
	case errors.Is(err, nats.ErrMaxPayload):
		return ErrTooLarge
	case errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrConnectionDraining):
		return ErrClosed
	case errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, nats.ErrDisconnected), errors.Is(err, nats.ErrConnectionReconnecting):
		return ErrDisconnected
	case errors.Is(err, ErrNoBroker):
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnknown, err)
}
