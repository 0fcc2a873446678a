package dispatch

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// watch follows pauses, and the oldest job of each queue, until the context ends.
func (o *owner) watch(ctx context.Context) error {
	return o.jobs.FollowPauses(ctx, func() {
		ctx, cancel := context.WithTimeout(ctx, brokerTimeout)
		defer cancel()
		_ = o.readPauses(ctx) // until it can be read, what is known holds
		for _, queue := range o.names() {
			if _, oldest, err := o.jobs.Backlog(ctx, queue); err == nil {
				o.mu.Lock()
				o.order.queue(string(queue)).oldest = oldest
				o.mu.Unlock()
			}
		}
	})
}

func (o *owner) readPauses(ctx context.Context) error {
	pauses, err := o.jobs.Pauses(ctx)
	if err != nil {
		return err
	}
	o.mu.Lock()
	for name := range o.queues {
		o.order.queue(name).pausedSince = pauses[pipeline.QueueName(name)]
	}
	o.mu.Unlock()
	o.wake()
	return nil
}

// report returns how the pool stands, and where a job is; the zero ID is none.
func (o *owner) report(job pipeline.JobID) *meshv1.PoolReport {
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	out := o.credit.report(now)
	why := ""
	switch out.Pool = o.pool; {
	case o.isGone:
		why = "pool is not in the file"
	case o.isRetiring:
		why = "configuration changes"
	}
	if why != "" {
		out.State, out.Why, out.Since, out.N = "closed", why, nil, 0
	}
	running := map[string]uint64{}
	for id := range o.running {
		running[o.known[id].line.queue]++
	}
	for _, name := range slices.Sorted(maps.Keys(o.queues)) {
		q := o.order.queue(name)
		r := &meshv1.QueueReport{
			Name: name, Waiting: uint64(q.waiting), Delayed: uint64(q.delayed), Running: running[name], //nolint:gosec // no count is negative
			Accepted: q.accepted, Recovered: q.recovered, Ended: q.ended, PausedSince: timestampOf(q.pausedSince),
		}
		if r.GetWaiting()+r.GetDelayed()+r.GetRunning() > 0 {
			r.Oldest = timestampOf(q.oldest)
		}
		out.Queues = append(out.Queues, r)
	}
	if e := o.known[job.UUID]; e != nil && e.line.queue == string(job.Queue) {
		out.Place = o.placeOf(e, out, now)
	}
	return out
}

// placeOf returns where a job stands, in a pool of which the report is; the lock is held.
func (o *owner) placeOf(e *entry, pool *meshv1.PoolReport, now time.Time) *inferencev1.JobPlace {
	out, paused := &inferencev1.JobPlace{Pool: o.pool}, e.line.of.pausedSince
	if e.standing == waiting {
		var isExact bool
		out.Position, isExact = o.order.position(e)
		out.IsEstimate = !isExact
	}
	switch {
	case o.running[e.id] != nil:
		out.Hold = "running"
	case !paused.IsZero():
		out.Hold, out.Since = "paused", timestampOf(paused)
	case e.standing == delayed && e.isAside:
		out.Hold, out.Why = "delayed", "it failed while its target failed for all jobs, and others are tried first"
	case e.standing == delayed:
		out.Hold, out.StartsAt = "delayed", timestampOf(time.Unix(0, e.notBefore))
	case pool.GetState() == "closed":
		out.Hold, out.Since = "closed", pool.GetSince()
		out.Why, _, _ = strings.Cut(pool.GetWhy(), ": ") // tenants see it, and what follows is about the gate
	default:
		if l := o.limits.limitOf(e.line, now, false); l != nil {
			out.Hold, out.Why = "limit", "the limit by "+l.By
			break
		}
		if out.Hold = "turn"; pool.GetWhy() != "" {
			out.Hold, out.Why, out.Since = "full", pool.GetWhy(), pool.GetSince()
		}
		if pace := paceOf(o.starts, now); pace > 0 {
			out.StartsAt = timestampOf(now.Add(time.Duration(float64(out.GetPosition()) / pace * float64(time.Second))))
		}
	}
	return out
}

func timestampOf(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

const maxLast = 128

func addLast[T any](last []T, value T, most int) []T {
	if len(last) >= most {
		last = slices.Delete(last, 0, 1)
	}
	return append(last, value)
}

// paceOf returns how many attempts began a second within the last minute; 0 if that is not known.
func paceOf(starts []time.Time, now time.Time) float64 {
	for len(starts) > 0 && now.Sub(starts[0]) >= time.Minute {
		starts = starts[1:]
	}
	if len(starts) < 2 {
		return 0
	}
	return float64(len(starts)) / max(now.Sub(starts[0]).Seconds(), .001)
}

// maxCounted bounds what a position is counted among: the owner's lock is held meanwhile.
const maxCounted = 4096

// position is 1 for the job that goes next. It is exact where deadlines alone decide; else lines get their shares.
func (o *order) position(e *entry) (position uint64, isExact bool) {
	before, isExact := e.line.before(e)
	for n := &e.line.node; n.parent != nil; n = n.parent {
		others, siblings := 0, n.parent.awake.items
		if len(siblings) > maxCounted {
			siblings, isExact = siblings[:maxCounted], false
		}
		for _, s := range siblings {
			switch {
			case s == n || s.isPaused():
			case s.line != nil: // the line of the earliest deadline goes first
				first, isAll := s.line.before(e)
				others, isExact = others+first, isExact && isAll
			default:
				others, isExact = others+min(s.waiting, int(o.share(s, n)*float64(before+1))), false
			}
		}
		before += others
	}
	return uint64(before) + 1, isExact //nolint:gosec // not negative
}

func (o *order) share(of, sibling *node) float64 {
	switch {
	case o.policy != strict || of.parent != &o.root:
		return of.weight / sibling.weight
	case of.precedes(sibling):
		return starvedShare - 1
	}
	return 1. / (starvedShare - 1)
}

// before returns how many jobs of the line go before another; it counts a part of many.
func (l *line) before(e *entry) (n int, isExact bool) {
	jobs := l.jobs.items
	step := 1 + len(jobs)/maxCounted
	for i := 0; i < len(jobs); i += step {
		if jobs[i].before(e) {
			n += step
		}
	}
	return min(n, len(jobs)), step == 1
}
