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

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// PullSettings say what a host pulls.
type PullSettings struct {
	Stage pipeline.StageName
	// Durabilities name the stage's queues to pull from.
	Durabilities []pipeline.Durability
	// Bound is the most items of all queues that the host holds and asks for
	// together, at least LeastBound of their number, or BoundFor one slot.
	Bound int
	// Sparing says that items are long: what waits here for another of its class
	// cannot run where a place falls free meanwhile, so no more than one item of each
	// class without work is asked for.
	Sparing bool
	// AckWait is the queues'; asks end within half of it.
	AckWait time.Duration
	// Malformed is told of messages that are no deliveries. It must not block.
	Malformed func(error)
	// QueueMissing is told when the broker says that a queue or its consumer is
	// gone. It must not block.
	QueueMissing func()
}

// Puller asks the broker for exactly as many items as the host has places for.
// It delivers what comes to the handler, one item at a time, and learns by
// Settled that a place is free again.
type Puller struct {
	bus      *Bus
	settings PullSettings
	handle   func(Delivery)
	inbox    string
	subs     []*nats.Subscription
	expiry   time.Duration

	mu     sync.Mutex
	credit credit
	// epochs are those of the queues, in the order of the settings; empty means
	// that nothing is asked of that queue.
	epochs []Epoch
	// handling counts the items that the handler has not taken yet.
	handling int
	draining bool
	drained  chan struct{}
	// reconnects is how often the connection was lost and found when last
	// looked at: asks do not outlive a connection.
	reconnects uint64

	quit chan struct{}
	done chan struct{}
}

const (
	maxExpiry   = 500 * time.Millisecond
	expiryGrace = 250 * time.Millisecond
	drainGrace  = 2 * time.Second
	pullTick    = 50 * time.Millisecond
	pullBacklog = 1 << 16
)

// AskLife is how long items may still come of a queue that Use has stopped asking.
const AskLife = maxExpiry + expiryGrace

// Pull subscribes and returns a puller that asks a queue for nothing until Use
// names its epoch. The handler may block: it then holds up the items behind this
// one, of which there are no more than the bound.
func (b *Bus) Pull(s PullSettings, handle func(Delivery)) (*Puller, error) {
	least := LeastBound(len(s.Durabilities))
	if s.Sparing {
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
		drained:  make(chan struct{}),

		reconnects: b.nc.Stats().Reconnects,

		quit: make(chan struct{}),
		done: make(chan struct{}),
	}
	p.credit.sparing = s.Sparing
	if err := p.subscribe(); err != nil {
		p.unsubscribe()
		return nil, err
	}
	go p.tick()
	return p, nil
}

func (p *Puller) subscribe() error {
	for i := range p.credit.lanes {
		sub, err := p.bus.nc.Subscribe(p.inbox+"."+strconv.Itoa(i)+".*", func(msg *nats.Msg) { p.receive(i, msg) })
		if err != nil {
			return err
		}
		p.subs = append(p.subs, sub)
		if err := sub.SetPendingLimits(pullBacklog, -1); err != nil {
			return err
		}
	}
	return p.bus.flush()
}

func (p *Puller) unsubscribe() {
	for _, sub := range p.subs {
		// The only error is that the connection is closed already.
		_ = sub.Unsubscribe()
	}
}

// Use pulls from the stage's queue of that durability and epoch from now on; the
// empty epoch stops asking it. The durability is one of the settings'.
func (p *Puller) Use(d pipeline.Durability, epoch Epoch) {
	p.mu.Lock()
	defer p.mu.Unlock()
	queue := p.queue(d)
	if p.epochs[queue] == epoch {
		return
	}
	p.setEpoch(queue, epoch)
	p.ask()
}

// setEpoch ends all asks of a queue. The caller holds the lock.
func (p *Puller) setEpoch(queue int, epoch Epoch) {
	p.epochs[queue] = epoch
	p.credit.use(queue, epoch != "")
}

func (p *Puller) queue(d pipeline.Durability) int { return slices.Index(p.settings.Durabilities, d) }

// Settled says that a delivered item is held no more.
func (p *Puller) Settled(d Delivery) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.credit.settled(p.credit.lane(indexOf(d.Class), p.queue(d.Durability)))
	p.ask()
}

// Drain stops asking and returns when everything asked for has come, and the
// handler has it, or lapsed, so that no item is stranded on its way. Items
// already delivered stay with their holder.
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
	close(p.quit)
	<-p.done
	p.unsubscribe()
}

