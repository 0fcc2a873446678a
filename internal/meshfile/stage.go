package meshfile

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/scale"
	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Stage is a stage and its hosts.
type Stage struct {
	// Runner has one key: the kind, with that kind's settings.
	Runner map[string]config.Section `yaml:"runner"`
	// Hosts is how many hosts of the stage a process that runs the whole mesh
	// has, 1 where 0.
	Hosts int `yaml:"hosts"`
	// MinHosts and MaxHosts bound the hosts that are wanted for the stage. 0 of MinHosts lets it have
	// none; nil means 1, or 0 with gateway.scaler. 0 of MaxHosts means no bound.
	MinHosts *int `yaml:"min_hosts"`
	MaxHosts int  `yaml:"max_hosts"`
	// Inputs and Outputs add to the runner's spec.
	Inputs  []Part `yaml:"inputs"`
	Outputs []Part `yaml:"outputs"`
	stagehost.Config
}

// Host returns the settings of one host of a stage, with a runner of its own.
// The host's id, its version, logger and meter are for the caller to fill in.
func (f *File) Host(stage string) (stagehost.Settings, error) {
	s, ok := f.Stages[stage]
	if !ok {
		return stagehost.Settings{}, f.At(fmt.Errorf("there is no stage %q; there are %s", stage, strings.Join(f.StageNames(), ", ")), "stages")
	}
	out := stagehost.Settings{
		Config: s.Config,
		Mesh:   pipeline.MeshName(f.Mesh), Stage: pipeline.StageName(stage),
		Bus:     bus.Settings{URL: f.NATS.URL, Auth: f.NATS.Broker},
		Results: f.Results, DeadLetters: f.DeadLetters,
	}
	// A number that is 0 means the default.
	standard := stagehost.DefaultBatch()
	out.Batch.MaxSize, out.Batch.MaxBytes = cmp.Or(out.Batch.MaxSize, standard.MaxSize), cmp.Or(out.Batch.MaxBytes, standard.MaxBytes)
	out.Queue.MaxAge, out.HostGrace = f.Gateway.MaxTimeout, f.Gateway.HostGrace
	var err, inputs, outputs, hosts error
	out.Inputs, inputs = parts("inputs", s.Inputs)
	out.Outputs, outputs = parts("outputs", s.Outputs)
	if s.Hosts < 0 || s.Hosts > maxHosts {
		hosts = fmt.Errorf("hosts: %d is not between 1 and %d", s.Hosts, maxHosts)
	}
	written := errors.Join(inputs, outputs, hosts, s.checkBounds())
	if out.Runner, err = f.runner(stage); err != nil {
		return out, errors.Join(err, f.At(errors.Join(written, out.Config.Validate()), "stages", stage))
	}
	return out, f.At(errors.Join(written, validateHost(out)), "stages", stage)
}

// maxWanted bounds max_hosts and min_hosts.
const maxWanted = 10000

// checkBounds checks how many hosts may be wanted. Errors begin with the key.
func (s Stage) checkBounds() error {
	if s.MinHosts != nil && (*s.MinHosts < 0 || *s.MinHosts > maxWanted) {
		return fmt.Errorf("min_hosts: %d is not between 0 and %d", *s.MinHosts, maxWanted)
	}
	if s.MaxHosts < 0 || s.MaxHosts > maxWanted {
		return fmt.Errorf("max_hosts: %d is not between 1 and %d", s.MaxHosts, maxWanted)
	}
	if s.MinHosts != nil && s.MaxHosts > 0 && *s.MinHosts > s.MaxHosts {
		return fmt.Errorf("max_hosts: %d is less than the %d of min_hosts", s.MaxHosts, *s.MinHosts)
	}
	return nil
}

// bounds returns the bounds of the stages that have some.
func (f *File) bounds() map[pipeline.StageName]scale.Bounds {
	out := map[pipeline.StageName]scale.Bounds{}
	for name, s := range f.Stages {
		if s.MinHosts == nil && s.MaxHosts == 0 {
			continue
		}
		b := scale.Bounds{Min: 1, Max: s.MaxHosts}
		switch {
		case s.MinHosts != nil:
			b.Min = *s.MinHosts
		case f.Gateway.Scaler != nil:
			b.Min = 0
		}
		out[pipeline.StageName(name)] = b
	}
	return out
}

// maxHosts bounds the hosts of one stage in one process.
const maxHosts = 64

// validateHost checks a host's settings except the mesh's, which are checked
// elsewhere.
func validateHost(s stagehost.Settings) error {
	s.Mesh, s.Host = "any", "any"
	if err := s.Validate(); err != nil {
		return err
	}
	// Many runners describe themselves only once they have started.
	_, err := schema.Complete(s.Runner.Spec(), s.Inputs, s.Outputs)
	return err
}

// Kind is a kind of runner that a stage may have: the key below "runner", and
// what builds a runner from the settings there.
type Kind struct {
	key   string
	build func(settings config.Section, folder string) (runner.Runner, error)
	// missing returns the error of a file that the settings name and that is not there.
	missing func(settings config.Section, folder string) error
}

