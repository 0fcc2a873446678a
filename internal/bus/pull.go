package bus

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// PullSettings name the queues that a host pulls from, and bound its items.
type PullSettings struct {
	Stage pipeline.StageName
	// Durabilities name the stage's queues to pull from.
	Durabilities []pipeline.Durability
	// Bound is the most items of all queues in flight and requested together, at
	// least LeastBound of their number, or BoundFor one slot. Items beyond it go back to
	// their queue.
	Bound int
	// OneIdlePull is for long items. An item that waits here cannot run on another host
	// with a free slot, so at most one item of each class without work is requested.
	OneIdlePull bool
	// Local bounds the items that are handed over in memory, beside the bound.
	Local LocalPlaces
	// AckWait is the ack wait of the queues; pull requests expire within half of it.
	AckWait time.Duration
	// Malformed is called for messages that are no deliveries. It must not block.
	Malformed func(error)
	// QueueMissing is called when a queue or its consumer does not exist. It must not
	// block.
	QueueMissing func()
}

// Puller requests exactly as many items as the host has capacity for. It passes
// deliveries to the handler, several at a time; Delivery.Release frees the capacity of one.
type Puller struct {
	bus      *Bus
	settings PullSettings
	handle   func(Delivery)
	inbox    string
	stops    []func() error
	expiry   time.Duration

	mu     sync.Mutex
	credit credit
	// epochs tell the queues from their replacements, in the order of the settings; empty means that
	// the queue is not pulled.
	epochs  []Epoch
	returns returns
	local   localCredit
	// forwarded counts the items in flight that other hosts have pulled.
	forwarded int
	// handling counts the items that the handler has not taken yet.
	handling int
	draining bool
	drained  chan struct{}
	// reconnects is the connection's count when last checked: pull requests do not
	// outlive a connection.
	reconnects uint64
	// echoed is when the last message was sent to this process itself by the broker.
	echoed  time.Time
	silence silence

	quit chan struct{}
	done chan struct{}
}

const (
	maxExpiry   = 500 * time.Millisecond
	expiryGrace = 250 * time.Millisecond
	drainGrace  = 2 * time.Second
	maxPullTick = 250 * time.Millisecond
)

// tickEvery is how often the puller looks. Every second time it asks for an echo, twice
// within the limit of a silence.
func (p *Puller) tickEvery() time.Duration { return min(p.settings.AckWait/10, maxPullTick) }

// PullLife is how long items of a queue may still arrive after Use has stopped its
// pull.
const PullLife = maxExpiry + expiryGrace

// Pull subscribes and returns a puller that pulls from no queue until Use names
// its epoch. The handler may block: it then delays the items behind this one, of
// which there are no more than the bound.
func (b *Bus) Pull(s PullSettings, handle func(Delivery)) (*Puller, error) {
	least := LeastBound(len(s.Durabilities))
	if s.OneIdlePull {
		least = BoundFor(1, len(s.Durabilities))
	}
	if s.Bound < least || len(s.Durabilities) == 0 {
		return nil, fmt.Errorf("bound on items in flight is %d, at least %d is needed for %d queues", s.Bound, least, len(s.Durabilities))
	}
	p := &Puller{
		bus:      b,
		settings: s,
		handle:   handle,
		inbox:    nats.NewInbox(),
		expiry:   min(maxExpiry, s.AckWait/2),
		credit:   newCredit(s.Bound, len(s.Durabilities)),
		epochs:   make([]Epoch, len(s.Durabilities)),
		returns:  returns{advisories: make(chan *nats.Msg, maxAdvisories)},
		drained:  make(chan struct{}),

		reconnects: b.Connection(),
		silence:    silence{limit: s.AckWait / 2, ticked: time.Now()},

		quit: make(chan struct{}),
		done: make(chan struct{}),
	}
	p.credit.oneIdlePull = s.OneIdlePull
	if err := p.subscribe(); err != nil {
		p.unsubscribe()
		return nil, err
	}
	if b.settings.Local != nil {
		b.settings.Local.add(p)
	}
	go p.tick()
	return p, nil
}

