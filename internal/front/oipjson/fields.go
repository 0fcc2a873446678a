package oipjson

import (
	"slices"
	"strconv"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// maxFields bounds the members of a flat object: inputs, parameters and an id.
const maxFields = payload.MaxParts + payload.MaxParameters + 1

// Field is a member of a flat object of the generate extension. The model's inputs
// decide how its value is converted.
type Field struct {
	Name string
	// JSON is the value's text, unchanged.
	JSON []byte
	// depth is the nesting depth of the value in its body.
	depth int
}

// DecodeFields reads an object. Each member may come once.
func DecodeFields(text []byte) ([]Field, error) {
	s := &scanner{data: text}
	var out []Field
	seen := map[string]bool{}
	err := s.object(func(key string) error {
		switch {
		case seen[key]:
			return invalidField(clip(key), "is there twice")
		case len(out) == maxFields:
			return invalidField(clip(key), "is one member too many; at most %d are allowed", maxFields)
		}
		seen[key] = true
		s.next()
		field := Field{Name: key, depth: s.depth}
		start := s.at
		err := s.skip()
		field.JSON = s.data[start:s.at:s.at]
		out = append(out, field)
		return err
	})
	if err == nil {
		err = s.end()
	}
	return out, classify(err)
}

func (f Field) scanner() *scanner { return &scanner{data: f.JSON, depth: f.depth} }

// Text returns the value if it is a string.
func (f Field) Text() (string, bool) {
	s := f.scanner()
	if s.next() != '"' {
		return "", false
	}
	out, err := s.text()
	return string(out), err == nil
}

// Bytes returns the value if it is a string. It allocates from the memory.
func (f Field) Bytes(memory *budget.Account) (out []byte, ok bool, err error) {
	s := f.scanner()
	if s.next() != '"' {
		return nil, false, nil
	}
	text, err := s.quoted()
	if err != nil {
		return nil, false, classify(err)
	}
	size := text.size()
	if err := memory.Input(clip(f.Name), int64(size)); err != nil {
		return nil, false, err
	}
	return text.append(make([]byte, 0, size)), true, nil
}

// Scalar reports whether the value is a string, a number or a boolean.
func (f Field) Scalar() bool {
	switch f.scanner().next() {
	case '{', '[', 'n':
		return false
	}
	return true
}

// Null reports whether the value is null.
func (f Field) Null() bool { return f.scanner().next() == 'n' }

// Elements calls do with each element of a list, whose name has its index. It reports false for another
// value.
func (f Field) Elements(do func(element Field) error) (isList bool, err error) {
	s := f.scanner()
	if s.next() != '[' {
		return false, nil
	}
	return true, classify(s.array(func(i int) error {
		s.next()
		start := s.at
		if err := s.skip(); err != nil {
			return err
		}
		return do(Field{Name: f.Name + "[" + strconv.Itoa(i) + "]", JSON: s.data[start:s.at:s.at], depth: s.depth})
	}))
}

// Parameter returns a scalar value as the value of a parameter.
func (f Field) Parameter() (payload.Value, error) {
	d := decoder{scanner: *f.scanner()}
	out, err := d.parameter(clip(f.Name))
	return out, classify(err)
}

// Parameters returns the value, an object of scalars, as parameters.
func (f Field) Parameters() (payload.Parameters, error) {
	d := decoder{scanner: *f.scanner()}
	out, err := d.parameters(clip(f.Name))
	return out, classify(err)
}

// Tensor returns the value as a tensor of the datatype: a scalar as one element, and nested lists
// as axes. The shape has at least the rank of the expected one, with leading axes of one. Tensor allocates
// from the memory.
func (f Field) Tensor(d tensor.Datatype, expected []int64, memory *budget.Account) (tensor.Tensor, error) {
	path, take := clip(f.Name), one
	switch f.scanner().next() {
	case '[':
		take = elements
	case '{', 'n':
		return tensor.Tensor{}, invalidField(path, "must be a string, number or boolean, or a list of these")
	}
	shape, err := f.scanner().extents(expected)
	if err != nil {
		return tensor.Tensor{}, classify(err)
	}
	out := tensor.Tensor{Datatype: d, Shape: shape}
	out.Raw, err = take(f.scanner(), path, out, memory)
	return out, classify(err)
}

// extents returns the extents of nested lists, by the first element of each, with leading axes of one up
// to the expected rank. An empty list is axis 0; its other extents are the expected ones, 0 where they are open.
func (s scanner) extents(expected []int64) (out []int64, err error) {
	rank := min(max(len(expected), 1), tensor.MaxRank)
	for s.next() == '[' && len(out) < rank && err == nil {
		n, first := int64(0), s
		err = s.array(func(int) error {
			if n++; n == 1 {
				first = s
			}
			return s.skip()
		})
		out, s = append(out, n), first
		if n == 0 {
			break
		}
	}
	if len(out) == 1 && out[0] == 0 && len(expected) == rank {
		for _, n := range expected[1:] {
			out = append(out, max(n, 0))
		}
	}
	return append(slices.Repeat([]int64{1}, rank-len(out)), out...), err
}

// AppendValue appends a tensor's data without the tensor's fields: one element as a
// scalar, more as a list, in row-major order.
func AppendValue(dst []byte, p payload.Part) ([]byte, error) {
	path := "outputs." + p.Name
	if err := p.Tensor.Validate(); err != nil {
		return dst, invalidOutput(path, err)
	}
	if n, _ := tensor.Elements(p.Tensor.Shape); n == 1 {
		return appendData(dst, path, *p.Tensor)
	}
	dst, err := appendData(append(dst, '['), path, *p.Tensor)
	return append(dst, ']'), err
}
