package dispatch

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"reflect"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// owner is a pool while this process owns it.
type owner struct {
	*Dispatcher
	plan // its queues need mu

	lease   *store.Lease
	pool    string
	log     *slog.Logger
	flights sync.WaitGroup // the attempts that run, and the ends that are stored
	woken   chan struct{}

	mu       sync.Mutex
	order    *order
	gate     *poolGate
	credit   *credit // the gate's
	limits   limits
	took     map[string][]time.Duration // by queue, the times of the last successes
	closed   time.Duration              // how long the gate was closed until lookedAt; isClosed if it was then
	isClosed bool
	lookedAt time.Time
	known    map[[16]byte]*entry // the jobs that have not ended, running those with an attempt
	running  map[[16]byte]*running
	records  map[[16]byte]store.StoredRecord // those that an earlier owner left, of jobs that are not known yet
	// attempts is the context of attempts; nil before the owner runs, and once it has stopped.
	attempts    context.Context //nolint:containedctx // it outlives run, for what checkCancelled starts
	starts      []time.Time     // of the last attempts
	isCaughtUp  bool            // the jobs are known that the owner has found
	highest     uint64          // number of a record that is known
	isReserving bool            // a reservation of quotas is stored
	ending      int             // ends that are stored without an attempt
	// full has, by tenant, when to try notices again after one was not stored; fullLogged is when that was logged.
	full       map[string]time.Time
	fullLogged time.Time
	// isRetiring is true once the plan is another one: no attempt begins, and the owner stops.
	isRetiring bool
	// aside are the jobs that failed while the breaker was open, in that order. They are delayed until it closes, or
	// until no other job can be the next probe.
	aside []asideJob
}

// asideJob is a job, and when it may be tried again, in nanoseconds of Unix time.
type asideJob struct {
	entry *entry
	from  int64
}

// running is what runs of a job: an attempt, or the store of its end.
type running struct {
	cancel   context.CancelFunc
	low      uint64 // not above the number of the record that it writes
	isEnding bool   // true for one that is counted in ending
	webhook  string // the job's; empty until it is read
	// unsent is when limits took the cost of an attempt that is not sent yet; zero if there is none.
	unsent time.Time
}

// targetLatch is what an owner of a pool leaves to the next one in the process.
type targetLatch struct {
	target TargetConfig
	latch  latch
}

const (
	maxEnding = 64 // bounds the ends that are stored at a time, of jobs that expire, were cancelled or are parked
	maxReads  = 64 // how many records of an earlier owner are read at a time
	// fullPause is the pause after a notice that was not stored. Then one of the tenant's ended jobs tries again, and
	// if it succeeds the others follow, about one in each fullStep, within fullSpread. Failures are logged once in fullLog.
	fullPause, fullStep, fullSpread, fullLog = time.Second, time.Millisecond, 30 * time.Second, time.Minute
	// idlePause is how long dispatch waits where nothing wakes it.
	idlePause = 100 * time.Millisecond
	quotaKind = "quota"
)

func newOwner(d *Dispatcher, pool string, p plan, l *store.Lease) *owner {
	o := &owner{
		Dispatcher: d, plan: p, lease: l, pool: pool, log: d.log.With("pool", pool),
		woken: make(chan struct{}, 1), order: newOrder(cmp.Or(p.config.Merge, weighted)),
		known: map[[16]byte]*entry{}, running: map[[16]byte]*running{}, records: map[[16]byte]store.StoredRecord{}, took: map[string][]time.Duration{},
		full: map[string]time.Time{},
	}
	o.gate, _ = newPoolGate(&d.settings, p.config, time.Now()) // Validate has checked it
	o.credit, o.limits = o.gate.credit, newLimits(p.config.Limits, time.Now())
	if before, ok := d.latches.Load(pool); ok && reflect.DeepEqual(before.(targetLatch).target, p.config.Target) {
		o.credit.latch = before.(targetLatch).latch
	}
	for name, t := range d.settings.Tenants {
		o.order.setWeight(ofTenant, name, cmp.Or(t.Weight, 1))
	}
	o.setQueues(p.queues)
	return o
}

