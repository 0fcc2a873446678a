package stagehost

import (
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/stagehost/ledger"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// recentWaits is of how many items the median wait is told.
const recentWaits = 64

// load is what the loop says of the items in hand, for whoever asks.
type load struct {
	mu      sync.Mutex
	inHand  int
	running int
	// waits are those of the last items in their queue, next is the oldest.
	waits []time.Duration
	next  int
}

// held books what is in hand.
func (l *load) held(of *ledger.Ledger) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inHand, l.running = of.Len(), of.Count(ledger.Running)
	if l.inHand == 0 {
		l.waits, l.next = l.waits[:0], 0
	}
}

// waited books how long an item was in its queue.
func (l *load) waited(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waits) < recentWaits {
		l.waits = append(l.waits, d)
		return
	}
	l.waits[l.next] = d
	l.next = (l.next + 1) % recentWaits
}

// get returns what is in hand, and the median of the waits.
func (l *load) get() (inHand, running int, wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waits) > 0 {
		sorted := slices.Sorted(slices.Values(l.waits))
		wait = sorted[len(sorted)/2]
	}
	return l.inHand, l.running, wait
}

// Record returns what the host publishes about itself. It is to be asked once the
// runner has started.
func (h *Host) Record() *meshv1.HostRecord {
	s := h.settings
	inHand, running, wait := h.load.get()
	r := &meshv1.HostRecord{
		Mesh: string(s.Mesh), Stage: string(s.Stage), Host: string(s.Host), Version: s.Version, Labels: s.Labels,
		MaxInFlight: uint32(s.MaxInFlight), Slots: uint32(s.Runner.Concurrency()),
		InFlight: uint32(inHand), Running: uint32(running), QueueWait: durationpb.New(wait),
		StartedAt: timestamppb.New(h.born),
	}
	r.Spec, r.Limits = h.Describe().Published()
	if addr := h.Addr(); addr != nil {
		r.Address = addr.String()
	}
	for _, d := range s.Queue.Durabilities {
		r.Durabilities = append(r.Durabilities, string(d))
	}
	err := h.serving()
	if r.Ready = err == nil; !r.GetReady() {
		r.Cause = err.Error()
	}
	at, _, _ := h.status.get()
	r.Draining = at == stateDraining
	if staffed, ok := s.Runner.(runner.Staffed); ok {
		for i, w := range staffed.Workers() {
			r.Workers = append(r.Workers, &meshv1.WorkerRecord{Index: uint32(i), State: w.State, Incarnation: w.Incarnation, Cause: w.Cause})
		}
	}
	return r
}
