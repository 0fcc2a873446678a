package modelserver

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	grpccredentials "google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

const (
	// maxMessage and maxHeaders bound the answers of a server, in bytes.
	maxMessage = 64 << 20
	maxHeaders = 64 << 10
	// The pauses between tries to connect.
	minPause, maxPause = 100 * time.Millisecond, 2 * time.Second
	// userTimeout is how long a server may acknowledge nothing, or take nothing, before its connection
	// ends. One that compiles a model may be busy for a while.
	userTimeout = 2 * time.Minute
)

// link is a connection to a server, which is made again after it ended.
type link struct {
	*grpc.ClientConn
	// serial changes whenever a connection begins or ends.
	serial  atomic.Uint64
	changed func()
}

// credentials returns what secures the connections.
func (s Settings) credentials() (grpccredentials.TransportCredentials, error) {
	if !s.TLS && s.CAFile == "" {
		return insecure.NewCredentials(), nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if s.CAFile != "" {
		var err error
		if config.RootCAs, err = credentials.Roots(s.CAFile); err != nil {
			return nil, fmt.Errorf("ca_file: %w", err)
		}
	}
	return grpccredentials.NewTLS(config), nil
}

// dial returns a link, which connects with its first call. Changed is called after each change of
// the serial, and does not block.
func dial(address string, security grpccredentials.TransportCredentials, changed func()) (*link, error) {
	l := &link{changed: changed}
	network, to, authority := "tcp", address, address
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		network, to, authority = "unix", path, "localhost"
	}
	var err error
	l.ClientConn, err = grpc.NewClient("passthrough:///"+authority,
		grpc.WithTransportCredentials(security),
		grpc.WithIdleTimeout(0), grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: minPause, Multiplier: 2, Jitter: 0.2, MaxDelay: maxPause}, MinConnectTimeout: maxPause,
		}),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			conn, err := dialer().DialContext(ctx, network, to)
			if err != nil {
				return nil, err
			}
			defer l.changed()
			return &watchedConn{Conn: conn, link: l, serial: l.serial.Add(1)}, nil
		}))
	return l, err
}

func dialer() *net.Dialer { return &net.Dialer{Control: setUserTimeout} }

// watchedConn reports its end to its link, before the calls that it carried fail.
type watchedConn struct {
	net.Conn
	link   *link
	serial uint64
}

// Close implements net.Conn.
func (c *watchedConn) Close() error {
	if c.link.serial.CompareAndSwap(c.serial, c.serial+1) {
		c.link.changed()
	}
	return c.Conn.Close()
}

// Invoke implements grpc.ClientConnInterface. An error that wraps runner.ErrCrashed or
// runner.ErrNotStarted means that the connection ended during the call, or that the server cannot
// be called.
func (l *link) Invoke(ctx context.Context, method string, in, out any, options ...grpc.CallOption) error {
	before := l.serial.Load()
	err := l.ClientConn.Invoke(ctx, method, in, out, options...)
	switch {
	case status.Code(err) != codes.Unavailable || isUnknownModel(err):
		return err
	case l.serial.Load() != before:
		return fmt.Errorf("%w: %w", runner.ErrCrashed, errors.Join(errLost, err))
	}
	return fmt.Errorf("%w: %w", runner.ErrNotStarted, err)
}
