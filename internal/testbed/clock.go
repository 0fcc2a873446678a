package testbed

import (
	"bytes"
	"net"
	"regexp"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
)

// Clock is how far the broker's clock is ahead, in nanoseconds, as a bus on it sees the
// broker.
type Clock struct{ atomic.Int64 }

// Of connects the bus to the broker on this clock.
func (c *Clock) Of(b *Broker) func(*bus.Settings) {
	return func(s *bus.Settings) { s.Server = shiftedBroker{c, strings.TrimPrefix(b.URL(), "nats://")} }
}

type shiftedBroker struct {
	clock   *Clock
	address string
}

// InProcessConn implements nats.InProcessConnProvider.
func (b shiftedBroker) InProcessConn() (net.Conn, error) {
	conn, err := net.Dial("tcp", b.address) //nolint:noctx // the interface has no context
	return &shiftedConn{Conn: conn, clock: b.clock}, err
}

// shiftedConn shifts the time of each answer about a stream.
type shiftedConn struct {
	net.Conn

	clock *Clock
	ready []byte
}

// Read implements net.Conn.
func (c *shiftedConn) Read(into []byte) (int, error) {
	part := make([]byte, 64<<10)
	for messages := []byte(nil); len(c.ready) == 0; {
		n, err := c.Conn.Read(part)
		if err != nil {
			return 0, err
		}
		messages = append(messages, part[:n]...)
		if bytes.HasSuffix(messages, []byte("\r\n")) { // they are whole
			c.ready = answerTime.ReplaceAllFunc(messages, c.shift)
		}
	}
	n := copy(into, c.ready)
	c.ready = c.ready[n:]
	return n, nil
}

var answerTime = regexp.MustCompile(`"ts":"[^"]+"`)

// shift returns the time in as many bytes.
func (c *shiftedConn) shift(text []byte) []byte {
	const start, end = `"ts":"`, `Z"`
	at, err := time.Parse(time.RFC3339Nano, string(text[len(start):len(text)-1]))
	digits := len(text) - len(start) - len("2006-01-02T15:04:05.") - len(end)
	if err != nil || digits <= 0 {
		return text
	}
	layout := "2006-01-02T15:04:05." + strings.Repeat("0", digits) + "Z"
	return []byte(start + at.Add(time.Duration(c.clock.Load())).UTC().Format(layout) + `"`)
}
