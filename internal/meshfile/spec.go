package meshfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/schema"
)

// Part is an input or an output of a stage that its runner does not describe itself.
type Part struct {
	Name string `yaml:"name"`
	// Datatype and Shape are of a tensor; -1 is any extent.
	Datatype string  `yaml:"datatype"`
	Shape    []int64 `yaml:"shape"`
	// ContentTypes are those that a blob may have.
	ContentTypes []string `yaml:"content_types"`
	// Schema is the JSON Schema of a blob's JSON, SchemaFile the file that has it.
	Schema      map[string]any `yaml:"schema"`
	SchemaFile  string         `yaml:"schema_file,path"`
	Optional    bool           `yaml:"optional"`
	Description string         `yaml:"description"`
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
	out := runner.PartSpec{
		Name: p.Name, Datatype: tensor.Datatype(p.Datatype), Shape: p.Shape,
		ContentTypes: p.ContentTypes, Optional: p.Optional, Description: p.Description,
	}
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
		return nil, fmt.Errorf("schema_file: %s is no object of JSON: %w", path, err)
	}
	return data, nil
}
