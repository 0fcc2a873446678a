package stagemesh

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/tempfolder"
)

const (
	memorySlack     = 64 << 20
	joinMemory      = 4 << 30
	storeSlack      = 16 << 30
	brokerReadyWait = 10 * time.Second
	// unlimited is in bytes; sums of it and of what streams reserve do not overflow.
	unlimited = 1 << 62
)

// Bounds on those that connect to nats.listen. A connection that does not authenticate in time is
// closed, so it holds little memory for a short time. Those who do are trusted: all that they keep
// has a bound each.
const (
	maxBrokerConnections = 1024
	brokerAuthTimeout    = 2 * time.Second
	// brokerSync is how often files are synced to disk, and cleared of messages that are gone: the default
	// of two minutes leaves a disk full for so long after each failed write.
	brokerSync     = 10 * time.Second
	maxControlLine = 4 << 10
	// maxBrokerPending is what waits for one connection that does not read, in bytes.
	maxBrokerPending = 64 << 20
	// maxBrokerSubscriptions is per connection. A gateway has one for each call that waits for a job.
	maxBrokerSubscriptions = 1 << 16
	maxBrokerStreams       = 4096
	// maxBrokerConsumers is per stream.
	maxBrokerConsumers = 1 << 14
)

// broker is NATS with JetStream in this process.
type broker struct {
	// Server is there once the broker is ready.
	*server.Server
	settings meshfile.NATS
	reserve  meshfile.Reserve
	log      *brokerLog
	ready    chan struct{}
	store    *brokerStore
	// streams is what the file streams may take.
	streams int64
}

var errBroker = errors.New("the broker in the process did not start")

// newBroker returns a broker for a mesh that reserves that much.
func newBroker(s meshfile.NATS, reserve meshfile.Reserve, log *slog.Logger) *broker {
	streams := reserve.Store
	reserve.Memory += memorySlack
	if s.Listen != "" {
		reserve.Memory += joinMemory
	}
	// For stages that join, and for those that the folder remembers.
	reserve.Store += storeSlack
	b := &broker{
		settings: s, reserve: reserve, ready: make(chan struct{}), streams: streams,
		log: &brokerLog{log: log.With("part", "broker"), fatal: make(chan string, 1)},
	}
	b.store = &brokerStore{broker: b}
	b.log.failed = b.store.fail
	return b
}

// run serves until the context ends.
func (b *broker) run(ctx context.Context) error {
	folder := b.settings.StoreDir
	if folder == "" {
		temporary, err := tempfolder.Open(os.TempDir(), "stagemesh-broker-", nil)
		if err != nil {
			return fmt.Errorf("%w: %w", errBroker, err)
		}
		defer b.remove(temporary)
		folder = temporary.Path
	}
	b.store.folder = folder
	err := b.store.checkStart(b.streams)
	if err == nil {
		err = b.start(folder)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errBroker, err)
	}
	close(b.ready)
	b.store.watch(ctx)
	b.stop()
	return nil
}

// remove removes the folder of a broker that has stopped. On an error its files remain in
// the system's folder for temporary files.
func (b *broker) remove(folder *tempfolder.Folder) {
	if err := folder.Remove(); err != nil {
		b.log.log.Warn("the broker's files stay behind", "error", err)
	}
}

func (b *broker) start(folder string) error {
	options, err := b.options(folder)
	if err != nil {
		return err
	}
	if b.Server, err = server.NewServer(options); err != nil {
		return err
	}
	b.SetLoggerV2(b.log, false, false, false)
	b.Start()
	select {
	case reason := <-b.log.fatal:
		if strings.HasPrefix(reason, "Error listening") {
			reason = "nats.listen: " + reason
		}
		err = errors.New(reason)
	default:
		if !b.ReadyForConnections(brokerReadyWait) {
			err = fmt.Errorf("it is not ready after %s", brokerReadyWait)
		}
	}
	if err == nil {
		err = b.limit(false)
	}
	if err == nil {
		err = b.warmUp()
	}
	if err != nil {
		b.stop()
	}
	return err
}

// limit sets the limits of the mesh's account. While the disk is full nothing is stored in files.
func (b *broker) limit(isFull bool) error {
	most := b.limits()
	if isFull {
		most.MaxStore = 1
	}
	return b.GlobalAccount().UpdateJetStreamLimits(map[string]server.JetStreamAccountLimits{"": most})
}

func (b *broker) limits() server.JetStreamAccountLimits {
	return server.JetStreamAccountLimits{
		MaxMemory:  cmp.Or(b.settings.MaxMemory, b.reserve.Memory),
		MaxStore:   cmp.Or(b.settings.MaxStore, b.reserve.Store),
		MaxStreams: maxBrokerStreams, MaxConsumers: maxBrokerConsumers,
		MaxAckPending: -1, MemoryMaxStreamBytes: -1, StoreMaxStreamBytes: -1,
	}
}

// reopenStreams opens the streams of the mesh's account again. Those in memory are gone.
func (b *broker) reopenStreams() error {
	if err := b.GlobalAccount().DisableJetStream(); err != nil {
		return err
	}
	return b.GlobalAccount().EnableJetStream(map[string]server.JetStreamAccountLimits{"": b.limits()}, nil)
}