// review takes changes of queues from a new plan. The owner retires if other things have changed.
func (o *owner) review(p plan) {
	o.mu.Lock()
	defer o.mu.Unlock()
	haveSameNames := maps.EqualFunc(p.queues, o.queues, func(QueueConfig, QueueConfig) bool { return true })
	if p.isGone != o.isGone || !haveSameNames || !reflect.DeepEqual(p.config, o.config) {
		o.isRetiring = true
		o.wake()
		return
	}
	o.setQueues(p.queues)
}

// setQueues takes settings of queues; the lock is held.
func (o *owner) setQueues(queues map[string]QueueConfig) {
	o.queues = queues
	for name, q := range queues {
		o.order.setWeight(ofQueue, name, q.weight())
	}
}

func (o *owner) names() (out []pipeline.QueueName) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for name := range o.queues {
		out = append(out, pipeline.QueueName(name))
	}
	return out
}

// run dispatches until the context ends. Attempts run on until running ends.
func (o *owner) run(ctx, running context.Context) error {
	if err := o.takeOver(ctx); err != nil {
		return err
	}
	o.setAttempts(running)
	defer o.setAttempts(nil) //nolint:staticcheck // nothing is started any more
	following, ctx := errgroup.WithContext(ctx)
	queues := o.names()
	caughtUp := make(chan struct{}, len(queues))
	for _, queue := range queues {
		following.Go(func() error {
			return o.jobs.Follow(ctx, queue, o.receive, func() { caughtUp <- struct{}{} })
		})
	}
	following.Go(func() error { return o.watch(ctx) })
	following.Go(func() error {
		o.gate.run(ctx, o.wake)
		return nil
	})
	following.Go(func() error {
		for range queues {
			select {
			case <-caughtUp:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		o.mu.Lock()
		clear(o.records) // what is left is of jobs that have gone
		o.isCaughtUp = true
		o.mu.Unlock()
		return o.dispatch(ctx)
	})
	return following.Wait()
}

func (o *owner) setAttempts(ctx context.Context) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.attempts = ctx
}

// takeOver reads what is paused, and the records that an earlier owner left.
func (o *owner) takeOver(ctx context.Context) error {
	if err := o.readPauses(ctx); err != nil && !errors.Is(err, store.ErrNotControl) {
		return err
	}
	var left []uint64
	from := o.lease.Low()
	o.highest = from // nothing else runs yet
	if err := o.jobs.UnendedRecords(ctx, o.names(), from, func(seq uint64) { left = append(left, seq) }); err != nil {
		return err
	}
	reads, ctx := errgroup.WithContext(ctx)
	reads.SetLimit(maxReads)
	for _, seq := range left {
		reads.Go(func() error {
			r, err := o.jobs.RecordAt(ctx, seq)
			if errors.Is(err, store.ErrNoJob) || errors.Is(err, store.ErrNotAJob) || errors.Is(err, bus.ErrNewer) {
				return nil
			}
			o.mu.Lock()
			defer o.mu.Unlock()
			o.records[r.ID.UUID] = r
			return err
		})
	}
	return reads.Wait()
}

func (o *owner) receive(j store.StoredJob) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.attempts == nil {
		return
	}
	now := time.Now()
	switch known := o.known[j.ID.UUID]; {
	case j.ID.UUID == uuid.Nil: // It is not a job. It expires at once, and becomes a dead letter.
		j.ID.UUID, j.Deadline = uuid.New(), now
	case known == nil:
	case known.seq == j.Seq:
		return // the broker has delivered it again
	default: // it has an idempotency key, and the job of that has just ended
		ctx := o.attempts
		o.flights.Go(func() {
			o.persist(ctx, nil, "a message cannot be removed from its queue", func(ctx context.Context) error {
				return o.jobs.Remove(ctx, j.ID, j.Seq)
			})
		})
		return
	}
	e := &entry{
		id: j.ID.UUID, seq: j.Seq, closed: o.closedUntil(now), deadline: j.Deadline.UnixNano(), size: uint32(min(j.Size, math.MaxUint32)),
		// A prompt of four bytes a token, and an answer.
		tokens: uint32(min(cmp.Or(j.Tokens, (j.Size+3)/4+pipeline.UnsaidTokens), math.MaxUint32)),
		line:   o.order.line(string(j.ID.Queue), pipeline.ClassOf(j.Priority), j.Tenant, o.limits.keysOf(j.Tenant, j.Attributes)...),
	}
	e.cost = e.costIn(o.credit.Unit)
	o.known[e.id] = e
	if o.isCaughtUp {
		e.line.of.accepted++
	} else {
		e.line.of.recovered++
	}
	r, ok := o.records[e.id]
	if delete(o.records, e.id); ok {
		e.take(r)
	}
	if r.GetJob().GetState() == inferencev1.JobState_JOB_STATE_RUNNING {
		o.credit.start(e.id, e.cost, r.GetJob().GetStartedAt().AsTime())
		o.limits.start(e, false, now)
		o.start(e, r.Seq, func(ctx, cut context.Context) { o.resume(ctx, cut, e, r) })
		return
	}
	o.enqueue(e, now)
}

