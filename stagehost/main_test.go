package stagehost_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats-server/v2/server"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

func TestMain(m *testing.M) { testbed.Main(m) }

const (
	mesh    pipeline.MeshName  = "test"
	stage   pipeline.StageName = "stage"
	gateway pipeline.GatewayID = "gateway"
)

// bed is a broker, and a connection that asks and is answered as a gateway is.
type bed struct {
	t      *testing.T
	broker *testbed.Broker
	bus    *bus.Bus
	// local are the hosts that get items in memory; nil where items pass the broker.
	local *bus.Local

	mu    sync.Mutex
	calls map[pipeline.ExecutionID]*call
	// handedOver counts the items that a host got in memory.
	handedOver int
	queued     []queuedItem
}

// queuedItem is an item that was handed over, and then published.
type queuedItem struct {
	position int
	seq      uint64
}

// eachWay runs a test whose promises hold for every item: once with items that pass the
// broker, once with items that are handed over in memory.
func eachWay(t *testing.T, test func(*testing.T, *bed)) {
	t.Helper()
	t.Parallel()
	t.Run("brokered", func(t *testing.T) {
		t.Parallel()
		test(t, newBed(t))
	})
	t.Run("local", func(t *testing.T) {
		t.Parallel()
		b := newLocalBed(t)
		test(t, b)
		if b.handedOver == 0 {
			t.Error("no item was handed over")
		}
	})
}

func newBed(t *testing.T, edits ...func(*server.Options)) *bed {
	t.Helper()
	return newBedWith(t, nil, edits...)
}

// newLocalBed returns a bed whose items are handed to its hosts in memory where they may be.
func newLocalBed(t *testing.T) *bed {
	t.Helper()
	return newBedWith(t, bus.NewLocal())
}

func newBedWith(t *testing.T, local *bus.Local, edits ...func(*server.Options)) *bed {
	t.Helper()
	b := &bed{t: t, broker: testbed.StartBroker(t, edits...), local: local, calls: map[pipeline.ExecutionID]*call{}}
	b.bus = b.broker.Connect(mesh, func(s *bus.Settings) { s.Local = local })
	stop, err := b.bus.ServeReplies(gateway, b.receive)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Errorf("replies: %v", err)
		}
	})
	return b
}

func (b *bed) receive(id pipeline.ExecutionID, data []byte) meshv1.ReplyDisposition {
	b.mu.Lock()
	_, ok := b.calls[id]
	b.mu.Unlock()
	if !ok {
		return meshv1.ReplyDisposition_REPLY_DISPOSITION_UNKNOWN
	}
	reply, err := envelope.DecodeReply(data)
	if err != nil || reply.ExecutionID != id {
		b.t.Errorf("reply to %s: %+v, %v", id, reply, err)
		return meshv1.ReplyDisposition_REPLY_DISPOSITION_MALFORMED
	}
	return b.Deliver(reply)
}

// Queued implements envelope.LocalGateway.
func (b *bed) Queued(_ pipeline.ExecutionID, position int, seq uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.queued = append(b.queued, queuedItem{position, seq})
}

// Deliver implements envelope.LocalGateway.
func (b *bed) Deliver(reply *envelope.Reply) meshv1.ReplyDisposition {
	b.mu.Lock()
	defer b.mu.Unlock()
	c, ok := b.calls[reply.ExecutionID]
	if !ok {
		return meshv1.ReplyDisposition_REPLY_DISPOSITION_UNKNOWN
	}
	if c.answered {
		c.extra++
		return meshv1.ReplyDisposition_REPLY_DISPOSITION_DUPLICATE
	}
	c.answered = reply.Terminal()
	c.replies <- reply
	return meshv1.ReplyDisposition_REPLY_DISPOSITION_DELIVERED
}

// host is a host that runs.
type host struct {
	*stagehost.Host
	t      *testing.T
	counts *testbed.Counts
	slots  *slots
	cancel context.CancelFunc
	once   sync.Once
	done   chan struct{}
	err    error
}

