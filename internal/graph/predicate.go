package graph

import (
	"encoding/binary"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// matches reports whether a predicate holds, and for which value.
func (m *Machine) matches(p *pipeline.Predicate, in parts) (_ bool, why string, _ *fault.Fault) {
	subject, values, f := m.subject(p, in)
	if f != nil {
		return false, "", f
	}
	if p.Exists != nil {
		return (values != nil) == *p.Exists, subject + map[bool]string{true: " exists", false: " is absent"}[values != nil], nil
	}
	if values == nil {
		return false, subject + " is absent", nil
	}
	if p.Index != nil {
		if *p.Index >= int64(len(values)) {
			return false, "", fault.InField(fault.InvalidInput, p.Part, "%s has %d elements, and the condition is for the one at %d", subject, len(values), *p.Index)
		}
		values = values[*p.Index : *p.Index+1]
	}
	if len(values) > 1 && !p.Any && !p.All {
		return false, "", fault.InField(fault.InvalidInput, p.Part, "%s has %d elements; the condition needs any, all or index", subject, len(values))
	}
	pattern, err := p.Pattern()
	if err != nil {
		return false, "", fault.InField(fault.Internal, p.Part, "the condition's pattern cannot be read: %w", err)
	}
	matching := 0
	for _, v := range values {
		if holds(p, pattern, v) {
			matching++
		}
	}
	if len(values) == 1 {
		why = subject + " is " + shown(values[0])
	} else {
		why = fmt.Sprintf("%d of %d elements of %s match", matching, len(values), subject)
	}
	if p.All {
		return matching == len(values), why, nil
	}
	return matching > 0, why, nil
}

// maxShown bounds the bytes of a value in a timeline.
const maxShown = 64

// shown returns a value as text of bounded length.
func shown(v payload.Value) string {
	text, isText := v.Any().(string)
	if !isText {
		return fmt.Sprint(v.Any())
	}
	if len(text) > maxShown {
		return fmt.Sprintf("%q...", strings.ToValidUTF8(text[:maxShown], ""))
	}
	return fmt.Sprintf("%q", text)
}

// subject returns the values that a predicate is about, nil where there is none, and its name.
func (m *Machine) subject(p *pipeline.Predicate, in parts) (name string, values []payload.Value, _ *fault.Fault) {
	one := func(v payload.Value, is bool) []payload.Value {
		if !is {
			return nil
		}
		return []payload.Value{v}
	}
	switch {
	case p.Parameter != "":
		v, is := m.request.Parameters[p.Parameter]
		return "parameter " + p.Parameter, one(v, is), nil
	case p.Metadata != "":
		v, is := m.request.Metadata[p.Metadata]
		return "metadata " + p.Metadata, one(payload.String(v), is), nil
	case p.Tenant:
		return "tenant", one(payload.String(m.request.Tenant), true), nil
	}
	part, is := payload.Find(in.reach, p.Part)
	if !is {
		return p.Part, nil, nil
	}
	if part.Tensor == nil || p.Exists != nil { // which asks for no element
		return p.Part, one(payload.String(string(part.Blob.Data)), true), nil
	}
	values, err := elements(*part.Tensor)
	if err != nil {
		return p.Part, nil, fault.InField(fault.InvalidInput, p.Part, "%v", err)
	}
	return p.Part, values, nil
}

// maxElements bounds the elements of a tensor that a predicate looks at.
const maxElements = 1 << 16

// elements returns the elements of a tensor, not nil.
func elements(t tensor.Tensor) ([]payload.Value, error) {
	n, _ := tensor.Elements(t.Shape)
	if n > maxElements {
		return nil, fmt.Errorf("has %d elements, and conditions are for at most %d", n, maxElements)
	}
	out := make([]payload.Value, 0, n)
	if t.Datatype == tensor.Bytes {
		all, err := t.BytesElements()
		for _, one := range all {
			out = append(out, payload.String(string(one)))
		}
		return out, err
	}
	size := t.Datatype.Size()
	for i := range int(n) {
		v, err := element(t.Datatype, t.Raw[i*size:(i+1)*size])
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}

func element(d tensor.Datatype, raw []byte) (payload.Value, error) {
	var wide [8]byte
	copy(wide[:], raw)
	bits := binary.LittleEndian.Uint64(wide[:])
	unused := 64 - 8*len(raw)
	switch d {
	case tensor.Bool:
		return payload.Bool(bits != 0), nil
	case tensor.Uint8, tensor.Uint16, tensor.Uint32, tensor.Uint64:
		return payload.Uint64(bits), nil
	case tensor.Int8, tensor.Int16, tensor.Int32, tensor.Int64:
		return payload.Int64(int64(bits<<unused) >> unused), nil
	case tensor.FP32:
		return payload.Double(float64(math.Float32frombits(uint32(bits)))), nil
	case tensor.FP64:
		return payload.Double(math.Float64frombits(bits)), nil
	case tensor.BF16:
		return payload.Double(float64(math.Float32frombits(uint32(bits) << 16))), nil
	}
	return payload.Value{}, fmt.Errorf("has datatype %s, which conditions do not support", d)
}

// holds reports whether the condition, whose pattern is compiled, is true for one value.
func holds(p *pipeline.Predicate, pattern *regexp.Regexp, v payload.Value) bool {
	switch {
	case p.Equals != nil:
		return equal(*p.Equals, v)
	case p.In != nil:
		return slices.ContainsFunc(p.In, func(one payload.Value) bool { return equal(one, v) })
	case pattern != nil:
		text, is := v.Any().(string)
		return is && pattern.MatchString(text)
	}
	number, is := v.Float()
	return is && (p.Above == nil || number > *p.Above) && (p.Below == nil || number < *p.Below)
}

// equal compares numbers as numbers.
func equal(a, b payload.Value) bool {
	i, isWhole := a.Int()
	if j, is := b.Int(); is && isWhole {
		return i == j // FP64 has not all of them
	}
	x, isNumber := a.Float()
	y, isOther := b.Float()
	if isNumber && isOther {
		return x == y
	}
	return a.Any() == b.Any()
}
