package frame

import (
	"encoding/json"
	"errors"
	"fmt"
)

// Message is a message of the protocol: a pointer to a struct of this package.
type Message interface {
	// kind is the message's type on the wire.
	kind() string
	// fields names the message's keys but type.
	fielder
}

// check refuses what is wrong with a message beyond single values. The body of the message
// has so many bytes.
func check(m Message, body int64) error {
	if m, ok := m.(interface{ check(body int64) error }); ok {
		return m.check(body)
	}
	return nil
}

// Kind returns the message's type on the wire, for logs.
func Kind(m Message) string { return m.kind() }

// messages makes an empty message of each type.
var messages = map[string]func() Message{
	"hello":    func() Message { return &Hello{} },
	"welcome":  func() Message { return &Welcome{} },
	"state":    func() Message { return &State{} },
	"ready":    func() Message { return &Ready{} },
	"predict":  func() Message { return &Predict{} },
	"result":   func() Message { return &Result{} },
	"chunk":    func() Message { return &Chunk{} },
	"error":    func() Message { return &Error{} },
	"cancel":   func() Message { return &Cancel{} },
	"ping":     func() Message { return &Ping{} },
	"pong":     func() Message { return &Pong{} },
	"shutdown": func() Message { return &Stop{} },
	"load":     func() Message { return &Load{} },
	"loaded":   func() Message { return &Loaded{} },
	"unload":   func() Message { return &Unload{} },
	"unloaded": func() Message { return &Unloaded{} },
	"size":     func() Message { return &Size{} },
	"sized":    func() Message { return &Sized{} },
}

// readType reads a header up to its type.
func (c *coder) readType() (kind string) {
	c.open('{', "an object")
	for first := true; c.more('}', first); first = false {
		if c.readName() != "type" {
			c.skip()
			continue
		}
		if kind = c.readString(); c.err != nil {
			c.within("type")
		}
		return kind
	}
	if c.err == nil {
		c.failAt("type", "it is missing")
	}
	return ""
}

// Stream is the capability of a worker that sends chunks.
const Stream = "stream"

// Prefetch is the capability of a worker of one slot that takes one batch more, and runs
// it next.
const Prefetch = "prefetch"

// Models is the capability of a worker that loads and unloads several models.
const Models = "models"

// Hello is the first message of a worker.
type Hello struct {
	// Protocols are the versions that the worker supports.
	Protocols []int `json:"protocols"`
	// Name is the name of the worker's code, SDK the library and its version.
	Name         string   `json:"name"`
	SDK          string   `json:"sdk,omitempty"`
	PID          int      `json:"pid"`
	Capabilities []string `json:"capabilities,omitempty"`
}

func (*Hello) kind() string { return "hello" }

func (m *Hello) fields(c *coder) {
	list(c, "protocols", &m.Protocols, required, countValue)
	c.text("name", &m.Name, required)
	c.text("sdk", &m.SDK, optional)
	integer(c, "pid", &m.PID, 0, maxCount, required)
	list(c, "capabilities", &m.Capabilities, optional, (*coder).textValue)
}

func (m *Hello) check(int64) error {
	if len(m.Protocols) == 0 {
		return errors.New("protocols: at least one is required")
	}
	return nil
}

// Welcome is the host's answer to Hello.
type Welcome struct {
	Protocol int `json:"protocol"`
	// Options are the worker's options in the stage's configuration: a JSON object.
	// None is an empty one.
	Options json.RawMessage `json:"options"`
	Devices []string        `json:"devices,omitempty"`
	// Slots is how many batches the host may give the worker at a time, MaxSize the rows
	// of the largest batch; 0 means 1.
	Slots   int `json:"slots,omitempty"`
	MaxSize int `json:"max_size,omitempty"`
	// MaxFrame is the longest body that either side may send, in bytes.
	MaxFrame     int64    `json:"max_frame"`
	Capabilities []string `json:"capabilities,omitempty"`
	// Memory is what the models of the worker may take; 0 is as much as there is.
	Memory Memory `json:"memory,omitzero"`
}

func (*Welcome) kind() string { return "welcome" }