// enqueue has a job wait, or end at once if it fits into no quota; the lock is held.
func (o *owner) enqueue(e *entry, now time.Time) {
	if e.end == 0 && o.limits.tooSmallFor(e) != nil {
		e.deadline = min(e.deadline, now.UnixNano())
	}
	o.order.add(e, now.UnixNano())
	o.wake()
}

// take takes what a record says of a job.
func (e *entry) take(r store.StoredRecord) {
	job := r.GetJob()
	e.record, e.attempts, e.interruptions, e.usage = r.Seq, uint16(job.GetAttempts()), uint16(job.GetInterruptions()), job.GetUsage()
	if job.GetNotBefore() != nil {
		e.notBefore = job.GetNotBefore().AsTime().UnixNano()
	}
}

func idOf(e *entry) pipeline.JobID {
	return pipeline.JobID{Queue: pipeline.QueueName(e.line.queue), UUID: e.id}
}

func (o *owner) wake() {
	select {
	case o.woken <- struct{}{}:
	default:
	}
}

// dispatch starts attempts and ends expired jobs until the context ends or the owner has retired.
func (o *owner) dispatch(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-o.woken:
		case <-timer.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		pause, hasRetired := o.advance(time.Now())
		if hasRetired {
			return errRetired
		}
		timer.Reset(pause)
	}
}

// closedUntil returns how long the gate was closed; the lock is held.
func (o *owner) closedUntil(now time.Time) time.Duration {
	if !o.isClosed {
		return o.closed
	}
	return o.closed + max(0, now.Sub(o.lookedAt))
}

// advance does what is due, and returns how long it may take until it looks again.
func (o *owner) advance(now time.Time) (pause time.Duration, hasRetired bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.gate.update(now)
	o.closed, o.lookedAt = o.closedUntil(now), now
	o.isClosed = o.credit.closedBy(now) != ""
	o.order.wake(now.UnixNano())
	for o.ending < maxEnding {
		e := o.order.firstExpired(now.UnixNano())
		if e == nil {
			break
		}
		switch until := o.full[e.line.tenant]; {
		case e.end == 0:
			o.startEnd(e, func(ctx, _ context.Context) { o.expire(ctx, e) })
		case now.Before(until) && !e.isTooLate(now):
			o.order.remove(e)
			o.park(e, until)
			o.enqueue(e, now)
		default:
			if !until.IsZero() { // the others of the tenant wait for the outcome
				o.full[e.line.tenant] = now.Add(fullPause)
			}
			o.startEnd(e, func(ctx, _ context.Context) { o.endUnlessOpen(ctx, e) })
		}
	}
	for !o.isRetiring && !o.isGone && o.lease.IsHeld(now) {
		e := o.order.next(func(l *line) bool { // what has expired ends as soon as other ends are stored
			return l.head().deadline <= now.UnixNano() || o.limits.limitOf(l, now, true) != nil
		})
		if e == nil && o.ending < maxEnding && o.probeAgain(now) {
			continue
		}
		if e == nil {
			break
		}
		if left := e.left(now); left < e.line.of.least && !e.wasLate && len(o.running) > o.ending {
			o.order.remove(e) // it will hardly end in time, so others go first
			e.wasLate, e.notBefore = true, now.Add(left/4).UnixNano()
			o.order.add(e, now.UnixNano())
			continue
		}
		if ok, _ := o.credit.room(now, e.cost); !ok {
			break
		}
		o.order.take(e)
		o.starts = addLast(o.starts, now, maxLast)
		o.credit.start(e.id, e.cost, now)
		o.limits.start(e, true, now)
		o.start(e, o.highest, func(ctx, cut context.Context) { o.attempt(ctx, cut, e) })
		o.running[e.id].unsent = now
	}
	if o.limits.wants() && !o.isReserving {
		o.isReserving = true
		ctx := o.attempts
		o.flights.Go(func() { o.reserve(ctx) })
	}
	pause = idlePause
	if o.ending < maxEnding {
		pause = min(pause, max(0, time.Duration(o.order.nextEvent()-now.UnixNano())))
	}
	// What runs of a pool that is gone is an earlier owner's, and the next one resumes it.
	return pause, o.isRetiring && (o.isGone || len(o.running) == o.ending)
}

