package dispatch

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"reflect"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

type setup struct {
	Config

	targets map[string]Target
}

func (d *Dispatcher) newSetup(c Config) (*setup, error) {
	if err := config.InSection("jobs", c.Validate()); err != nil {
		return nil, err
	}
	c = c.WithWebhooks()
	out := &setup{Config: c, targets: map[string]Target{}}
	for name, p := range c.Pools {
		limit := cmp.Or(p.MaxInFlight, DefaultMaxInFlight)
		if p.Gate != nil {
			if err := config.InSection("jobs.pools."+name+".gate", p.Gate.checkOwn(d.settings.Gates)); err != nil {
				return nil, err
			}
		}
		var err error
		switch {
		case p.Target.webhooks != nil:
			out.targets[name], err = newWebhookTarget(*p.Target.webhooks, limit)
			err = config.InSection("jobs.webhooks", err)
		case p.Target.HTTP != nil:
			out.targets[name], err = newHTTPTarget(*p.Target.HTTP, limit)
			err = config.InSection("jobs.pools."+name+".target.http", err)
		default:
			out.targets[name] = d.settings.Target(p)
		}
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// SetConfig replaces pools and queues, all or, on an error, none. No attempt is cancelled: a pool that
// has changed sends nothing until its attempts have ended. A queue left out stays with its pool.
func (d *Dispatcher) SetConfig(c Config) error {
	s, err := d.newSetup(c)
	if err != nil {
		return err
	}
	d.setup.Store(s)
	select {
	case d.changed <- struct{}{}:
	default:
	}
	return nil
}

// assignment is a queue as the dispatchers of a mesh agree on it, by the last file that had it.
type assignment struct {
	QueueConfig

	// Holder is the pool whose owner has the jobs: after Pool has changed, the old one until none
	// of its attempts runs. So two pools never send jobs of one queue.
	Holder string
}

// assignments say which pool has which queue of a mesh. They are one value on the broker.
type assignments map[string]assignment

const assignmentKind, assignmentName = "queues", "all"

func (a assignments) publish(c Config, isNew bool) (changed bool) {
	for name, q := range c.Queues {
		q.Pool, _ = c.PoolOf(name) // Validate has checked it
		before, ok := a[name]
		if !ok || isNew && !reflect.DeepEqual(before.QueueConfig, q) {
			a[name], changed = assignment{QueueConfig: q, Holder: before.Holder}, true
		}
	}
	return changed
}

func (a assignments) of(pool string) map[string]QueueConfig {
	out := map[string]QueueConfig{}
	for name, q := range a {
		if q.Pool == pool && (q.Holder == "" || q.Holder == pool) {
			out[name] = q.QueueConfig
		}
	}
	return out
}

func (a assignments) hold(pool string) (changed bool) {
	for name, q := range a {
		switch {
		case q.Pool == pool && q.Holder == "":
			q.Holder = pool
		case q.Pool != pool && q.Holder == pool:
			q.Holder = ""
		default:
			continue
		}
		a[name], changed = q, true
	}
	return changed
}

// assign returns the assignments once edit, which may be called again, has changed them, or need not.
func (d *Dispatcher) assign(ctx context.Context, edit func(assignments) bool) (assignments, error) {
	ctx, cancel := context.WithTimeout(ctx, brokerTimeout)
	defer cancel()
	return store.UpdateControl(ctx, d.jobs, assignmentKind, assignmentName, func(a *assignments) bool {
		maps.DeleteFunc(*a, func(_ string, q assignment) bool { return q.Pool == "" }) // nobody has written that
		return edit(*a)
	})
}

type plan struct {
	config PoolConfig
	target Target
	isGone bool // true if the pool is not in the file. Then nothing is sent, and jobs expire
	queues map[string]QueueConfig
}

func (d *Dispatcher) planOf(pool string, queues map[string]QueueConfig) plan {
	s := d.setup.Load()
	config, ok := s.Pools[pool]
	if !ok { // attempts may run that an earlier owner began
		return plan{target: d.settings.Target(config), isGone: true, queues: queues}
	}
	return plan{config: config, target: s.targets[pool], queues: queues}
}

func (d *Dispatcher) claim(ctx context.Context, pool string, l *store.Lease) (plan, error) {
	all, err := d.assign(ctx, func(a assignments) bool { return a.hold(pool) && l.IsHeld(time.Now()) })
	if err != nil {
		return plan{}, err
	}
	if !l.IsHeld(time.Now()) {
		return plan{}, store.ErrLeaseLost
	}
	queues := all.of(pool)
	for name := range queues {
		if _, ok := d.setup.Load().Queues[name]; ok {
			continue
		}
		// It was taken out of the file. An operator who deletes its stream is done with it.
		has, err := d.jobs.HasQueue(ctx, pipeline.QueueName(name))
		if err == nil && !has {
			delete(queues, name)
			_, err = d.assign(ctx, func(a assignments) bool { delete(a, name); return true })
		}
		if err != nil {
			return plan{}, err
		}
	}
	return d.planOf(pool, queues), nil
}

// lookEvery is how often a dispatcher looks for changes that others have made.
const lookEvery = time.Second

// supervise has each pool run that the file or the broker names, until the context ends.
func (d *Dispatcher) supervise(ctx context.Context, conn *bus.Bus, pools *errgroup.Group) error {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	var s, published *setup
	var all assignments
	for {
		if retry(ctx, d.log, "the broker has no streams for jobs", func(ctx context.Context) (err error) {
			s = d.setup.Load()
			if all, err = d.look(ctx, s, s != published); err != nil && ctx.Err() == nil {
				d.problem.Store(&err)
			}
			return err
		}) != nil {
			return nil
		}
		for _, pool := range slices.Concat(slices.Collect(maps.Keys(s.Pools)), all.pools()) {
			if _, runs := d.running.LoadOrStore(pool, true); !runs {
				pools.Go(func() error {
					defer d.running.Delete(pool)
					d.runPool(ctx, conn, pool)
					return nil
				})
			}
		}
		for pool, o := range d.owners.Range {
			o.(*owner).review(d.planOf(pool.(string), all.of(pool.(string))))
		}
		if published == nil {
			close(d.ready)
		}
		published = s
		look := ticker.C
		if len(all) == 0 {
			look = nil // there are no jobs
		}
		select {
		case <-d.changed:
		case <-look:
		case <-ctx.Done():
			return nil
		}
	}
}

func (d *Dispatcher) look(ctx context.Context, s *setup, isNew bool) (assignments, error) {
	if isNew && len(s.Queues) > 0 {
		if err := d.ensure(ctx); err != nil {
			return nil, err
		}
	}
	all, err := d.assign(ctx, func(a assignments) bool { return a.publish(s.Config, isNew) })
	switch {
	case !errors.Is(err, bus.ErrNoQueue):
		return all, err
	case len(s.Queues) == 0:
		return nil, nil
	}
	return nil, errors.Join(err, d.ensure(ctx))
}

func (a assignments) pools() (out []string) {
	for _, q := range a {
		out = append(out, q.Pool)
		if q.Holder != "" {
			out = append(out, q.Holder)
		}
	}
	return out
}

const (
	// A dispatcher without the pool in its file lets others go first, again after each ownGoneFor.
	awaitOthers = 2 * time.Second
	ownGoneFor  = time.Minute
)

// errRetired is why an owner stops whose plan is another one.
var errRetired = errors.New("the configuration of the pool has changed")

// runPool owns a pool whenever it can, until the context ends or nobody needs the pool.
func (d *Dispatcher) runPool(ctx context.Context, conn *bus.Bus, pool string) {
	log := d.log.With("pool", pool)
	for ctx.Err() == nil {
		if _, ok := d.setup.Load().Pools[pool]; !ok && process.Sleep(ctx, awaitOthers) != nil {
			return
		}
		// A broker that was wiped has no streams.
		l := store.NewLease(d.jobs, store.PoolLease, pool, d.id)
		if retry(ctx, log, "the broker has no streams for jobs", d.ensure) != nil || !l.Acquire(ctx, log, d.ensure) {
			return
		}
		p, err := d.claim(ctx, pool, l)
		switch {
		case err != nil:
			l.Release()
		case p.isGone && len(p.queues) == 0:
			l.Release()
			return
		default:
			log.Info("owns the pool", "in_file", !p.isGone)
			err = d.ownPool(ctx, conn, pool, p, l)
		}
		if ctx.Err() == nil && !errors.Is(err, errRetired) && !p.isGone {
			log.Warn("no longer owns the pool", "error", err)
			_ = process.Sleep(ctx, retryEvery)
		}
	}
}
