package worker

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
)

// session is one connection to the host.
type session struct {
	settings    Settings
	environment Environment
	conn        net.Conn
	in          *bufio.Reader
	// maxBody is the longest body, in bytes.
	maxBody int64

	// life ends with the connection; end ends it with a cause.
	life context.Context
	end  context.CancelCauseFunc
	// asked gets how long the worker may take to exit; stopped is true once the host has
	// asked.
	asked   chan time.Duration
	stopped atomic.Bool
	// readers are the goroutines that read, or may have to.
	readers sync.WaitGroup
	relief  *relief

	writing sync.Mutex

	mu sync.Mutex
	// axis and outputs are the spec's. The worker takes batches while isReady is true and
	// leaving is not.
	axis             string
	outputs          []PartSpec
	isReady, leaving bool
	// batches are those that the host has no answer for; running counts those whose
	// goroutines have not ended, and requests about models.
	batches map[uint64]*Batch
	running int
	// models are the loaded ones, loads those that are being loaded.
	models map[string]*Model
	loads  map[string]*load
	// idle is closed when the worker leaves and no batch runs.
	idle chan struct{}
}

// sendMessage sends a message without a body.
func (s *session) sendMessage(m frame.Message) {
	if head, err := frame.Encode(m, 0); err == nil {
		s.send(head, nil)
	}
}

// send sends a frame. If that fails the host is gone, which read notices too.
func (s *session) send(head []byte, body *frame.Body) {
	s.writing.Lock()
	defer s.writing.Unlock()
	_ = frame.Send(s.conn, head, body)
}

// read handles messages until the life ends, or until another goroutine reads.
func (s *session) read() {
	for {
		m, body, err := frame.Read(s.in, s.maxBody)
		var b *Batch
		if err == nil {
			b, err = s.handle(m, body)
		}
		switch {
		case err != nil:
			s.fail(err)
			s.readers.Done()
			return
		case b == nil:
		case s.settings.Slots > 1 || s.settings.Stream != nil:
			go s.work(b)
		default:
			turn := s.relief.begin()
			s.work(b)
			if !s.relief.end(turn) {
				return
			}
		}
	}
}

// fail ends the life because of an error of reading, or of a message.
func (s *session) fail(err error) {
	switch {
	case errors.Is(err, frame.ErrViolation):
		s.reportError(err)
	case !errors.Is(err, ErrRefused):
		err = fmt.Errorf("%w: %w", ErrHostGone, err)
	}
	s.end(err)
}

// handle handles a message, or returns the batch in it.
func (s *session) handle(m frame.Message, body []byte) (*Batch, error) {
	switch m := m.(type) {
	case *frame.Predict:
		return s.begin(m, body)
	case *frame.Cancel:
		s.mu.Lock()
		b := s.batches[m.Batch]
		s.mu.Unlock()
		if b != nil {
			b.cancelItems(m.Items)
		}
	case *frame.Ping:
		s.sendMessage(&frame.Pong{N: m.N})
	case *frame.Stop:
		s.stopped.Store(true)
		select {
		case s.asked <- time.Duration(min(m.Timeout, maxTimeout)) * time.Millisecond:
		default: // it has been asked already
		}
	case frame.Request:
		return nil, s.beginRequest(m)
	case *frame.Error:
		return nil, fmt.Errorf("%w: %s: %s", ErrRefused, m.Kind, m.Message)
	default:
		return nil, fmt.Errorf("%w: %s from a host after welcome", frame.ErrViolation, frame.Kind(m))
	}
	return nil, nil
}

// begin begins a batch. It returns nil for a batch that a worker which leaves does not
// run; the host gives it to another.
func (s *session) begin(m *frame.Predict, body []byte) (*Batch, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !s.isReady:
		return nil, fmt.Errorf("%w: predict before ready", frame.ErrViolation)
	case s.batches[m.Batch] != nil:
		return nil, fmt.Errorf("%w: batch %d is there twice", frame.ErrViolation, m.Batch)
	case len(s.batches) == s.settings.Slots:
		return nil, fmt.Errorf("%w: more batches than the %d slots", frame.ErrViolation, s.settings.Slots)
	case s.leaving || s.life.Err() != nil:
		return nil, nil
	case s.settings.Stream != nil && len(m.Items) != 1:
		return nil, fmt.Errorf("%w: predict of %d items for a worker that streams", frame.ErrViolation, len(m.Items))
	}
	b, err := newBatch(s.life, m, body, s.axis)
	if err != nil {
		return nil, err
	}
	s.batches[m.Batch] = b
	s.running++
	return b, nil
}

// work runs a batch and answers it.
func (s *session) work(b *Batch) {
	defer s.release(b)
	outputs, err := s.call(b)
	head, body := s.answer(b, outputs, err)
	// The host may use the slot as soon as it has the answer.
	s.mu.Lock()
	delete(s.batches, b.number)
	s.mu.Unlock()
	if err != nil && s.life.Err() != nil {
		return // the worker had to exit, which is not an item's fault: the host runs them again
	}
	s.send(head, body)
}

// release ends a batch.
func (s *session) release(b *Batch) {
	b.cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.countEnd()
}

// countEnd counts the end of a batch, or of a request about a model. The caller holds the lock.
func (s *session) countEnd() {
	if s.running--; s.running == 0 && s.leaving {
		close(s.idle)
	}
}

