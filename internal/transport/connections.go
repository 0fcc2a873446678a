package transport

import (
	"bytes"
	"container/list"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
)

// Connections bounds the connections of a port. Those that have carried no request of a caller
// who may call are few: a new one beyond them ends another, the oldest of the address that has
// most. All others count as their tenant's.
type Connections struct {
	limit     int64
	anonymous int
	admitted  *budget.Pool
	dropped   atomic.Int64

	mu sync.Mutex
	// waiting are the anonymous ones, the oldest first.
	waiting list.List
}

// NewConnections returns the bounds of a port with so many connections. On a port that
// authenticates its callers tenants share them, and few are anonymous.
func NewConnections(limit int64, authenticates bool) *Connections {
	anonymous := max(1, limit/anonymousPart)
	if !authenticates {
		anonymous = limit // whoever connects may call
	}
	return &Connections{
		limit:     limit,
		anonymous: int(anonymous),
		admitted:  budget.NewPool(budget.Settings{Limit: limit, Name: "connections", Key: "docs/security.md", Shared: authenticates}),
	}
}

// anonymousPart is which part of all connections may be anonymous: one in so many.
const anonymousPart = 5

// minAnonymous may wait although all connections are admitted, so that they are answered OVERLOADED.
const minAnonymous = 32

// Listen returns a listener whose connections count.
func (c *Connections) Listen(l net.Listener) net.Listener { return countingListener{l, c} }

type countingListener struct {
	net.Listener

	connections *Connections
}

// Accept implements net.Listener.
func (l countingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.connections.add(conn), nil
}

// countedConn is a connection that counts.
type countedConn struct {
	net.Conn

	connections *Connections
	// host is the caller's address, or the network of one of IPv6, and own has the bytes of
	// anonymous requests that come over this connection: so others cannot hold up a probe.
	host string
	own  *budget.Pool
	// These are guarded by the mutex of connections: place is nil once a request was admitted, or
	// the connection has ended.
	place  *list.Element
	tenant string
	gone   bool
	// admitted is set under that mutex, once.
	admitted atomic.Bool
	// idle looks whether the connection has been idle for its time; nil where net/http does not serve.
	idle  *time.Timer
	begin time.Time
	// idleSince is the time since begin at which the connection fell idle; 0 while it is not.
	idleSince       atomic.Int64
	isLast, isHTTP2 atomic.Bool
	// hasBegun is true once the header of a request was read; on net/http the preface of HTTP/2 is enough.
	hasBegun atomic.Bool
	hasRead  bool
}

func (c *Connections) add(conn net.Conn) *countedConn {
	out := &countedConn{Conn: conn, connections: c, host: hostOf(conn), own: newAnonymousPool(ownAnonymousBytes)}
	if oldest := c.wait(out); oldest != nil {
		c.dropped.Add(1)
		_ = oldest.Conn.Close() // its server sees the end
	}
	return out
}

// wait adds an anonymous connection, and returns the one that has to end for it, if any. Anonymous and
// admitted connections together stay within the limit, but minAnonymous may always wait.
func (c *Connections) wait(conn *countedConn) (oldest *countedConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	free := max(int(c.limit-c.admitted.Held()), minAnonymous)
	if c.waiting.Len() >= min(c.anonymous, free) {
		oldest = c.waiting.Remove(c.oldestOfMostLocked()).(*countedConn)
		oldest.place = nil
	}
	conn.place = c.waiting.PushBack(conn)
	return oldest
}

// oldestOfMostLocked returns the oldest anonymous connection of the address that has most.
func (c *Connections) oldestOfMostLocked() (oldest *list.Element) {
	counts, most := map[string]int{}, 0
	for e := c.waiting.Front(); e != nil; e = e.Next() {
		host := e.Value.(*countedConn).host
		counts[host]++
		most = max(most, counts[host])
	}
	for e := c.waiting.Front(); e != nil; e = e.Next() {
		if counts[e.Value.(*countedConn).host] == most {
			return e
		}
	}
	return nil
}

// hostOf returns the address of a caller, and of IPv6 the network, of which one caller may have all.
func hostOf(conn net.Conn) string {
	const network = 64
	at, _ := netip.ParseAddrPort(conn.RemoteAddr().String())
	if addr := at.Addr().Unmap(); !addr.Is6() {
		return addr.String()
	}
	prefix, _ := at.Addr().WithZone("").Prefix(network)
	return prefix.String()
}

// Count returns how many connections there are.
func (c *Connections) Count() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.admitted.Held() + int64(c.waiting.Len())
}

// Dropped returns how many connections were ended because others came.
func (c *Connections) Dropped() int64 { return c.dropped.Load() }

// admit counts the connection as its tenant's, once, or returns why it may not be used.
func (c *countedConn) admit(tenant string) error {
	if c == nil || c.admitted.Load() {
		return nil
	}
	c.connections.mu.Lock()
	defer c.connections.mu.Unlock()
	if c.admitted.Load() || c.gone {
		return nil
	}
	if f := c.connections.admitted.Reserve(tenant, 1); f != nil {
		return f
	}
	c.tenant = tenant
	c.admitted.Store(true)
	c.leaveWaiting()
	return nil
}

