package stagehost_test

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// unanswered is an edit: the bus waits for an answer for longer than a test.
func unanswered(s *stagehost.Settings) { s.Bus.AckTimeout = time.Hour }

// A question to the broker that is lost with its connection is asked again on
// the next one, and not when the wait for its answer is over.
func TestReconcileRetriesOnTheNextConnection(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	w := b.wire()
	b.host(inproc.Each(inproc.Settings{}, echo), w.via, unanswered)
	const question = "$JS.API.STREAM.INFO."
	testbed.Receive(t, "a question that is lost", w.loses(question))
	again := w.sees(question)
	w.cut()
	testbed.Receive(t, "the question again", again)
	checkEcho(t, b.ask("afterwards"))
}

// Whoever asks whether the host is ready is answered at once, also while the
// host waits for the broker.
func TestReadyAnswersWhileTheBrokerHangs(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	w := b.wire()
	silent := w.loses(b.bus.Subjects.Alive(stage))
	h := b.start(inproc.Each(inproc.Settings{}, echo), w.via, unanswered)
	testbed.Receive(t, "the host says that it is there", silent)
	testbed.Returns(t, "whether the host is ready", func() {
		if h.Ready() == nil {
			t.Error("ready although the broker has not answered")
		}
	})
	w.cut()
	b.waitReady(h)
	checkEcho(t, b.ask("afterwards"))
}

func TestHostWithAWrongClockIsNotReady(t *testing.T) {
	t.Parallel()
	for direction, offset := range map[string]time.Duration{"ahead of": time.Second, "behind": -time.Second} {
		t.Run(direction, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			var behind atomic.Int64
			behind.Store(int64(offset))
			h := b.start(inproc.Each(inproc.Settings{}, echo), func(s *stagehost.Settings) {
				s.Bus.Now = func() time.Time { return time.Now().Add(-time.Duration(behind.Load())) }
			})
			testbed.Eventually(t, "the clock is the reason", func() bool {
				err := h.Ready()
				return err != nil && strings.Contains(err.Error(), "clock is 1s "+direction)
			})
			behind.Store(0)
			b.waitReady(h)
			checkEcho(t, b.ask("it"))
		})
	}
}