// KindOf returns the kind of that key whose settings are an S, and whose
// runners the function builds. Settings with paths in them have a method
// RelativeTo(folder string) S, which is called first, and those with files that hosts read
// MissingFile() error.
func KindOf[S any, R runner.Runner](key string, build func(S) (R, error)) Kind {
	read := func(section config.Section, folder string) (settings S, err error) {
		err = section.Decode(&settings)
		if s, ok := any(settings).(interface{ RelativeTo(folder string) S }); ok {
			settings = s.RelativeTo(folder)
		}
		return settings, err
	}
	return Kind{key: key, build: func(section config.Section, folder string) (runner.Runner, error) {
		settings, err := read(section, folder)
		if err != nil {
			return nil, err
		}
		built, err := build(settings)
		if err != nil {
			return nil, section.At(err)
		}
		return built, nil
	}, missing: func(section config.Section, folder string) error {
		settings, err := read(section, folder)
		if s, ok := any(settings).(interface{ MissingFile() error }); ok && err == nil {
			return section.At(s.MissingFile())
		}
		return nil
	}}
}

// MissingFiles returns whether another machine may run the stages, and an error for each model or
// worker that one names and that is not here.
func (f *File) MissingFiles() (mayBeElsewhere bool, _ error) {
	var errs []error
	for _, stage := range f.StageNames() {
		for _, kind := range f.kinds {
			if section, ok := f.Stages[stage].Runner[kind.key]; ok {
				errs = append(errs, kind.missing(section, f.folder))
			}
		}
	}
	return f.Joinable(), errors.Join(errs...)
}

// runner returns a new runner of the kind that the stage asks for.
func (f *File) runner(stage string) (runner.Runner, error) {
	asked := slices.Sorted(maps.Keys(f.Stages[stage].Runner))
	at := func(err error) error { return f.At(err, "stages", stage, "runner") }
	switch len(asked) {
	case 0:
		return nil, at(fmt.Errorf("is required; use %s, with its settings or {}", f.kindNames()))
	case 1:
	default:
		return nil, at(fmt.Errorf("%s; a stage has one", strings.Join(asked, " and ")))
	}
	i := slices.IndexFunc(f.kinds, func(k Kind) bool { return k.key == asked[0] })
	if i < 0 {
		return nil, f.At(fmt.Errorf("this program has no such runner; it has %s", f.kindNames()), "stages", stage, "runner", asked[0])
	}
	return f.kinds[i].build(f.Stages[stage].Runner[asked[0]], f.folder)
}

// kindNames lists the kinds for a message.
func (f *File) kindNames() string {
	var out string
	for i, kind := range f.kinds {
		switch i {
		case 0:
		case len(f.kinds) - 1:
			out += " or "
		default:
			out += ", "
		}
		out += kind.key
	}
	return out
}

// Part is an input or an output of a stage that its runner does not describe itself.
type Part struct {
	runner.PartSpec
	// Schema is the JSON Schema of a blob's JSON, SchemaFile the file that has it.
	Schema     map[string]any `yaml:"schema"`
	SchemaFile string         `yaml:"schema_file,path"`
}

// parts returns the specs of a list of parts; errors begin with its key.
func parts(key string, listed []Part) ([]runner.PartSpec, error) {
	var errs []error
	var out []runner.PartSpec
	for i, p := range listed {
		spec, err := p.spec()
		if err != nil {
			errs = append(errs, fmt.Errorf("%s[%d].%w", key, i, err))
		}
		out = append(out, spec)
	}
	return out, errors.Join(errs...)
}

// spec returns the part's spec; errors begin with a key.
func (p Part) spec() (runner.PartSpec, error) {
	out := p.PartSpec
	if p.Datatype != "" && p.Shape == nil {
		return out, errors.New("datatype: a tensor has a shape too, such as [-1, 64], or [] for a scalar")
	}
	var err error
	switch {
	case p.Schema != nil && p.SchemaFile != "":
		err = errors.New("schema_file: there is a schema already; leave one of them out")
	case p.SchemaFile != "":
		out.Schema, err = readSchema(p.SchemaFile)
	case p.Schema != nil:
		if out.Schema, err = json.Marshal(p.Schema); err != nil {
			err = fmt.Errorf("schema: %w", err)
		}
	}
	return out, err
}

// readSchema reads a file that has a JSON Schema, in JSON.
func readSchema(path string) (json.RawMessage, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("schema_file: %w", err)
	}
	defer file.Close() //nolint:errcheck // it was only read
	data, err := io.ReadAll(io.LimitReader(file, schema.MaxSchema+1))
	if err != nil {
		return nil, fmt.Errorf("schema_file: %w", err)
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(data, &object); err != nil && len(data) <= schema.MaxSchema {
		return nil, fmt.Errorf("schema_file: %s is not an object of JSON: %w", path, err)
	}
	return data, nil
}
