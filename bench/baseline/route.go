package baseline

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Route is where requests go, and is known to all parts of a baseline.
type Route struct {
	// Name is in the names of the route's subjects and streams, and of no other route's.
	Name string `json:"name"`
	// Stages are in the order of the hops; one may be there several times. Without any, the
	// front is a bare handler.
	Stages     []string            `json:"stages"`
	Durability pipeline.Durability `json:"durability"`
}

// NewRoute returns one of a name of its own.
func NewRoute(stages []string, d pipeline.Durability) Route {
	return Route{Name: "BASELINE-" + uuid.NewString(), Stages: stages, Durability: d}
}

// consumer is the one of each stream, which all hosts of a stage share.
const consumer = "hosts"

// maxWaiting bounds what waits in a stream.
const maxWaiting = 100_000

func (r Route) subject(hop int) string { return r.Name + "." + strconv.Itoa(hop) }
func (r Route) stream(hop int) string  { return r.Name + "-" + strconv.Itoa(hop) }
func (r Route) answers() string        { return r.Name + ".answers" }

// StageNames returns the stages of the route, each once, sorted.
func (r Route) StageNames() []string { return slices.Compact(slices.Sorted(slices.Values(r.Stages))) }

// hops returns the places of a stage on the route.
func (r Route) hops(stage string) []int {
	var out []int
	for hop, name := range r.Stages {
		if name == stage {
			out = append(out, hop)
		}
	}
	return out
}

// create makes the streams and their consumers.
func (r Route) create(ctx context.Context, js jetstream.JetStream) error {
	storage := jetstream.MemoryStorage
	if r.Durability == pipeline.File {
		storage = jetstream.FileStorage
	}
	for hop := range r.Stages {
		stream, err := js.CreateStream(ctx, jetstream.StreamConfig{
			Name: r.stream(hop), Subjects: []string{r.subject(hop)}, Storage: storage,
			Retention: jetstream.WorkQueuePolicy, MaxMsgs: maxWaiting, Discard: jetstream.DiscardNew,
		})
		if err != nil {
			return fmt.Errorf("stream %s: %w", r.stream(hop), err)
		}
		_, err = stream.CreateConsumer(ctx, jetstream.ConsumerConfig{
			Durable: consumer, AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: -1,
		})
		if err != nil {
			return fmt.Errorf("consumer of stream %s: %w", r.stream(hop), err)
		}
	}
	return nil
}

// removeTime is how long the removal of a stream may take.
const removeTime = 5 * time.Second

// remove deletes the streams, as far as they are there.
func (r Route) remove(js jetstream.JetStream) error {
	ctx, cancel := context.WithTimeout(context.Background(), removeTime)
	defer cancel()
	var errs []error
	for hop := range r.Stages {
		if err := js.DeleteStream(ctx, r.stream(hop)); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			errs = append(errs, fmt.Errorf("stream %s: %w", r.stream(hop), err))
		}
	}
	return errors.Join(errs...)
}
