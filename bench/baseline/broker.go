package baseline

import (
	"fmt"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/mesh/credentials"
)

// Broker says where the broker is.
type Broker struct {
	URL string
	// Server, where set, is one in this process; the URL is then ignored.
	Server nats.InProcessConnProvider
	Auth   credentials.Broker
}

// connect returns a connection with the client's own settings.
func (b Broker) connect(name string) (*nats.Conn, error) {
	options, err := b.Auth.Options()
	if err != nil {
		return nil, fmt.Errorf("broker: %w", err)
	}
	options = append(options, nats.Name(name))
	if b.Server != nil {
		options = append(options, nats.InProcessServer(b.Server))
	}
	nc, err := nats.Connect(b.URL, options...)
	if err != nil {
		return nil, fmt.Errorf("broker: %w", credentials.Explain(err)) // the URL may have a password
	}
	return nc, nil
}
