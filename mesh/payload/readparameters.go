package payload

import (
	"fmt"

	"github.com/stagemesh/stagemesh/mesh/wire"
)

// ParameterReader reads a message's map of parameters: each of its fields by
// Read, and then Parameters. The zero ParameterReader has read none.
type ParameterReader struct {
	values Parameters
	// empty is true where a value was missing; another of its name may follow.
	empty bool
	// full is true where there are too many names.
	full bool
}

// Read reads the field that holds one entry.
func (r *ParameterReader) Read(m *wire.Message) {
	name, value := readEntry(m)
	if r.values == nil {
		r.values = Parameters{}
	}
	if len(r.values) == MaxParameters && !r.has(name) {
		r.full = true
		return
	}
	r.values[name] = value
	r.empty = r.empty || value.kind == kindNone
}

func (r *ParameterReader) has(name string) bool {
	_, ok := r.values[name]
	return ok
}

// Parameters returns the parameters that were read, nil where there are none, and
// validates them.
func (r *ParameterReader) Parameters() (Parameters, error) {
	out, err := r.found()
	if err != nil {
		return nil, err
	}
	return out, out.Validate()
}

// found returns the parameters that were read, unless they are too many or one
// has no value.
func (r *ParameterReader) found() (Parameters, error) {
	if r.full {
		return nil, tooManyParameters(MaxParameters + 1)
	}
	if !r.empty {
		return r.values, nil
	}
	for name, value := range r.values {
		if value.kind == kindNone {
			return nil, fmt.Errorf("parameter %.*q: %w", MaxName, name, errNoValue)
		}
	}
	return r.values, nil
}

func readEntry(m *wire.Message) (name string, value Value) {
	value.kind = kindNone
	entry := m.Inner()
	for entry.Next() {
		switch entry.Tag {
		case wire.KeyTag:
			name = entry.Text()
		case wire.ValueTag:
			value.read(&entry)
		}
	}
	m.Fail(entry.Err())
	return name, value
}

func (v *Value) read(m *wire.Message) {
	in := m.Inner()
	for in.Next() {
		switch in.Tag {
		case valueBoolTag:
			*v = Bool(in.Bool())
		case valueInt64Tag:
			*v = Int64(in.Int64())
		case valueDoubleTag:
			*v = Value{kind: kindDouble, bits: in.Uint64()}
		case valueStringTag:
			*v = String(in.Text())
		case valueUint64Tag:
			*v = Uint64(in.Uint64())
		}
	}
	m.Fail(in.Err())
}

// Read reads the field that holds a reference; of one that is there twice, the
// second is read into the first.
func (m *ModelRef) Read(from *wire.Message) {
	in := from.Inner()
	for in.Next() {
		switch in.Tag {
		case modelModelTag:
			m.Model, m.Alias = in.Text(), ""
		case modelAliasTag:
			m.Model, m.Alias = "", in.Text()
		case modelVersionTag:
			m.Version = in.Text()
		}
	}
	from.Fail(in.Err())
}