func (p *Puller) tick() {
	defer close(p.done)
	ticker := time.NewTicker(pullTick)
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
	p.credit.lapse(now.Add(-p.grace()))
	if n := p.bus.nc.Stats().Reconnects; n != p.reconnects {
		p.reconnects = n
		p.credit.forget()
	}
	p.ask()
	p.checkDrained()
}

// grace is how much later than expected the broker may say that an ask is over,
// before it is taken to be. A drain is patient: what comes after it is stranded
// for an ack wait, and on a busy machine messages are late.
func (p *Puller) grace() time.Duration {
	if p.draining {
		return drainGrace
	}
	return 0
}

func (p *Puller) checkDrained() {
	if !p.draining || p.credit.asked() > 0 || p.handling > 0 {
		return
	}
	select {
	case <-p.drained:
	default:
		close(p.drained)
	}
}

// ask sends what the credit's plan says. The caller holds the lock.
func (p *Puller) ask() {
	if p.draining {
		return
	}
	for _, ask := range p.credit.plan(time.Now().Add(p.expiry + expiryGrace)) {
		if err := p.send(ask); err != nil {
			p.credit.over(ask.lane, ask.number, ask.items)
		}
	}
}

func (p *Puller) send(ask ask) error {
	if !p.bus.Connected() {
		return ErrDisconnected
	}
	body, err := json.Marshal(struct {
		Batch   int           `json:"batch"`
		Expires time.Duration `json:"expires"`
	}{ask.items, p.expiry})
	if err != nil {
		return err
	}
	class, queue := classAt(p.credit.classOf(ask.lane)), p.credit.queueOf(ask.lane)
	subject := "$JS.API.CONSUMER.MSG.NEXT." + p.bus.Stream(p.settings.Stage, p.settings.Durabilities[queue]) + "." + consumerName(class, p.epochs[queue])
	reply := p.inbox + "." + strconv.Itoa(ask.lane) + "." + strconv.FormatUint(ask.number, askBase)
	return p.bus.nc.PublishRequest(subject, reply, body)
}

func (p *Puller) receive(i int, msg *nats.Msg) {
	// A delivery has a subject to be settled by. What it holds is anybody's,
	// also what looks like a status.
	if msg.Reply == "" && msg.Header.Get("Status") != "" {
		p.status(i, msg)
		return
	}
	delivery, err := newDelivery(p.bus.nc, msg)
	delivery.Class, delivery.Durability = classAt(p.credit.classOf(i)), p.settings.Durabilities[p.credit.queueOf(i)]
	if err != nil {
		p.settings.Malformed(err)
		p.mu.Lock()
		p.credit.came(i)
		p.mu.Unlock()
		return
	}
	p.mu.Lock()
	p.handling++
	p.credit.delivered(i, delivery.Pending)
	p.ask()
	p.mu.Unlock()
	p.handle(delivery)
	p.mu.Lock()
	p.handling--
	p.checkDrained()
	p.mu.Unlock()
}

const (
	statusNoResponders = "503"
	statusConflict     = "409"
	pendingHeader      = "Nats-Pending-Messages"

	askBase = 36
)

// status books the end of an ask.
func (p *Puller) status(i int, msg *nats.Msg) {
	p.mu.Lock()
	missing, again := p.ended(i, msg)
	if missing {
		p.setEpoch(p.credit.queueOf(i), "")
	}
	if again {
		p.ask()
	}
	p.checkDrained()
	p.mu.Unlock()
	if missing {
		p.settings.QueueMissing()
	}
}

// ended reports whether the queue or its consumer is gone, and whether to ask
// again at once. A status that does not say how many items will not come ends
// every ask of its lane, and what refused them may do so again. Of an ask that is
// over already none counts: it may be of a queue that was used before. The caller
// holds the lock.
func (p *Puller) ended(i int, msg *nats.Msg) (missing, again bool) {
	number, err := strconv.ParseUint(msg.Subject[strings.LastIndexByte(msg.Subject, '.')+1:], askBase, 64)
	if err != nil {
		return false, false
	}
	left, err := strconv.Atoi(msg.Header.Get(pendingHeader))
	if err == nil {
		return false, p.credit.over(i, number, left)
	}
	if !p.credit.over(i, number, 0) {
		return false, false
	}
	p.credit.close(i)
	code := msg.Header.Get("Status")
	return code == statusNoResponders || code == statusConflict, false
}
