package dispatch

import (
	"cmp"
	"container/heap"
	"math"
	"strings"
	"time"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Merge policies say which queue of a pool goes next.
const (
	weighted = "weighted" // each queue has its share by weight
	strict   = "strict"   // the highest weight goes first, with a small share for each of the others
	// There is no level of queues: of a class and tenant, the earliest deadline of all queues goes first.
	byDeadline = "deadline"
)

const (
	// A queue with under 1/starvedShare of the cost of the last recentJobs jobs goes first.
	recentJobs   = 256
	starvedShare = 16
	idleKept     = 1024 // idle queues, or tenants of a class, that keep what they owe
)

// entry is one job of a pool. It is small, because there are a million of them.
type entry struct {
	id                      [16]byte
	seq                     uint64 // of its message in the stream of its queue: the order of acceptance
	line                    *line
	deadline, notBefore     int64 // Unix times in nanoseconds; deadline is never 0
	cost                    int64 // in the pool's unit; less than 1 counts as 1
	size, tokens            uint32
	record                  uint64 // the number of the job's record, which has what follows; 0 for none
	attempts, interruptions uint16
	isAside                 bool // it failed while the breaker was open; see owner.aside
	wasLate                 bool // it has let others go first, for want of time
	usage                   *inferencev1.JobUsage
	closed                  time.Duration // how long the pool's gate had been closed as the job began to wait

	place    int // in the heap that has the entry
	standing standing
	end      uint8  // the JobState, if that is stored, but not the notice for the webhook; else 0
	dropAt   uint32 // when the notice is dropped then, in seconds of Unix time
}

// standing is where the order has an entry.
type standing uint8

const (
	absent standing = iota
	waiting
	delayed
)

// before is the order within a line: earliest deadline, then acceptance.
func (e *entry) before(other *entry) bool {
	if e.deadline != other.deadline {
		return e.deadline < other.deadline
	}
	return e.seq < other.seq
}

func (e *entry) event() int64 { return min(e.notBefore, e.deadline) }

func (e *entry) left(now time.Time) time.Duration { return time.Duration(e.deadline - now.UnixNano()) }

// line has the waiting jobs of one queue, class and tenant, and of one key of each limit.
type line struct {
	queue  string
	class  pipeline.Class
	tenant string
	keys   []string

	node          node
	jobs          heapOf[*entry]
	deadlinePlace int
	of            *queueState
}

// queueState is what is counted of a queue, and since when no job of it may go.
type queueState struct {
	least                      time.Duration // the shortest time of the last successes; 0 until there are many
	waiting, delayed           int
	accepted, recovered, ended uint64
	pausedSince, oldest        time.Time
}

func (l *line) head() *entry { return l.jobs.items[0] }

// order is the order of a pool's queued jobs. Queues, classes and tenants are levels of a tree; its leaves are
// lines, and the one with the first job goes. To find a job takes longer by each line that is passed over,
// to take it by the logarithm of what waits. It is pure.
type order struct {
	policy       string
	root         node
	weights      map[nodeKey]float64
	queues       map[string]*queueState
	delayed      heapOf[*entry]
	deadlines    heapOf[*line] // the lines that are not empty
	taken, spent float64       // jobs, and their cost, where the policy is strict
}

type level uint8

const (
	ofPool level = iota
	ofQueue
	ofClass
	ofTenant
	ofLine
)

type nodeKey struct {
	of   level
	name string
}

func newOrder(policy string) *order {
	o := &order{policy: policy, queues: map[string]*queueState{}, weights: map[nodeKey]float64{
		{ofClass, string(pipeline.High)}: 16, {ofClass, string(pipeline.Normal)}: 4,
	}}
	o.delayed.less, o.delayed.place = func(a, b *entry) bool { return a.event() < b.event() }, func(e *entry) *int { return &e.place }
	o.deadlines.less, o.deadlines.place = func(a, b *line) bool { return a.head().deadline < b.head().deadline }, func(l *line) *int { return &l.deadlinePlace }
	o.initNode(&o.root, nil, nodeKey{})
	return o
}

// setWeight sets the weight of a queue or tenant, which is positive; 1 is the default.
func (o *order) setWeight(of level, name string, weight float64) {
	if key := (nodeKey{of, name}); o.weights[key] != weight {
		o.weights[key] = weight
		o.root.reweigh(o)
	}
}

// queue returns what is counted of a queue.
func (o *order) queue(name string) *queueState {
	if o.queues[name] == nil {
		o.queues[name] = new(queueState)
	}
	return o.queues[name]
}

// line returns a line. One that stays empty may be replaced by another with the same names.
func (o *order) line(queue string, class pipeline.Class, tenant string, keys ...string) *line {
	path := []nodeKey{{ofQueue, queue}, {ofClass, string(class)}, {ofTenant, tenant}, {ofLine, queue + "\x00" + strings.Join(keys, "\x00")}}
	if o.policy == byDeadline {
		path = path[1:]
	}
	at := &o.root
	for _, key := range path {
		child := at.children[key.name]
		if child == nil {
			child = new(node)
			if key.of == ofLine {
				l := &line{queue: queue, class: class, tenant: tenant, keys: keys, of: o.queue(queue)}
				l.jobs.less, l.jobs.place = (*entry).before, func(e *entry) *int { return &e.place }
				child = &l.node
				child.line = l
			}
			o.initNode(child, at, key)
		}
		at = child
	}
	return at.line
}

// add has a new or returning job wait in its line, or apart until its notBefore.
func (o *order) add(e *entry, now int64) {
	if now < e.notBefore {
		e.standing = delayed
		e.line.of.delayed++
		heap.Push(&o.delayed, e)
		return
	}
	l := e.line
	if l.node.waiting == 0 { // other lines may have replaced it
		l = o.line(l.queue, l.class, l.tenant, l.keys...)
		e.line = l
	}
	e.standing = waiting
	heap.Push(&l.jobs, e)
	l.of.waiting++
	if l.node.waiting > 0 {
		o.fix(l)
	} else {
		heap.Push(&o.deadlines, l)
	}
	for n := &l.node; n.parent != nil; n = n.parent {
		if n.waiting++; n.waiting == 1 {
			n.wake()
		}
	}
}

// remove removes a job that waits or is delayed, and no other.
func (o *order) remove(e *entry) {
	l := e.line
	switch e.standing {
	case absent:
		return
	case delayed:
		heap.Remove(&o.delayed, e.place)
		l.of.delayed--
	default:
		heap.Remove(&l.jobs, e.place)
		l.of.waiting--
		if len(l.jobs.items) > 0 {
			o.fix(l)
		} else {
			heap.Remove(&o.deadlines, l.deadlinePlace)
		}
		for n := &l.node; n.parent != nil; n = n.parent {
			if n.waiting--; n.waiting == 0 {
				n.sleep()
			}
		}
	}
	e.standing = absent
}

func (o *order) fix(l *line) {
	heap.Fix(&o.deadlines, l.deadlinePlace)
	heap.Fix(&l.node.parent.awake, l.node.place)
}

// wake has delayed jobs wait whose time has come, or whose deadline: ask firstExpired before next.
func (o *order) wake(now int64) {
	for len(o.delayed.items) > 0 && o.delayed.items[0].event() <= now {
		e := o.delayed.items[0]
		o.remove(e)
		e.notBefore = min(e.notBefore, now)
		o.add(e, now)
	}
}

// next returns the job to take next, if any. Paused queues, and lines by passOver, are passed over.
func (o *order) next(passOver func(*line) bool) *entry {
	if _, l := o.root.first(0, passOver, nil, nil); l != nil {
		return l.head()
	}
	return nil
}

// take removes a waiting job that is about to run, and charges its queue, class and tenant.
func (o *order) take(e *entry) {
	cost := float64(max(1, e.cost))
	n := &e.line.node
	for n.charge(cost); n.parent != &o.root; n.charge(cost) {
		n = n.parent
	}
	if o.policy == strict {
		o.taken, o.spent = o.taken+1, o.spent+cost
		recent := recentJobs * o.spent / o.taken
		n.served = min(o.spent, max(n.served, o.spent-recent)) + starvedShare*cost
		heap.Init(&o.root.awake)
	}
	o.remove(e)
}

// firstExpired returns a waiting or delayed job whose deadline has passed, if any.
func (o *order) firstExpired(now int64) *entry {
	o.wake(now)
	if len(o.deadlines.items) > 0 && o.deadlines.items[0].head().deadline <= now {
		return o.deadlines.items[0].head()
	}
	return nil
}

// nextEvent returns when the next job expires or ends its delay, if ever.
func (o *order) nextEvent() (at int64) {
	at = math.MaxInt64
	if len(o.delayed.items) > 0 {
		at = o.delayed.items[0].event()
	}
	if len(o.deadlines.items) > 0 {
		at = min(at, o.deadlines.items[0].head().deadline)
	}
	return at
}

// node is a queue, class, tenant or line. Its children go by stride: v is a child's cost divided by its
// weight, and the least v goes next. awake are those with waiting jobs.
type node struct {
	parent  *node
	line    *line       // of a leaf
	queue   *queueState // of a queue
	key     nodeKey
	waiting int // jobs
	weight  float64
	v       float64
	// floor is the v of the child that was served last. Others rise to it, so idle ones collect no credit.
	floor    float64
	served   float64 // what may be spent in the pool until a queue is starved
	place    int     // in the parent's heap
	children map[string]*node
	awake    heapOf[*node]
}

func (o *order) initNode(n, parent *node, key nodeKey) {
	n.parent, n.key = parent, key
	n.reweigh(o)
	if parent != nil {
		parent.children[key.name] = n
	}
	if n.line != nil {
		return
	}
	if key.of == ofQueue {
		n.queue = o.queue(key.name)
	}
	n.children = map[string]*node{}
	n.awake.place = func(n *node) *int { return &n.place }
	switch {
	case key.of == ofTenant:
		n.awake.less = func(a, b *node) bool { return a.line.head().before(b.line.head()) }
	case o.policy == strict && parent == nil:
		n.awake.less = o.lessStrictly
	default:
		n.awake.less = lessByShare
	}
}

func lessByShare(a, b *node) bool {
	if a.v != b.v {
		return a.v < b.v
	}
	return a.precedes(b)
}

func (n *node) precedes(other *node) bool {
	if n.weight != other.weight {
		return n.weight > other.weight
	}
	return n.key.name < other.key.name
}

// lessStrictly puts starved queues first, and of these the one that got least.
func (o *order) lessStrictly(a, b *node) bool {
	isStarved := func(n *node) bool { return o.taken >= recentJobs && n.served < o.spent }
	switch starved := isStarved(a); {
	case starved != isStarved(b):
		return starved
	case starved && a.served != b.served:
		return a.served < b.served
	}
	return a.precedes(b)
}

func (n *node) reweigh(o *order) {
	n.weight = cmp.Or(o.weights[n.key], 1)
	for _, child := range n.children {
		child.reweigh(o)
	}
	heap.Init(&n.awake)
}

// wake puts the node among the awake ones, at the least v of these.
func (n *node) wake() {
	p := n.parent
	if len(p.awake.items) > 0 {
		n.v = max(n.v, p.awake.items[0].v)
	}
	heap.Push(&p.awake, n)
}

// sleep is for a node without waiting jobs. It keeps what it owes, unless too many are idle.
func (n *node) sleep() {
	p := n.parent
	heap.Remove(&p.awake, n.place)
	if len(p.children) <= 2*len(p.awake.items)+idleKept {
		return
	}
	for name, child := range p.children {
		if child.waiting == 0 {
			delete(p.children, name)
		}
	}
}

func (n *node) charge(cost float64) {
	n.v = max(n.v, n.parent.floor)
	n.parent.floor = n.v
	n.v += cost / n.weight
	heap.Fix(&n.parent.awake, n.place)
}

func (n *node) isPaused() bool {
	return n.queue != nil && !n.queue.pausedSince.IsZero() || n.line != nil && !n.line.of.pausedSince.IsZero()
}

// first returns the child that goes first, with its line, of those from a place of the heap on, or best if that
// goes before. It looks below passed over ones only.
func (n *node) first(place int, passOver func(*line) bool, best *node, of *line) (*node, *line) {
	if place >= len(n.awake.items) || best != nil && !n.awake.less(n.awake.items[place], best) {
		return best, of
	}
	child := n.awake.items[place]
	found := child.line
	switch {
	case child.isPaused(), found != nil && passOver != nil && passOver(found):
		found = nil
	case found == nil:
		_, found = child.first(0, passOver, nil, nil)
	}
	if found != nil {
		return child, found
	}
	best, of = n.first(2*place+1, passOver, best, of)
	return n.first(2*place+2, passOver, best, of)
}

// heapOf is a heap.Interface of items that know their places.
type heapOf[T any] struct {
	items []T
	less  func(a, b T) bool
	place func(T) *int
}

func (h *heapOf[T]) Len() int           { return len(h.items) }
func (h *heapOf[T]) Less(i, j int) bool { return h.less(h.items[i], h.items[j]) }

func (h *heapOf[T]) Swap(i, j int) {
	h.items[i], h.items[j] = h.items[j], h.items[i]
	*h.place(h.items[i]), *h.place(h.items[j]) = i, j
}

func (h *heapOf[T]) Push(x any) {
	*h.place(x.(T)) = len(h.items)
	h.items = append(h.items, x.(T))
}

func (h *heapOf[T]) Pop() any {
	last := len(h.items) - 1
	item := h.items[last]
	clear(h.items[last:])
	h.items = h.items[:last]
	return item
}
