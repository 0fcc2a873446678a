package oipjson

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// DetectPacked is Detect of valid MessagePack. It passes over keys that are not strings; decoding
// rejects them.
func DetectPacked(data []byte) bool {
	_, ok := msgpack.Lookup(data, "inputs", 0, "datatype")
	return ok
}

// DecodePacked decodes a request in MessagePack, in which data may be binary: then it shares the
// bytes. The rest is decoded as JSON, which takes at most limit bytes.
func DecodePacked(data []byte, limit int, memory *budget.Account) (*Request, error) {
	if !msgpack.IsMap(data) {
		return nil, fault.New(fault.InvalidInput, "the body must be a map")
	}
	inInputs := false
	isData := func(depth int, key []byte) bool {
		if depth < 2 {
			inInputs = depth == 0 && string(key) == "inputs"
		}
		return depth == 2 && inInputs && string(key) == "data"
	}
	text, release, err := unpack(data, &msgpack.Conversion{Limit: limit, Skip: isData}, memory)
	defer release()
	if err != nil {
		return nil, err
	}
	return decode(&decoder{scanner: scanner{data: text, packed: data}, known: unknown, memory: memory})
}

// Unpack returns a document in MessagePack as JSON, in reserved memory until release is called.
func Unpack(data []byte, memory *budget.Account) (text []byte, release func(), err error) {
	const growth = len(`\u0000`) // of a byte in a string
	return unpack(data, &msgpack.Conversion{Limit: growth * len(data)}, memory)
}

func unpack(data []byte, c *msgpack.Conversion, memory *budget.Account) (text []byte, release func(), err error) {
	reserved := int64(0)
	c.Reserve = func(n int64) error {
		err := memory.Reserve(n)
		if err == nil {
			reserved += n
		}
		return err
	}
	text, err = c.JSON(data)
	if e, ok := errors.AsType[*msgpack.Error](err); ok {
		err = unpackFault(data, e)
	}
	return text, func() { memory.Release(reserved) }, err
}

// unpackFault returns INVALID_INPUT with the place of what JSON cannot represent. An input is
// called by its name.
func unpackFault(data []byte, e *msgpack.Error) error {
	path, i := e.At(""), 0
	if path == "" {
		return fault.Newf(fault.InvalidInput, "the body %s", e.Problem())
	}
	if n, _ := fmt.Sscanf(path, "inputs[%d]", &i); n == 1 {
		packedName, _ := msgpack.Lookup(data, "inputs", i, "name")
		name, err := msgpack.Text(packedName)
		if err == nil && len(name) <= payload.MaxName {
			path = payload.Path("inputs", i, string(name)) + strings.TrimPrefix(path, payload.Path("inputs", i, ""))
		}
	}
	return invalidField(path, "%s", e.Problem())
}

// unpacked returns the data of a tensor, whose offset is next.
func (s *scanner) unpacked() []byte {
	text, _ := s.number()
	offset, _ := strconv.Atoi(string(text))
	value, _, _ := msgpack.Next(s.packed[offset:])
	return value
}

// packed is data in MessagePack; value is all of the next value. It converts numbers
// to JSON first, so that both forms follow the same rules.
type packed struct {
	value []byte
	json  scanner
}

func (p *packed) most() int64 { return int64(len(p.value)) }

func (p *packed) opens() bool { return msgpack.IsList(p.value) }

func (p *packed) nests() bool {
	first, _ := msgpack.Lookup(p.value, 0)
	return msgpack.IsList(first)
}

func (p *packed) array(element func(i int) error) error {
	return msgpack.Elements(p.value, func(i int, value []byte) error {
		p.value = value
		return element(i)
	})
}

func (p *packed) scalar(dst []byte, take element) (_ []byte, err error) {
	text := p.json.data[:0]
	switch {
	case msgpack.IsMap(p.value):
		text = append(text, "{}"...)
	case msgpack.IsList(p.value):
		text = append(text, "[]"...)
	case msgpack.IsText(p.value):
		text = append(text, `""`...)
	default:
		if text, err = msgpack.AppendScalar(text, p.value); err != nil {
			return dst, err
		}
	}
	p.json = scanner{data: text}
	return take(dst, &p.json)
}

func (p *packed) string() (rawText, error) {
	if !msgpack.IsText(p.value) {
		return rawText{}, noText()
	}
	text, err := msgpack.Text(p.value)
	return rawText{text: text}, err
}

func (p *packed) unsupported(path, datatype string) error { return noList(path, datatype) }

func (p *packed) again() values { return &packed{value: p.value} }