// longTime outlasts every test.
const longTime = time.Hour

// host starts a host and waits until it is ready. Without edits it makes
// batches of what is there, of at most 32 rows.
func (b *bed) host(r runner.Runner, edits ...func(*stagehost.Settings)) *host {
	b.t.Helper()
	h := b.start(r, edits...)
	b.waitReady(h)
	return h
}

// start is host without the wait.
func (b *bed) start(r runner.Runner, edits ...func(*stagehost.Settings)) *host {
	b.t.Helper()
	c := &testbed.Counts{}
	counted := &slots{Runner: r}
	s := stagehost.Settings{
		Mesh: mesh, Stage: stage, Host: pipeline.HostID(uuid.NewString()), Version: "v1",
		Runner: counted, Config: stagehost.Config{Batch: batch.Settings{MaxSize: 32}},
		Bus:    bus.Settings{URL: b.broker.URL(), Local: b.local},
		Logger: discard(), Meter: c,
	}
	for _, edit := range edits {
		edit(&s)
	}
	made, err := stagehost.New(s)
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	h := &host{Host: made, t: b.t, counts: c, slots: counted, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(h.done)
		h.err = made.Run(ctx)
	}()
	b.t.Cleanup(h.stop)
	return h
}

func (b *bed) waitReady(h *host) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), testbed.Patience)
	defer cancel()
	if err := h.WaitReady(ctx); err != nil {
		b.t.Fatal(err)
	}
}

// stop drains the host and waits for its end.
func (h *host) stop() {
	h.t.Helper()
	h.once.Do(func() {
		h.cancel()
		<-h.done
		if h.err != nil {
			h.t.Errorf("host: %v", h.err)
		}
		h.leftNothing()
	})
}

// fails waits until the host ends by itself, and returns why.
func (h *host) fails() error {
	h.t.Helper()
	testbed.Receive(h.t, "end of the host", h.done)
	h.once.Do(func() {
		h.cancel()
		h.leftNothing()
	})
	if h.err == nil {
		h.t.Fatal("the host ended without a reason")
	}
	return h.err
}

// leftNothing makes sure that a host that has ended holds nothing any more.
func (h *host) leftNothing() {
	h.t.Helper()
	if n := h.counts.Of("stagemesh.stage.internal_errors"); n > 0 {
		h.t.Errorf("%d defects", n)
	}
	if n := h.slots.out.Load(); n != 0 {
		h.t.Errorf("%d slots were neither used nor given back", n)
	}
}

// slots is a runner that counts the slots that are in its host's hands, unused.
type slots struct {
	runner.Runner
	out atomic.Int64
}

func (s *slots) Acquire(ctx context.Context) (runner.Slot, error) {
	got, err := s.Runner.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	s.out.Add(1)
	counted := &slot{Slot: got, slots: s}
	if of, ok := got.(runner.Prefetcher); ok {
		return &prefetcher{slot: counted, of: of}, nil
	}
	return counted, nil
}

type prefetcher struct {
	*slot
	of runner.Prefetcher
}

func (p *prefetcher) Next() (runner.PrefetchSlot, bool) {
	next, ok := p.of.Next()
	if !ok {
		return nil, false
	}
	p.slots.out.Add(1)
	return &prefetchSlot{prefetcher: prefetcher{slot: &slot{Slot: next, slots: p.slots}, of: next}, next: next}, true
}

type prefetchSlot struct {
	prefetcher
	next runner.PrefetchSlot
}

func (s *prefetchSlot) DoNext(ctx context.Context, b runner.Batch, sink runner.Sink, began func()) error {
	s.slots.out.Add(-1)
	return s.next.DoNext(ctx, b, sink, began)
}

type slot struct {
	runner.Slot
	slots *slots
}

func (s *slot) Do(ctx context.Context, b runner.Batch, sink runner.Sink) error {
	s.slots.out.Add(-1)
	return s.Slot.Do(ctx, b, sink)
}

func (s *slot) Release() {
	s.slots.out.Add(-1)
	s.Slot.Release()
}

