package deadletter

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Replayed says what a letter's item is done again as.
type Replayed struct {
	RequestID   pipeline.RequestID
	ExecutionID pipeline.ExecutionID
	Deadline    time.Time
}

// Replay puts the letter's item into its queue again, at the step that it died
// at, as a new execution of a new request with as much time as the first had, and
// discards the letter. Its answer is a stored result, for nobody waits. Repeated
// soon after a failure it does not run the item twice.
//
// An error beside a Replayed that has a request says that the item is queued and
// the letter still there.
func (s *Store) Replay(ctx context.Context, seq uint64) (Replayed, error) {
	letter, err := s.Get(ctx, seq)
	if errors.Is(err, ErrUnreadable) {
		return Replayed{}, fmt.Errorf("%w: %w", ErrNotReplayable, err)
	}
	if err != nil {
		return Replayed{}, err
	}
	item, err := letter.Replayable()
	if err != nil {
		return Replayed{}, err
	}
	renew(item, letter, time.Now())
	if err := s.send(ctx, item); err != nil {
		return Replayed{}, err
	}
	out := Replayed{RequestID: item.RequestID, ExecutionID: item.ExecutionID, Deadline: item.Deadline}
	if err := s.Discard(ctx, seq); err != nil && !errors.Is(err, ErrNone) {
		return out, fmt.Errorf("replayed, but the letter is still there: %w", err)
	}
	return out, nil
}

// Replayable returns the letter's item, or ErrNotReplayable: the message is no
// item, or is one that the hosts of the stage would refuse.
func (l Letter) Replayable() (*envelope.Envelope, error) {
	item, err := envelope.Decode(l.Item)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrNotReplayable, err)
	case item.Mesh != l.Mesh:
		return nil, fmt.Errorf("%w: it is of mesh %s", ErrNotReplayable, item.Mesh)
	case item.Hop().Stage != l.Stage:
		return nil, fmt.Errorf("%w: it is for stage %s", ErrNotReplayable, item.Hop().Stage)
	case !item.AdmittedAt.Before(item.Deadline):
		return nil, fmt.Errorf("%w: it never had any time", ErrNotReplayable)
	}
	return item, nil
}

func (s *Store) send(ctx context.Context, item *envelope.Envelope) error {
	m, err := s.bus.Item(item)
	if err == nil {
		_, err = s.bus.SendAndWait(ctx, m)
	}
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return refused(err, item.Hop())
}

// refused is what a bus error about a hop tells who asks: where, unless the
// broker itself is away, and when to come back.
func refused(err error, hop pipeline.Hop) *fault.Fault {
	f := bus.FaultOf(err, hop.Stage)
	if f.Reason != fault.BrokerUnavailable {
		f = f.At(string(hop.Stage), string(hop.Step), "")
	}
	if f.Retryable() {
		f = f.WithRetryAfter(retryAfter)
	}
	return f
}

// renew makes the item a new one. Its ids are made from the letter's, so that
// the broker tells a repeated replay.
func renew(item *envelope.Envelope, letter Letter, now time.Time) {
	timeout := item.Timeout()
	space := uuid.NewSHA1(uuid.NameSpaceOID, []byte(letter.Mesh))
	id := func(kind string) string {
		return uuid.NewSHA1(space, fmt.Appendf(nil, "%s/%s/%d/%d", kind, item.ExecutionID, letter.DeadLetteredAt.UnixNano(), letter.Seq)).String()
	}
	item.RequestID = pipeline.RequestID(id("request"))
	item.ExecutionID = pipeline.ExecutionID(id("execution"))
	item.Generation, item.Attempt = 0, 0
	item.IdempotencyKey, item.TakesChunks = "", false
	item.Durability = pipeline.File
	item.AdmittedAt, item.Deadline = now, now.Add(timeout)
}
