package stagehost_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh/stagehost"
)

// wire is a way to the broker on which a test loses messages.
type wire struct {
	t        *testing.T
	broker   string
	listener net.Listener
	copying  sync.WaitGroup

	mu      sync.Mutex
	conns   []net.Conn
	watches []*watch
}

// watch waits for a message to the broker that holds a text.
type watch struct {
	text []byte
	seen chan struct{}
	// lose says that it, and all after it on its connection, is lost.
	lose bool
}

func (b *bed) wire() *wire {
	b.t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.t.Fatal(err)
	}
	w := &wire{t: b.t, broker: strings.TrimPrefix(b.broker.URL(), "nats://"), listener: listener}
	w.copying.Go(w.accept)
	b.t.Cleanup(func() {
		w.listener.Close()
		w.cut()
		w.copying.Wait()
	})
	return w
}

// via is an edit.
func (w *wire) via(s *stagehost.Settings) { s.Bus.URL = "nats://" + w.listener.Addr().String() }

// sees returns a channel that is closed when the text is sent to the broker.
func (w *wire) sees(text string) <-chan struct{} { return w.watch(text, false) }

// loses is sees, and loses what is sent.
func (w *wire) loses(text string) <-chan struct{} { return w.watch(text, true) }

func (w *wire) watch(text string, lose bool) <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	one := &watch{text: []byte(text), seen: make(chan struct{}), lose: lose}
	w.watches = append(w.watches, one)
	return one.seen
}

// cut ends all connections.
func (w *wire) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, conn := range w.conns {
		conn.Close()
	}
	w.conns = nil
}

func (w *wire) accept() {
	for {
		client, err := w.listener.Accept()
		if err != nil {
			return
		}
		broker, err := net.Dial("tcp", w.broker)
		if err != nil {
			client.Close()
			continue
		}
		w.mu.Lock()
		w.conns = append(w.conns, client, broker)
		w.mu.Unlock()
		w.copying.Go(func() { w.copyAndClose(client, broker) })
		w.copying.Go(func() { w.copyAndClose(&watched{Conn: broker, wire: w}, client) })
	}
}

// copyAndClose copies until either end is closed, and closes both.
func (w *wire) copyAndClose(to io.WriteCloser, from net.Conn) {
	defer to.Close()
	defer from.Close()
	if _, err := io.Copy(to, from); err != nil && !errors.Is(err, net.ErrClosed) {
		w.t.Logf("wire: %v", err)
	}
}

// watched is the end of a wire that the broker is at.
type watched struct {
	net.Conn
	wire *wire
	lost bool
}

// Write implements io.Writer.
func (c *watched) Write(data []byte) (int, error) {
	if c.lost = c.lost || c.wire.passes(data); c.lost {
		return len(data), nil
	}
	return c.Conn.Write(data)
}

// passes tells those who watch, and reports whether the data are to be lost. The
// client sends a message in one piece.
func (w *wire) passes(data []byte) (lose bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	rest := w.watches[:0]
	for _, one := range w.watches {
		if !bytes.Contains(data, one.text) {
			rest = append(rest, one)
			continue
		}
		close(one.seen)
		lose = lose || one.lose
	}
	w.watches = rest
	return lose
}
