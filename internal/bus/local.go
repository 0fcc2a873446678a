package bus

import (
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Local are the pullers of one mesh in this process. Buses that share it hand items over in
// memory, where HandOver says so.
type Local struct {
	// process distinguishes this process from others with hosts of the same stages.
	process string

	mu     sync.RWMutex
	stages map[pipeline.StageName]*localStage
}

// localStage are the pullers of a stage. It counts the items that closed ones took.
type localStage struct {
	pullers []*Puller
	taken   uint64
}

// NewLocal returns a Local without pullers.
func NewLocal() *Local {
	return &Local{process: uuid.NewString(), stages: map[pipeline.StageName]*localStage{}}
}

// LocalPlaces bound the items that a host has in flight without a delivery, beside its
// bound; the zero value means none.
type LocalPlaces struct {
	// Items and Bytes are the most. While other hosts serve the stage, Shared bounds the items too:
	// an item that waits here cannot run there.
	Items, Bytes int64
	Shared       int64
}

// localCredit are a puller's items that were handed over. The puller's lock guards it.
type localCredit struct {
	// inFlight items are not settled, by class; bytes are theirs. taken counts all.
	inFlight [pipeline.ClassCount]int64
	bytes    int64
	taken    uint64
	// othersUntil is until when a host of another process is taken to be alive; announced is
	// when this one announced itself last.
	othersUntil, announced time.Time
}

func (c *localCredit) items() (n int64) {
	for _, of := range c.inFlight {
		n += of
	}
	return n
}

// localShare is the part of the largest message that an item may have to be handed over, so
// that it can be published all the same: one in so many.
const localShare = 2

// HandOver decides how an item travels; nothing else does. It hands the item to a host of its
// stage in this process, in memory, and is true; else the caller publishes the item. Only an
// item travels in memory that was never published (e.Local is set), that nobody else may wait
// for or run again (in memory, without a key), and that the broker would take too: a host
// that stops publishes it. Puller.mayTakeLocked has the rules of the host. Neither the sender nor
// the host changes the item or its payload after that.
//
// It may wait until the host's loop takes events, so no loop calls it.
func (b *Bus) HandOver(e *envelope.Envelope) bool {
	local := b.settings.Local
	if local == nil || e.Local == nil || e.Durability != pipeline.Memory || e.StoresResult() {
		return false
	}
	most := b.MaxPayload()
	if b.settings.Loopback == nil { // else no item is published
		most /= localShare
	}
	size, ok := textSize(e.Metadata)
	size += len(e.Trace.Parent) + len(e.Trace.State) + payload.WireSize(e.Parts) + payload.WireSize(e.Kept)
	if !ok || !utf8.ValidString(e.Trace.Parent) || !utf8.ValidString(e.Trace.State) || size > most {
		return false
	}
	p, alone := local.choose(e.Hop().Queue())
	return p != nil && p.take(e, int64(size), alone)
}

// HandOverReply hands a reply to the gateway of an item whose Local is set: always, so that
// chunks and the final reply stay in order. It fails as Reply does. Nobody changes the
// reply or its payload after that.
func (b *Bus) HandOverReply(e *envelope.Envelope, r *envelope.Reply) (Receipt, error) {
	size, ok := textSize(r.Metadata)
	if !ok || r.Fault != nil || size+payload.WireSize(r.Parts) > b.MaxPayload()/localShare {
		// A fault has the limits and texts that it has in a message.
		data, err := b.encode(r)
		if err != nil {
			return Receipt{}, err
		}
		if r, err = envelope.DecodeReply(data); err != nil {
			return Receipt{}, err
		}
	}
	return Receipt{Disposition: e.Local.Deliver(r)}, nil
}

// textSize returns the bytes of the texts, and whether all are UTF-8, as a message needs.
func textSize(texts map[string]string) (size int, ok bool) {
	for key, value := range texts {
		if !utf8.ValidString(key) || !utf8.ValidString(value) {
			return 0, false
		}
		size += len(key) + len(value)
	}
	return size, true
}

// choose returns the stage's puller with the fewest local items, nil where there is none, and
// whether it is the only one.
func (l *Local) choose(stage pipeline.StageName) (best *Puller, alone bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	s := l.stages[stage]
	switch {
	case s == nil || len(s.pullers) == 0:
		return nil, false
	case len(s.pullers) == 1:
		return s.pullers[0], true
	}
	var least int64
	for _, p := range s.pullers {
		p.mu.Lock()
		n, takes, waiting := p.local.items(), p.mayTakeLocked(0, false), p.credit.hasWaiting()
		p.mu.Unlock()
		if waiting {
			return nil, false
		}
		if takes && (best == nil || n < least) {
			best, least = p, n
		}
	}
	return best, false
}

func (l *Local) add(p *Puller) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stages[p.settings.Stage]
	if s == nil {
		s = &localStage{}
		l.stages[p.settings.Stage] = s
	}
	s.pullers = append(s.pullers, p)
}

