package worker

import (
	"bufio"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker/spawn"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker/supervise"
)

const (
	// readBuffer saves reads of small frames.
	readBuffer = 64 << 10
	// lastWord bounds the write of a shutdown to a worker that may not read.
	lastWord = 100 * time.Millisecond
)

// rank is one process of a worker, and the connection to it.
type rank struct {
	life     *life
	index    int
	log      *slog.Logger
	process  *spawn.Process
	listener *net.UnixListener

	// heard is closed when everything is read that it has said.
	heard chan struct{}
	// write is held while a frame is written.
	write sync.Mutex

	// The life's lock guards these.
	conn  net.Conn
	slots int
	// pinged is the ping that is not answered yet, 0 where there is none.
	pings, pinged uint64

	// These are the reader's.
	streams, loaded bool
}

// serve reads what the rank says until its connection ends.
func (r *rank) serve() {
	err := r.talk()
	close(r.heard)
	r.life.lost(r, err)
}

// hearOut waits until everything is read that a process has said which has ended, if
// it has said anything: how it left, or a result. A child of its own may hold the
// connection.
func (r *rank) hearOut() {
	r.life.mu.Lock()
	connected := r.conn != nil
	r.life.mu.Unlock()
	if !connected {
		return
	}
	timer := time.NewTimer(exitPatience)
	defer timer.Stop()
	select {
	case <-r.heard:
	case <-timer.C:
	}
}

func (r *rank) talk() error {
	conn, err := r.accept()
	if err != nil {
		return err
	}
	in := bufio.NewReaderSize(conn, readBuffer)
	if err := r.greet(in); err != nil {
		return err
	}
	for {
		m, body, err := frame.Read(in, r.settings().MaxFrame)
		if err != nil {
			return err
		}
		if err := r.hear(m, body); err != nil {
			return err
		}
	}
}

func (r *rank) settings() *Settings { return &r.life.worker.runner.settings }

// accept takes the one connection of the process.
func (r *rank) accept() (net.Conn, error) {
	conn, err := r.listener.Accept()
	r.listener.Close() //nolint:errcheck // nobody else is to connect
	if err != nil {
		return nil, err
	}
	r.life.mu.Lock()
	defer r.life.mu.Unlock()
	if r.life.gone != nil {
		conn.Close() //nolint:errcheck // nothing was said
		return nil, r.life.gone
	}
	r.conn = conn
	return conn, nil
}

// hangUp closes the connection, or sees to it that there will be none.
func (r *rank) hangUp() {
	r.listener.Close() //nolint:errcheck // it may be closed
	r.life.mu.Lock()
	defer r.life.mu.Unlock()
	if r.conn != nil {
		r.conn.Close() //nolint:errcheck // nobody waits for what is left
	}
}

// greet answers the hello.
func (r *rank) greet(in *bufio.Reader) error {
	m, _, err := frame.Read(in, 0)
	if err != nil {
		return err
	}
	hello, ok := m.(*frame.Hello)
	if !ok {
		return violation("it says %s before hello", frame.Kind(m))
	}
	r.log.Info("the worker says hello", "name", hello.Name, "sdk", hello.SDK, "pid", hello.PID, "capabilities", hello.Capabilities)
	if !slices.Contains(hello.Protocols, frame.Version) {
		err := violation("it speaks versions %v of the protocol, the host speaks %d", hello.Protocols, frame.Version)
		_ = r.send(&frame.Error{Kind: frame.Protocol, Message: err.Error()}) // it is over either way
		return err
	}
	s := r.settings()
	r.streams = slices.Contains(hello.Capabilities, frame.Stream)
	welcome := &frame.Welcome{
		Protocol: frame.Version, Options: s.Options, Devices: s.Replicas[r.life.worker.index].Devices,
		Slots: s.slots(r.streams), MaxSize: s.MaxSize, MaxFrame: s.MaxFrame,
	}
	if r.streams {
		welcome.Capabilities = []string{frame.Stream}
	}
	return r.send(welcome)
}

// hear takes a message. An error ends the connection.
func (r *rank) hear(m frame.Message, body []byte) error {
	switch m := m.(type) {
	case *frame.Result:
		return r.life.take(r, m.Batch, end{result: m, body: body})
	case *frame.Chunk:
		return r.chunk(m, body)
	case *frame.Pong:
		return r.pong(m)
	case *frame.Ready:
		return r.ready(m, body)
	case *frame.State:
		r.state(m)
		return nil
	case *frame.Error:
		if m.Batch != nil {
			return r.life.take(r, *m.Batch, end{failed: m})
		}
		return r.erring(m)
	default:
		return violation("a worker does not say %s now", frame.Kind(m))
	}
}

func (r *rank) post(event func(m *supervise.Machine, of supervise.Incarnation, now time.Time) []supervise.Action) {
	w := r.life.worker
	w.post(func(now time.Time) []supervise.Action { return event(w.machine, r.life.of, now) })
}

// ready takes slots, and with the first the spec.
func (r *rank) ready(m *frame.Ready, body []byte) error {
	first := !r.loaded
	if first != (m.Spec != nil) {
		return violation("a spec is in the first ready, and in no other")
	}
	if first {
		if err := r.load(m, body); err != nil {
			return err
		}
		r.loaded = true
	}
	if err := r.widen(max(1, m.Slots)); err != nil {
		return err
	}
	if !first {
		r.life.worker.pool().widen(r.life.worker.index, r.life, r.life.slots())
		return nil
	}
	r.post(func(m *supervise.Machine, of supervise.Incarnation, now time.Time) []supervise.Action {
		return m.Ready(of, r.index, now)
	})
	return nil
}