// call calls Predict or Stream.
func (s *session) call(b *Batch) (outputs Outputs, err error) {
	name := "predict"
	if s.settings.Stream != nil {
		name = "stream"
	}
	var span *Span
	b.ctx, span = b.Span(b.ctx, name)
	defer func() {
		if p := recover(); p != nil {
			err = &panicError{value: p, stack: string(debug.Stack())}
		}
		if err != nil {
			span.Fail(typeOf(err))
		}
		span.End()
	}()
	if s.settings.Models != nil {
		if b.Model != nil {
			b.Loaded = s.model(b.Model.ID)
		}
		if b.Loaded == nil {
			return nil, errModelGone
		}
	}
	if s.settings.Stream != nil {
		return s.stream(b)
	}
	return s.settings.Predict(b.ctx, b)
}

// typeOf returns the name of an error's type, for a host.
func typeOf(err error) string {
	if _, ok := errors.AsType[*panicError](err); ok {
		return "panic"
	}
	return fmt.Sprintf("%T", err)
}

// panicError is a panic of Predict or Stream.
type panicError struct {
	value any
	stack string
}

func (p *panicError) Error() string { return fmt.Sprint(p.value) }

// Unwrap returns the value if it is an error.
func (p *panicError) Unwrap() error {
	err, _ := p.value.(error)
	return err
}

// answer encodes the end of a batch.
func (s *session) answer(b *Batch, outputs Outputs, err error) ([]byte, *frame.Body) {
	spans := b.takeSpans()
	if err != nil {
		err = b.failItems(err)
	}
	if err == nil {
		var head []byte
		var body *frame.Body
		if head, body, err = s.encodeResult(b, outputs, spans); err == nil {
			return head, body
		}
	}
	m := errorOf(err)
	m.Batch, m.Spans = &b.number, spans
	if errors.Is(err, errModelGone) {
		m.Kind = frame.InvalidModel
	}
	head, _ := encodeWithSpans(m, &m.Spans, 0) // all other texts are bounded, so it fits
	return head, nil
}

// errorOf returns the message of an error.
func errorOf(err error) *frame.Error {
	m := &frame.Error{Kind: frame.Exception, Name: typeOf(err), Message: clip(err.Error())}
	if p, ok := errors.AsType[*panicError](err); ok {
		m.Traceback = clip(p.stack)
	}
	if errors.Is(err, ErrOutOfMemory) {
		m.Kind = frame.OutOfMemory
	}
	return m
}

// encodeWithSpans encodes the end of a batch, without its spans if they do not fit.
func encodeWithSpans(m frame.Message, spans *[]frame.Span, body int64) ([]byte, error) {
	head, err := frame.Encode(m, body)
	if err != nil && *spans != nil {
		*spans = nil
		return frame.Encode(m, body)
	}
	return head, err
}

// encodeResult encodes a result that the host takes.
func (s *session) encodeResult(b *Batch, outputs Outputs, spans []frame.Span) ([]byte, *frame.Body, error) {
	m, body := &frame.Result{Batch: b.number}, &frame.Body{}
	if s.environment.Rank == 0 {
		var err error
		if m, body, err = b.result(outputs); err != nil {
			return nil, nil, err
		}
		m.Spans = spans
	}
	if body.Len() > s.maxBody {
		return nil, nil, fmt.Errorf("outputs of %d bytes, the host takes %d", body.Len(), s.maxBody)
	}
	head, err := encodeWithSpans(m, &m.Spans, body.Len())
	return head, body, err
}

func clip(text string) string {
	if len(text) > maxText {
		return text[:maxText] + "..."
	}
	return text
}

// reliefInterval is the interval in which a relief looks. A batch that it sees twice is
// long.
const reliefInterval = 5 * time.Millisecond

// relief lets the goroutine that reads run a batch itself, because a switch of
// goroutines takes as long as a round trip to the host. When a batch takes longer than
// the interval, another goroutine reads on, so that no message waits behind the batch.
//
// The turn is odd while a batch runs. The goroutine that moves it to even reads on: the
// one that ran the batch, or its relief.
type relief struct {
	turn atomic.Uint64
	read func()
	// timer calls look while batches come, which is when watches is true. To set it for
	// each batch would take as long as a tenth of a round trip.
	timer   *time.Timer
	watches atomic.Bool
	// seen is the turn of the last look.
	seen uint64
}

func newRelief(read func()) *relief {
	r := &relief{read: read}
	r.watches.Store(true)
	r.timer = time.AfterFunc(reliefInterval, r.look)
	return r
}

// begin begins a batch on the goroutine that reads, and returns the turn for end.
func (r *relief) begin() uint64 {
	turn := r.turn.Add(1)
	r.watch()
	return turn
}

func (r *relief) watch() {
	if !r.watches.Load() && r.watches.CompareAndSwap(false, true) {
		r.timer.Reset(reliefInterval)
	}
}

// end reports whether the goroutine that ran the batch reads on.
func (r *relief) end(turn uint64) bool { return r.turn.CompareAndSwap(turn, turn+1) }

// look reads on where a batch is long.
func (r *relief) look() {
	turn := r.turn.Load()
	if turn != r.seen {
		r.seen = turn
		r.timer.Reset(reliefInterval)
		return
	}
	isLong := turn%2 == 1 && r.turn.CompareAndSwap(turn, turn+1)
	r.watches.Store(false)
	if now := r.turn.Load(); now != turn && now%2 == 1 {
		r.watch() // a batch began before watches was false
	}
	if isLong {
		r.read()
	}
}
