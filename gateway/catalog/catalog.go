// Package catalog says which pipelines a gateway serves. A Catalog is immutable
// and safe for concurrent use.
package catalog

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Catalog holds pipelines by name.
type Catalog struct {
	pipelines map[pipeline.Name]pipeline.Pipeline
}

// New returns a catalog of the pipelines, which must be valid and of different
// names.
func New(pipelines []pipeline.Pipeline) (*Catalog, error) {
	c := &Catalog{pipelines: make(map[pipeline.Name]pipeline.Pipeline, len(pipelines))}
	for _, p := range pipelines {
		if err := p.Validate(); err != nil {
			return nil, err
		}
		if _, implicit := pipeline.StageOf(p.Name); implicit {
			return nil, fmt.Errorf("pipeline %s: the prefix %q is for pipelines of one stage, which are there already", p.Name, pipeline.StagePrefix)
		}
		if _, twice := c.pipelines[p.Name]; twice {
			return nil, fmt.Errorf("pipeline %s: there are two of that name", p.Name)
		}
		c.pipelines[p.Name] = p
	}
	return c, nil
}

// shown is how much of a name that a caller made up is repeated to it.
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

// Unknown says that there is no pipeline of that name, and which there are.
func (c *Catalog) Unknown(name string) *fault.Fault {
	return fault.Newf(fault.UnknownPipeline, "there is no pipeline %.*q; there is %s", shown, name, c.list())
}

// Label returns the value of a metric's label for a request that names a
// pipeline. There are only as many values as pipelines, and two more: a caller
// can make up as many names as it likes.
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

const listed = 10

func (c *Catalog) list() string {
	names := c.Names()
	if len(names) == 0 {
		return "none"
	}
	text := make([]string, 0, listed+1)
	for _, name := range names[:min(len(names), listed)] {
		text = append(text, string(name))
	}
	if len(names) > listed {
		text = append(text, fmt.Sprintf("and %d more", len(names)-listed))
	}
	return strings.Join(text, ", ")
}
