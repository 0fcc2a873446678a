package bus_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// moveBed is a stream of an earlier version, whose sequences begin at the time.
type moveBed struct {
	t    *testing.T
	js   jetstream.JetStream
	nc   *nats.Conn
	move bus.Move
	want []string
}

var errMissing = errors.New("missing")

func newMoveBed(t *testing.T, messages int) *moveBed {
	t.Helper()
	nc := testbed.StartBroker(t).Client()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	config := jetstream.StreamConfig{
		Name: "old", Subjects: []string{"a.*"}, Storage: jetstream.FileStorage, Discard: jetstream.DiscardNew, MaxMsgsPerSubject: 1,
		MaxMsgs: max(1, int64(messages)), MaxBytes: 64 << 20, AllowDirect: true, FirstSeq: uint64(time.Now().UnixMicro()),
	}
	if _, err := js.CreateStream(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	b := &moveBed{t: t, js: js, nc: nc}
	config.Name, config.FirstSeq = "new", 0
	b.move = bus.Move{From: "old", To: config, Call: b.call, IsMissing: func(err error) bool { return errors.Is(err, errMissing) }, Create: b.create}
	for i := range messages {
		subject := fmt.Sprintf("a.%03d", i)
		if _, err := js.Publish(t.Context(), subject, []byte(subject)); err != nil {
			t.Fatal(err)
		}
		b.want = append(b.want, subject)
	}
	return b
}

func (b *moveBed) call(ctx context.Context, name string, question, answer any) error {
	data, err := json.Marshal(question)
	if err != nil {
		return err
	}
	msg, err := b.nc.RequestWithContext(ctx, "$JS.API."+name, data)
	if err != nil {
		return err
	}
	var failed struct{ Error *jetstream.APIError }
	if err := json.Unmarshal(msg.Data, &failed); err != nil {
		return err
	}
	if failed.Error != nil && slices.Contains([]jetstream.ErrorCode{10037, 10059}, failed.Error.ErrorCode) {
		return errMissing
	}
	if failed.Error != nil {
		return failed.Error
	}
	return json.Unmarshal(msg.Data, answer)
}

func (b *moveBed) create(ctx context.Context, config jetstream.StreamConfig) error {
	if _, err := b.js.CreateStream(ctx, config); err != nil && !errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
		return err
	}
	return nil
}

// check checks that the new stream has all messages, its subjects and bounds, and low sequences.
func (b *moveBed) check() {
	b.t.Helper()
	if _, err := b.js.Stream(b.t.Context(), "old"); !errors.Is(err, jetstream.ErrStreamNotFound) {
		b.t.Errorf("the old stream: %v", err)
	}
	s, err := b.js.Stream(b.t.Context(), "new")
	if err != nil {
		b.t.Fatal(err)
	}
	info := s.CachedInfo()
	var got []string
	for seq := max(1, info.State.FirstSeq); seq <= info.State.LastSeq && seq < 10_000; seq++ {
		msg, err := s.GetMsg(b.t.Context(), seq)
		if err != nil || msg.Subject != string(msg.Data) {
			b.t.Fatalf("message %d: %+v, %v", seq, msg, err)
		}
		got = append(got, msg.Subject)
	}
	if !slices.Equal(got, b.want) {
		b.t.Errorf("it has %s, want %s", got, b.want)
	}
	if c := info.Config; len(c.Sources) != 0 || fmt.Sprint(c.Subjects) != "[a.*]" || c.MaxMsgs != b.move.To.MaxMsgs || c.MaxBytes != b.move.To.MaxBytes || c.Sealed {
		b.t.Errorf("it is %+v", c)
	}
	// It is full, and says so.
	if _, err := b.js.Publish(b.t.Context(), "a.more", nil); len(b.want) > 0 && (err == nil || !strings.Contains(err.Error(), "maximum messages")) {
		b.t.Errorf("a message beyond the bound: %v", err)
	}
}

func TestManyProcessesMoveAStreamOnce(t *testing.T) {
	t.Parallel()
	b := newMoveBed(t, 500)
	var all sync.WaitGroup
	for range 6 {
		all.Go(func() {
			if err := b.move.Run(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	b.check()
}

func TestEmptyStreamIsMoved(t *testing.T) {
	t.Parallel()
	b := newMoveBed(t, 0)
	if err := b.move.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.check()
}

// A process may die before or after any request; another one goes on.
func TestMoveGoesOnAfterADeathAtAnyStep(t *testing.T) {
	t.Parallel()
	const steps = 12 // a move of one process makes about ten requests
	errDied := errors.New("died")
	for step := range steps {
		for _, isSent := range []bool{false, true} {
			t.Run(fmt.Sprintf("request %d, sent %t", step+1, isSent), func(t *testing.T) {
				t.Parallel()
				b := newMoveBed(t, 20)
				dying, calls := b.move, 0
				die := func(send func() error) error {
					if calls++; calls <= step {
						return send()
					}
					if isSent && calls == step+1 {
						_ = send()
					}
					return errDied
				}
				dying.Call = func(ctx context.Context, name string, question, answer any) error {
					return die(func() error { return b.call(ctx, name, question, answer) })
				}
				dying.Create = func(ctx context.Context, config jetstream.StreamConfig) error {
					return die(func() error { return b.create(ctx, config) })
				}
				if err := dying.Run(t.Context()); err != nil && !errors.Is(err, errDied) {
					t.Fatal(err)
				}
				if err := b.move.Run(t.Context()); err != nil {
					t.Error(err)
				}
				b.check()
			})
		}
	}
}
