package testbed

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// Link is a TCP proxy that a test can make fail, for one client of a server. It ends with
// its test.
type Link struct {
	to       string
	listener net.Listener
	pumps    sync.WaitGroup
	done     chan struct{}

	mu    sync.Mutex
	isCut bool
	drops bool
	delay time.Duration
	// conns are both ends of every connection.
	conns map[net.Conn]struct{}
}

// StartLink returns a link to a server, host:port, that works.
func StartLink(t testing.TB, to string) *Link {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &Link{to: to, listener: listener, done: make(chan struct{}), conns: map[net.Conn]struct{}{}}
	l.pumps.Go(l.accept)
	t.Cleanup(func() {
		_ = listener.Close()
		close(l.done)
		l.Cut()
		l.pumps.Wait()
	})
	return l
}

// Addr returns where the client dials.
func (l *Link) Addr() string { return l.listener.Addr().String() }

// Cut closes all connections, and each new one at once.
func (l *Link) Cut() { l.set(true, true, false, 0) }

// Drop discards what is sent in either direction, and closes nothing: neither end learns
// of it but by silence.
func (l *Link) Drop() { l.set(false, false, true, 0) }

// Delay delivers what is sent that much later, in either direction.
func (l *Link) Delay(by time.Duration) { l.set(false, false, false, by) }

// Mend ends any fault. Connections of a link that dropped bytes close, as what follows
// would make no sense.
func (l *Link) Mend() {
	l.mu.Lock()
	dropped := l.drops
	l.mu.Unlock()
	l.set(dropped, false, false, 0)
}

func (l *Link) set(closeAll, isCut, drops bool, delay time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.isCut, l.drops, l.delay = isCut, drops, delay
	if closeAll {
		for conn := range l.conns {
			_ = conn.Close()
		}
		clear(l.conns)
	}
}

func (l *Link) accept() {
	for {
		client, err := l.listener.Accept()
		if err != nil {
			return // the test ends
		}
		server, err := net.Dial("tcp", l.to)
		if err != nil {
			_ = client.Close()
			continue
		}
		l.mu.Lock()
		if l.isCut {
			_, _ = client.Close(), server.Close()
		}
		l.conns[client], l.conns[server] = struct{}{}, struct{}{}
		l.mu.Unlock()
		l.pumps.Go(func() { l.pump(client, server) })
		l.pumps.Go(func() { l.pump(server, client) })
	}
}

// pump delivers what one end sends to the other, until either closes.
func (l *Link) pump(from, to net.Conn) {
	defer func() {
		_, _ = from.Close(), to.Close()
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.conns, from)
	}()
	_, _ = io.Copy(&lossy{link: l, to: to}, from)
}

// lossy writes as its link says.
type lossy struct {
	link *Link
	to   net.Conn
}

func (w *lossy) Write(data []byte) (int, error) {
	w.link.mu.Lock()
	drops, delay := w.link.drops, w.link.delay
	w.link.mu.Unlock()
	if drops {
		return len(data), nil
	}
	if delay > 0 {
		timer := time.NewTimer(delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-w.link.done:
		}
	}
	return w.to.Write(data)
}
