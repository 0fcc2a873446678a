package transport

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// SharedListener is the listener of a port that net/http shares with a server of NewGRPC. Its
// Accept is for net/http, which reads each connection first. Where the first request is a gRPC
// client's own, the connection goes on to the other server, and net/http sees its end.
//
// Connections of proxies stay with net/http: they may mix calls with other requests.
type SharedListener struct {
	net.Listener

	tls *tls.Config
	log *slog.Logger
	// calls are the connections for the server of gRPC, which takes them until closed ends.
	calls  chan net.Conn
	closed context.Context
	close  context.CancelFunc
}

// NewSharedListener returns a listener for Serve of the server, whose TLS it takes over.
func NewSharedListener(l net.Listener, server *http.Server, log *slog.Logger) *SharedListener {
	out := &SharedListener{Listener: l, log: log, calls: make(chan net.Conn)}
	out.closed, out.close = context.WithCancel(context.Background())
	if server.TLSConfig == nil {
		return out
	}
	out.tls = server.TLSConfig.Clone()
	out.tls.NextProtos = []string{"h2", "http/1.1"}
	server.ConnContext = func(ctx context.Context, conn net.Conn) context.Context {
		return context.WithValue(ctx, connKey{}, conn)
	}
	next := server.Handler
	server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c, ok := r.Context().Value(connKey{}).(*sharedConn); ok {
			r.TLS = &c.state
		}
		next.ServeHTTP(w, r)
	})
	return out
}

// connKey is the context key of the connection of a request over TLS.
type connKey struct{}

// Accept implements net.Listener, for net/http.
func (l *SharedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	out := &sharedConn{Conn: conn, listener: l}
	if l.tls != nil {
		out.Conn = tls.Server(conn, l.tls)
	}
	return out, nil
}

// GRPC returns the listener for the server of gRPC. Once that is closed, net/http serves
// every new connection, and those that wait for their first request are ended.
func (l *SharedListener) GRPC() net.Listener { return grpcListener{l} }

type grpcListener struct{ shared *SharedListener }

// Accept implements net.Listener.
func (l grpcListener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.shared.calls:
		return conn, nil
	case <-l.shared.closed.Done():
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l grpcListener) Close() error {
	l.shared.close()
	return nil
}

// Addr implements net.Listener.
func (l grpcListener) Addr() net.Addr { return l.shared.Addr() }

// replayedConn is a connection whose first bytes were read already.
type replayedConn struct {
	net.Conn

	in io.Reader
}

// Read implements net.Conn.
func (c *replayedConn) Read(buf []byte) (int, error) { return c.in.Read(buf) }

// sharedConn is a connection as net/http sees it.
type sharedConn struct {
	net.Conn

	listener *SharedListener
	state    tls.ConnectionState
	// in is what net/http reads; nil before its first read.
	in io.Reader

	mu sync.Mutex
	// gone is true where the connection is the gRPC server's.
	gone bool
}

// Read implements net.Conn. The first one waits for the first request of gRPC or HTTP/2, at
// most for as long as net/http waits for a header.
func (c *sharedConn) Read(buf []byte) (int, error) {
	if c.in == nil {
		c.in = io.MultiReader() // the end
		if err := c.begin(); err != nil {
			c.listener.log.Debug("no request", "remote", c.RemoteAddr().String(), "error", err)
		}
	}
	return c.in.Read(buf)
}

// Close implements net.Conn.
func (c *sharedConn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		return nil
	}
	return c.Conn.Close()
}

// CloseWrite lets net/http end a response before its request is read.
func (c *sharedConn) CloseWrite() error {
	if conn, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return conn.CloseWrite()
	}
	return nil
}

// begin reads as much as it takes to know whose connection it is.
func (c *sharedConn) begin() error {
	if err := c.SetWriteDeadline(time.Now().Add(HandshakeTimeout)); err != nil {
		return err
	}
	if err := c.handshake(); err != nil {
		return err
	}
	var first bytes.Buffer
	isHTTP2, err := readPreface(c.Conn, &first)
	isCall := false
	if isHTTP2 && err == nil && c.listener.closed.Err() == nil {
		stop := context.AfterFunc(c.listener.closed, func() { _ = c.SetReadDeadline(time.Unix(0, 0)) })
		isCall, err = readFirstRequest(c.Conn, &first)
		if !stop() {
			err = net.ErrClosed
		}
		if err != nil {
			c.goAway()
		}
	}
	if err == nil {
		err = c.SetWriteDeadline(time.Time{})
	}
	if err != nil {
		return err
	}
	all := io.MultiReader(&first, c.Conn)
	if !isCall || !c.handOver(all) {
		c.in = all
	}
	return nil
}

