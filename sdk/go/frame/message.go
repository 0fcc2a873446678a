package frame

import (
	"math"
	"unicode/utf8"
)

// Message is one of the protocol's: a pointer to a struct of this package.
type Message interface {
	// kind is the message's type on the wire.
	kind() string
	// read reads all keys, and refuses what is no value of its key.
	read(s *scanner)
	// write writes all keys but type.
	write(w *writer)
	// check refuses what is wrong beyond single values, in a message that came or
	// is to be sent with a body of so many bytes.
	check(body int64) error
}

// Kind returns the message's type on the wire, for logs.
func Kind(m Message) string { return m.kind() }

// blank returns an empty message of the type; nil where there is none.
func blank(kind string) Message {
	switch kind {
	case "hello":
		return &Hello{}
	case "welcome":
		return &Welcome{}
	case "state":
		return &State{}
	case "ready":
		return &Ready{}
	case "predict":
		return &Predict{}
	case "result":
		return &Result{}
	case "chunk":
		return &Chunk{}
	case "error":
		return &Error{}
	case "cancel":
		return &Cancel{}
	case "ping":
		return &Ping{}
	case "pong":
		return &Pong{}
	case "shutdown":
		return &Stop{}
	case "load":
		return &Load{}
	case "unload":
		return &Unload{}
	}
	return nil
}

// Decode reads a header, without holding its places against a body. Its errors
// wrap ErrViolation.
func Decode(header []byte) (Message, error) { return decode(header, math.MaxInt64) }

func decode(header []byte, body int64) (Message, error) {
	if !utf8.Valid(header) {
		return nil, violation("header: it is no UTF-8")
	}
	text := string(header)
	kind, err := kindOf(text)
	if err != nil {
		return nil, violation("header: %w", err)
	}
	m := blank(kind)
	if m == nil {
		return nil, violation("header: type %q is not known", clip(kind))
	}
	s := scanner{text: text}
	m.read(&s)
	s.end()
	if err := s.failure(); err != nil {
		return nil, violation("%s: %w", kind, err)
	}
	if err := m.check(body); err != nil {
		return nil, violation("%s: %w", kind, err)
	}
	return m, nil
}

var typeKeys = keys{1, []string{"type"}}

// kindOf returns the type that a header says first.
func kindOf(header string) (string, error) {
	s := scanner{text: header}
	o := s.object(&typeKeys)
	kind := ""
	if o.more() {
		kind = s.string()
	}
	return kind, s.failure()
}
