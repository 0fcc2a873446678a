package bus

import (
	"net"
	"time"

	"github.com/nats-io/nats.go"
)

// steadyDialer connects to a broker. On its connections writeTimeout bounds each part of a write, not the
// whole: the client writes a large message at once.
type steadyDialer struct{}

var _ nats.CustomDialer = steadyDialer{}

// dialTimeout is for one of the addresses that the broker's name has, which the client tries in turn.
const dialTimeout = time.Second

// Dial implements nats.CustomDialer.
func (steadyDialer) Dial(network, address string) (net.Conn, error) {
	conn, err := net.DialTimeout(network, address, dialTimeout)
	if err != nil {
		return nil, err
	}
	return &steadyConn{Conn: conn}, nil
}

const (
	// steadyBytes is the size of such a part.
	steadyBytes = 256 << 10
	// maxWrite bounds a whole write: the client does nothing else meanwhile.
	maxWrite = 30 * time.Second
)

// steadyConn is a connection of a client, which writes by one goroutine at a time.
type steadyConn struct {
	net.Conn

	// begun is when the client has set the deadline of this write, deadlineSet when it was moved last.
	begun, deadlineSet time.Time
}

// SetWriteDeadline implements net.Conn.
func (c *steadyConn) SetWriteDeadline(at time.Time) error {
	c.begun = time.Now()
	c.deadlineSet = c.begun
	return c.Conn.SetWriteDeadline(at)
}

// Write implements net.Conn.
func (c *steadyConn) Write(data []byte) (written int, err error) {
	for err == nil && written < len(data) {
		if now := time.Now(); now.Sub(c.deadlineSet) > writeTimeout/5 && now.Sub(c.begun) < maxWrite-writeTimeout {
			c.deadlineSet = now
			_ = c.Conn.SetWriteDeadline(now.Add(writeTimeout)) // a closed connection fails below
		}
		var n int
		n, err = c.Conn.Write(data[written:min(written+steadyBytes, len(data))])
		written += n
	}
	return written, err
}