// goAway tells a client of HTTP/2 that no server has seen what it has sent, so that it sends
// that again on another connection.
func (c *sharedConn) goAway() {
	_ = c.SetWriteDeadline(time.Now().Add(time.Second))
	_ = http2.NewFramer(c.Conn, nil).WriteGoAway(0, http2.ErrCodeNo, nil) // they may have left
}

func (c *sharedConn) handshake() error {
	conn, ok := c.Conn.(*tls.Conn)
	if !ok {
		return nil
	}
	err := conn.Handshake()
	c.state = conn.ConnectionState()
	if plain, ok := errors.AsType[tls.RecordHeaderError](err); ok && plain.Conn != nil {
		_, _ = io.WriteString(plain.Conn, "HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n") // they may have left
	}
	return err
}

// handOver reports whether the server of gRPC has taken the connection.
func (c *sharedConn) handOver(in io.Reader) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case c.listener.calls <- &replayedConn{c.Conn, in}:
		c.gone = true
	case <-c.listener.closed.Done():
	}
	return c.gone
}

// readPreface reads until the bytes are the preface of HTTP/2, or cannot become it.
func readPreface(from io.Reader, into *bytes.Buffer) (isHTTP2 bool, err error) {
	var buf [len(http2.ClientPreface)]byte
	for into.Len() < len(buf) {
		n, err := from.Read(buf[into.Len():])
		into.Write(buf[into.Len() : into.Len()+n])
		if !strings.HasPrefix(http2.ClientPreface, into.String()) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
	}
	return true, nil
}

// maxFirstBytes bounds what a client may send before the server's first window update.
const maxFirstBytes = 256 << 10

// defaultFrameSize is the largest frame of HTTP/2 where no setting allows more.
const defaultFrameSize = 16 << 10

// readFirstRequest reads the header of the first request, which many clients send after the
// server's settings only. The server that takes the connection sends its own again, so the
// acknowledgement of these is dropped. That server also answers malformed frames.
func readFirstRequest(conn io.ReadWriter, into *bytes.Buffer) (isOfClient bool, err error) {
	framer := http2.NewFramer(conn, io.TeeReader(io.LimitReader(conn, maxFirstBytes), into))
	framer.ReadMetaHeaders, framer.MaxHeaderListSize = hpack.NewDecoder(4096, nil), MaxHeaderBytes
	framer.SetMaxReadFrameSize(defaultFrameSize)                          // a frame gets its memory at once
	few := http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: 100} // until the server's own
	if err := framer.WriteSettings(few); err != nil {
		return false, err
	}
	for acknowledged, complete := false, false; !acknowledged || !complete; {
		at := into.Len()
		frame, err := framer.ReadFrame()
		if _, ok := errors.AsType[http2.ConnectionError](err); ok {
			return false, nil
		}
		if _, ok := errors.AsType[http2.StreamError](err); ok {
			complete = true
			continue
		}
		if err != nil {
			return false, err
		}
		switch f := frame.(type) {
		case *http2.SettingsFrame:
			if f.IsAck() {
				acknowledged = true
				into.Truncate(at)
			}
		case *http2.MetaHeadersFrame:
			if !complete {
				complete, isOfClient = true, isCall(f.Fields)
			}
		}
	}
	return isOfClient, nil
}

// isCall reports whether a request is one that a gRPC client has sent itself.
func isCall(header []hpack.HeaderField) bool {
	var isGRPC, isClient bool
	for _, f := range header {
		switch {
		case f.Name == "content-type":
			rest, ok := strings.CutPrefix(f.Value, "application/grpc")
			isGRPC = ok && (rest == "" || rest[0] == '+' || rest[0] == ';')
		case f.Name == "user-agent":
			// After the name of a program, if it has one. Connect's libraries say grpc-go-connect,
			// and send other protocols over the same connection.
			isClient = strings.Contains(" "+f.Value, " grpc-") && !strings.Contains(f.Value, "-connect/")
		case f.Name == "forwarded", f.Name == "via", strings.HasPrefix(f.Name, "x-forwarded-"):
			return false
		}
	}
	return isGRPC && isClient
}
