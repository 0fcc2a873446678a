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
	// limit is the longest body, in bytes.
	limit int64

	// life ends with the connection; end says why.
	life context.Context
	end  context.CancelCauseFunc
	// asked has how long the worker may take to leave, and stopped says that the
	// host has asked.
	asked   chan time.Duration
	stopped atomic.Bool
	// pumps are done when nobody reads any more, or is about to.
	pumps  sync.WaitGroup
	relief *relief

	writing sync.Mutex

	mu sync.Mutex
	// axis and outputs are the spec's; open says that the worker is ready, leaving that it takes
	// no more batches.
	axis          string
	outputs       []PartSpec
	open, leaving bool
	// batches are those whose end the host has not been told of, running those whose
	// goroutines have not ended.
	batches map[uint64]*Batch
	running int
	// idle is closed when the worker leaves and nothing runs.
	idle chan struct{}
}

func (s *session) hangUp() { _ = s.conn.Close() }

// say sends a message without a body.
func (s *session) say(m frame.Message) {
	if head, err := frame.Encode(m, 0); err == nil {
		s.send(head, nil)
	}
}

// send sends a frame. Where that fails the host is gone, which read notices too.
func (s *session) send(head []byte, body *frame.Body) {
	s.writing.Lock()
	defer s.writing.Unlock()
	_ = frame.Send(s.conn, head, body)
}

// read takes messages until the life ends, or until another goroutine does.
func (s *session) read() {
	for {
		m, body, err := frame.Read(s.in, s.limit)
		var b *Batch
		if err == nil {
			b, err = s.heard(m, body)
		}
		switch {
		case err != nil:
			s.lost(err)
			s.pumps.Done()
			return
		case b == nil:
		case s.settings.Slots > 1 || s.settings.Stream != nil:
			go s.work(b)
		default:
			turn, ok := s.relief.begin()
			if !ok {
				s.rest(b)
				continue
			}
			s.work(b)
			if !s.relief.end(turn) {
				return
			}
		}
	}
}

// lost ends the life by an error of reading, or of what was read.
func (s *session) lost(err error) {
	switch {
	case errors.Is(err, frame.ErrViolation):
		s.depart(err)
	case !errors.Is(err, ErrRefused):
		err = fmt.Errorf("%w: %w", ErrHostGone, err)
	}
	s.end(err)
}

// heard does what a message says, or returns the batch that it is.
func (s *session) heard(m frame.Message, body []byte) (*Batch, error) {
	switch m := m.(type) {
	case *frame.Predict:
		return s.predict(m, body)
	case *frame.Cancel:
		s.mu.Lock()
		b := s.batches[m.Batch]
		s.mu.Unlock()
		if b != nil {
			b.callOff(m.Items)
		}
	case *frame.Ping:
		s.say(&frame.Pong{N: m.N})
	case *frame.Stop:
		s.stopped.Store(true)
		select {
		case s.asked <- time.Duration(min(m.Timeout, maxTimeout)) * time.Millisecond:
		default: // it has been asked already
		}
	case *frame.Load, *frame.Unload:
		s.say(&frame.Error{Kind: frame.Unsupported, Name: "Unsupported", Message: frame.Kind(m) + ": this worker has one model"})
	case *frame.Error:
		return nil, fmt.Errorf("%w: %s: %s", ErrRefused, m.Kind, m.Message)
	default:
		return nil, fmt.Errorf("%w: %s from a host that has said welcome", frame.ErrViolation, frame.Kind(m))
	}
	return nil, nil
}

// predict begins a batch; nil is one that is left to others.
func (s *session) predict(m *frame.Predict, body []byte) (*Batch, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !s.open:
		return nil, fmt.Errorf("%w: predict before ready", frame.ErrViolation)
	case s.batches[m.Batch] != nil:
		return nil, fmt.Errorf("%w: batch %d is there twice", frame.ErrViolation, m.Batch)
	case len(s.batches) == s.settings.Slots:
		return nil, fmt.Errorf("%w: more batches than the %d slots", frame.ErrViolation, s.settings.Slots)
	case s.leaving:
		return nil, nil
	}
	if s.settings.Stream != nil && len(m.Items) != 1 {
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

// work runs a batch and ends it.
func (s *session) work(b *Batch) {
	defer s.rest(b)
	outputs, err := s.call(b)
	head, body := s.answer(b, outputs, err)
	// The host may use the slot as soon as it has the answer.
	s.mu.Lock()
	delete(s.batches, b.number)
	s.mu.Unlock()
	if err != nil && s.life.Err() != nil {
		return // it had to end, which is not the items' fault: the host keeps them in hand
	}
	s.send(head, body)
}

func (s *session) rest(b *Batch) {
	b.cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running--; s.running == 0 && s.leaving {
		close(s.idle)
	}
}

// call calls Predict or Stream.
func (s *session) call(b *Batch) (outputs Outputs, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &panicked{value: p, stack: string(debug.Stack())}
		}
	}()
	if s.settings.Stream != nil {
		return s.stream(b)
	}
	return s.settings.Predict(b.ctx, b)
}

// panicked is the error of a Predict or Stream that panics.
type panicked struct {
	value any
	stack string
}

func (p *panicked) Error() string { return fmt.Sprint(p.value) }

// Unwrap returns the value where it is an error.
func (p *panicked) Unwrap() error {
	err, _ := p.value.(error)
	return err
}

// answer is the frame that ends a batch.
func (s *session) answer(b *Batch, outputs Outputs, err error) ([]byte, *frame.Body) {
	if err != nil {
		err = b.settle(err)
	}
	if err == nil {
		head, body, unfit := s.result(b, outputs)
		if unfit == nil {
			return head, body
		}
		err = unfit
	}
	// All its words are bounded, so that it fits.
	head, _ := frame.Encode(failure(b, err), 0)
	return head, nil
}

// settle makes an error that is about items into their faults, and returns any
// other.
func (b *Batch) settle(err error) error {
	fault, ok := errors.AsType[*Fault](err)
	switch {
	case ok && len(b.Items) == 1:
		b.Items[0].Fail(fault)
	case b.abandoned():
		for _, item := range b.Items {
			item.Fail(Failed("nobody waits for it any more"))
		}
	default:
		return err
	}
	return nil
}

// result is a result that the host takes.
func (s *session) result(b *Batch, outputs Outputs) ([]byte, *frame.Body, error) {
	if s.environment.Rank != 0 {
		head, err := frame.Encode(&frame.Result{Batch: b.number}, 0)
		return head, nil, err
	}
	m, body, err := b.result(outputs)
	if err != nil {
		return nil, nil, err
	}
	if body.Len() > s.limit {
		return nil, nil, fmt.Errorf("outputs of %d bytes, the host takes %d", body.Len(), s.limit)
	}
	head, err := frame.Encode(m, body.Len())
	return head, body, err
}

// failure says that a batch failed as a whole.
func failure(b *Batch, err error) *frame.Error {
	m := &frame.Error{Batch: &b.number, Kind: frame.Exception, Name: fmt.Sprintf("%T", err), Message: err.Error()}
	if p, ok := errors.AsType[*panicked](err); ok {
		m.Name, m.Traceback = "panic", p.stack
	}
	if errors.Is(err, ErrOutOfMemory) {
		m.Kind = frame.OutOfMemory
	}
	m.Message, m.Traceback = clip(m.Message), clip(m.Traceback)
	return m
}

// clip bounds words, so that they fit a header whatever is in them.
func clip(text string) string {
	const most = 64 << 10
	if len(text) > most {
		return text[:most] + "..."
	}
	return text
}