func (p *Puller) subscribe() error {
	stop, err := p.bus.Watch(p.inbox, func([]byte) {
		p.mu.Lock()
		p.silence.hear(time.Now())
		p.mu.Unlock()
	})
	if err != nil {
		return err
	}
	p.stops = append(p.stops, stop)
	for _, d := range p.settings.Durabilities {
		on, isBroker := p.bus.nc.(connection)
		if !isBroker {
			break // nothing is delivered, and given back
		}
		sub, err := on.ChanSubscribe(nakAdvisories+p.bus.Stream(p.settings.Stage, d)+".*", p.returns.advisories)
		if err != nil {
			return sendError(err)
		}
		p.stops = append(p.stops, sub.Unsubscribe)
	}
	if p.bus.settings.Local != nil {
		if stop, err = p.watchOthers(); err != nil {
			return err
		}
		p.stops = append(p.stops, stop)
	}
	for i := range p.credit.classQueues {
		stop, err := p.bus.subscribe(p.inbox+"."+strconv.Itoa(i)+".*", "", -1, func(msg *nats.Msg) { p.receive(i, msg) })
		if err != nil {
			return err
		}
		p.stops = append(p.stops, stop)
	}
	return nil
}

func (p *Puller) unsubscribe() {
	for _, stop := range p.stops {
		// The only error is that the connection is closed already.
		_ = stop()
	}
}

// Use pulls from the stage's queue of that durability and epoch from now on; the
// empty epoch stops the pull. The durability is one of the settings'.
func (p *Puller) Use(d pipeline.Durability, epoch Epoch) {
	p.mu.Lock()
	defer p.mu.Unlock()
	// A host names its epochs right after a reconnect.
	now := time.Now()
	p.checkReconnectLocked(now)
	if queue := p.queue(d); p.epochs[queue] != epoch {
		p.setEpochLocked(queue, epoch)
	}
	p.announceLocked(now)
	p.pullLocked()
}

// setEpochLocked ends all pull requests of a queue.
func (p *Puller) setEpochLocked(queue int, epoch Epoch) {
	p.epochs[queue] = epoch
	p.credit.use(queue, epoch != "")
}

func (p *Puller) queue(d pipeline.Durability) int { return slices.Index(p.settings.Durabilities, d) }

// Release frees the capacity of the item at its host. Call it once, whether the item is settled
// or not.
func (d Delivery) Release() {
	p := d.puller
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case d.Item != nil:
		p.local.inFlight[d.Class.Index()]--
		p.local.bytes -= d.size
		return
	case d.Forwarded:
		p.forwarded--
		return
	}
	p.credit.release(p.credit.index(d.Class.Index(), p.queue(d.Durability)))
	p.pullLocked()
}

