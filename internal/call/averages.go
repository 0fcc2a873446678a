package call

import (
	"cmp"
	"maps"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/internal/admission"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/graph"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	// smoothing is the weight of the latest request in a moving average.
	smoothing = 0.1
	// maxAveraged bounds the pipelines that have averages.
	maxAveraged = 4096
)

// averages has the moving averages of each pipeline with blocks.
type averages struct {
	mu        sync.Mutex
	pipelines map[pipeline.Name]*average
}

// average has exponentially weighted moving averages of one pipeline.
type average struct {
	// items is the number of items per request of each map, by its path without indices.
	items map[string]float64
	// durations is the duration of each step.
	durations map[pipeline.StepName]time.Duration
}

func smooth[K comparable, V float64 | time.Duration](all map[K]V, key K, value V) {
	if mean, is := all[key]; is {
		value = mean + V(smoothing*float64(value-mean))
	}
	all[key] = value
}

// observe adds a request that has ended.
func (a *averages) observe(name pipeline.Name, branches []graph.Branch, durations map[pipeline.StepName]time.Duration) {
	counts := map[string]float64{}
	for _, b := range branches {
		if b.Block == graph.Map && b.Status == graph.Done {
			counts[envelope.WithoutIndices(b.Path)] += float64(b.Items)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.pipelines == nil || a.pipelines[name] == nil && len(a.pipelines) >= maxAveraged {
		a.pipelines = map[pipeline.Name]*average{}
	}
	one := a.pipelines[name]
	if one == nil || len(one.items)+len(one.durations) > 2*pipeline.MaxSteps { // of a pipeline that was changed
		one = &average{map[string]float64{}, map[pipeline.StepName]time.Duration{}}
		a.pipelines[name] = one
	}
	for path, n := range counts {
		smooth(one.items, path, n)
	}
	for step, d := range durations {
		smooth(one.durations, step, d)
	}
}

// stepDuration returns the average duration of a step, 0 if it is not known.
func (a *averages) stepDuration(name pipeline.Name, step pipeline.StepName) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	if one := a.pipelines[name]; one != nil {
		return one.durations[step]
	}
	return 0
}

// report reports the items of maps.
func (a *averages) report(o metric.Observer, items metric.Float64Observable) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for name, one := range a.pipelines {
		for path, n := range one.items {
			o.ObserveFloat64(items, n, metric.WithAttributes(attribute.String("pipeline", string(name)), attribute.String("map", path)))
		}
	}
}

// FanFactors returns how many items the maps of a pipeline have for a request, by their paths, as this
// gateway has learnt.
func (s *Service) FanFactors(name pipeline.Name) map[string]float64 {
	s.averages.mu.Lock()
	defer s.averages.mu.Unlock()
	if one := s.averages.pipelines[name]; one != nil {
		return maps.Clone(one.items)
	}
	return nil
}

// work is how long the items ahead of a request with blocks take, and at which step most of that.
type work struct {
	total, longest time.Duration
	hop            *pipeline.Hop
}

func (w *work) add(other work) {
	w.total += other.total
	if other.longest > w.longest {
		w.longest, w.hop = other.longest, other.hop
	}
}

// checkWork returns why the work ahead of what every request runs leaves a request too little time: with
// as many items in maps as is usual.
func (s *Service) checkWork(x *call) *fault.Fault {
	var factors map[string]float64
	var ahead func(steps []pipeline.Step, path string, items float64) work
	ahead = func(steps []pipeline.Step, path string, items float64) (out work) {
		for i := range steps {
			step := &steps[i]
			at := path + string(step.Name)
			switch {
			case !step.IsBlock():
				hop := x.hopOf(step.Name)
				wait := s.availability.WaitOf(hop, x.env, items)
				out.add(work{wait, wait, hop})
			case step.Map != nil:
				if factors == nil {
					factors = s.FanFactors(x.env.Pipeline)
				}
				out.add(ahead(step.Map.Steps, at+"/", cmp.Or(factors[at], items)))
			case step.Parallel != nil && step.Parallel.Quorum == 0:
				var slowest work
				for name, b := range step.Parallel.Branches {
					if b.Optional || b.Missing != nil {
						continue
					}
					if w := ahead(b.Steps, at+"/"+name+"/", items); w.total > slowest.total {
						slowest = w
					}
				}
				out.add(slowest)
			}
		}
		return out
	}
	w := ahead(x.graph.pipeline.Steps, "", 1)
	if w.hop == nil {
		return nil
	}
	return admission.CheckWork(x.env, w.total, w.hop)
}