func (b *broker) warmUp() error {
	options, err := b.auth().Options()
	if err != nil {
		return err
	}
	return bus.WarmUp(b, options...)
}

func (b *broker) stop() {
	b.Shutdown()
	b.WaitForShutdown()
}

func (b *broker) options(folder string) (*server.Options, error) {
	s := b.settings
	o := &server.Options{
		DontListen: s.Listen == "",
		JetStream:  true,
		// The account of the mesh has the limits: the server's own count streams that are opened
		// again twice (nats-server 2.15.2).
		JetStreamMaxMemory: unlimited,
		JetStreamMaxStore:  unlimited,
		StoreDir:           folder,
		MaxPayload:         int32(cmp.Or(s.MaxPayload, meshfile.DefaultBrokerPayload)),
		NoSigs:             true,
		SyncInterval:       brokerSync,
	}
	if s.Listen == "" {
		return o, nil
	}
	if err := s.Exposure().Check("nats.listen", "name a file with a token in nats.token_file, "); err != nil {
		return nil, err
	}
	s.Exposure().Warn(b.log.log, "nats.listen")
	if err := b.guard(o); err != nil {
		return nil, err
	}
	o.MaxConn, o.AuthTimeout, o.MaxControlLine = maxBrokerConnections, brokerAuthTimeout.Seconds(), maxControlLine
	o.MaxPending, o.MaxSubs = maxBrokerPending, maxBrokerSubscriptions
	addr, err := net.ResolveTCPAddr("tcp", s.Listen)
	if err != nil {
		return nil, fmt.Errorf("nats.listen: %w", err)
	}
	o.Host, o.Port = addr.IP.String(), addr.Port
	if addr.IP == nil {
		o.Host = server.DEFAULT_HOST
	}
	if addr.Port == 0 {
		o.Port = server.RANDOM_PORT
	}
	return o, nil
}

// guard requires TLS and a token of those that join, as far as the settings have them.
func (b *broker) guard(o *server.Options) (err error) {
	s := b.settings
	pair := credentials.Pair{CertFile: s.ListenCertFile, KeyFile: s.ListenKeyFile}
	if o.TLSConfig, err = pair.Server("nats.listen_", b.log.log); err != nil {
		return err
	}
	if s.TokenFile == "" {
		// The broker waits for the first message of those that authenticate alone, so all do.
		const anybody = "anybody"
		o.Users, o.NoAuthUser = []*server.User{{Username: anybody}}, anybody
		return nil
	}
	if _, err := credentials.Token(s.TokenFile); err != nil {
		return fmt.Errorf("nats.token_file: %w", err)
	}
	tokens, err := credentials.ReadTokens(s.TokenFile, b.log.log)
	if err != nil {
		return fmt.Errorf("nats.token_file: %w", err)
	}
	o.CustomClientAuthentication = tokenHolders{tokens}
	return nil
}

// tokenHolders are the clients that know the token of the file as it is now.
type tokenHolders struct{ credentials.Tokens }

// Check implements server.Authentication.
func (t tokenHolders) Check(c server.ClientAuthentication) bool {
	_, ok := t.Holder(c.GetOpts().Token)
	return ok
}

// auth returns how this process connects to the broker: without TLS, which is for
// other processes.
func (b *broker) auth() credentials.Broker {
	if b.settings.Listen == "" {
		return credentials.Broker{}
	}
	return credentials.Broker{TokenFile: b.settings.TokenFile}
}

func (b *broker) waitReady(ctx context.Context) error {
	select {
	case <-b.ready:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// url returns where the broker listens, once it does, else "".
func (b *broker) url() string {
	select {
	case <-b.ready:
	default:
		return ""
	}
	if b.settings.Listen == "" {
		return ""
	}
	return b.ClientURL()
}

// brokerLog passes the broker's log to the process's, and keeps the first fatal line.
type brokerLog struct {
	log   *slog.Logger
	fatal chan string
	// failed is called with each line about a stream whose store has failed.
	failed func(line string)
}

// Fatalf implements server.Logger.
func (l *brokerLog) Fatalf(format string, v ...any) {
	select {
	case l.fatal <- fmt.Sprintf(format, v...):
	default:
	}
}

// The other methods of server.Logger. The broker logs much, so its notices and warnings are
// for the level debug.
func (l *brokerLog) Noticef(format string, v ...any) { l.log.Debug(fmt.Sprintf(format, v...)) }
func (l *brokerLog) Warnf(format string, v ...any)   { l.log.Warn(fmt.Sprintf(format, v...)) }
func (l *brokerLog) Errorf(format string, v ...any) {
	text := fmt.Sprintf(format, v...)
	if strings.Contains(text, "ritical write error") {
		l.failed(text)
	}
	if strings.Contains(text, "TLS handshake error") {
		// It is about one connection, such as a probe of TCP.
		l.log.Debug(text)
		return
	}
	l.log.Error(text)
}

func (l *brokerLog) Debugf(format string, v ...any) { l.log.Debug(fmt.Sprintf(format, v...)) }
func (l *brokerLog) Tracef(format string, v ...any) { l.log.Debug(fmt.Sprintf(format, v...)) }
