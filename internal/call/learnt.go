package call

import (
	"cmp"
	"maps"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/internal/admission"
	"github.com/stagemesh/stagemesh/internal/graph"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	// lastShare is the part that the last request has in a mean.
	lastShare = 0.1
	// maxLearnt bounds the pipelines of which something is known.
	maxLearnt = 4096
)

// learnt is what the last requests of pipelines with blocks tell of the next ones.
type learnt struct {
	mu        sync.Mutex
	pipelines map[pipeline.Name]*means
}

// means are moving means of the last requests of a pipeline.
type means struct {
	// items are how many items maps have, by their paths without indices.
	items map[string]float64
	// took is how long steps take.
	took map[pipeline.StepName]time.Duration
}

// learn takes a request that has ended.
func (l *learnt) learn(name pipeline.Name, branches []graph.Branch, took map[pipeline.StepName]time.Duration) {
	counts := map[string]float64{}
	for _, b := range branches {
		if b.Block == graph.Map && b.Status == graph.Done {
			counts[withoutIndices(b.Path)] += float64(b.Items)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pipelines == nil || l.pipelines[name] == nil && len(l.pipelines) >= maxLearnt {
		l.pipelines = map[pipeline.Name]*means{}
	}
	m := l.pipelines[name]
	if m == nil || len(m.items)+len(m.took) > 2*pipeline.MaxSteps { // of a pipeline that was changed
		m = &means{map[string]float64{}, map[pipeline.StepName]time.Duration{}}
		l.pipelines[name] = m
	}
	for path, n := range counts {
		if mean, is := m.items[path]; is {
			n = mean + lastShare*(n-mean)
		}
		m.items[path] = n
	}
	for step, d := range took {
		if mean, is := m.took[step]; is {
			d = mean + time.Duration(lastShare*float64(d-mean))
		}
		m.took[step] = d
	}
}

// usual returns how long the steps of a pipeline took lately.
func (l *learnt) usual(name pipeline.Name) map[pipeline.StepName]time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if m := l.pipelines[name]; m != nil {
		return maps.Clone(m.took)
	}
	return nil
}

// observe reports the items of maps.
func (l *learnt) observe(o metric.Float64Observer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name, m := range l.pipelines {
		for path, n := range m.items {
			o.Observe(n, metric.WithAttributes(attribute.String("pipeline", string(name)), attribute.String("map", path)))
		}
	}
}

// FanFactors returns how many items the maps of a pipeline have for a request, by their paths, as this
// gateway has learnt.
func (s *Service) FanFactors(name pipeline.Name) map[string]float64 {
	s.learnt.mu.Lock()
	defer s.learnt.mu.Unlock()
	if m := s.learnt.pipelines[name]; m != nil {
		return maps.Clone(m.items)
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
	hops := map[pipeline.StepName]*pipeline.Hop{}
	for i := range x.env.Route {
		hops[x.env.Route[i].Step] = &x.env.Route[i]
	}
	factors := s.FanFactors(x.env.Pipeline)
	var ahead func(steps []pipeline.Step, path string, items float64) work
	ahead = func(steps []pipeline.Step, path string, items float64) (out work) {
		for i := range steps {
			step := &steps[i]
			at := path + string(step.Name)
			switch {
			case !step.IsBlock():
				hop := hops[step.Name]
				wait := s.availability.WaitOf(hop, x.env, items)
				out.add(work{wait, wait, hop})
			case step.Map != nil:
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
