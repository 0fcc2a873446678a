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
	// fanShare is the part that the last request has in the mean of a map's items.
	fanShare = 0.1
	// maxFans bounds the pipelines whose maps are known.
	maxFans = 4096
)

// fans knows how many items the maps of pipelines have for a request: the moving means of the last
// ones, by their paths without indices.
type fans struct {
	mu    sync.Mutex
	means map[pipeline.Name]map[string]float64
}

// learn takes the maps of a request that has ended.
func (f *fans) learn(name pipeline.Name, branches []graph.Branch) {
	counts := map[string]float64{}
	for _, b := range branches {
		if b.Block == graph.Map && b.Status == graph.Done {
			counts[withoutIndices(b.Path)] += float64(b.Items)
		}
	}
	if len(counts) == 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.means == nil || f.means[name] == nil && len(f.means) >= maxFans {
		f.means = map[pipeline.Name]map[string]float64{}
	}
	means := f.means[name]
	if means == nil || len(means) > pipeline.MaxSteps { // of a pipeline that was changed
		means = map[string]float64{}
		f.means[name] = means
	}
	for path, n := range counts {
		if mean, is := means[path]; is {
			n = mean + fanShare*(n-mean)
		}
		means[path] = n
	}
}

// observe reports the means.
func (f *fans) observe(o metric.Float64Observer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, means := range f.means {
		for path, n := range means {
			o.Observe(n, metric.WithAttributes(attribute.String("pipeline", string(name)), attribute.String("map", path)))
		}
	}
}

// FanFactors returns how many items the maps of a pipeline have for a request, by their paths, as this
// gateway has learnt.
func (s *Service) FanFactors(name pipeline.Name) map[string]float64 {
	s.fans.mu.Lock()
	defer s.fans.mu.Unlock()
	return maps.Clone(s.fans.means[name])
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