func (m *Welcome) fields(c *coder) {
	integer(c, "protocol", &m.Protocol, 1, maxCount, required)
	c.raw("options", &m.Options, required)
	list(c, "devices", &m.Devices, optional, (*coder).textValue)
	integer(c, "slots", &m.Slots, 1, MaxSlots, optional)
	integer(c, "max_size", &m.MaxSize, 1, maxCount, optional)
	integer(c, "max_frame", &m.MaxFrame, 0, maxNumber, required)
	list(c, "capabilities", &m.Capabilities, optional, (*coder).textValue)
	c.memory("memory", &m.Memory)
}

// WorkerState is a state of a worker's lifecycle.
type WorkerState string

// The states that a worker reports.
const (
	Startup  WorkerState = "STARTUP"
	Failed   WorkerState = "ERROR"
	Shutdown WorkerState = "SHUTDOWN"
)

// State is a worker's report of its state.
type State struct {
	State   WorkerState `json:"state"`
	Message string      `json:"message,omitempty"`
}

func (*State) kind() string { return "state" }

func (m *State) fields(c *coder) {
	c.choice("state", (*string)(&m.State), required, string(Startup), string(Failed), string(Shutdown))
	c.text("message", &m.Message, optional)
}

// Ready asks for batches.
type Ready struct {
	// Slots is how many more batches the worker takes; 0 means 1.
	Slots int `json:"slots,omitempty"`
	// Spec is in the first Ready, and in no other.
	Spec *Spec `json:"spec,omitempty"`
	// Models is in the first Ready of a worker with Models, and in no other.
	Models *ModelLimits `json:"models,omitempty"`
	// Engine names what runs the batches; empty where the worker does not say.
	Engine string `json:"engine,omitempty"`
}

func (*Ready) kind() string { return "ready" }

func (m *Ready) fields(c *coder) {
	integer(c, "slots", &m.Slots, 1, MaxSlots, optional)
	member(c, "spec", &m.Spec)
	member(c, "models", &m.Models)
	c.text("engine", &m.Engine, optional)
}

func (m *Ready) check(body int64) error {
	if len(m.Engine) > maxEngine {
		return fmt.Errorf("engine: has %d bytes, %d are allowed", len(m.Engine), maxEngine)
	}
	return m.Spec.check(body)
}

// maxEngine is in bytes: hosts publish the text.
const maxEngine = 200

// Predict is a batch.
type Predict struct {
	Batch uint64 `json:"batch"`
	// Trace is the W3C traceparent of the batch's span; empty where no item is traced.
	Trace string `json:"trace,omitempty"`
	Model *Model `json:"model,omitempty"`
	Items []Item `json:"items"`
	Parts []Part `json:"parts"`
	// Warmup is true where nobody waits for the answer.
	Warmup bool `json:"warmup,omitempty"`
}

func (*Predict) kind() string { return "predict" }

func (m *Predict) fields(c *coder) {
	integer(c, "batch", &m.Batch, 0, maxNumber, required)
	c.text("trace", &m.Trace, optional)
	member(c, "model", &m.Model)
	list(c, "items", &m.Items, required, each[Item])
	list(c, "parts", &m.Parts, required, each[Part])
	c.flag("warmup", &m.Warmup)
}

func (m *Predict) check(body int64) error {
	if len(m.Items) == 0 {
		return errors.New("items: at least one is required")
	}
	if len(m.Items) > MaxItems {
		return fmt.Errorf("items: %d, at most %d are allowed", len(m.Items), MaxItems)
	}
	total := int64(0)
	for i := range m.Items {
		total += int64(max(1, m.Items[i].Rows))
	}
	if err := checkBatch(m.Parts, len(m.Items), body); err != nil {
		return err
	}
	for i := range m.Parts {
		if p := &m.Parts[i]; p.Item == nil && p.Shape[0] != total {
			return fmt.Errorf("parts[%d]: shape: %d rows of items that have %d", i, p.Shape[0], total)
		}
	}
	return nil
}

// Item is one request of a batch.
type Item struct {
	ID string `json:"id"`
	// Rows is the item's extent on axis 0; 0 means 1.
	Rows       int        `json:"rows,omitempty"`
	Parameters Parameters `json:"parameters,omitempty"`
	// InputParameters has the parameters of single inputs, by the input's name.
	InputParameters map[string]Parameters `json:"input_parameters,omitempty"`
	Metadata        map[string]string     `json:"metadata,omitempty"`
	// Timeout is how long somebody waits for the item, in milliseconds; 0 is for ever,
	// so round a remainder of less than one up.
	Timeout int64 `json:"timeout,omitempty"`
}

