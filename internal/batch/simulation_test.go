package batch_test

import (
	"cmp"
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
)

// simulation runs a Batcher against workers and callers in virtual time. Its random
// numbers do not depend on what the Batcher does: each seed gives the same numbers to all
// policies.
type simulation struct {
	settings batch.Settings
	// workers run one batch each at a time; run says for how long.
	workers int
	run     func(rows int, since time.Duration, r *rand.Rand) time.Duration
	load    load
	seed    uint64
	// warmUp goes by before anything is counted, for length.
	warmUp, length time.Duration
	// learning batches from the start are not counted, nor relearning batches from
	// stepAt, where that is not zero.
	learning, relearning int
	stepAt               time.Duration
}

// load is who asks for what.
type load struct {
	// callers have one request in flight each. The i-th of a batch gets its answer and
	// comes back with the next request so long after the batch has ended.
	callers int
	back    func(i int, r *rand.Rand) time.Duration
	// rate is of requests a second that come at random: one by one, or in bursts of
	// that many on average with that mean gap.
	rate  float64
	burst float64
	gap   time.Duration
	// keys are dealt out to callers and requests evenly; 0 is 1.
	keys int
}

// seen is what a simulation counted.
type seen struct {
	latencies []time.Duration
	batches   int
	sizes     map[int]int
	length    time.Duration
}

func (s *seen) percentile(p float64) time.Duration {
	return s.latencies[int(p*float64(len(s.latencies)-1))]
}

func (s *seen) mean() time.Duration {
	var sum time.Duration
	for _, l := range s.latencies {
		sum += l
	}
	return sum / time.Duration(len(s.latencies))
}

func (s *seen) throughput() float64 { return float64(len(s.latencies)) / s.length.Seconds() }

// share returns the share of batches that had that size.
func (s *seen) share(size int) float64 { return float64(s.sizes[size]) / float64(s.batches) }

func (s *seen) String() string {
	millis := func(d time.Duration) float64 { return float64(d) / float64(ms) }
	return fmt.Sprintf("%5.0f/s  mean %6.2f  p50 %6.2f  p99 %6.2f ms  sizes %s",
		s.throughput(), millis(s.mean()), millis(s.percentile(0.5)), millis(s.percentile(0.99)), s.sizeList())
}

// sizeList lists the most frequent sizes.
func (s *seen) sizeList() string {
	sizes := make([]int, 0, len(s.sizes))
	for size := range s.sizes {
		sizes = append(sizes, size)
	}
	slices.SortFunc(sizes, func(a, b int) int { return cmp.Or(s.sizes[b]-s.sizes[a], a-b) })
	var list []string
	for _, size := range sizes[:min(4, len(sizes))] {
		list = append(list, fmt.Sprintf("%d:%.0f%%", size, 100*s.share(size)))
	}
	return strings.Join(list, " ")
}

// play is a simulation while it runs.
type play struct {
	simulation
	batcher *batch.Batcher
	agenda  agenda
	planned int
	now     time.Time
	idle    int
	// wake is when the batcher wants to be asked again, zero for never.
	wake time.Time
	// arrivals and noise are random, and so is each caller.
	arrivals, noise *rand.Rand
	callers         []*rand.Rand
	asked           batch.ID
	// callerOf has who waits for an answer; others have none.
	callerOf map[batch.ID]int
	// uncounted batches are to come.
	uncounted  int
	stepped    bool
	countsFrom time.Time
	seen       seen
}

// observe runs the simulation. It is the same every time.
func (s simulation) observe() *seen {
	random := func(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(s.seed, stream)) }
	p := &play{
		simulation: s,
		batcher:    batch.New(s.settings),
		now:        epoch,
		idle:       s.workers,
		arrivals:   random(1), noise: random(2),
		callerOf:  map[batch.ID]int{},
		uncounted: s.learning,
		seen:      seen{sizes: map[int]int{}},
	}
	for caller := range s.load.callers {
		p.callers = append(p.callers, random(uint64(3+caller)))
		p.after(s.load.back(caller, p.callers[caller]), func() { p.call(caller) })
	}
	if s.load.rate > 0 {
		p.after(p.pause(), p.arrive)
	}
	for end := epoch.Add(s.warmUp + s.length); p.step(end); {
		p.settle()
	}
	if p.counts() {
		p.seen.length += p.now.Sub(p.countsFrom)
	}
	slices.Sort(p.seen.latencies)
	return &p.seen
}

