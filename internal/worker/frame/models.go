package frame

import (
	"fmt"
	"strings"
	"unicode"
)

// MaxModel is the longest identifier of a model, in bytes.
const MaxModel = 255

// Memory is memory of the host and of its devices, in bytes.
type Memory struct {
	Host   int64 `json:"host,omitempty"`
	Device int64 `json:"device,omitempty"`
}

func (m *Memory) fields(c *coder) {
	integer(c, "host", &m.Host, 0, maxNumber, optional)
	integer(c, "device", &m.Device, 0, maxNumber, optional)
}

func (c *coder) memory(name string, v *Memory) {
	if c.field(name, optional, *v == Memory{}) {
		c.object(v)
		c.done(name)
	}
}

// ModelLimits are the limits of a worker with Models.
type ModelLimits struct {
	// Capacity bounds the sizes of all models; 0 means the welcome's. DefaultSize is the
	// size of a model whose size is not known.
	Capacity    Memory `json:"capacity,omitzero"`
	DefaultSize Memory `json:"default_size,omitzero"`
	// LoadSlots is how many models load at a time; 0 means 1. LoadTimeout is how long a load
	// may take, in milliseconds; 0 leaves that to the host.
	LoadSlots   int   `json:"load_slots,omitempty"`
	LoadTimeout int64 `json:"load_timeout,omitempty"`
}

func (m *ModelLimits) fields(c *coder) {
	c.memory("capacity", &m.Capacity)
	c.memory("default_size", &m.DefaultSize)
	integer(c, "load_slots", &m.LoadSlots, 1, MaxSlots, optional)
	integer(c, "load_timeout", &m.LoadTimeout, 1, maxCount, optional)
	capacity, size := m.Capacity, m.DefaultSize
	if (c.writing || c.atEnd()) && (capacity.Host > 0 && size.Host > capacity.Host || capacity.Device > 0 && size.Device > capacity.Device) {
		c.failAt("default_size", "it exceeds the capacity")
	}
}

// Request is a Load, an Unload or a Size.
type Request interface {
	Message
	Request() *Load
}

// Load loads a model.
type Load struct {
	// Load is the number of the request, which the answer repeats.
	Load  uint64 `json:"load"`
	Model string `json:"model"`
	// ModelType, Source and Options are the model's in its registry.
	ModelType string            `json:"model_type,omitempty"`
	Source    string            `json:"source,omitempty"`
	Options   map[string]string `json:"options,omitempty"`
	// Timeout is when the host is going to cancel, in milliseconds; 0 is never.
	Timeout int64 `json:"timeout,omitempty"`
}

// Unload unloads a model or cancels its load; it needs no more than Load and Model.
type Unload struct{ Load }

// Size asks for the size of a model.
type Size struct{ Load }

func (*Load) kind() string   { return "load" }
func (*Unload) kind() string { return "unload" }
func (*Size) kind() string   { return "size" }

// Request implements Request.
func (m *Load) Request() *Load { return m }

func (m *Load) fields(c *coder) {
	integer(c, "load", &m.Load, 0, maxNumber, required)
	c.text("model", &m.Model, required)
	c.text("model_type", &m.ModelType, optional)
	c.text("source", &m.Source, optional)
	table(c, "options", &m.Options, optional, (*coder).textValue)
	integer(c, "timeout", &m.Timeout, 1, maxNumber, optional)
}

func (m *Load) check(int64) error {
	if m.Model == "" || len(m.Model) > MaxModel || strings.ContainsFunc(m.Model, unicode.IsControl) {
		return fmt.Errorf("model: it has %d bytes; 1 to %d are possible, and no control characters", len(m.Model), MaxModel)
	}
	return nil
}

// Answer ends a Request: Loaded a Load, Unloaded an Unload, Sized a Size. An Error does too.
type Answer interface {
	Message
	Answer() *Loaded
}

// Loaded describes a loaded model.
type Loaded struct {
	Load uint64 `json:"load"`
	// Size is 0 where it is not known.
	Size Memory `json:"size,omitzero"`
	// MaxConcurrency is how many batches of the model run at a time; 0 is as many as there
	// are slots.
	MaxConcurrency int `json:"max_concurrency,omitempty"`
	// Spec is the model's own; nil where the worker's applies.
	Spec *Spec `json:"spec,omitempty"`
}

// Unloaded has no more than Load.
type Unloaded struct{ Loaded }

// Sized has no more than Load and Size.
type Sized struct{ Loaded }

func (*Loaded) kind() string   { return "loaded" }
func (*Unloaded) kind() string { return "unloaded" }
func (*Sized) kind() string    { return "sized" }

// Answer implements Answer.
func (m *Loaded) Answer() *Loaded { return m }

func (m *Loaded) fields(c *coder) {
	integer(c, "load", &m.Load, 0, maxNumber, required)
	c.memory("size", &m.Size)
	integer(c, "max_concurrency", &m.MaxConcurrency, 1, MaxSlots, optional)
	member(c, "spec", &m.Spec)
}

func (m *Loaded) check(body int64) error { return m.Spec.check(body) }
