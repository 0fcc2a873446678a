package frame

import (
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"
)

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

var helloKeys = keys{4, []string{"type", "protocols", "name", "pid", "sdk", "capabilities"}}

func (*Hello) kind() string { return "hello" }

func (m *Hello) read(s *scanner) {
	o := s.object(&helloKeys)
	for o.more() {
		switch o.key {
		case "protocols":
			m.Protocols = list(s, func(to *int, s *scanner) { *to = s.count(0) })
		case "name":
			m.Name = s.string()
		case "pid":
			m.PID = s.count(0)
		case "sdk":
			m.SDK = s.string()
		case "capabilities":
			m.Capabilities = s.strings()
		default:
			s.skip()
		}
	}
}

func (m *Hello) write(w *writer) {
	writeList(w, "protocols", m.Protocols, writeInt)
	w.text("name", m.Name)
	w.textOr("sdk", m.SDK)
	w.number("pid", int64(m.PID))
	w.textsOr("capabilities", m.Capabilities)
}

func (m *Hello) check(int64) error {
	if len(m.Protocols) == 0 {
		return errors.New("protocols: there are none")
	}
	for _, version := range m.Protocols {
		if err := checkCount("protocols", version, 0, maxCount); err != nil {
			return err
		}
	}
	return checkCount("pid", m.PID, 0, maxCount)
}

// Welcome is the host's answer to Hello.
type Welcome struct {
	Protocol int `json:"protocol"`
	// Options are the worker's, from the stage's configuration: a JSON object. None
	// is an empty one.
	Options json.RawMessage `json:"options"`
	Devices []string        `json:"devices,omitempty"`
	// Slots is how many batches the host may have with the worker at a time, and
	// MaxSize the rows of the largest batch; 0 means 1.
	Slots   int `json:"slots,omitempty"`
	MaxSize int `json:"max_size,omitempty"`
	// MaxFrame is the longest body that either side may send, in bytes.
	MaxFrame     int64    `json:"max_frame"`
	Capabilities []string `json:"capabilities,omitempty"`
}

var welcomeKeys = keys{4, []string{
	"type", "protocol", "options", "max_frame", "devices", "slots", "max_size", "capabilities",
}}

func (*Welcome) kind() string { return "welcome" }

func (m *Welcome) read(s *scanner) {
	o := s.object(&welcomeKeys)
	for o.more() {
		switch o.key {
		case "protocol":
			m.Protocol = s.count(1)
		case "options":
			m.Options = json.RawMessage(s.anObject())
		case "max_frame":
			m.MaxFrame = s.whole(0, maxNumber)
		case "devices":
			m.Devices = s.strings()
		case "slots":
			m.Slots = s.count(1)
		case "max_size":
			m.MaxSize = s.count(1)
		case "capabilities":
			m.Capabilities = s.strings()
		default:
			s.skip()
		}
	}
}

func (m *Welcome) write(w *writer) {
	w.number("protocol", int64(m.Protocol))
	w.key("options")
	if len(m.Options) == 0 {
		w.buf = append(w.buf, "{}"...)
	} else {
		w.buf = append(w.buf, m.Options...)
	}
	w.textsOr("devices", m.Devices)
	w.numberOr("slots", int64(m.Slots))
	w.numberOr("max_size", int64(m.MaxSize))
	w.number("max_frame", m.MaxFrame)
	w.textsOr("capabilities", m.Capabilities)
}

func (m *Welcome) check(int64) error {
	return errors.Join(
		checkCount("protocol", m.Protocol, 1, maxCount),
		checkCount("slots", m.Slots, 0, MaxSlots),
		checkCount("max_size", m.MaxSize, 0, maxCount),
		checkObject("options", m.Options, 1),
	)
}

// checkObject checks bytes that are written as they are: a JSON object that is at
// some depth in the header.
func checkObject(key string, text json.RawMessage, depth int) error {
	if len(text) == 0 {
		return nil
	}
	if !utf8.Valid(text) {
		return fmt.Errorf("%s: no UTF-8", key)
	}
	s := scanner{text: string(text), depth: depth}
	s.anObject()
	s.end()
	if err := s.failure(); err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	return nil
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

var stateKeys = keys{2, []string{"type", "state", "message"}}

func (*State) kind() string { return "state" }

func (m *State) read(s *scanner) {
	o := s.object(&stateKeys)
	for o.more() {
		switch o.key {
		case "state":
			m.State = WorkerState(s.string())
		case "message":
			m.Message = s.string()
		default:
			s.skip()
		}
	}
}

func (m *State) write(w *writer) {
	w.text("state", string(m.State))
	w.textOr("message", m.Message)
}

func (m *State) check(int64) error {
	switch m.State {
	case Startup, Failed, Shutdown:
		return nil
	}
	return fmt.Errorf("state: %q is none", clip(string(m.State)))
}

// Ready asks for batches.
type Ready struct {
	// Slots is how many more batches the worker takes; 0 means 1.
	Slots int `json:"slots,omitempty"`
	// Spec is in the first Ready, and in no other.
	Spec *Spec `json:"spec,omitempty"`
}

var readyKeys = keys{1, []string{"type", "slots", "spec"}}

func (*Ready) kind() string { return "ready" }

func (m *Ready) read(s *scanner) {
	o := s.object(&readyKeys)
	for o.more() {
		switch o.key {
		case "slots":
			m.Slots = s.count(1)
		case "spec":
			m.Spec = &Spec{}
			m.Spec.read(s)
		default:
			s.skip()
		}
	}
}

func (m *Ready) write(w *writer) {
	w.numberOr("slots", int64(m.Slots))
	if m.Spec != nil {
		w.key("spec")
		m.Spec.write(w)
	}
}

func (m *Ready) check(body int64) error {
	if err := checkCount("slots", m.Slots, 0, MaxSlots); err != nil {
		return err
	}
	if m.Spec == nil {
		return nil
	}
	if err := m.Spec.check(body); err != nil {
		return fmt.Errorf("spec.%w", err)
	}
	return nil
}

// Ping asks an idle worker whether it is there.
type Ping struct {
	N uint64 `json:"n"`
}

// Pong answers a Ping by its number.
type Pong struct {
	N uint64 `json:"n"`
}

var pingKeys = keys{2, []string{"type", "n"}}

func (*Ping) kind() string      { return "ping" }
func (m *Ping) read(s *scanner) { m.N = readN(s) }
func (m *Ping) write(w *writer) { w.batch("n", m.N) }

func (*Ping) check(int64) error { return nil }

func (*Pong) kind() string      { return "pong" }
func (m *Pong) read(s *scanner) { m.N = readN(s) }
func (m *Pong) write(w *writer) { w.batch("n", m.N) }

func (*Pong) check(int64) error { return nil }

func readN(s *scanner) (n uint64) {
	o := s.object(&pingKeys)
	for o.more() {
		if o.key == "n" {
			n = s.batch()
		} else {
			s.skip()
		}
	}
	return n
}

// Stop is shutdown: take no more batches, end what is there, leave.
type Stop struct {
	// Timeout is how long that may take, in milliseconds.
	Timeout int64 `json:"timeout"`
}

var stopKeys = keys{2, []string{"type", "timeout"}}

func (*Stop) kind() string { return "shutdown" }

func (m *Stop) read(s *scanner) {
	o := s.object(&stopKeys)
	for o.more() {
		if o.key == "timeout" {
			m.Timeout = s.whole(0, maxNumber)
		} else {
			s.skip()
		}
	}
}

func (m *Stop) write(w *writer) { w.number("timeout", m.Timeout) }

func (*Stop) check(int64) error { return nil }