func (l *Local) remove(p *Puller) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stages[p.settings.Stage]
	s.pullers = slices.DeleteFunc(s.pullers, func(other *Puller) bool { return other == p })
	p.mu.Lock()
	defer p.mu.Unlock()
	s.taken += p.local.taken
}

// addTo adds the local items of a stage to the content of its queue in memory: an item there
// waits as long behind them as behind others.
func (l *Local) addTo(stage pipeline.StageName, b *Backlog) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	s := l.stages[stage]
	if s == nil {
		return
	}
	b.Last += s.taken
	for _, p := range s.pullers {
		p.mu.Lock()
		b.Items += uint64(p.local.items())
		b.Bytes += uint64(p.local.bytes)
		b.Last += p.local.taken
		if b.Epoch == loopbackEpoch {
			b.MaxItems, b.MaxBytes = b.MaxItems+p.settings.Local.Items, b.MaxBytes+p.settings.Local.Bytes
		}
		for i, n := range p.local.inFlight {
			b.Classes[classAt(i)] += uint64(n)
		}
		p.mu.Unlock()
	}
}

// mayTakeLocked reports whether the host takes an item of that size in memory. It does not while it
// leaves the stage, nor while items of any class wait in the stage's queues, as far as it
// knows: those came first.
func (p *Puller) mayTakeLocked(size int64, alone bool) bool {
	memory := p.queue(pipeline.Memory)
	if p.draining || memory < 0 || p.epochs[memory] == "" || p.credit.hasWaiting() {
		return false
	}
	places, most := p.settings.Local, p.settings.Local.Items
	if !alone || time.Now().Before(p.local.othersUntil) {
		most = min(most, places.Shared)
	}
	return p.local.items() < most && p.local.bytes+size <= places.Bytes
}

// take hands an item to the handler, if the host takes it.
func (p *Puller) take(e *envelope.Envelope, size int64, alone bool) bool {
	p.mu.Lock()
	if !p.mayTakeLocked(size, alone) {
		p.mu.Unlock()
		return false
	}
	class, now := e.Class(), time.Now()
	p.local.inFlight[class.Index()]++
	p.local.bytes += size
	p.local.taken++
	p.handling++
	p.mu.Unlock()
	p.handle(Delivery{puller: p, Item: e, Stage: p.settings.Stage, Durability: e.Durability, Class: class, Deliveries: 1, QueuedAt: now, Arrived: now, size: size})
	p.mu.Lock()
	p.handling--
	p.checkDrained()
	p.mu.Unlock()
	return true
}

// announceEvery is how often a host announces itself to hosts of its stage in other processes.
// They take it to be alive until two announcements are missing.
const announceEvery = 2 * time.Second

// announceLocked announces the host to others of its stage.
func (p *Puller) announceLocked(now time.Time) {
	if now.Sub(p.local.announced) < announceEvery || p.draining || !slices.ContainsFunc(p.epochs, func(e Epoch) bool { return e != "" }) {
		return
	}
	p.local.announced = now
	process := p.inbox
	if l := p.bus.settings.Local; l != nil {
		process = l.process
	}
	// Without a connection others do not serve either.
	_ = p.bus.nc.Publish(p.bus.Announced(p.settings.Stage), []byte(process))
}

// watchOthers records the announcements of other processes.
func (p *Puller) watchOthers() (stop func() error, err error) {
	return p.bus.Watch(p.bus.Announced(p.settings.Stage), func(process []byte) {
		if string(process) == p.bus.settings.Local.process {
			return
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.local.othersUntil = time.Now().Add(3 * announceEvery)
	})
}
