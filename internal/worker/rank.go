package worker

import (
	"bufio"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/internal/worker/fork"
	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// rank is one process of an incarnation, and the connection to it.
type rank struct {
	of       *incarnation
	index    int
	log      *slog.Logger
	process  *fork.Process
	listener *net.UnixListener

	// readDone is closed when everything is read that the rank has sent.
	readDone chan struct{}
	// write is held while a frame is written.
	write sync.Mutex

	// The incarnation's lock guards these.
	conn  net.Conn
	slots int
	// pings counts the pings; pinged is the one without an answer, 0 for none.
	pings, pinged uint64
}

// reader reads what a rank sends, on one goroutine.
type reader struct {
	*rank
	// streams is true where the rank answers in chunks, loaded once its first ready has come.
	streams, loaded bool
}

func (r *rank) settings() *Settings { return r.of.worker.settings() }

// serve reads the rank's messages until its connection ends.
func (r *rank) serve() {
	err := (&reader{rank: r}).readAll()
	close(r.readDone)
	r.of.connectionLost(r, err)
}

func (r *reader) readAll() error {
	conn, err := r.accept()
	if err != nil {
		return err
	}
	in := bufio.NewReaderSize(conn, readBuffer)
	if err := r.handshake(in); err != nil {
		return err
	}
	for {
		m, body, err := frame.Read(in, r.settings().MaxFrame)
		if err != nil {
			return err
		}
		if err := r.handle(m, body); err != nil {
			return err
		}
	}
}

// accept accepts the one connection of the process.
func (r *rank) accept() (net.Conn, error) {
	conn, err := r.listener.Accept()
	r.listener.Close() //nolint:errcheck // nobody else is to connect
	if err != nil {
		return nil, err
	}
	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	if r.of.lost != nil {
		conn.Close() //nolint:errcheck // nothing was written
		return nil, r.of.lost
	}
	r.conn = conn
	return conn, nil
}

// close closes the connection, or prevents it.
func (r *rank) close() {
	r.listener.Close() //nolint:errcheck // it may be closed
	if conn := r.connection(); conn != nil {
		conn.Close() //nolint:errcheck // nobody waits for what is left
	}
}

// connection returns the connection; nil before accept.
func (r *rank) connection() net.Conn {
	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	return r.conn
}

// awaitRead waits until everything is read that an exited process has sent, such as a
// result or why it exited. A child of its own may hold the connection open.
func (r *rank) awaitRead() {
	if r.connection() == nil {
		return
	}
	timer := time.NewTimer(exitGrace)
	defer timer.Stop()
	select {
	case <-r.readDone:
	case <-timer.C:
	}
}

// handshake answers the hello.
func (r *reader) handshake(in *bufio.Reader) error {
	m, _, err := frame.Read(in, 0)
	if err != nil {
		return err
	}
	hello, ok := m.(*frame.Hello)
	if !ok {
		return violation("it sends %s before hello", frame.Kind(m))
	}
	r.log.Info("the worker connected", "name", hello.Name, "sdk", hello.SDK, "pid", hello.PID, "capabilities", hello.Capabilities)
	if !slices.Contains(hello.Protocols, frame.Version) {
		err := violation("it supports versions %v of the protocol, the host supports %d", hello.Protocols, frame.Version)
		_ = r.send(&frame.Error{Kind: frame.Protocol, Message: err.Error()}) // the connection ends either way
		return err
	}
	s := r.settings()
	r.streams = slices.Contains(hello.Capabilities, frame.Stream)
	welcome := &frame.Welcome{
		Protocol: frame.Version, Options: s.Options, Devices: s.Replicas[r.of.worker.index].Devices,
		Slots: s.slots(r.streams), MaxSize: s.MaxSize, MaxFrame: s.MaxFrame,
	}
	switch {
	case r.streams:
		welcome.Capabilities = []string{frame.Stream}
	case welcome.Slots == 1 && r.of.worker.ranks == 1 && slices.Contains(hello.Capabilities, frame.Prefetch):
		r.of.prefetches = true
		welcome.Capabilities = []string{frame.Prefetch}
	}
	if s.Models != nil {
		if !slices.Contains(hello.Capabilities, frame.Models) {
			r.of.fail(ErrNoModels) // a wrong worker is not a violation
			return ErrNoModels
		}
		welcome.Capabilities = append(welcome.Capabilities, frame.Models)
		welcome.Memory = frame.Memory{Host: s.Models.Host, Device: s.Models.Device}
	}
	return r.send(welcome)
}

// handle handles a message. An error ends the connection.
func (r *reader) handle(m frame.Message, body []byte) error {
	switch m := m.(type) {
	case *frame.Result:
		return r.of.recordResult(r.rank, m.Batch, result{message: m, body: body})
	case *frame.Chunk:
		return r.handleChunk(m, body)
	case *frame.Pong:
		return r.handlePong(m)
	case *frame.Ready:
		return r.handleReady(m, body)
	case *frame.State:
		r.handleState(m)
		return nil
	case *frame.Error:
		switch {
		case m.Load != nil:
			return r.of.endRequest(r, *m.Load, m, body)
		case m.Kind == frame.InvalidModel && r.settings().Models == nil:
			return violation("%q from a worker of one model", m.Kind)
		case m.Batch != nil:
			return r.of.recordResult(r.rank, *m.Batch, result{failed: m})
		}
		return r.handleError(m)
	case frame.Answer:
		return r.of.endRequest(r, m.Answer().Load, m, body)
	default:
		return violation("a worker does not send %s now", frame.Kind(m))
	}
}

// handleReady adds slots. The first ready has the spec.
func (r *reader) handleReady(m *frame.Ready, body []byte) error {
	first := !r.loaded
	if first != (m.Spec != nil) {
		return violation("a spec is in the first ready, and in no other")
	}
	if !first && m.Models != nil {
		return violation("models are in the first ready, and in no other")
	}
	if first {
		if err := errors.Join(r.adoptSpec(m, body), r.adoptLimits(m.Models)); err != nil {
			return err
		}
		r.loaded = true
	}
	if err := r.addSlots(max(1, m.Slots)); err != nil {
		return err
	}
	if !first {
		r.of.worker.pool().resize(r.of.worker.index, r.of, r.of.slots())
		return nil
	}
	r.of.post(func(m *machine, _ time.Time) []action { return m.Ready(r.index) })
	return nil
}

func (r *reader) addSlots(n int) error {
	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	if most := r.settings().slots(r.streams); r.slots+n > most {
		return violation("it takes %d batches at a time, %d are allowed", r.slots+n, most)
	}
	r.slots += n
	return nil
}

// adoptSpec checks the spec, and adopts rank 0's.
func (r *reader) adoptSpec(m *frame.Ready, body []byte) error {
	spec, err := specOf(m.Spec, body)
	if err != nil {
		return violation("spec: %w", err)
	}
	spec.Stream = r.streams
	if r.index > 0 {
		return nil
	}
	r.of.worker.runner.engine.Store(m.Engine)
	if err := r.of.worker.runner.acceptSpec(spec); err != nil {
		r.of.fail(err) // a wrong spec is not a violation
	}
	return nil
}

func (r *rank) handleState(m *frame.State) {
	log := r.log.Info
	if m.State == frame.Failed {
		log = r.log.Error
	}
	log("the worker reports its state", "state", m.State, "message", m.Message)
	r.of.post(func(machine *machine, now time.Time) []action {
		switch m.State {
		case frame.Failed:
			return machine.ReportError(fmt.Errorf("it reports %s: %s", m.State, m.Message), now)
		case frame.Shutdown:
			return machine.ReportShutdown(now)
		default:
			machine.SetProgress(m.Message)
			return nil
		}
	})
}

// handleError handles an error of the worker itself, or of the connection.
func (r *rank) handleError(m *frame.Error) error {
	err := newBatchError(m)
	r.log.Error("the worker failed", "kind", err.Kind, "error", err.Error(), "traceback", err.Traceback)
	for line := range strings.Lines(err.Traceback) {
		r.process.Keep(strings.TrimRight(line, "\n"))
	}
	switch m.Kind {
	case frame.Protocol:
		return violation("the worker reports that the host breaks the protocol: %s", err.Error())
	case frame.Unsupported:
		return nil // the host sends nothing optional
	}
	r.of.post(func(machine *machine, now time.Time) []action {
		return machine.ReportError(errors.New(err.Error()), now) // its fault is for no caller
	})
	return nil
}

// handleChunk passes on a part of an item's answer.
func (r *reader) handleChunk(m *frame.Chunk, body []byte) error {
	if !r.streams || r.index > 0 {
		return violation("rank %d may not send chunks", r.index)
	}
	b, err := r.of.find(r.rank, m.Batch)
	if err != nil {
		return err
	}
	if m.Item >= len(b.items) {
		return violation("a chunk for item %d of a batch of %d", m.Item, len(b.items))
	}
	parts := make([]payload.Part, len(m.Parts))
	for i, p := range m.Parts {
		if parts[i], err = partOf(p, body); err != nil {
			return violation("chunk: %w", err)
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sink == nil || b.cancelled != nil && b.cancelled[m.Item] {
		return nil // a cancelled item that goes on shows no progress
	}
	r.of.touch(b)
	if err := b.sink.Chunk(m.Item, parts); err != nil {
		b.cancelLocked(m.Item)
		// On another goroutine: the worker may not read before this one reads on.
		r.of.worker.tasks.Go(func() { r.of.sendCancel(b, []int{m.Item}) })
	}
	return nil
}

// ping sends a ping, unless the rank has a batch or a request about a model, which may keep
// the whole process busy. Both are recorded before they are written, so the worker reads a
// ping that finds none recorded before any of them.
func (r *rank) ping() {
	r.write.Lock()
	defer r.write.Unlock()
	r.of.mu.Lock()
	busy := r.conn == nil || len(r.of.running)+len(r.of.requests) > 0
	if !busy {
		r.pings++
		r.pinged = r.pings
	}
	n := r.pinged
	r.of.mu.Unlock()
	if busy {
		r.postPong()
		return
	}
	_ = r.sendLocked(&frame.Ping{N: n}) // without it there is no pong
}

func (r *rank) handlePong(m *frame.Pong) error {
	r.of.mu.Lock()
	expected := r.pinged != 0 && r.pinged == m.N
	r.pinged = 0
	r.of.mu.Unlock()
	if !expected {
		return violation("pong %d has no ping", m.N)
	}
	r.postPong()
	return nil
}

// postPong posts that the rank answered a ping, or was not pinged.
func (r *rank) postPong() {
	r.of.post(func(m *machine, now time.Time) []action {
		m.Pong(r.index, now)
		return nil
	})
}

// ask asks the rank to exit, by a signal and, where it reads, by a message.
func (r *rank) ask() {
	r.process.Terminate()
	if !r.write.TryLock() {
		return
	}
	defer r.write.Unlock()
	if conn := r.connection(); conn != nil {
		_ = conn.SetWriteDeadline(time.Now().Add(writeGrace)) // a closed one needs none
		_ = r.sendLocked(&frame.Stop{Timeout: r.settings().StopLimit.Milliseconds()})
		_ = conn.SetWriteDeadline(time.Time{})
	}
}

// send writes a message without a body. It blocks while the worker does not read; the
// end of the incarnation ends it.
func (r *rank) send(m frame.Message) error {
	r.write.Lock()
	defer r.write.Unlock()
	return r.sendLocked(m)
}

func (r *rank) sendLocked(m frame.Message) error {
	head, err := frame.Encode(m, 0)
	if err != nil {
		return err
	}
	_, err = r.writeFrame(head, nil)
	return err
}

// sendFrame writes a frame, and returns how many bytes were written.
func (r *rank) sendFrame(head []byte, body *frame.Body) (int64, error) {
	r.write.Lock()
	defer r.write.Unlock()
	return r.writeFrame(head, body)
}

func (r *rank) writeFrame(head []byte, body *frame.Body) (int64, error) {
	conn := r.connection()
	if conn == nil {
		return 0, net.ErrClosed
	}
	buffers := body.Buffers(head)
	return buffers.WriteTo(conn)
}

func violation(format string, args ...any) error {
	return fmt.Errorf("%w: %w", frame.ErrViolation, fmt.Errorf(format, args...))
}