// isTooLate reports whether a notice has waited for so long that it is dropped.
func (e *entry) isTooLate(now time.Time) bool { return now.Unix() > int64(e.dropAt) }

// park has a job whose end was taken wait until a time; the lock is held.
func (o *owner) park(e *entry, until time.Time) {
	spread := min(fullStep*time.Duration(1+e.line.of.delayed), fullSpread)
	e.notBefore = until.Add(rand.N(spread)).UnixNano() //nolint:gosec // it keeps no secret
	e.deadline = e.notBefore
}

func (o *owner) reserve(ctx context.Context) {
	ok := o.persist(ctx, nil, "the quotas of the pool cannot be stored", func(ctx context.Context) error {
		_, err := store.UpdateControl(ctx, o.jobs, quotaKind, o.pool, func(stored *storedQuotas) bool {
			o.mu.Lock()
			defer o.mu.Unlock()
			*stored = o.limits.reserve(*stored)
			return true
		})
		return err
	})
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.isReserving = false; ok {
		o.limits.grant()
		o.wake()
	}
}

// start has do run for a job whose records are not below low; the lock is held. The first context ends with
// the ownership, the second one also as the job is cancelled.
func (o *owner) start(e *entry, low uint64, do func(ctx, cut context.Context)) {
	ctx := o.attempts
	cut, cancel := context.WithCancel(ctx)
	o.running[e.id] = &running{low: low, cancel: cancel}
	o.flights.Go(func() {
		defer cancel()
		do(ctx, cut)
	})
}

// startEnd is start for a job that ends without an attempt.
func (o *owner) startEnd(e *entry, do func(ctx, cut context.Context)) {
	o.order.remove(e)
	o.start(e, o.highest, do)
	o.running[e.id].isEnding = true
	o.ending++
}

// low returns the number of a record from which a new owner has to read. Older ones are of ended jobs, or of
// waiting ones, whose next attempt finds them.
func (o *owner) low() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	out := o.highest
	for _, r := range o.running {
		out = min(out, r.low)
	}
	for _, e := range o.order.delayed.items {
		if e.record > 0 {
			out = min(out, e.record)
		}
	}
	for _, r := range o.records {
		out = min(out, r.Seq)
	}
	return out
}

// checkCancelled applies a cancel at once: a waiting job leaves, a running attempt is stopped.
func (o *owner) checkCancelled(id pipeline.JobID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	e := o.known[id.UUID]
	switch {
	case e == nil || e.line.queue != string(id.Queue) || o.attempts == nil:
	case o.running[e.id] != nil:
		o.running[e.id].cancel()
	case o.ending < maxEnding:
		o.startEnd(e, func(ctx, _ context.Context) { o.endUnlessOpen(ctx, e) })
	}
}
