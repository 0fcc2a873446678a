package oipjson

import "github.com/stagemesh/stagemesh/mesh/msgpack"

// values is where a walk reads the data of a tensor.
type values interface {
	// most is at least as many as there can be elements.
	most() int64
	// opens reports whether a list is next, and nests whether another begins it.
	opens() bool
	nests() bool
	// array takes the list, and calls element for each of its elements, which takes it.
	array(element func(i int) error) error
	// scalar takes what is next as one element.
	scalar(dst []byte, take element) ([]byte, error)
	// pieces takes a string, and hands over its value piece by piece.
	pieces(piece func([]byte)) error
	// again returns the same values, to be read a second time.
	again() values
	// unspoken says of a datatype that no list has it, and how to send it.
	unspoken(path, datatype string) error
}

var (
	_ values = (*scanner)(nil)
	_ values = (*packed)(nil)
)

// most counts a byte for each element, and one before it.
func (s *scanner) most() int64 { return int64(len(s.data)-s.at) / 2 }

func (s *scanner) opens() bool { return s.next() == '[' }

func (s *scanner) nests() bool {
	ahead := scanner{data: s.data, at: s.at + 1}
	return ahead.opens()
}

func (s *scanner) scalar(dst []byte, take element) ([]byte, error) { return take(dst, s) }

func (s *scanner) pieces(piece func([]byte)) error {
	if s.next() != '"' {
		return noText()
	}
	return s.string(piece)
}

func (s *scanner) again() values {
	out := *s
	return &out
}

// packed is data in MessagePack: what is next is the whole of value. Its numbers are
// taken as JSON says them, so that both forms are held against the same rules.
type packed struct {
	value   []byte
	scratch []byte
}

// maxScalar is more than a number of 64 bits takes as JSON, in bytes.
const maxScalar = 64

func (p *packed) most() int64 { return int64(len(p.value)) }

func (p *packed) opens() bool { return msgpack.IsList(p.value) }

func (p *packed) nests() bool {
	nests := false
	_ = msgpack.Elements(p.value, func(_ int, first []byte) error {
		nests = msgpack.IsList(first)
		return errStop
	})
	return nests
}

func (p *packed) array(element func(i int) error) error {
	return msgpack.Elements(p.value, func(i int, value []byte) error {
		p.value = value
		return element(i)
	})
}

func (p *packed) scalar(dst []byte, take element) (_ []byte, err error) {
	p.scratch = p.scratch[:0]
	switch {
	case msgpack.IsMap(p.value):
		p.scratch = append(p.scratch, "{}"...)
	case msgpack.IsList(p.value):
		p.scratch = append(p.scratch, "[]"...)
	case msgpack.IsText(p.value):
		p.scratch = append(p.scratch, `""`...)
	default:
		if p.scratch, err = msgpack.AppendAsJSON(p.scratch, p.value, maxScalar); err != nil {
			return dst, err
		}
	}
	return take(dst, &scanner{data: p.scratch})
}

func (p *packed) pieces(piece func([]byte)) error {
	if !msgpack.IsText(p.value) {
		return noText()
	}
	text, err := msgpack.Text(p.value)
	if err == nil {
		piece(text)
	}
	return err
}

func (p *packed) unspoken(path, datatype string) error { return noList(path, datatype) }

func (p *packed) again() values { return &packed{value: p.value} }

func noText() error { return unfit("is no BYTES: use a string") }
