package natskv

import (
	"context"
	"crypto/tls"
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
	conn   *grpc.ClientConn
	failed int
	last   bool
}

func newChecker(address string, config *tls.Config) (*checker, error) {
	if address == "" {
		return &checker{}, nil
	}
	by := insecure.NewCredentials()
	if config != nil {
		by = credentials.NewTLS(config)
	}
	// One that comes back is found at the next question.
	again := backoff.Config{BaseDelay: beatEvery / 4, Multiplier: 1, MaxDelay: beatEvery / 4}
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(by), grpc.WithNoProxy(),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: again, MinConnectTimeout: checkTimeout}))
	return &checker{conn: conn}, err
}

// serving asks. What says that it does not serve is believed at once; what says
// nothing is asked again first.
func (c *checker) serving(ctx context.Context) bool {
	if c.conn == nil {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	answer, err := healthv1.NewHealthClient(c.conn).Check(ctx, &healthv1.HealthCheckRequest{})
	if err == nil {
		c.failed, c.last = 0, answer.GetStatus() == healthv1.HealthCheckResponse_SERVING
		return c.last
	}
	c.failed++
	c.last = c.last && c.failed < unanswered
	return c.last
}

func (c *checker) close() {
	if c.conn != nil {
		// It has nothing to say any more.
		_ = c.conn.Close()
	}
}
