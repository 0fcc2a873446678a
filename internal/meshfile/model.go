package meshfile

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
)

// Alias is a movable name for a model.
type Alias struct {
	Model string `yaml:"model"`
	// Owner is who may change it.
	Owner string `yaml:"owner"`
	// Weights are percents of the requests for other models.
	Weights map[string]int `yaml:"weights"`
	// Shadow also runs some requests.
	Shadow Shadow `yaml:"shadow"`
}

// Shadow is a model that runs percent of the requests of an alias.
type Shadow struct {
	Model   string `yaml:"model"`
	Percent int    `yaml:"percent"`
}

// ReadModels reads the models and aliases of a file, sorted by name: of a mesh's, or of one
// that has nothing else.
func ReadModels(path string) ([]model.Model, []models.AliasChange, error) {
	f, err := read(path, File{pipelinesOnly: true})
	if err != nil {
		return nil, nil, err
	}
	if len(f.Models)+len(f.Aliases) == 0 {
		return nil, nil, f.At(errors.New("there are none"), "models")
	}
	return f.models()
}

// models returns the models and aliases.
func (f *File) models() (out []model.Model, aliases []models.AliasChange, err error) {
	var errs []error
	if f.Registry.None && len(f.Models)+len(f.Aliases) > 0 {
		errs = append(errs, f.At(errors.New("models and aliases need a registry; remove registry.none"), "models"))
	}
	for _, name := range slices.Sorted(maps.Keys(f.Models)) {
		in := f.Models[name]
		in.ID = model.ID(name)
		if in.MinReplicas < 0 {
			errs = append(errs, f.At(errors.New("min_replicas: is negative"), "models", name))
			continue
		}
		m, err := models.FromProto("", models.ToProto(in))
		if err != nil {
			errs = append(errs, f.At(keyError(err), "models", name))
		}
		if _, here := f.Stages[string(in.Stage)]; err == nil && !here && !f.pipelinesOnly && !f.Joinable() {
			errs = append(errs, f.At(fmt.Errorf("stage: there is no stage %q", in.Stage), "models", name))
		}
		out = append(out, m)
	}
	for _, name := range slices.Sorted(maps.Keys(f.Aliases)) {
		in := f.Aliases[name]
		route := &meshv1.AliasRoute{Model: in.Model, Weights: map[string]uint32{}}
		for id, weight := range in.Weights {
			route.Weights[id] = percent(weight)
		}
		if in.Shadow != (Shadow{}) {
			route.Shadow = &meshv1.AliasShadow{Model: in.Shadow.Model, Percent: percent(in.Shadow.Percent)}
		}
		alias := models.AliasChange{Name: model.ID(name), Route: route, Owner: in.Owner}
		if err := alias.Validate(); err != nil {
			errs = append(errs, f.At(keyError(err), "aliases", name))
		}
		aliases = append(aliases, alias)
	}
	return out, aliases, errors.Join(errs...)
}

// percent returns a number that is valid only if the given one is.
func percent(n int) uint32 { return uint32(max(0, min(n, 1000))) }

// keyError returns a fault as an error that begins with its key in the file.
func keyError(err error) error {
	return errors.New(strings.TrimPrefix(fault.From(err).Message, "route."))
}
