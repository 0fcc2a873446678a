package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/mesh/credentials"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Settings say which broker to use, and as whom.
type Settings struct {
	Mesh pipeline.MeshName
	// URL of the broker, or several with commas between them.
	URL string
	// Server, where set, is a broker in this process; URL is then ignored.
	Server nats.InProcessConnProvider
	// Name is what the broker shows the connection as.
	Name string
	// Auth are the files by which the broker and this process know each other.
	Auth credentials.Broker
	// AckTimeout is how long a send waits to be acknowledged before it is
	// ErrUnknown; 0 means 2 s.
	AckTimeout time.Duration
	Logger     *slog.Logger
}

// Bus is one connection to the broker.
type Bus struct {
	Subjects
	settings Settings
	nc       *nats.Conn
	js       jetstream.JetStream
	requests *requester
	closing  sync.Once
	closed   chan struct{}

	// making are the streams that are being made; none are any more once leaving.
	making sync.WaitGroup

	mu        sync.Mutex
	leaving   bool
	listeners []chan struct{}
	// why is why there is no connection, as far as is known; told is the advice that
	// has been logged since there was one.
	why  error
	told map[string]bool
}

const (
	defaultAckTimeout = 2 * time.Second
	apiTimeout        = 5 * time.Second
	pingEvery         = 2 * time.Second
	maxPings          = 2
	// writeTimeout is for the largest message, on a slow line: one that is cut off costs
	// the connection, and is sent again.
	writeTimeout = 5 * time.Second
)

// Connect returns a bus that connects, and reconnects for ever, in the
// background; see WaitConnected.
func Connect(s Settings) (*Bus, error) {
	if err := pipeline.ValidName("mesh", string(s.Mesh)); err != nil {
		return nil, err
	}
	if s.AckTimeout <= 0 {
		s.AckTimeout = defaultAckTimeout
	}
	b := &Bus{Subjects: SubjectsOf(s.Mesh), settings: s, closed: make(chan struct{})}
	b.requests = newRequester(s.AckTimeout)
	files, err := s.Auth.Options()
	if err != nil {
		return nil, fmt.Errorf("broker: %w", err)
	}
	nc, err := nats.Connect(s.URL, append(b.options(), files...)...)
	if err != nil {
		// The URL may have a password.
		return nil, fmt.Errorf("broker: %w", err)
	}
	b.mu.Lock()
	b.nc = nc
	b.mu.Unlock()
	if err := b.start(); err != nil {
		nc.Close()
		return nil, err
	}
	return b, nil
}

func (b *Bus) start() error {
	js, err := jetstream.New(b.nc, jetstream.WithDefaultTimeout(apiTimeout))
	if err != nil {
		return err
	}
	b.js = js
	return b.requests.start(b.nc)
}

func (b *Bus) options() []nats.Option {
	options := []nats.Option{
		nats.Name(b.settings.Name),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		nats.ReconnectBufSize(-1),
		// A broker that is silent is away after two questions.
		nats.PingInterval(pingEvery),
		nats.MaxPingsOutstanding(maxPings),
		nats.FlusherTimeout(writeTimeout),
		nats.CustomReconnectDelay(func(int) time.Duration { return credentials.ReconnectDelay(b.refused()) }),
		nats.ConnectHandler(func(*nats.Conn) { b.connected() }),
		nats.ReconnectHandler(func(*nats.Conn) { b.connected() }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) { b.disconnected(err) }),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) { b.missed(err) }),
		// Credentials may be mended, and brokers that start may refuse all.
		nats.IgnoreAuthErrorAbort(),
		nats.ErrorHandler(b.asyncError),
		nats.ClosedHandler(func(*nats.Conn) { close(b.closed) }),
	}
	if b.settings.Server != nil {
		options = append(options, nats.InProcessServer(b.settings.Server))
	}
	return options
}

func (b *Bus) connected() {
	b.settings.Logger.Info("broker connected", "connection", b.settings.Name)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.why, b.told = nil, nil
	for _, listener := range b.listeners {
		select {
		case listener <- struct{}{}:
		default:
		}
	}
}