// step goes to the next event; it is false at the end.
func (p *play) step(end time.Time) bool {
	next := p.wake
	if len(p.agenda) > 0 && (next.IsZero() || !p.agenda[0].at.After(next)) {
		next = p.agenda[0].at
	}
	if next.IsZero() || !next.Before(end) {
		return false
	}
	p.now = next
	for len(p.agenda) > 0 && !p.agenda[0].at.After(p.now) {
		heap.Pop(&p.agenda).(event).do()
	}
	return true
}

func (p *play) after(d time.Duration, do func()) {
	p.planned++
	heap.Push(&p.agenda, event{at: p.now.Add(d), order: p.planned, do: do})
}

func (p *play) key(n int) batch.Key {
	if p.load.keys < 2 {
		return "k"
	}
	return batch.Key(strconv.Itoa(n % p.load.keys))
}

// call is a request of somebody who comes back.
func (p *play) call(caller int) {
	p.ask(p.key(caller))
	p.callerOf[p.asked] = caller
}

// arrive is a request of somebody who does not come back.
func (p *play) arrive() {
	p.ask(p.key(int(p.asked)))
	p.after(p.pause(), p.arrive)
}

// pause is the time to the next request of those that come at random.
func (p *play) pause() time.Duration {
	random := func(mean time.Duration) time.Duration { return time.Duration(p.arrivals.ExpFloat64() * float64(mean)) }
	mean := time.Duration(float64(time.Second) / p.load.rate)
	if p.load.burst < 2 {
		return random(mean)
	}
	if p.arrivals.Float64() >= 1/p.load.burst {
		return random(p.load.gap)
	}
	return random(time.Duration(float64(mean)*p.load.burst - float64(p.load.gap)*(p.load.burst-1)))
}

func (p *play) ask(key batch.Key) {
	p.asked++
	it := batch.Item{ID: p.asked, Key: key, Rows: 1, Arrival: p.now, Deadline: p.now.Add(time.Minute)}
	if err := p.batcher.Add(p.now, it); err != nil {
		panic(err)
	}
}

// settle is what a host does after every event.
func (p *play) settle() {
	p.batcher.Expire(p.now)
	for {
		b, ok := p.batcher.Next(p.now, p.idle)
		if !ok {
			break
		}
		p.start(b)
	}
	p.wake, _ = p.batcher.Wake(p.idle)
}

func (p *play) start(b batch.Batch) {
	p.idle--
	p.learn()
	counts := p.counts()
	if counts {
		p.seen.batches++
		p.seen.sizes[len(b.Items)]++
	}
	took := p.run(b.Rows, p.now.Sub(epoch), p.noise)
	p.after(took, func() { p.end(b, took, counts) })
}

// learn counts a batch that starts, as far as batches are not to be counted in.
func (p *play) learn() {
	if p.stepAt > 0 && !p.stepped && p.now.Sub(epoch) >= p.stepAt {
		if p.counts() {
			p.seen.length += p.now.Sub(p.countsFrom)
		}
		p.stepped, p.uncounted = true, p.relearning
		p.countsFrom = time.Time{}
	}
	switch {
	case p.uncounted > 0:
		p.uncounted--
	case p.countsFrom.IsZero() && p.now.Sub(epoch) >= p.warmUp:
		p.countsFrom = p.now
	}
}

func (p *play) counts() bool { return !p.countsFrom.IsZero() }

func (p *play) end(b batch.Batch, took time.Duration, counts bool) {
	p.idle++
	p.batcher.Finished(p.now, batch.Run{Key: b.Key, Items: len(b.Items), Rows: b.Rows, Took: took})
	for i, it := range b.Items {
		if counts {
			p.seen.latencies = append(p.seen.latencies, p.now.Sub(it.Arrival))
		}
		if caller, ok := p.callerOf[it.ID]; ok {
			delete(p.callerOf, it.ID)
			p.after(p.load.back(i, p.callers[caller]), func() { p.call(caller) })
		}
	}
}

// event is something that will happen.
type event struct {
	at    time.Time
	order int
	do    func()
}

// agenda implements heap.Interface.
type agenda []event

func (a agenda) Len() int      { return len(a) }
func (a agenda) Swap(i, j int) { a[i], a[j] = a[j], a[i] }

func (a agenda) Less(i, j int) bool {
	return cmp.Or(a[i].at.Compare(a[j].at), a[i].order-a[j].order) < 0
}

func (a *agenda) Push(x any) { *a = append(*a, x.(event)) }

func (a *agenda) Pop() any {
	last := len(*a) - 1
	popped := (*a)[last]
	*a = (*a)[:last]
	return popped
}
