package natskv

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
)

const (
	// checkTimeout bounds one check. Together with the next renewal it is within the
	// instance's time to live.
	checkTimeout = time.Second
	// maxUnanswered is how many checks in a row without an answer make an instance
	// unhealthy.
	maxUnanswered = 2
)

// checker checks the health of an instance. An instance without an address always serves.
type checker struct {
	conn *grpc.ClientConn
	id   string
	// handshake has the error of the latest TLS handshake, of which gRPC passes on the text only.
	handshake  *atomic.Pointer[error]
	unanswered int
	serves     bool
}

func newChecker(address, id string, config *tls.Config) (*checker, error) {
	if address == "" {
		return &checker{}, nil
	}
	transport, latest := insecure.NewCredentials(), &atomic.Pointer[error]{}
	if config != nil {
		transport = recordingCredentials{credentials.NewTLS(config), latest}
	}
	// The delay is short, so that the next check finds an instance that has restarted.
	delay := backoff.Config{BaseDelay: renewInterval / 4, Multiplier: 1, MaxDelay: renewInterval / 4}
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(transport), grpc.WithNoProxy(),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: delay, MinConnectTimeout: checkTimeout}))
	return &checker{conn: conn, id: id, handshake: latest}, err
}

// serving reports whether the instance serves. The answer that it does not counts at
// once. Only several checks without an answer count, and then the error is the reason.
func (c *checker) serving(ctx context.Context) (bool, error) {
	if c.conn == nil {
		return true, nil
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	answer, err := healthv1.NewHealthClient(c.conn).Check(ctx, &healthv1.HealthCheckRequest{Service: c.id})
	if err == nil {
		c.unanswered, c.serves = 0, answer.GetStatus() == healthv1.HealthCheckResponse_SERVING
		return c.serves, nil
	}
	c.unanswered++
	if c.unanswered < maxUnanswered {
		return c.serves, nil
	}
	c.serves = false
	if why := c.handshake.Load(); why != nil && *why != nil {
		err = *why
	}
	return false, err
}

// recordingCredentials record the errors of handshakes.
type recordingCredentials struct {
	credentials.TransportCredentials
	latest *atomic.Pointer[error]
}

// ClientHandshake implements credentials.TransportCredentials.
func (r recordingCredentials) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	secure, info, err := r.TransportCredentials.ClientHandshake(ctx, authority, conn)
	r.latest.Store(&err)
	return secure, info, err
}

// Clone implements credentials.TransportCredentials.
func (r recordingCredentials) Clone() credentials.TransportCredentials {
	return recordingCredentials{r.TransportCredentials.Clone(), r.latest}
}

// advice returns what an operator has to do about a check that fails, if it does not
// mend by itself.
func advice(err error) string {
	var name x509.HostnameError
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	switch {
	case errors.As(err, &name):
		return "the server_name of a stage is the name in its certificate, where that is not the address that it listens on"
	case errors.As(err, &unknown):
		return "the process at the address has a certificate of another authority, so it is not the stage's host"
	case errors.As(err, &invalid):
		return "the certificate of the stage's cert_file is expired, not valid yet, or not for a server"
	}
	return ""
}

func (c *checker) close() {
	if c.conn != nil {
		_ = c.conn.Close() // nothing is in flight
	}
}
