package natskv

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
)

const (
	// checkTimeout bounds one question; it and the next beat together are within the
	// instance's time to live.
	checkTimeout = time.Second
	// An instance that does not answer is asked once more.
	unanswered = 2
)

// checker asks an instance how it is. Without an address it always serves.
type checker struct {
	conn *grpc.ClientConn
	// handshake is what the latest one ended with, where there is TLS.
	handshake *handshake
	failed    int
	last      bool
}

func newChecker(address string, config *tls.Config) (*checker, error) {
	if address == "" {
		return &checker{}, nil
	}
	by, seen := insecure.NewCredentials(), &handshake{}
	if config != nil {
		by = noting{credentials.NewTLS(config), seen}
	}
	// One that comes back is found at the next question.
	again := backoff.Config{BaseDelay: beatEvery / 4, Multiplier: 1, MaxDelay: beatEvery / 4}
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(by), grpc.WithNoProxy(),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: again, MinConnectTimeout: checkTimeout}))
	return &checker{conn: conn, handshake: seen}, err
}

// serving asks. What says that it does not serve is believed at once; what says
// nothing is asked again first, and then the error is why it cannot be asked.
func (c *checker) serving(ctx context.Context) (bool, error) {
	if c.conn == nil {
		return true, nil
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	answer, err := healthv1.NewHealthClient(c.conn).Check(ctx, &healthv1.HealthCheckRequest{})
	if err == nil {
		c.failed, c.last = 0, answer.GetStatus() == healthv1.HealthCheckResponse_SERVING
		return c.last, nil
	}
	c.failed++
	c.last = c.last && c.failed < unanswered
	if c.failed < unanswered {
		return c.last, nil
	}
	if why := c.handshake.get(); why != nil {
		err = why
	}
	return c.last, err
}

// handshake is an error that gRPC makes a text of.
type handshake struct {
	mu  sync.Mutex
	err error
}

func (h *handshake) get() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}

func (h *handshake) set(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.err = err
}

// noting keeps what handshakes end with.
type noting struct {
	credentials.TransportCredentials
	seen *handshake
}

// ClientHandshake implements credentials.TransportCredentials.
func (n noting) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	secure, info, err := n.TransportCredentials.ClientHandshake(ctx, authority, conn)
	n.seen.set(err)
	return secure, info, err
}

// Clone implements credentials.TransportCredentials.
func (n noting) Clone() credentials.TransportCredentials {
	return noting{n.TransportCredentials.Clone(), n.seen}
}

// advice says what is to be done about an instance that cannot be asked, where that
// does not mend by itself.
func advice(err error) string {
	var name x509.HostnameError
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	switch {
	case errors.As(err, &name):
		return "the server_name of a stage is the name in its certificate, where that is not the address that it listens on"
	case errors.As(err, &unknown):
		return "who answers at the address has another certificate, so it is another"
	case errors.As(err, &invalid):
		return "the certificate of the stage's cert_file is not good now, or not for a server"
	}
	return ""
}

func (c *checker) close() {
	if c.conn != nil {
		// It has nothing to say any more.
		_ = c.conn.Close()
	}
}
