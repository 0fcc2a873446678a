package bus_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// largeMessages stores messages of that size in a stream, and returns its name and their subject.
func largeMessages(t *testing.T, broker *testbed.Broker, size int) (stream, subject string) {
	t.Helper()
	js, err := jetstream.New(broker.Client())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "large", Subjects: []string{"large.*"}, AllowDirect: true, MaxMsgsPerSubject: 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(t.Context(), "large.one", bytes.Repeat([]byte("x"), size)); err != nil {
		t.Fatal(err)
	}
	return "large", "large.one"
}

func TestParallelReadsKeepTheConnection(t *testing.T) {
	t.Parallel()
	const size = 7 << 20
	broker := testbed.StartBroker(t, func(o *server.Options) { o.MaxPayload = 8 << 20 })
	stream, subject := largeMessages(t, broker, size)
	b := broker.Connect(mesh)
	before := broker.Connections()
	var reads errgroup.Group
	for i := range 40 {
		reads.Go(func() error {
			ctx := budget.WithTenant(t.Context(), fmt.Sprint("tenant", i%2))
			if i%4 > 1 { // it leaves, and the broker sends what it asked for all the same
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, time.Duration(i)*time.Millisecond)
				defer cancel()
			}
			msg, err := b.Last(ctx, stream, subject)
			switch {
			case errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil:
				return nil
			case err != nil:
				return err
			case len(msg.Data) != size:
				return fmt.Errorf("%d bytes of %d", len(msg.Data), size)
			}
			return nil
		})
	}
	if err := reads.Wait(); err != nil {
		t.Error(err)
	}
	if n := broker.Connections() - before; n > 0 {
		t.Errorf("the broker has disconnected the reader %d times", n)
	}
}

func TestReadCountsAgainstItsRequest(t *testing.T) {
	t.Parallel()
	const size = 1 << 20
	broker := testbed.StartBroker(t, func(o *server.Options) { o.MaxPayload = 8 << 20 })
	stream, subject := largeMessages(t, broker, size)
	b := broker.Connect(mesh)
	memory := budget.NewPool(budget.Settings{Limit: 12 * size, Name: "bytes", Key: "the.key"})
	ctx, release := budget.WithScope(budget.NewContext(t.Context(), budget.NewAccount(memory, "")))
	for read := int64(1); read <= 4; read++ {
		if _, err := b.Last(ctx, stream, subject); err != nil || memory.Held() != 3*size*read {
			t.Errorf("%v, %d bytes are held after %d reads of %d", err, memory.Held(), read, size)
		}
	}
	if _, err := b.Last(ctx, stream, subject); err == nil {
		t.Error("a message beyond the budget was read")
	}
	release()
	if memory.Held() != 0 {
		t.Errorf("%d bytes are held after the request", memory.Held())
	}
}

// A reader that knows the size of a message reads it beside large ones.
func TestReadOfASmallMessageDoesNotWaitForLargeOnes(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t, func(o *server.Options) { o.MaxPayload = 10 << 20 })
	stream, _ := largeMessages(t, broker, 1<<10)
	b := broker.Connect(mesh)
	for range 3 {
		release, err := b.AcquireRead(t.Context(), stream)
		if err != nil {
			t.Fatal(err)
		}
		defer release()
	}
	if msg, err := b.At(t.Context(), stream, 1, 1<<10); err != nil || len(msg.Data) != 1<<10 {
		t.Errorf("of a known size: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := b.At(ctx, stream, 1, 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("of an unknown size: %v", err)
	}
}
