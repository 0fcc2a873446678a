package baseline

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/internal/credentials"
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

// PublishAsync publishes messages of that size to a file stream, which it creates, and returns
// when they are stored.
func (b Broker) PublishAsync(ctx context.Context, messages, size int) error {
	conn, err := b.connect("baseline")
	if err != nil {
		return err
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return err
	}
	if _, err := js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{Name: "bare", Subjects: []string{"bare.>"}}); err != nil {
		return err
	}
	data := make([]byte, size)
	for i := range messages {
		if _, err := js.PublishAsync(fmt.Sprint("bare.", i), data, jetstream.WithStallWait(time.Minute)); err != nil {
			return err
		}
	}
	select {
	case <-js.PublishAsyncComplete():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
