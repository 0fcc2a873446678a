package batch_test

import (
	"cmp"
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/stagehost/batch"
)

// simulation runs a Batcher against workers and callers in virtual time.
type simulation struct {
	settings batch.Settings
	// workers run one batch each at a time; run says for how long.
	workers int
	run     func(rows int) time.Duration
	load    load
	// warmUp goes by before anything is counted, for length.
	warmUp, length time.Duration
}

// load is who asks for what.
type load struct {
	// callers have one request in flight each, and come back with the next one
	// so long after an answer.
	callers int
	back    func(*rand.Rand) time.Duration
	// rate is of requests a second that come at random.
	rate float64
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
	random  *rand.Rand
	agenda  agenda
	planned int
	now     time.Time
	idle    int
	asked   batch.ID
	// answered says what follows an item's answer.
	answered map[batch.ID]func()
	seen     seen
}

// observe runs the simulation. It is the same every time.
func (s simulation) observe() *seen {
	p := &play{
		simulation: s,
		batcher:    batch.New(s.settings),
		random:     rand.New(rand.NewPCG(1, 1)),
		now:        epoch,
		idle:       s.workers,
		answered:   map[batch.ID]func(){},
		seen:       seen{sizes: map[int]int{}, length: s.length},
	}
	p.begin()
	for end := epoch.Add(s.warmUp + s.length); p.agenda[0].at.Before(end); {
		next := heap.Pop(&p.agenda).(event)
		p.now = next.at
		next.do()
		p.settle()
	}
	slices.Sort(p.seen.latencies)
	return &p.seen
}

func (p *play) after(d time.Duration, do func()) {
	p.planned++
	heap.Push(&p.agenda, event{at: p.now.Add(d), order: p.planned, do: do})
}

func (p *play) begin() {
	for caller := range p.load.callers {
		p.after(p.load.back(p.random), func() { p.call(p.key(caller)) })
	}
	if p.load.rate > 0 {
		p.after(p.gap(), p.arrive)
	}
}

func (p *play) key(n int) batch.Key { return batch.Key(fmt.Sprint(n % max(1, p.load.keys))) }

// call is what one caller does for ever.
func (p *play) call(key batch.Key) {
	p.ask(key, func() { p.after(p.load.back(p.random), func() { p.call(key) }) })
}

// arrive is the request of somebody who does not come back.
func (p *play) arrive() {
	p.ask(p.key(int(p.asked)), func() {})
	p.after(p.gap(), p.arrive)
}

func (p *play) gap() time.Duration {
	return time.Duration(p.random.ExpFloat64() / p.load.rate * float64(time.Second))
}

func (p *play) ask(key batch.Key, answered func()) {
	p.asked++
	p.answered[p.asked] = answered
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
	if wake, ok := p.batcher.Wake(p.idle); ok {
		p.after(wake.Sub(p.now), func() {})
	}
}

func (p *play) start(b batch.Batch) {
	p.idle--
	if p.counts() {
		p.seen.batches++
		p.seen.sizes[len(b.Items)]++
	}
	took := p.run(b.Rows)
	p.after(took, func() { p.end(b, took) })
}

func (p *play) end(b batch.Batch, took time.Duration) {
	p.idle++
	p.batcher.Finished(p.now, batch.Run{Key: b.Key, Items: len(b.Items), Rows: b.Rows, Took: took})
	for _, it := range b.Items {
		if p.counts() {
			p.seen.latencies = append(p.seen.latencies, p.now.Sub(it.Arrival))
		}
		p.answered[it.ID]()
		delete(p.answered, it.ID)
	}
}

func (p *play) counts() bool { return p.now.Sub(epoch) >= p.warmUp }

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