// Drain stops pulling and returns when every requested item has arrived and the
// handler has it, or its request has expired, so that no item is stranded on its
// way. Delivered items stay with their holder.
func (p *Puller) Drain(ctx context.Context) error {
	p.mu.Lock()
	p.draining = true
	p.checkDrained()
	p.mu.Unlock()
	select {
	case <-p.drained:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close ends the subscription and waits for the puller's goroutine.
func (p *Puller) Close() {
	if l := p.bus.settings.Local; l != nil {
		l.remove(p)
	}
	close(p.quit)
	<-p.done
	p.unsubscribe()
}

func (p *Puller) tick() {
	defer close(p.done)
	ticker := time.NewTicker(p.tickEvery())
	defer ticker.Stop()
	for {
		select {
		case now := <-ticker.C:
			p.refresh(now)
		case <-p.quit:
			return
		}
	}
}

func (p *Puller) refresh(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.credit.expire(now.Add(-p.grace()))
	p.checkReconnectLocked(now)
	p.returns.receive()
	p.silence.tick(now)
	if now.Sub(p.echoed) > p.tickEvery()*3/2 {
		p.echoed = now
		// Without a connection there is silence.
		_ = p.bus.nc.Publish(p.inbox, nil)
	}
	p.announceLocked(now)
	p.pullLocked()
	p.checkDrained()
}

// checkReconnectLocked ends the pull requests of a connection that was lost.
func (p *Puller) checkReconnectLocked(now time.Time) {
	if n := p.bus.Connection(); n != p.reconnects {
		p.reconnects = n
		p.credit.closeAll()
		p.silence.ended = now
	}
}

// silence records when the broker was last away for so long that it may have missed
// extensions: by a lost connection, or without an echo. Only the time counts in which this
// process runs: on a busy machine it may hear late. It is pure.
type silence struct {
	limit         time.Duration
	lasted        time.Duration
	ticked, ended time.Time
}

func (s *silence) tick(now time.Time) {
	s.lasted += min(now.Sub(s.ticked), s.limit/5)
	s.ticked = now
}

func (s *silence) hear(now time.Time) {
	if s.lasted > s.limit {
		s.ended = now
	}
	s.lasted = 0
}

// mayRedeliver reports whether the silence may be why an item that was queued then is
// delivered again.
func (s *silence) mayRedeliver(queued time.Time) bool {
	return queued.Before(s.ended) || s.lasted > s.limit
}

// grace is how long after its expiry a pull request still counts as open. A drain
// waits longer: an item that arrives after it is stranded for an ack wait, and
// messages are late on a busy machine.
func (p *Puller) grace() time.Duration {
	if p.draining {
		return drainGrace
	}
	return 0
}

func (p *Puller) checkDrained() {
	if !p.draining || p.credit.requested() > 0 || p.handling > 0 {
		return
	}
	select {
	case <-p.drained:
	default:
		close(p.drained)
	}
}

// pullLocked sends the requests of the credit's plan.
func (p *Puller) pullLocked() {
	if p.draining || p.bus.settings.Loopback != nil {
		return
	}
	for _, r := range p.credit.plan(time.Now().Add(p.expiry + expiryGrace)) {
		if err := p.send(r); err != nil {
			p.credit.endSome(r.cq, r.number, r.items)
		}
	}
}

func (p *Puller) send(r pullRequest) error {
	if !p.bus.Connected() {
		return ErrDisconnected
	}
	body, err := json.Marshal(struct {
		Batch   int           `json:"batch"`
		Expires time.Duration `json:"expires"`
	}{r.items, p.expiry})
	if err != nil {
		return err
	}
	class, queue := classAt(p.credit.classOf(r.cq)), p.credit.queueOf(r.cq)
	subject := "$JS.API.CONSUMER.MSG.NEXT." + p.bus.Stream(p.settings.Stage, p.settings.Durabilities[queue]) + "." + consumerName(class, p.epochs[queue])
	reply := p.inbox + "." + strconv.Itoa(r.cq) + "." + strconv.FormatUint(r.number, requestBase)
	return p.bus.nc.PublishMsg(&nats.Msg{Subject: subject, Reply: reply, Data: body})
}

func (p *Puller) receive(i int, msg *nats.Msg) {
	// A delivery has a reply subject. Its headers are the publisher's, also a header
	// that looks like a status.
	if msg.Reply == "" && msg.Header.Get("Status") != "" {
		p.status(i, msg)
		return
	}
	delivery, err := p.newDelivery(msg)
	delivery.Class, delivery.Durability = classAt(p.credit.classOf(i)), p.settings.Durabilities[p.credit.queueOf(i)]
	if err != nil {
		p.settings.Malformed(err)
		p.mu.Lock()
		p.credit.arrive(i)
		p.mu.Unlock()
		return
	}
	p.mu.Lock()
	p.explainRedeliveryLocked(&delivery)
	if !p.credit.deliver(i, delivery.Pending) {
		p.mu.Unlock()
		// By then the broker has ended the request that brought it. A nak that is not sent
		// leaves the item to its ack wait.
		_ = delivery.Nak(p.expiry)
		return
	}
	p.handling++
	p.pullLocked()
	p.mu.Unlock()
	p.pass(delivery)
}

// explainRedeliveryLocked records why an item may be delivered again.
func (p *Puller) explainRedeliveryLocked(d *Delivery) {
	if d.Deliveries > 1 {
		d.Returned = p.returns.of(*d)
		p.checkReconnectLocked(d.Arrived)
		d.AfterSilence = p.silence.mayRedeliver(d.QueuedAt)
	}
}

// forwardedStream is the stream by which a host acknowledges a delivery that is passed on to it.
const forwardedStream = "forwarded"

// deliveryHeader has the reply subject of a delivery that another host passes on.
const deliveryHeader = "Stagemesh-Delivery"

// ServeForwarded takes deliveries of durable items that other hosts of the stage pass on to this
// one, as many in flight as the bound, until the returned function is called.
func (p *Puller) ServeForwarded(host pipeline.HostID) (stop func() error, err error) {
	subject := p.bus.Stage(pipeline.HostQueue(p.settings.Stage, host), pipeline.File, "*")
	return p.bus.subscribe(subject, "", -1, p.receiveForwarded)
}

// receiveForwarded answers as a stream does that has taken the item, or is full.
func (p *Puller) receiveForwarded(msg *nats.Msg) {
	delivery, err := p.newDelivery(&nats.Msg{Sub: msg.Sub, Reply: msg.Header.Get(deliveryHeader), Data: msg.Data})
	if own := p.bus.Stream(p.settings.Stage, pipeline.File); err == nil && delivery.stream != own {
		err = fmt.Errorf("delivery of stream %s on the subject of %s", delivery.stream, own)
	}
	if err != nil {
		p.settings.Malformed(err)
		return
	}
	delivery.Durability, delivery.Forwarded = pipeline.File, true
	answer := `{"stream":"` + forwardedStream + `","seq":1}`
	p.mu.Lock()
	p.explainRedeliveryLocked(&delivery)
	isTaken := !p.draining && p.forwarded < p.settings.Bound
	if isTaken {
		p.forwarded++
		p.handling++
	} else {
		answer = fmt.Sprintf(`{"error": {"err_code": %d, "description": "the host has %d forwarded items"}}`, codeStoreFailed, p.forwarded)
	}
	p.mu.Unlock()
	// Without an answer the sender gives the item back, which does no harm.
	_ = p.bus.nc.Publish(msg.Reply, []byte(answer))
	if isTaken {
		_ = delivery.InProgress()
		p.pass(delivery)
	}
}

// pass gives a delivery that counts as handling to the handler.
func (p *Puller) pass(d Delivery) {
	p.handle(d)
	p.mu.Lock()
	p.handling--
	p.checkDrained()
	p.mu.Unlock()
}

const (
	statusNoResponders = "503"
	statusConflict     = "409"
	pendingHeader      = "Nats-Pending-Messages"

	requestBase = 36
)

// status records the end of a pull request.
func (p *Puller) status(i int, msg *nats.Msg) {
	p.mu.Lock()
	missing, again := p.endRequestLocked(i, msg)
	if missing {
		p.setEpochLocked(p.credit.queueOf(i), "")
	}
	if again {
		p.pullLocked()
	}
	p.checkDrained()
	p.mu.Unlock()
	if missing {
		p.settings.QueueMissing()
	}
}

// endRequestLocked reports whether the queue or its consumer is missing, and whether to
// pull again at once. A status without the number of items that will not come ends
// every request of its class queue; its cause may end the next one too. A request
// that is over already does not count: it may be of a queue that was used before.
func (p *Puller) endRequestLocked(i int, msg *nats.Msg) (missing, again bool) {
	number, err := strconv.ParseUint(msg.Subject[strings.LastIndexByte(msg.Subject, '.')+1:], requestBase, 64)
	if err != nil {
		return false, false
	}
	left, err := strconv.Atoi(msg.Header.Get(pendingHeader))
	if err == nil {
		return false, p.credit.endSome(i, number, left)
	}
	if !p.credit.endSome(i, number, 0) {
		return false, false
	}
	p.credit.close(i)
	code := msg.Header.Get("Status")
	return code == statusNoResponders || code == statusConflict, false
}

// Delivery is one delivery of an item. Its holder settles it exactly once, by Ack,
// Nak or Term, or drops it when its Epoch is not the queue's any more. A local one is in no
// queue: it has no Epoch, and is only released.
type Delivery struct {
	// Item is the item of a local delivery, which nobody changes; nil for others, which have
	// Data.
	Item *envelope.Envelope
	// Data is the item: an encoded envelope, or anything that was published to
	// the queue.
	Data []byte
	// Stage, Durability and Class name the queue, Epoch its creation.
	Stage      pipeline.StageName
	Durability pipeline.Durability
	Class      pipeline.Class
	Epoch      Epoch
	// Seq is the item's sequence number in its queue.
	Seq uint64
	// Deliveries counts this and earlier deliveries to any host. Returned counts those
	// of them that ended with a nak, as far as this process was connected to know.
	Deliveries, Returned int
	// AfterSilence is true where the broker was away for half an ack wait since the item
	// was queued. Then a redelivery may be its doing, and not of a host that died.
	AfterSilence bool
	// Forwarded is true where another host pulled the item; it counts for a bound of its own.
	Forwarded bool
	// Pending items wait behind this one in its class.
	Pending uint64
	// QueuedAt is when the broker received the item, on the broker's clock.
	QueuedAt time.Time
	// Arrived is when this process received it; QueueWait how long it waited before, on the
	// broker's clock.
	Arrived   time.Time
	QueueWait time.Duration

	puller *Puller
	stream string
	reply  string
	size   int64
}

// Unreturned counts the deliveries that no host gave back, this one included: above 1,
// a host had the item and may have crashed.
func (d Delivery) Unreturned() int { return d.Deliveries - d.Returned }

// Same reports whether both are deliveries of one item.
func (d Delivery) Same(other Delivery) bool {
	return d.Seq == other.Seq && d.stream == other.stream && d.Epoch == other.Epoch
}

// Key is the same for all deliveries of the item, and for no other item.
func (d Delivery) Key() string {
	return d.stream + "/" + string(d.Epoch) + "/" + strconv.FormatUint(d.Seq, 10)
}

func (p *Puller) newDelivery(msg *nats.Msg) (Delivery, error) {
	meta, err := msg.Metadata()
	if err != nil {
		return Delivery{}, fmt.Errorf("delivery without metadata: %w", err)
	}
	class, epoch, _ := strings.Cut(meta.Consumer, "-")
	now := time.Now()
	return Delivery{
		Data:       msg.Data,
		Class:      pipeline.Class(class),
		Epoch:      Epoch(epoch),
		Seq:        meta.Sequence.Stream,
		Deliveries: int(meta.NumDelivered),
		Pending:    meta.NumPending,
		QueuedAt:   meta.Timestamp,
		Arrived:    now,
		QueueWait:  max(0, now.Add(p.bus.ClockAhead()).Sub(meta.Timestamp)),
		stream:     meta.Stream,
		Stage:      p.settings.Stage,
		puller:     p,
		reply:      msg.Reply,
	}, nil
}

// Ack settles the item; the queue deletes it. An error means that the ack was not
// sent, so the item will be redelivered.
func (d Delivery) Ack() error { return d.publish("+ACK") }

// Nak returns the item to its queue, to be redelivered after the delay. The next
// holder knows that it was given back.
func (d Delivery) Nak(delay time.Duration) error {
	return d.publish(fmt.Sprintf(`-NAK {"delay": %d}`, delay.Nanoseconds()))
}

// Term settles the item as failed: it is not redelivered.
func (d Delivery) Term(reason string) error { return d.publish("+TERM " + reason) }

// InProgress extends the delivery: its ack wait starts again.
func (d Delivery) InProgress() error { return d.publish("+WPI") }

func (d Delivery) publish(verb string) error {
	if err := d.puller.bus.nc.Publish(d.reply, []byte(verb)); err != nil {
		return sendError(err)
	}
	return nil
}

// returns counts the naks of each item by the broker's advisories. On one connection
// the advisory of a nak comes before the redelivery, so the channel, which all
// advisories share and the connection fills in order, has it by then.
type returns struct {
	advisories chan *nats.Msg
	// recent is bounded; when it is full it becomes older.
	recent, older map[returnKey]int
}

// returnKey names an item in its queue: a consumer's name has the class and the epoch.
type returnKey struct {
	stream, consumer string
	seq              uint64
}

const (
	nakAdvisories = "$JS.EVENT.ADVISORY.CONSUMER.MSG_NAKED."
	// maxAdvisories bounds those that wait for a tick, maxReturns the items that are
	// remembered twice. An item whose nak is forgotten only runs alone.
	maxAdvisories = 1 << 13
	maxReturns    = 1 << 15
)

// receive counts the advisories that have arrived.
func (r *returns) receive() {
	for {
		select {
		case msg := <-r.advisories:
			var nak struct {
				Stream, Consumer string
				Seq              uint64 `json:"stream_seq"`
			}
			if json.Unmarshal(msg.Data, &nak) != nil {
				continue
			}
			if r.recent == nil || len(r.recent) == maxReturns {
				r.recent, r.older = map[returnKey]int{}, r.recent
			}
			r.recent[returnKey{nak.Stream, nak.Consumer, nak.Seq}]++
		default:
			return
		}
	}
}

// of returns how often the delivery's item was given back.
func (r *returns) of(d Delivery) int {
	r.receive()
	key := returnKey{d.stream, consumerName(d.Class, d.Epoch), d.Seq}
	return min(r.recent[key]+r.older[key], d.Deliveries-1)
}
