package frame

import "fmt"

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
	Name      string `json:"error"`
	Message   string `json:"message"`
	Traceback string `json:"traceback,omitempty"`
}

var errorKeys = keys{4, []string{"type", "kind", "error", "message", "batch", "traceback"}}

func (*Error) kind() string { return "error" }

func (m *Error) read(s *scanner) {
	o := s.object(&errorKeys)
	for o.more() {
		switch o.key {
		case "batch":
			n := s.batch()
			m.Batch = &n
		case "kind":
			m.Kind = s.string()
		case "error":
			m.Name = s.string()
		case "message":
			m.Message = s.string()
		case "traceback":
			m.Traceback = s.string()
		default:
			s.skip()
		}
	}
}

func (m *Error) write(w *writer) {
	if m.Batch != nil {
		w.batch("batch", *m.Batch)
	}
	w.text("kind", m.Kind)
	w.text("error", m.Name)
	w.text("message", m.Message)
	w.textOr("traceback", m.Traceback)
}

func (m *Error) check(int64) error {
	switch m.Kind {
	case Exception, OutOfMemory, Protocol, Unsupported:
		return nil
	}
	return fmt.Errorf("kind: %q is none", clip(m.Kind))
}
