package frame

import (
	"encoding/json"
	"fmt"
)

// Message is one of the protocol's: a pointer to a struct of this package.
type Message interface {
	// kind is the message's type on the wire.
	kind() string
	// check says what is wrong with a message that came.
	check() error
}

// Names of capabilities.
const (
	// Stream says that the worker sends chunks.
	Stream = "stream"
)

// Hello is what a worker says first.
type Hello struct {
	// Protocols are the versions that the worker speaks.
	Protocols []int `json:"protocols"`
	// Name is that of the worker's code, SDK the library and its version.
	Name         string   `json:"name"`
	SDK          string   `json:"sdk,omitempty"`
	PID          int      `json:"pid"`
	Capabilities []string `json:"capabilities,omitempty"`
}

// Welcome is the host's answer to Hello.
type Welcome struct {
	Protocol int `json:"protocol"`
	// Options are the worker's, from the stage's configuration: a JSON object.
	Options json.RawMessage `json:"options"`
	Devices []string        `json:"devices,omitempty"`
	// Slots is how many batches the host may have with the worker at a time; 0
	// means 1. MaxSize is the rows of the largest batch.
	Slots   int `json:"slots,omitempty"`
	MaxSize int `json:"max_size,omitempty"`
	// MaxFrame is the longest body that either side may send, in bytes.
	MaxFrame     int64    `json:"max_frame"`
	Capabilities []string `json:"capabilities,omitempty"`
}

// WorkerState is where a worker is in its life.
type WorkerState string

// The states that a worker says.
const (
	Startup  WorkerState = "STARTUP"
	Failed   WorkerState = "ERROR"
	Shutdown WorkerState = "SHUTDOWN"
)

// State is what a worker says about itself.
type State struct {
	State   WorkerState `json:"state"`
	Message string      `json:"message,omitempty"`
}

// Ready asks for batches.
type Ready struct {
	// Slots is how many more batches the worker takes; 0 means 1.
	Slots int `json:"slots,omitempty"`
	// Spec is in the first Ready, and in no other.
	Spec *Spec `json:"spec,omitempty"`
}

// Predict is a batch.
type Predict struct {
	Batch uint64 `json:"batch"`
	Items []Item `json:"items"`
	Parts []Part `json:"parts"`
	Model *Model `json:"model,omitempty"`
	// Warmup says that nobody waits for the answer.
	Warmup bool `json:"warmup,omitempty"`
}

// Model names one of a stage's models.
type Model struct {
	ID      string `json:"id,omitempty"`
	Alias   string `json:"alias,omitempty"`
	Version string `json:"version,omitempty"`
}

// Item is one request of a batch.
type Item struct {
	ID string `json:"id"`
	// Rows is the item's extent on axis 0; 0 means 1.
	Rows       int               `json:"rows,omitempty"`
	Parameters Parameters        `json:"parameters,omitempty"`
	Metadata   map[string]string `json:"metadata,omitempty"`
	// Timeout is how long somebody waits for it, in milliseconds; 0 is for ever.
	Timeout int64 `json:"timeout,omitempty"`
}

// Result ends a batch.
type Result struct {
	Batch uint64 `json:"batch"`
	Parts []Part `json:"parts,omitempty"`
	// Faults are of items that have no outputs.
	Faults   []Fault    `json:"faults,omitempty"`
	Metadata []Metadata `json:"metadata,omitempty"`
}

// Fault is the outcome of one item.
type Fault struct {
	Item    int    `json:"item"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
	// Field is the input that is to blame.
	Field string `json:"field,omitempty"`
}

// Metadata is what the caller of one item gets beside its outputs.
type Metadata struct {
	Item   int               `json:"item"`
	Values map[string]string `json:"values"`
}

// Chunk is a part of an item's answer, ahead of its outcome.
type Chunk struct {
	Batch uint64 `json:"batch"`
	Item  int    `json:"item"`
	Parts []Part `json:"parts"`
}

// Kinds of an Error.
const (
	Exception   = "exception"
	OutOfMemory = "out_of_memory"
	Protocol    = "protocol"
	Unsupported = "unsupported"
)

// Error says that a batch failed as a whole or, without one, the worker or the
// connection.
type Error struct {
	Batch *uint64 `json:"batch,omitempty"`
	Kind  string  `json:"kind"`
	// Name is that of the error's type, in its language.
	Name      string `json:"error,omitempty"`
	Message   string `json:"message,omitempty"`
	Traceback string `json:"traceback,omitempty"`
}

// Cancel says that nobody waits for items any more: all where there are none.
type Cancel struct {
	Batch uint64 `json:"batch"`
	Items []int  `json:"items,omitempty"`
}

// Ping asks an idle worker whether it is there, and Pong is its answer.
type (
	Ping struct {
		N uint64 `json:"n"`
	}
	Pong struct {
		N uint64 `json:"n"`
	}
)

// Stop is shutdown: take no more batches, end what is there, leave.
type Stop struct {
	// Timeout is how long that may take, in milliseconds.
	Timeout int64 `json:"timeout"`
}

// Load and Unload are reserved, for stages that serve several models.
type (
	Load struct {
		Model Model `json:"model"`
	}
	Unload struct {
		Model Model `json:"model"`
	}
)

func (*Hello) kind() string   { return "hello" }
func (*Welcome) kind() string { return "welcome" }
func (*State) kind() string   { return "state" }
func (*Ready) kind() string   { return "ready" }
func (*Predict) kind() string { return "predict" }
func (*Result) kind() string  { return "result" }
func (*Chunk) kind() string   { return "chunk" }
func (*Error) kind() string   { return "error" }
func (*Cancel) kind() string  { return "cancel" }
func (*Ping) kind() string    { return "ping" }
func (*Pong) kind() string    { return "pong" }
func (*Stop) kind() string    { return "shutdown" }
func (*Load) kind() string    { return "load" }
func (*Unload) kind() string  { return "unload" }

// Kind returns the message's type on the wire, for logs.
func Kind(m Message) string { return m.kind() }

// blank returns an empty message of the type; nil where there is none.
func blank(kind string) Message {
	for _, m := range []Message{
		&Hello{}, &Welcome{}, &State{}, &Ready{}, &Predict{}, &Result{}, &Chunk{}, &Error{},
		&Cancel{}, &Ping{}, &Pong{}, &Stop{}, &Load{}, &Unload{},
	} {
		if m.kind() == kind {
			return m
		}
	}
	return nil
}

// Decode reads a header. Its errors wrap ErrViolation.
func Decode(header []byte) (Message, error) {
	var of struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(header, &of); err != nil {
		return nil, violation("header: %w", err)
	}
	m := blank(of.Type)
	if m == nil {
		return nil, violation("header: type %.40q is not known", of.Type)
	}
	if err := json.Unmarshal(header, m); err != nil {
		return nil, violation("%s: %w", of.Type, err)
	}
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrViolation, of.Type, err)
	}
	return m, nil
}