func (c *countedConn) leaveWaiting() {
	if c.place != nil {
		c.connections.waiting.Remove(c.place)
		c.place = nil
	}
}

// Close implements net.Conn.
func (c *countedConn) Close() error {
	c.connections.mu.Lock()
	if !c.gone {
		c.gone = true
		c.leaveWaiting()
		if c.admitted.Load() {
			c.connections.admitted.Release(c.tenant, 1)
		}
	}
	c.connections.mu.Unlock()
	if c.idle != nil {
		c.idle.Stop()
	}
	return c.Conn.Close()
}

// CloseWrite lets net/http end a response before its request is read.
func (c *countedConn) CloseWrite() error {
	if conn, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return conn.CloseWrite()
	}
	return nil
}

// countedOf returns the connection below TLS, or nil if the port counts none.
func countedOf(conn net.Conn) *countedConn {
	if secure, ok := conn.(*tls.Conn); ok {
		conn = secure.NetConn()
	}
	out, _ := conn.(*countedConn)
	return out
}

type connKey struct{}

// ConnContext is for the http.Server of a port whose connections count.
func ConnContext(ctx context.Context, conn net.Conn) context.Context {
	c := countedOf(conn)
	if c != nil {
		c.begin = time.Now()
		c.idle = time.AfterFunc(IdleTimeout, func() { c.endIdle(conn) })
	}
	return context.WithValue(ctx, connKey{}, c)
}

// EndIdle is for the http.Server of a port whose connections count: it ends those that are idle for
// IdleTimeout. With the server's own IdleTimeout each connection of HTTP/2 that its client cuts within
// a stream stays in memory for as long: closing the stream starts the timer again (Go 1.26).
func EndIdle(conn net.Conn, state http.ConnState) {
	c := countedOf(conn)
	if c == nil {
		return
	}
	c.hasBegun.Store(state != http.StateNew)
	idleSince := int64(0)
	if state == http.StateIdle {
		idleSince = max(1, int64(time.Since(c.begin)))
	}
	c.idleSince.Store(idleSince) // a timer that each request stops and resets would cost more
}

// EndSilent is for a port that stops, until it has: connections without a request get a moment to
// send one, and are ended. Its server would wait for them for seconds.
func (c *Connections) EndSilent() (stop func() bool) {
	return time.AfterFunc(beginTimeout, c.endSilent).Stop
}

func (c *Connections) endSilent() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for e := c.waiting.Front(); e != nil; e = e.Next() {
		if conn := e.Value.(*countedConn); !conn.hasBegun.Load() {
			_ = conn.Conn.Close() // its server sees the end
		}
	}
}

// goAway is the frame of HTTP/2 that asks a client for no more streams, but takes those on their way.
const goAway = "\x00\x00\x08\x07\x00\x00\x00\x00\x00" + "\x7f\xff\xff\xff" + "\x00\x00\x00\x00"

// endIdle ends a connection that has been idle for its time; of any other it looks again. A client of
// HTTP/2 is asked to leave first: while no stream is open, its server writes whole frames, so that this
// one comes between two of them.
func (c *countedConn) endIdle(conn net.Conn) {
	c.connections.mu.Lock()
	gone := c.gone
	c.connections.mu.Unlock()
	if gone {
		return
	}
	left := IdleTimeout
	if c.isLast.Load() {
		left = leaveTimeout
	}
	if since := c.idleSince.Load(); since > 0 {
		left -= time.Since(c.begin) - time.Duration(since)
	}
	if left > 0 {
		c.idle.Reset(left)
		return
	}
	secure, _ := conn.(*tls.Conn)
	isHTTP2 := c.isHTTP2.Load() || secure != nil && secure.ConnectionState().NegotiatedProtocol == "h2"
	if isHTTP2 && !c.isLast.Swap(true) {
		if _, err := io.WriteString(conn, goAway); err == nil {
			c.idle.Reset(leaveTimeout)
			return
		}
	}
	_ = c.Conn.Close() // its server sees the end
}

// Read implements net.Conn. Where it has filled the buffer, other connections get their turn first: a
// goroutine that never waits runs for 10 ms at a time, and each call takes several turns. HTTP/1 fills
// it where more has arrived, HTTP/2 by each frame.
func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n == len(p) {
		runtime.Gosched()
	}
	if !c.hasRead {
		c.hasRead = true
		c.isHTTP2.Store(bytes.HasPrefix(p[:n], []byte("PRI ")))
	}
	return n, err
}

// connOf returns the connection of a request of net/http; nil where none counts.
func connOf(ctx context.Context) *countedConn {
	conn, _ := ctx.Value(connKey{}).(*countedConn)
	return conn
}