func (i *Item) fields(c *coder) {
	c.text("id", &i.ID, required)
	integer(c, "rows", &i.Rows, 1, maxCount, optional)
	table(c, "parameters", (*map[string]any)(&i.Parameters), optional, parameterValue)
	table(c, "input_parameters", &i.InputParameters, optional, (*coder).parameters)
	table(c, "metadata", &i.Metadata, optional, (*coder).textValue)
	integer(c, "timeout", &i.Timeout, 1, maxNumber, optional)
}

// Model names one of a stage's models.
type Model struct {
	ID      string `json:"id,omitempty"`
	Alias   string `json:"alias,omitempty"`
	Version string `json:"version,omitempty"`
}

func (m *Model) fields(c *coder) {
	c.text("id", &m.ID, optional)
	c.text("alias", &m.Alias, optional)
	c.text("version", &m.Version, optional)
}

// Result ends a batch.
type Result struct {
	Batch uint64 `json:"batch"`
	Parts []Part `json:"parts,omitempty"`
	// Faults are of items that have no outputs.
	Faults   []Fault    `json:"faults,omitempty"`
	Metadata []Metadata `json:"metadata,omitempty"`
	// Spans are of a batch with a trace.
	Spans []Span `json:"spans,omitempty"`
}

func (*Result) kind() string { return "result" }

func (m *Result) fields(c *coder) {
	integer(c, "batch", &m.Batch, 0, maxNumber, required)
	list(c, "parts", &m.Parts, optional, each[Part])
	list(c, "faults", &m.Faults, optional, each[Fault])
	list(c, "metadata", &m.Metadata, optional, each[Metadata])
	list(c, "spans", &m.Spans, optional, each[Span])
}

func (m *Result) check(body int64) error {
	for i := range m.Faults {
		if m.Faults[i].Reason == "" {
			return fmt.Errorf("faults[%d]: reason: is required", i)
		}
	}
	return checkBatch(m.Parts, MaxItems, body)
}

