// Package model has what gateways and hosts agree on about the models of a stage that loads
// many: their identifiers, their records and their sizes. It is pure.
package model

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// MaxID is the longest ID of a model and the longest name of an alias, in bytes.
const MaxID = 255

// ErrInvalid means that a record or a part of it is out of bounds.
var ErrInvalid = errors.New("invalid model")

// ID identifies a model in a mesh: 1 to MaxID bytes of UTF-8 without control characters.
type ID string

// Validate checks the bounds of an ID or the name of an alias.
func (id ID) Validate() error {
	switch {
	case id == "":
		return fmt.Errorf("%w: the name is empty", ErrInvalid)
	case len(id) > MaxID:
		return fmt.Errorf("%w: the name %.40q... has %d bytes, at most %d are possible", ErrInvalid, string(id), len(id), MaxID)
	case !utf8.ValidString(string(id)) || strings.ContainsFunc(string(id), unicode.IsControl):
		return fmt.Errorf("%w: the name %q has bytes that are not UTF-8, or control characters", ErrInvalid, string(id))
	}
	return nil
}

// Options are texts by name, as a JSON object with sorted names; empty for none. As one text they
// cost the garbage collector little where thousands of models are in memory.
type Options string

// NewOptions returns options.
func NewOptions(of map[string]string) Options {
	if len(of) == 0 {
		return ""
	}
	text, _ := json.Marshal(of) // a map of strings always has a form in JSON
	return Options(text)
}

// Map returns the options by name; nil for none.
func (o Options) Map() (out map[string]string) {
	_ = json.Unmarshal([]byte(o), &out) // NewOptions has made it
	return out
}

// UnmarshalYAML reads the options of a configuration file.
func (o *Options) UnmarshalYAML(decode func(any) error) error {
	var of map[string]string
	err := decode(&of)
	*o = NewOptions(of)
	return err
}

// Size is the memory of a model, or of all models of a host, in bytes.
type Size struct {
	Host   int64 `yaml:"size,size"`
	Device int64 `yaml:"device_size,size"`
}

// Within returns the lesser limits of both sizes, where 0 is no limit.
func (s Size) Within(most Size) Size {
	lesser := func(a, b int64) int64 {
		if a == 0 || b == 0 {
			return max(a, b)
		}
		return min(a, b)
	}
	return Size{Host: lesser(s.Host, most.Host), Device: lesser(s.Device, most.Device)}
}

// Model is the record of a model. It never changes once it is registered.
type Model struct {
	ID    ID                 `yaml:"-"`
	Stage pipeline.StageName `yaml:"stage"`
	// Type groups models by what they need of a host; it may be empty.
	Type string `yaml:"type"`
	// Source is text for the runtime, such as a path below the stage's root; the mesh
	// fetches nothing.
	Source string `yaml:"source"`
	// Options are for the runtime.
	Options Options `yaml:"options"`
	// Size is a hint; zero where it is unknown.
	Size Size `yaml:",inline"`
	// MinReplicas is the number of replicas that no eviction goes below.
	MinReplicas int `yaml:"min_replicas"`
}
