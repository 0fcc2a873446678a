package pipelines

import (
	"fmt"
	"maps"
	"slices"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Catalog holds the pipelines that a gateway serves, by name. It is immutable and
// safe for concurrent use.
type Catalog struct {
	pipelines map[pipeline.Name]pipeline.Pipeline
}

// NewCatalog returns a catalog of the pipelines, which must be valid and have
// different names.
func NewCatalog(pipelines []pipeline.Pipeline) (*Catalog, error) {
	c := &Catalog{pipelines: make(map[pipeline.Name]pipeline.Pipeline, len(pipelines))}
	for _, p := range pipelines {
		if err := p.Validate(); err != nil {
			return nil, err
		}
		if _, implicit := pipeline.StageOf(p.Name); implicit {
			return nil, fmt.Errorf("pipeline %s: the prefix %q is reserved for the implicit pipelines of single stages", p.Name, pipeline.StagePrefix)
		}
		if _, twice := c.pipelines[p.Name]; twice {
			return nil, fmt.Errorf("pipeline %s: two pipelines have that name", p.Name)
		}
		c.pipelines[p.Name] = p
	}
	return c, nil
}

// shown is how much of a caller's text a message repeats, in runes.
const shown = 80

// Resolve returns the pipeline of that name, or the implicit one of
// "stage:<name>".
func (c *Catalog) Resolve(name string) (pipeline.Pipeline, *fault.Fault) {
	if stage, implicit := pipeline.StageOf(pipeline.Name(name)); implicit {
		if err := pipeline.ValidName("stage", string(stage)); err != nil {
			return pipeline.Pipeline{}, fault.Newf(fault.UnknownPipeline, "pipeline %.*q: %w", shown, name, err)
		}
		return pipeline.OfStage(stage), nil
	}
	if p, ok := c.pipelines[pipeline.Name(name)]; ok {
		return p, nil
	}
	return pipeline.Pipeline{}, c.Unknown(name)
}

// Unknown is the fault of a name without a pipeline. It lists those that exist.
func (c *Catalog) Unknown(name string) *fault.Fault {
	return fault.Newf(fault.UnknownPipeline, "there is no pipeline %.*q; there is %s", shown, name, listed(c.Names()))
}

// Label returns a metric's label for a request that names a pipeline. It has only as
// many values as there are pipelines, and two more: callers can make up any name.
func (c *Catalog) Label(name string) string {
	if _, known := c.pipelines[pipeline.Name(name)]; known {
		return name
	}
	if _, implicit := pipeline.StageOf(pipeline.Name(name)); implicit {
		return pipeline.StagePrefix
	}
	return "unknown"
}

// Names returns the names of all pipelines, sorted.
func (c *Catalog) Names() []pipeline.Name { return slices.Sorted(maps.Keys(c.pipelines)) }