func (r *rank) widen(by int) error {
	r.life.mu.Lock()
	defer r.life.mu.Unlock()
	if most := r.settings().slots(r.streams); r.slots+by > most {
		return violation("it takes %d batches at a time, %d are allowed", r.slots+by, most)
	}
	r.slots += by
	return nil
}

// load takes the spec, that of rank 0.
func (r *rank) load(m *frame.Ready, body []byte) error {
	spec, err := specOf(m.Spec, body)
	if err != nil {
		return violation("spec: %w", err)
	}
	spec.Stream = r.streams
	if r.index > 0 {
		return nil
	}
	if err := r.life.worker.runner.adopt(spec); err != nil {
		// The worker is to blame, and nothing else.
		r.life.fail(err)
	}
	return nil
}

func (r *rank) state(m *frame.State) {
	log := r.log.Info
	if m.State == frame.Failed {
		log = r.log.Error
	}
	log("the worker says where it is", "state", m.State, "message", m.Message)
	r.post(func(machine *supervise.Machine, of supervise.Incarnation, now time.Time) []supervise.Action {
		switch m.State {
		case frame.Failed:
			return machine.Erring(of, fmt.Errorf("it says %s: %s", m.State, m.Message), now)
		case frame.Shutdown:
			return machine.Leaving(of, now)
		default:
			machine.Progress(of, m.Message)
			return nil
		}
	})
}

// erring takes an error that is about the worker itself, or the connection.
func (r *rank) erring(m *frame.Error) error {
	err := newBatchError(m)
	r.log.Error("the worker failed", "kind", err.Kind, "error", err.Error(), "traceback", err.Traceback)
	switch m.Kind {
	case frame.Protocol:
		return violation("the worker says that the host breaks the protocol: %s", err.Error())
	case frame.Unsupported:
		return nil // nothing was asked that matters
	}
	r.post(func(machine *supervise.Machine, of supervise.Incarnation, now time.Time) []supervise.Action {
		return machine.Erring(of, errors.New(err.Error()), now) // not a batch's
	})
	return nil
}

// chunk hands on a part of an item's answer.
func (r *rank) chunk(m *frame.Chunk, body []byte) error {
	if !r.streams || r.index > 0 {
		return violation("rank %d may not send chunks", r.index)
	}
	f, err := r.life.flight(r, m.Batch)
	if err != nil {
		return err
	}
	if m.Item >= f.items {
		return violation("a chunk for item %d of a batch of %d", m.Item, f.items)
	}
	parts := make([]payload.Part, len(m.Parts))
	for i, p := range m.Parts {
		if parts[i], err = partOf(p, body); err != nil {
			return violation("chunk: %w", err)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.wants(m.Item) {
		return nil // one that ignores its cancel shows nothing by it
	}
	r.life.goesOn(f)
	if err := f.sink.Chunk(m.Item, parts); err != nil {
		f.callOffOne(m.Item)
		// Not from here: the worker may not read before this has read on.
		r.life.worker.tasks.Go(func() { r.life.tellOff(f, []int{m.Item}) })
	}
	return nil
}

// ping asks the rank whether it is there, unless it has a batch: that is written
// after it is booked, so a ping that finds none booked is answered before any.
func (r *rank) ping() {
	r.write.Lock()
	defer r.write.Unlock()
	r.life.mu.Lock()
	busy := r.conn == nil || len(r.life.flights) > 0
	if !busy {
		r.pings++
		r.pinged = r.pings
	}
	n := r.pinged
	r.life.mu.Unlock()
	if busy {
		r.answered()
		return
	}
	_ = r.sendLocked(&frame.Ping{N: n}) // or there will be no pong
}

func (r *rank) pong(m *frame.Pong) error {
	r.life.mu.Lock()
	asked := r.pinged != 0 && r.pinged == m.N
	r.pinged = 0
	r.life.mu.Unlock()
	if !asked {
		return violation("a pong %d that nobody asked for", m.N)
	}
	r.answered()
	return nil
}

// answered says that the worker has answered a ping, or was not asked.
func (r *rank) answered() {
	r.post(func(m *supervise.Machine, of supervise.Incarnation, now time.Time) []supervise.Action {
		m.Pong(of, r.index, now)
		return nil
	})
}

// send writes a message without a body. It blocks while the worker does not read;
// the end of the life ends it.
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
	_, err = r.writeBuffers(net.Buffers{head})
	return err
}

// predict writes a frame that is there, and returns how much of it was written.
func (r *rank) predict(body *frame.Body, head []byte) (int64, error) {
	r.write.Lock()
	defer r.write.Unlock()
	return r.writeBuffers(body.Buffers(head))
}

func (r *rank) writeBuffers(b net.Buffers) (int64, error) {
	r.life.mu.Lock()
	conn := r.conn
	r.life.mu.Unlock()
	if conn == nil {
		return 0, net.ErrClosed
	}
	return b.WriteTo(conn)
}

// ask tells the rank to leave, by a frame where it reads and by a signal.
func (r *rank) ask(within time.Duration) {
	r.process.Terminate()
	if r.write.TryLock() {
		r.life.mu.Lock()
		conn := r.conn
		r.life.mu.Unlock()
		if conn != nil {
			_ = conn.SetWriteDeadline(time.Now().Add(lastWord))           // it is closed, or obeys
			_ = r.sendLocked(&frame.Stop{Timeout: within.Milliseconds()}) // the signal says it too
			_ = conn.SetWriteDeadline(time.Time{})
		}
		r.write.Unlock()
	}
}