// together holds items back until there are exactly n of them.
func together(n int) func(*stagehost.Settings) {
	return func(s *stagehost.Settings) {
		s.Batch = batch.Settings{Mode: batch.Window, MaxSize: n, MaxWait: longTime}
	}
}

// call is a request and the replies to it.
type call struct {
	t       *testing.T
	bed     *bed
	env     *envelope.Envelope
	replies chan *envelope.Reply
	// answered says that the terminal answer has come; extra counts what came
	// after it. The bed's lock guards both.
	answered bool
	extra    int
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

const roomy = 1 << 10

// ask sends a request with one text input.
func (b *bed) ask(text string, edits ...func(*envelope.Envelope)) *call {
	b.t.Helper()
	return b.askParts([]payload.Part{payload.OfBlob("", "text/plain", []byte(text))}, edits...)
}

func (b *bed) askParts(parts []payload.Part, edits ...func(*envelope.Envelope)) *call {
	b.t.Helper()
	c := b.expect(parts, edits...)
	b.send(c.env)
	return c
}

// expect returns a call that waits for its answer, whoever sends its request.
func (b *bed) expect(parts []payload.Part, edits ...func(*envelope.Envelope)) *call {
	b.t.Helper()
	now := time.Now()
	e := &envelope.Envelope{
		Mesh: mesh, Gateway: gateway, Pipeline: "pipeline",
		RequestID: pipeline.RequestID(uuid.NewString()), ExecutionID: pipeline.ExecutionID(uuid.NewString()),
		Route:      []pipeline.Hop{{Step: "step", Stage: stage}},
		Durability: pipeline.Memory, Deadline: now.Add(longTime), AdmittedAt: now,
		TakesChunks: true, Parts: parts,
	}
	for _, edit := range edits {
		edit(e)
	}
	c := &call{t: b.t, bed: b, env: e, replies: make(chan *envelope.Reply, roomy)}
	b.mu.Lock()
	b.calls[e.ExecutionID] = c
	b.mu.Unlock()
	return c
}

func (b *bed) send(e *envelope.Envelope) {
	b.t.Helper()
	if b.local != nil {
		e.Local = b
	}
	if b.bus.HandOver(e) {
		b.handedOver++
		return
	}
	m, err := b.bus.Item(e)
	if err != nil {
		b.t.Fatalf("item: %v", err)
	}
	done := make(chan error, 1)
	b.bus.Publish(m, func(_ bus.Receipt, err error) { done <- err })
	if err := testbed.Receive(b.t, "acknowledgement of the item", done); err != nil {
		b.t.Fatalf("send: %v", err)
	}
}

// deadline is an edit.
func deadline(d time.Duration) func(*envelope.Envelope) {
	return func(e *envelope.Envelope) { e.Deadline = e.AdmittedAt.Add(d) }
}

// next returns the next message of the answer.
func (c *call) next() *envelope.Reply {
	c.t.Helper()
	return testbed.Receive(c.t, "reply", c.replies)
}

// output returns the answer, which must be no fault.
func (c *call) output() *envelope.Reply {
	c.t.Helper()
	r := c.next()
	if r.Fault != nil {
		c.t.Fatalf("request %s: %v", c.text(), r.Fault)
	}
	if !r.Terminal() {
		c.t.Fatalf("request %s: a chunk came where the answer was due", c.text())
	}
	return r
}

// fault returns the fault of the answer, which must be of that reason.
func (c *call) fault(want fault.Reason) *fault.Fault {
	c.t.Helper()
	r := c.next()
	if r.Fault == nil || r.Fault.Reason != want {
		c.t.Fatalf("request %s: answered with %+v, want a fault %s", c.text(), r, want)
	}
	return r.Fault
}

// fails waits for the answer, which must be a fault of that reason.
func (c *call) fails(want fault.Reason) {
	c.t.Helper()
	_ = c.fault(want)
}

func (c *call) text() string { return first(c.env.Parts) }

// answeredOnce makes sure that no second answer has come.
func (c *call) answeredOnce() {
	c.t.Helper()
	c.bed.mu.Lock()
	defer c.bed.mu.Unlock()
	if c.extra > 0 {
		c.t.Errorf("request %s: %d answers too many", c.text(), c.extra)
	}
}

func first(parts []payload.Part) string {
	if len(parts) == 0 {
		return ""
	}
	return string(parts[0].Blob.Data)
}

// emptied waits until nothing waits or is in flight: every item is settled.
func (b *bed) emptied() {
	b.t.Helper()
	testbed.Eventually(b.t, "the queue is empty", func() bool {
		info, err := b.bus.Queue(b.t.Context(), stage, pipeline.Memory)
		return err == nil && info.Items == 0
	})
}

// echo answers with its input.
func echo(_ context.Context, item runner.Item) ([]payload.Part, error) { return item.Inputs, nil }

// batches is an in-process runner of a function of whole batches that settle
// themselves.
func batches(do func(ctx context.Context, b runner.Batch, sink runner.Sink) error) runner.Runner {
	return inproc.New(inproc.Settings{}, do)
}

// settleAll answers every item with its input.
func settleAll(b runner.Batch, sink runner.Sink) error {
	var errs []error
	for i, item := range b.Items {
		errs = append(errs, sink.SetOutcome(i, runner.Output(item.Inputs...)))
	}
	return errors.Join(errs...)
}

// gate is a runner that reports each batch and works when it is released.
type gate struct {
	runner.Runner
	entered chan []string
	release chan struct{}
}

// newGate returns a gate that passes a batch for every value of release, and
// all once that is closed. It gives up with its context.
func newGate() *gate {
	g := &gate{entered: make(chan []string, roomy), release: make(chan struct{})}
	g.Runner = batches(func(ctx context.Context, b runner.Batch, sink runner.Sink) error {
		var texts []string
		for _, item := range b.Items {
			texts = append(texts, first(item.Inputs))
		}
		g.entered <- texts
		select {
		case <-g.release:
			return settleAll(b, sink)
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	return g
}

// ran waits until the gate has a batch and returns its texts, sorted.
func (g *gate) ran(t *testing.T) []string {
	t.Helper()
	texts := testbed.Receive(t, "batch at the runner", g.entered)
	slices.Sort(texts)
	return texts
}

// awaitCount waits until a counter has exactly that sum.
func (h *host) awaitCount(key string, want int64) {
	h.t.Helper()
	testbed.Eventually(h.t, key, func() bool { return h.counts.Of(key) >= want })
	if got := h.counts.Of(key); got != want {
		h.t.Errorf("%s is %d, want %d", key, got, want)
	}
}

// awaitItems waits until the host got exactly so many items, either way.
func (h *host) awaitItems(want int64) {
	h.t.Helper()
	got := func() int64 { return h.counts.Of("stagemesh.stage.pulled") + h.counts.Of("stagemesh.stage.local") }
	testbed.Eventually(h.t, "items at the host", func() bool { return got() >= want })
	if n := got(); n != want {
		h.t.Errorf("the host got %d items, want %d", n, want)
	}
}

// logs is a log that keeps its lines' levels and messages.
type logs struct {
	mu    sync.Mutex
	lines []slog.Record
}

// into is an edit.
func (l *logs) into(s *stagehost.Settings) { s.Logger = slog.New(l) }

// Enabled implements slog.Handler.
func (l *logs) Enabled(context.Context, slog.Level) bool { return true }

// Handle implements slog.Handler.
func (l *logs) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, r.Clone())
	return nil
}

// WithAttrs implements slog.Handler.
func (l *logs) WithAttrs([]slog.Attr) slog.Handler { return l }

// WithGroup implements slog.Handler.
func (l *logs) WithGroup(string) slog.Handler { return l }

// of returns the messages of that level and above.
func (l *logs) of(level slog.Level) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for _, r := range l.lines {
		if r.Level >= level {
			out = append(out, r.Message)
		}
	}
	return out
}