// Fault is the outcome of one item.
type Fault struct {
	Item    int    `json:"item"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
	// Field is the input that caused the fault.
	Field string `json:"field,omitempty"`
	// Exception is what the code raised, where the message is a general sentence.
	Exception *Raised `json:"exception,omitempty"`
}

func (f *Fault) fields(c *coder) {
	integer(c, "item", &f.Item, 0, MaxItems-1, required)
	c.text("reason", &f.Reason, required)
	c.text("message", &f.Message, required)
	c.text("field", &f.Field, optional)
	member(c, "exception", &f.Exception)
}

// Raised is an exception of the worker's code.
type Raised struct {
	// Name is the name of its type in the worker's language.
	Name      string `json:"error"`
	Message   string `json:"message"`
	Traceback string `json:"traceback,omitempty"`
}

func (r *Raised) fields(c *coder) {
	c.text("error", &r.Name, required)
	c.text("message", &r.Message, required)
	c.text("traceback", &r.Traceback, optional)
}

// Metadata is what the caller of one item gets beside its outputs.
type Metadata struct {
	Item   int               `json:"item"`
	Values map[string]string `json:"values"`
}

func (m *Metadata) fields(c *coder) {
	integer(c, "item", &m.Item, 0, MaxItems-1, required)
	table(c, "values", &m.Values, required, (*coder).textValue)
}

// Span is a timed part of a batch's run.
type Span struct {
	Name string `json:"name"`
	// Parent is the index of an earlier span of the list; nil is the batch.
	Parent *int `json:"parent,omitempty"`
	// Start and End are in microseconds since 1970.
	Start      int64      `json:"start"`
	End        int64      `json:"end"`
	Attributes Parameters `json:"attributes,omitempty"`
	// Error is the type of the error that ended it.
	Error string `json:"error,omitempty"`
}

func (s *Span) fields(c *coder) {
	c.text("name", &s.Name, required)
	pointer(c, "parent", &s.Parent, maxCount)
	integer(c, "start", &s.Start, 0, maxNumber, required)
	integer(c, "end", &s.End, 0, maxNumber, required)
	table(c, "attributes", (*map[string]any)(&s.Attributes), optional, parameterValue)
	c.text("error", &s.Error, optional)
}

// Chunk is a part of an item's answer, ahead of its outcome. Its parts belong to
// that item, whether they name it or not.
type Chunk struct {
	Batch uint64 `json:"batch"`
	Item  int    `json:"item"`
	Parts []Part `json:"parts"`
}

func (*Chunk) kind() string { return "chunk" }

func (m *Chunk) fields(c *coder) {
	integer(c, "batch", &m.Batch, 0, maxNumber, required)
	integer(c, "item", &m.Item, 0, MaxItems-1, required)
	list(c, "parts", &m.Parts, required, each[Part])
}

func (m *Chunk) check(body int64) error {
	for i, p := range m.Parts {
		if p.Item != nil && *p.Item != m.Item {
			return fmt.Errorf("parts[%d]: item: %d in a chunk of item %d", i, *p.Item, m.Item)
		}
	}
	return checkParts(m.Parts, MaxItems, body)
}

// Cancel cancels items of a batch: all of them where Items is empty.
type Cancel struct {
	Batch uint64 `json:"batch"`
	Items []int  `json:"items,omitempty"`
}

func (*Cancel) kind() string { return "cancel" }

func (m *Cancel) fields(c *coder) {
	integer(c, "batch", &m.Batch, 0, maxNumber, required)
	list(c, "items", &m.Items, optional, indexValue)
	if c.present() && len(m.Items) == 0 {
		c.failAt("items", "at least one is required")
	}
}

// Kinds of an Error.
const (
	Exception   = "exception"
	OutOfMemory = "out_of_memory"
	Protocol    = "protocol"
	Unsupported = "unsupported"
	// InvalidModel means that a model cannot be loaded, or that the worker does not have
	// the model of a batch. Cancelled means that a load was cancelled.
	InvalidModel = "invalid_model"
	Cancelled    = "cancelled"
)

// Error reports that a batch failed as a whole or a request about a model or, without
// either, the worker or the connection.
type Error struct {
	Batch *uint64 `json:"batch,omitempty"`
	Load  *uint64 `json:"load,omitempty"`
	Kind  string  `json:"kind"`
	// Name is the name of the error's type in its language.
	Name      string `json:"error"`
	Message   string `json:"message"`
	Traceback string `json:"traceback,omitempty"`
	// Spans are of a batch with a trace.
	Spans []Span `json:"spans,omitempty"`
}

func (*Error) kind() string { return "error" }

func (m *Error) fields(c *coder) {
	pointer(c, "batch", &m.Batch, maxNumber)
	pointer(c, "load", &m.Load, maxNumber)
	c.choice("kind", &m.Kind, required, Exception, OutOfMemory, Protocol, Unsupported, InvalidModel, Cancelled)
	c.text("error", &m.Name, required)
	c.text("message", &m.Message, required)
	c.text("traceback", &m.Traceback, optional)
	list(c, "spans", &m.Spans, optional, each[Span])
}

func (m *Error) check(int64) error {
	switch {
	case m.Batch != nil && m.Load != nil:
		return errors.New("load: it is an error of a batch")
	case m.Kind == Cancelled && m.Load == nil, m.Kind == InvalidModel && m.Load == nil && m.Batch == nil:
		return fmt.Errorf("kind: %q is about a model", m.Kind)
	}
	return nil
}

// Ping asks an idle worker for a Pong.
type Ping struct {
	N uint64 `json:"n"`
}

func (*Ping) kind() string { return "ping" }

func (m *Ping) fields(c *coder) { integer(c, "n", &m.N, 0, maxNumber, required) }

// Pong answers a Ping by its number.
type Pong struct {
	N uint64 `json:"n"`
}

func (*Pong) kind() string { return "pong" }

func (m *Pong) fields(c *coder) { integer(c, "n", &m.N, 0, maxNumber, required) }

// Stop is shutdown: take no more batches, finish the others, exit.
type Stop struct {
	// Timeout is how long that may take, in milliseconds.
	Timeout int64 `json:"timeout"`
}

func (*Stop) kind() string { return "shutdown" }

func (m *Stop) fields(c *coder) { integer(c, "timeout", &m.Timeout, 0, maxNumber, required) }
