package questions

import (
	"container/list"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/internal/process"
)

const (
	// many models are registered, and few of them in comparison.
	many, few = 20_000, 20
	loadTime  = 20 * time.Millisecond
	// unloadTime is how long models take to unload, which should hold up nothing.
	unloadTime = 2 * time.Second
	// A host leaves during a load of three hosts that have leavingModels, after leavesAfter.
	leavingModels, leavingRate = 300, 200
	leavesAfter                = warmup
)

// registration measures registrations, and the memory of what joins later.
func (m *measurement) registration(ctx context.Context) error {
	for range m.times {
		err := m.with(ctx, setup{hosts: 1, room: few}, func(b *mesh, _ []string) error {
			for round := range 2 {
				for gateway, name := range map[bool]string{true: "gateway", false: "host"} {
					heap, err := b.heap(ctx, gateway)
					if err != nil {
						return err
					}
					if round == 0 {
						m.add(name, -heap/many)
					} else {
						m.report.Values[name][len(m.report.Values[name])-1] += heap / many
					}
				}
				if round == 0 {
					took, err := b.register(ctx, names("m", many), 0, 0)
					if err != nil {
						return err
					}
					m.add("register", took.Seconds())
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// throughput compares a loaded model with a plain stage, and a mesh of many models with one of few.
func (m *measurement) throughput(ctx context.Context) error {
	return m.with(ctx, setup{hosts: 1, room: 2 * few, models: few, isLoaded: true}, func(b *mesh, all []string) error {
		closed := load.Settings{Concurrency: 64, Warmup: warmup, Duration: m.duration}
		alone := closed
		alone.Concurrency = 1
		err := errors.Join(
			m.pairs("plain", throughput, b.load(ctx, closed, all[0]), b.load(ctx, closed, plain)),
			m.pairs("plain P50", p50, b.load(ctx, alone, all[0]), b.load(ctx, alone, plain)))
		if err != nil {
			return err
		}
		return m.with(ctx, setup{hosts: 1, room: 2 * few, models: many}, func(large *mesh, _ []string) error {
			if err := large.each(ctx, all, few, first); err != nil {
				return err
			}
			return m.pairs("few", throughput, large.load(ctx, closed, all...), b.load(ctx, closed, all...))
		})
	})
}

// cold measures the first answers of models, one at a time.
func (m *measurement) cold(ctx context.Context) error {
	const each = 150
	return m.with(ctx, setup{hosts: 3, room: m.times * each, models: m.times * each, load: loadTime}, func(b *mesh, all []string) error {
		for some := range slices.Chunk(all, each) {
			var beyond []time.Duration
			err := b.each(ctx, some, 1, func(_ *inferencev1.StepTiming, took time.Duration, err error) error {
				beyond = append(beyond, took-loadTime)
				return err
			})
			if err != nil {
				return err
			}
			slices.Sort(beyond)
			m.add("P50", inMS(beyond[each/2]))
			m.add("P99", inMS(beyond[each*99/100]))
		}
		return nil
	})
}

// hits compares the hit ratio of three hosts with one LRU's.
func (m *measurement) hits(ctx context.Context) error {
	const room, requests, callers = 1000, 5_000, 16
	return m.with(ctx, setup{hosts: 3, room: room / 3, models: many, load: time.Millisecond}, func(b *mesh, all []string) error {
		// The LRU has the models in the order of their last uses, the latest first.
		order, at := list.New(), map[uint64]*list.Element{}
		popular := rand.NewZipf(rand.New(rand.NewPCG(1, 2)), 1.1, 1, many-1) //nolint:gosec // it is not a secret
		// The first turn fills the caches.
		for turn := -1; turn < m.times; turn++ {
			wanted, hits, failed, ofLRU := make([]string, requests), 0, 0, 0
			for i := range wanted {
				key := popular.Uint64()
				wanted[i] = all[key]
				if e := at[key]; e != nil {
					ofLRU++
					order.Remove(e)
				} else if len(at) == room {
					delete(at, order.Remove(order.Back()).(uint64))
				}
				at[key] = order.PushFront(key)
			}
			err := b.each(ctx, wanted, callers, func(step *inferencev1.StepTiming, _ time.Duration, err error) error {
				if err != nil {
					failed++
				} else if step.GetModelWait() == nil {
					hits++
				}
				return nil
			})
			if err != nil {
				return err
			}
			if turn >= 0 {
				m.add("hit ratio", float64(hits)/requests)
				m.add("below LRU", 100*float64(ofLRU-hits)/requests)
				m.add("failed requests", float64(failed))
			}
		}
		return nil
	})
}

// loads compares the latency of loaded models during loads with that without.
func (m *measurement) loads(ctx context.Context) error {
	const perSecond = 20
	return m.with(ctx, setup{hosts: 3, room: 200, models: few, load: loadTime, isLoaded: true}, func(b *mesh, all []string) error {
		open := load.Settings{Rate: leavingRate, Fine: true, Arrivals: load.Poisson, Warmup: warmup, Duration: m.duration}
		unused := names("cold", m.times*perSecond*(1+int((warmup+m.duration)/time.Second)))
		if _, err := b.register(ctx, unused, loadTime, 0); err != nil {
			return err
		}
		hot, each := b.load(ctx, open, all...), len(unused)/m.times
		return m.pairs("loads", p99, func() (out load.Run, err error) {
			var calls errgroup.Group
			calls.Go(func() error {
				cold := open
				cold.Rate, cold.Arrivals = perSecond, load.Constant
				_, err := b.load(ctx, cold, unused[:each]...)()
				return err
			})
			out, err = hot()
			err = errors.Join(err, calls.Wait())
			unused = unused[each:]
			return out, err
		}, hot)
	})
}

// unload measures how long a load waits for room while an evicted model unloads.
func (m *measurement) unload(ctx context.Context) error {
	const room = 10
	return m.with(ctx, setup{hosts: 1, room: room, models: room, unload: unloadTime, isLoaded: true}, func(b *mesh, _ []string) error {
		unused := names("cold", m.times)
		if _, err := b.register(ctx, unused, loadTime, unloadTime); err != nil {
			return err
		}
		// Models that were used a moment ago are not evicted.
		_ = process.Sleep(ctx, unloadTime)
		return b.each(ctx, unused, 1, func(_ *inferencev1.StepTiming, took time.Duration, err error) error {
			m.add("unload", inMS(took-loadTime))
			_ = process.Sleep(ctx, unloadTime+time.Second/2)
			return err
		})
	})
}

// burst asks for cold models at once.
func (m *measurement) burst(ctx context.Context) error {
	const hosts, each = 3, 100
	return m.with(ctx, setup{hosts: hosts, room: m.times * each, models: m.times * each, load: loadTime}, func(b *mesh, all []string) error {
		for some := range slices.Chunk(all, each) {
			queues, longest := map[string]int{}, 0
			err := b.each(ctx, some, each, func(step *inferencev1.StepTiming, _ time.Duration, err error) error {
				queues[step.GetHost()]++
				longest = max(longest, queues[step.GetHost()])
				return err
			})
			if err != nil {
				return err
			}
			m.add("queue", float64(longest)*hosts/each)
		}
		return nil
	})
}

// drain compares the latency while a host leaves with that without.
func (m *measurement) drain(ctx context.Context) error {
	return m.with(ctx, setup{hosts: 3, room: leavingModels, models: leavingModels, load: loadTime, isLoaded: true}, func(b *mesh, all []string) error {
		all3 := b.load(ctx, load.Settings{Rate: leavingRate, Fine: true, Arrivals: load.Poisson, Warmup: warmup, Duration: m.duration}, all...)
		return m.pairs("drain", p99, func() (load.Run, error) {
			var leave errgroup.Group
			leave.Go(func() error {
				_ = process.Sleep(ctx, leavesAfter)
				return b.StopHost(false)
			})
			out, err := all3()
			return out, errors.Join(err, leave.Wait(), b.AddHost(ctx, score))
		}, all3)
	})
}

// kill measures how long requests go to a host that was killed, and how late the last of them is
// answered. When it is killed, it loads models that requests wait for.
func (m *measurement) kill(ctx context.Context) error {
	// prompt is the most that an answer takes that does not wait for the killed host.
	const prompt, most, waiting = time.Second, 9 * time.Second, 90
	return m.with(ctx, setup{hosts: 3, room: leavingModels, models: leavingModels, load: loadTime, isLoaded: true}, func(b *mesh, all []string) error {
		unused := names("cold", m.times*waiting)
		if _, err := b.register(ctx, unused, loadTime, 0); err != nil {
			return err
		}
		for some := range slices.Chunk(unused, waiting) {
			type late struct{ sent, answered time.Time }
			var mu sync.Mutex
			var lates []late
			failed := 0
			note := func(took time.Duration, err error) {
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					failed++
				}
				if now := time.Now(); took > prompt {
					lates = append(lates, late{now.Add(-took), now})
				}
			}
			var killed time.Time
			var calls errgroup.Group
			calls.Go(func() error {
				_ = process.Sleep(ctx, leavesAfter-loadTime)
				return b.each(ctx, some, waiting, func(_ *inferencev1.StepTiming, took time.Duration, err error) error {
					note(took, err)
					return nil
				})
			})
			calls.Go(func() error {
				_ = process.Sleep(ctx, leavesAfter)
				killed = time.Now()
				return b.StopHost(true)
			})
			_, err := load.RunLoad(ctx, load.Settings{Rate: leavingRate, Fine: true, Duration: leavesAfter + most}, b.target(all...), func(s load.Sample) { note(s.Latency, s.Err) })
			if err := errors.Join(err, calls.Wait(), b.AddHost(ctx, score)); err != nil {
				return err
			}
			var elsewhere, last time.Duration
			for _, l := range lates {
				elsewhere, last = max(elsewhere, l.sent.Sub(killed)), max(last, l.answered.Sub(killed))
			}
			m.add("elsewhere", elsewhere.Seconds())
			m.add("last answer", last.Seconds())
			m.add("failed requests", float64(failed))
		}
		return nil
	})
}
