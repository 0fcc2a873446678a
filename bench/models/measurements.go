package models

import (
	"container/list"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/services/bench"
)

const (
	// many models are registered, and few of them in comparison.
	many = 20_000
	few  = 20
	// loadTime is how long a model takes to load, where that matters.
	loadTime = 20 * time.Millisecond
	// unloadTime is how long models take to unload where that should hold up nothing.
	unloadTime = 2 * time.Second
	warmup     = time.Second
)

// with measures on a mesh that it starts.
func (m *measurement) with(ctx context.Context, hosts, room int, measure func(*mesh) error) error {
	b, err := m.start(ctx, hosts, room)
	if err != nil {
		return err
	}
	return errors.Join(measure(b), b.stop())
}

// registered measures registrations, and the memory of what joins later.
func (m *measurement) registered(ctx context.Context) error {
	for range m.times {
		err := m.with(ctx, 1, few, func(b *mesh) error {
			heaps := map[bool]float64{}
			for _, gateway := range []bool{true, false} {
				var err error
				if heaps[gateway], err = b.heap(ctx, gateway); err != nil {
					return err
				}
			}
			took, err := b.register(ctx, names("m", many), 0, 0)
			if err != nil {
				return err
			}
			m.add(RegisterTime, took.Seconds())
			for gateway, name := range map[bool]string{true: GatewayMemory, false: HostMemory} {
				heap, err := b.heap(ctx, gateway)
				if err != nil {
					return err
				}
				m.add(name, (heap-heaps[gateway])/many)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// loaded compares a loaded model with a plain stage, and a mesh of many models with one of few.
func (m *measurement) loaded(ctx context.Context) error {
	return m.with(ctx, 1, 2*few, func(b *mesh) error {
		all := names("m", few)
		if _, err := b.register(ctx, all, 0, 0); err != nil {
			return err
		}
		if err := b.load(ctx, all); err != nil {
			return err
		}
		for _, callers := range []int{64, 1} {
			for i := range m.times {
				s := bench.Settings{Concurrency: callers, Warmup: warmup, Duration: m.duration}
				model, stage, err := pair(i,
					func() (bench.Run, error) { return b.run(ctx, s, all[0]) }, func() (bench.Run, error) { return b.run(ctx, s, plain) })
				if err != nil {
					return err
				}
				if callers > 1 {
					m.add(ToPlain, model.ThroughputPerS/stage.ThroughputPerS)
				} else {
					m.add(P50ToPlain, model.Latency.P50MS/stage.Latency.P50MS)
				}
			}
		}
		return m.with(ctx, 1, 2*few, func(large *mesh) error {
			if _, err := large.register(ctx, names("m", many), 0, 0); err != nil {
				return err
			}
			if err := large.load(ctx, all); err != nil {
				return err
			}
			for i := range m.times {
				s := bench.Settings{Concurrency: 64, Warmup: warmup, Duration: m.duration}
				ofMany, ofFew, err := pair(i,
					func() (bench.Run, error) { return large.run(ctx, s, all...) }, func() (bench.Run, error) { return b.run(ctx, s, all...) })
				if err != nil {
					return err
				}
				m.add(ToFew, ofMany.ThroughputPerS/ofFew.ThroughputPerS)
			}
			return nil
		})
	})
}

// cold measures the first answers of models, one at a time.
func (m *measurement) cold(ctx context.Context) error {
	const each = 150
	return m.with(ctx, 3, m.times*each, func(b *mesh) error {
		all := names("m", m.times*each)
		if _, err := b.register(ctx, all, loadTime, 0); err != nil {
			return err
		}
		for some := range slices.Chunk(all, each) {
			var beyond []time.Duration
			for _, name := range some {
				begin := time.Now()
				if _, err := b.infer(ctx, name); err != nil {
					return err
				}
				beyond = append(beyond, time.Since(begin)-loadTime)
			}
			slices.Sort(beyond)
			m.add(ColdP50, inMS(beyond[each/2]))
			m.add(ColdP99, inMS(beyond[each*99/100]))
		}
		return nil
	})
}

func inMS(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// lru is a cache that evicts what was used longest ago.
type lru struct {
	room  int
	order *list.List
	at    map[uint64]*list.Element
}

// use reports whether a key is there, and puts it there.
func (c *lru) use(key uint64) bool {
	if e, ok := c.at[key]; ok {
		c.order.MoveToFront(e)
		return true
	}
	c.at[key] = c.order.PushFront(key)
	if len(c.at) > c.room {
		delete(c.at, c.order.Remove(c.order.Back()).(uint64))
	}
	return false
}

// hits compares the hit ratio of three hosts with that of one LRU.
func (m *measurement) hits(ctx context.Context) error {
	const room, requests, callers = 1000, 5_000, 16
	return m.with(ctx, 3, room/3, func(b *mesh) error {
		all := names("m", many)
		if _, err := b.register(ctx, all, time.Millisecond, 0); err != nil {
			return err
		}
		cache := lru{room, list.New(), map[uint64]*list.Element{}}
		popular := rand.NewZipf(rand.New(rand.NewPCG(1, 2)), 1.1, 1, many-1) //nolint:gosec // it is no secret
		// The first turn fills the caches.
		for turn := -1; turn < m.times; turn++ {
			var mu sync.Mutex
			ours, single, failed := 0, 0, 0
			calls, within := errgroup.WithContext(ctx)
			calls.SetLimit(callers)
			for range requests {
				key := popular.Uint64()
				if cache.use(key) {
					single++
				}
				calls.Go(func() error {
					step, err := b.infer(within, all[key])
					mu.Lock()
					defer mu.Unlock()
					switch {
					case err != nil:
						failed++
					case step.GetModelWait() == nil:
						ours++
					}
					return within.Err()
				})
			}
			if err := calls.Wait(); err != nil {
				return err
			}
			if turn >= 0 {
				m.add(HitRatio, float64(ours)/requests)
				m.add(BelowLRU, 100*float64(single-ours)/requests)
				m.add(Failed, float64(failed))
			}
		}
		return nil
	})
}

// loads compares the latency of loaded models during loads with that without.
func (m *measurement) loads(ctx context.Context) error {
	const perSecond = 20
	return m.with(ctx, 3, 200, func(b *mesh) error {
		hot, unused := names("hot", few), names("cold", m.times*perSecond*int(2+m.duration.Seconds()))
		if _, err := b.register(ctx, slices.Concat(hot, unused), loadTime, 0); err != nil {
			return err
		}
		if err := b.load(ctx, hot); err != nil {
			return err
		}
		s := bench.Settings{Rate: 200, Arrivals: bench.Poisson, Warmup: warmup, Duration: m.duration}
		for i := range m.times {
			with, without, err := pair(i, func() (out bench.Run, err error) {
				calls, ctx := errgroup.WithContext(ctx)
				calls.Go(func() (err error) {
					out, err = b.run(ctx, s, hot...)
					return err
				})
				calls.Go(func() error {
					cold := s
					cold.Rate, cold.Arrivals = perSecond, bench.Constant
					some := unused[:len(unused)/(m.times-i)]
					unused = unused[len(some):]
					_, err := b.run(ctx, cold, some...)
					return err
				})
				return out, calls.Wait()
			}, func() (bench.Run, error) { return b.run(ctx, s, hot...) })
			if err != nil {
				return err
			}
			m.add(P99WithLoads, with.Latency.P99MS/without.Latency.P99MS)
		}
		return nil
	})
}

// unload measures how long a load waits for room while an evicted model unloads.
func (m *measurement) unload(ctx context.Context) error {
	const room = 10
	return m.with(ctx, 1, room, func(b *mesh) error {
		all := names("m", room+m.times)
		if _, err := b.register(ctx, all, loadTime, unloadTime); err != nil {
			return err
		}
		if err := b.load(ctx, all[:room]); err != nil {
			return err
		}
		for _, name := range all[room:] {
			pause(ctx, unloadTime+time.Second/2)
			begin := time.Now()
			if _, err := b.infer(ctx, name); err != nil {
				return err
			}
			m.add(LoadBeside, inMS(time.Since(begin)-loadTime))
		}
		return nil
	})
}

// burst asks for cold models at once.
func (m *measurement) burst(ctx context.Context) error {
	const hosts, each = 3, 100
	return m.with(ctx, hosts, m.times*each, func(b *mesh) error {
		all := names("m", m.times*each)
		if _, err := b.register(ctx, all, loadTime, 0); err != nil {
			return err
		}
		for some := range slices.Chunk(all, each) {
			var mu sync.Mutex
			queues := map[string]int{}
			calls, within := errgroup.WithContext(ctx)
			for _, name := range some {
				calls.Go(func() error {
					step, err := b.infer(within, name)
					mu.Lock()
					defer mu.Unlock()
					queues[step.GetHost()]++
					return err
				})
			}
			if err := calls.Wait(); err != nil {
				return err
			}
			longest := 0
			for _, n := range queues {
				longest = max(longest, n)
			}
			m.add(LongestQueue, float64(longest)*hosts/each)
		}
		return nil
	})
}

// Loads on hosts of which one leaves.
const (
	leaving      = 3
	leavingModel = 300
	leavingRate  = 200
	leavesAfter  = 500 * time.Millisecond
)

// withLoaded measures on a mesh of which each host has room for all models, and has a third.
func (m *measurement) withLoaded(ctx context.Context, measure func(b *mesh, all []string) error) error {
	return m.with(ctx, leaving, leavingModel, func(b *mesh) error {
		all := names("m", leavingModel)
		if _, err := b.register(ctx, all, loadTime, 0); err != nil {
			return err
		}
		if err := b.load(ctx, all); err != nil {
			return err
		}
		return measure(b, all)
	})
}

// drain compares the latency while a host leaves with that without.
func (m *measurement) drain(ctx context.Context) error {
	return m.withLoaded(ctx, func(b *mesh, all []string) error {
		s := bench.Settings{Rate: leavingRate, Arrivals: bench.Poisson, Warmup: warmup, Duration: m.duration}
		for i := range m.times {
			with, without, err := pair(i, func() (out bench.Run, err error) {
				var calls errgroup.Group
				calls.Go(func() error {
					pause(ctx, warmup+leavesAfter)
					return b.StopHost(false)
				})
				calls.Go(func() (err error) {
					out, err = b.run(ctx, s, all...)
					return err
				})
				return out, errors.Join(calls.Wait(), b.AddHost(ctx, score))
			}, func() (bench.Run, error) { return b.run(ctx, s, all...) })
			if err != nil {
				return err
			}
			m.add(P99WithDrain, with.Latency.P99MS/without.Latency.P99MS)
		}
		return nil
	})
}

// kill measures how long requests go to a host that was killed, and how late the last of them is
// answered. When it is killed, it loads models that requests wait for.
func (m *measurement) kill(ctx context.Context) error {
	// prompt is the most that an answer takes that does not wait for the killed host.
	const prompt, most, waiting = time.Second, 9 * time.Second, 90
	return m.withLoaded(ctx, func(b *mesh, all []string) error {
		unused := names("cold", m.times*waiting)
		if _, err := b.register(ctx, unused, loadTime, 0); err != nil {
			return err
		}
		for some := range slices.Chunk(unused, waiting) {
			var mu sync.Mutex
			took := map[time.Time]time.Duration{}
			failed := 0
			infer := func(ctx context.Context, name string) {
				begin := time.Now()
				_, err := b.infer(ctx, name)
				mu.Lock()
				defer mu.Unlock()
				if took[begin] = time.Since(begin); err != nil {
					failed++
				}
			}
			var killed time.Time
			var kill errgroup.Group
			kill.Go(func() error {
				pause(ctx, leavesAfter)
				for _, name := range some {
					kill.Go(func() error { infer(ctx, name); return nil })
				}
				pause(ctx, 2*loadTime)
				killed = time.Now()
				return b.StopHost(true)
			})
			s := bench.Settings{Rate: leavingRate, Duration: leavesAfter + most}
			_, err := bench.RunLoad(ctx, s, func(ctx context.Context, _ *bench.Answer) error {
				infer(ctx, all[rand.N(len(all))]) //nolint:gosec // it is no secret
				return nil
			}, func(bench.Sample) {})
			if err := errors.Join(err, kill.Wait(), b.AddHost(ctx, score)); err != nil {
				return err
			}
			var elsewhere, last time.Duration
			for begin, took := range took {
				if took > prompt {
					elsewhere, last = max(elsewhere, begin.Sub(killed)), max(last, begin.Add(took).Sub(killed))
				}
			}
			m.add(Elsewhere, elsewhere.Seconds())
			m.add(LastAnswer, last.Seconds())
			m.add(Failed, float64(failed))
		}
		return nil
	})
}