func (b *Bus) disconnected(err error) {
	if err != nil {
		b.settings.Logger.Warn("broker lost; reconnecting", "connection", b.settings.Name, "error", err)
	}
	b.requests.failAll(ErrUnknown)
}

// refused returns what the latest attempt to connect has failed with once the broker
// had answered, which the client tells nobody, or nil.
func (b *Bus) refused() error {
	b.mu.Lock()
	nc := b.nc
	b.mu.Unlock()
	if nc == nil {
		return nil
	}
	err := nc.LastError()
	if err != nil {
		b.missed(err)
	}
	return err
}

// missed hears of each attempt to connect that comes to nothing, and says so once for
// each reason that somebody can do something about. Servers of one broker may have
// different reasons.
func (b *Bus) missed(err error) {
	if errors.Is(err, nats.ErrNoServers) {
		// The next attempt says why.
		return
	}
	advice := credentials.Advice(err)
	b.mu.Lock()
	known := b.told[advice]
	if b.told == nil {
		b.told = map[string]bool{}
	}
	b.why, b.told[advice] = err, true
	b.mu.Unlock()
	if !known {
		b.settings.Logger.Warn("the broker is not reached; trying again", "connection", b.settings.Name, "error", credentials.Explain(err))
	}
}

func (b *Bus) asyncError(nc *nats.Conn, sub *nats.Subscription, err error) {
	if credentials.IsRefused(err) && !nc.IsConnected() {
		// It is heard at each attempt to connect, and refused says it once.
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

// JetStream returns the client of the broker's streams, for the packages of the
// mesh that keep streams of their own.
func (b *Bus) JetStream() jetstream.JetStream { return b.js }

// Watch hands every message on a subject to handle, which must not block, until
// the returned function is called. What is published after Watch has returned is
// heard.
func (b *Bus) Watch(subject string, handle func([]byte)) (stop func() error, err error) {
	sub, err := b.nc.Subscribe(subject, func(msg *nats.Msg) { handle(msg.Data) })
	if err != nil {
		return nil, sendError(err)
	}
	return b.known(sub, sub.SetPendingLimits(watchBacklog, -1))
}

// known returns the end of a subscription once the broker knows of it.
func (b *Bus) known(sub *nats.Subscription, err error) (stop func() error, _ error) {
	if err == nil {
		err = b.flush()
	}
	if err != nil {
		// What is not known to the broker may fail to end there as well.
		_ = sub.Unsubscribe()
		return nil, sendError(err)
	}
	return sub.Unsubscribe, nil
}

// watchBacklog bounds the messages that wait for the handler of a Watch.
const watchBacklog = 1 << 16

// Connected reports whether the broker can be reached right now.
func (b *Bus) Connected() bool { return b.nc.IsConnected() }

// Away returns nil while the broker is reached, else an ErrDisconnected with the
// reason, and what to do about it, as far as they are known.
func (b *Bus) Away() error {
	if b.Connected() {
		return nil
	}
	return b.away()
}

func (b *Bus) away() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.why == nil {
		return ErrDisconnected
	}
	return fmt.Errorf("%w: %w", ErrDisconnected, credentials.Explain(b.why))
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
			return fmt.Errorf("%w: %w", b.away(), ctx.Err())
		}
	}
	return nil
}

// MaxPayload returns the largest message that the broker takes, in bytes,
// headers included.
func (b *Bus) MaxPayload() int { return int(b.nc.MaxPayload()) }

const closeFlush = 2 * time.Second

// Close sends what is buffered, ends the connection and waits for it. Sends
// that wait are ErrUnknown. A second call does nothing.
func (b *Bus) Close() { b.closing.Do(b.close) }

func (b *Bus) close() {
	b.mu.Lock()
	b.leaving = true
	b.mu.Unlock()
	b.making.Wait()
	if b.nc.IsConnected() {
		if err := b.nc.FlushTimeout(closeFlush); err != nil {
			b.settings.Logger.Warn("flush before close", "error", err)
		}
	}
	b.nc.Close()
	<-b.closed
	b.requests.stop()
}
