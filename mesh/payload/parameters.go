package payload

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"
)

// Value is a parameter's value: bool, int64, uint64, float64 or string. The
// zero Value is the empty string.
type Value struct {
	kind kind
	bits uint64
	text string
}

type kind uint8

const (
	kindString kind = iota
	kindBool
	kindInt64
	kindUint64
	kindDouble
	// kindNone is no value: only while one is read.
	kindNone
)

// String returns the value of a string parameter.
func String(s string) Value { return Value{kind: kindString, text: s} }

// Bool returns the value of a boolean parameter.
func Bool(b bool) Value {
	if b {
		return Value{kind: kindBool, bits: 1}
	}
	return Value{kind: kindBool}
}

// Int64 returns the value of a signed parameter.
func Int64(n int64) Value { return Value{kind: kindInt64, bits: uint64(n)} }

// Uint64 returns the value of an unsigned parameter.
func Uint64(n uint64) Value { return Value{kind: kindUint64, bits: n} }

// Double returns the value of a floating-point parameter.
func Double(f float64) Value { return Value{kind: kindDouble, bits: math.Float64bits(f)} }

// Any returns the value as bool, int64, uint64, float64 or string.
func (v Value) Any() any {
	switch v.kind {
	case kindBool:
		return v.bits == 1
	case kindInt64:
		return int64(v.bits)
	case kindUint64:
		return v.bits
	case kindDouble:
		return math.Float64frombits(v.bits)
	default:
		return v.text
	}
}

// Int returns the value as an int64 where it is a whole number that fits, and
// ok false otherwise.
func (v Value) Int() (n int64, ok bool) {
	switch v.kind {
	case kindInt64:
		return int64(v.bits), true
	case kindUint64:
		return int64(v.bits), v.bits <= math.MaxInt64
	case kindDouble:
		f := math.Float64frombits(v.bits)
		return int64(f), f == math.Trunc(f) && math.Abs(f) < 1<<53
	default:
		return 0, false
	}
}

// Float returns the value as a float64 where it is a number.
func (v Value) Float() (f float64, ok bool) {
	switch v.kind {
	case kindInt64:
		return float64(int64(v.bits)), true
	case kindUint64:
		return float64(v.bits), true
	case kindDouble:
		return math.Float64frombits(v.bits), true
	default:
		return 0, false
	}
}

// Type is what values a parameter may have; empty means any.
type Type string

// The types. Any value may be a string: in a query, 3 is a number.
const (
	TypeBool   Type = "bool"
	TypeInt    Type = "int"
	TypeFloat  Type = "float"
	TypeString Type = "string"
)

// Is reports whether the value is of the type. A whole number is a float, too.
func (v Value) Is(t Type) (ok bool) {
	switch t {
	case TypeBool:
		return v.kind == kindBool
	case TypeInt:
		_, ok = v.Int()
		return ok
	case TypeFloat:
		_, ok = v.Float()
		return ok
	default:
		return true
	}
}

// String returns the value as text.
func (v Value) String() string { return fmt.Sprint(v.Any()) }

// ValueOf returns the value of a Go bool, whole number, float or string.
func ValueOf(v any) (Value, error) {
	switch v := v.(type) {
	case bool:
		return Bool(v), nil
	case int:
		return Int64(int64(v)), nil
	case int64:
		return Int64(v), nil
	case uint64:
		if v <= math.MaxInt64 {
			return Int64(int64(v)), nil
		}
		return Uint64(v), nil
	case float64:
		return Double(v), nil
	case string:
		return String(v), nil
	}
	return Value{}, fmt.Errorf("a %T is not a parameter; use a bool, a number or a string", v)
}

// UnmarshalYAML reads a value of a configuration file.
func (v *Value) UnmarshalYAML(decode func(any) error) error {
	var in any
	err := decode(&in)
	if err == nil {
		if *v, err = ValueOf(in); err != nil {
			err = errors.New("a parameter is true or false, a number or text")
		}
	}
	return err
}

// ParseValue parses a value that a person wrote: true, 3, 0.5, or else text. What only
// a program would take for a number, such as nan, 0x1p4 or 1_000, is text, and so is a
// string of JSON, such as "3".
func ParseValue(s string) Value {
	var quoted string
	if strings.HasPrefix(s, `"`) && json.Unmarshal([]byte(s), &quoted) == nil {
		return String(quoted)
	}
	if b, err := strconv.ParseBool(s); err == nil && (s == "true" || s == "false") {
		return Bool(b)
	}
	if n, err := strconv.ParseInt(s, 10, 64); err == nil {
		return Int64(n)
	}
	if n, err := strconv.ParseUint(s, 10, 64); err == nil {
		return Uint64(n)
	}
	if f, err := strconv.ParseFloat(s, 64); err == nil && strings.Trim(s, "+-.0123456789eE") == "" {
		return Double(f)
	}
	return String(s)
}

// Parameters are named values. A nil map is no parameters.
type Parameters map[string]Value

// maxListed is how many names of parameters a message lists.
const maxListed = 10

// Unread returns why a stage that declares these parameters does not read one, and whether it
// declares one of that name; "" if it reads it. A stage that declares nothing reads any.
func Unread(declared *stagev1.ParameterSpecs, name string, value Value) (why string, named bool) {
	if declared == nil {
		return "", false
	}
	names := []string{}
	for _, one := range declared.GetSpecs() {
		if one.GetName() != name {
			names = append(names, one.GetName())
			continue
		}
		if value.Is(Type(one.GetType())) {
			return "", true
		}
		expected := map[Type]string{TypeBool: "true or false", TypeInt: "a whole number", TypeFloat: "a number", TypeString: "a string"}
		return fmt.Sprintf("expects %s, got %.80q", expected[Type(one.GetType())], value.String()), true
	}
	if more := len(names) - maxListed; more > 0 {
		names = append(names[:maxListed], fmt.Sprintf("and %d more", more))
	}
	return "reads no such parameter; it reads " + cmp.Or(strings.Join(names, ", "), "none"), false
}

// Merge returns the parameters of all layers; later ones win.
func Merge(layers ...Parameters) Parameters {
	var out Parameters
	for _, layer := range layers {
		for name, value := range layer {
			if out == nil {
				out = Parameters{}
			}
			out[name] = value
		}
	}
	return out
}

// Key returns the named parameters as one string that is equal exactly when
// they are.
func (p Parameters) Key(names []string) string {
	if len(names) == 0 || len(p) == 0 {
		return ""
	}
	var b []byte
	for _, name := range slices.Sorted(slices.Values(names)) {
		if v, ok := p[name]; ok {
			b = strconv.AppendQuote(b, name)
			b = fmt.Appendf(b, "=%d:%x:%q;", v.kind, v.bits, v.text)
		}
	}
	return string(b)
}

// ParametersFromProto converts parameters from outside.
func ParametersFromProto(in map[string]*inferencev1.Value) (Parameters, error) {
	if len(in) == 0 {
		return nil, nil
	}
	if len(in) > MaxParameters {
		return nil, tooManyParameters(len(in))
	}
	out := make(Parameters, len(in))
	for name, value := range in {
		v, err := ValueFromProto(value)
		if err != nil {
			return nil, fmt.Errorf("parameter %.*q: %w", MaxName, name, err)
		}
		out[name] = v
	}
	return out, out.Validate()
}

// Validate checks that parameters can travel: their number and names are within
// bounds, and all text is UTF-8.
func (p Parameters) Validate() error {
	if len(p) == 0 {
		return nil // ranging over nothing has its price, and most parts have none
	}
	if len(p) > MaxParameters {
		return tooManyParameters(len(p))
	}
	for name, value := range p {
		err := ValidName(name)
		if value.kind == kindNone {
			err = errNoValue
		}
		if err != nil {
			return fmt.Errorf("parameter %.*q: %w", MaxName, name, err)
		}
		if !utf8.ValidString(value.text) {
			return fmt.Errorf("parameter %q: is not UTF-8", name)
		}
	}
	return nil
}

func tooManyParameters(n int) error {
	return fmt.Errorf("%d parameters, at most %d are allowed", n, MaxParameters)
}

var errNoValue = errors.New("has no value")

// ValueFromProto converts a value from the wire.
func ValueFromProto(in *inferencev1.Value) (Value, error) {
	switch v := in.GetKind().(type) {
	case *inferencev1.Value_BoolValue:
		return Bool(v.BoolValue), nil
	case *inferencev1.Value_Int64Value:
		return Int64(v.Int64Value), nil
	case *inferencev1.Value_Uint64Value:
		return Uint64(v.Uint64Value), nil
	case *inferencev1.Value_DoubleValue:
		return Double(v.DoubleValue), nil
	case *inferencev1.Value_StringValue:
		return String(v.StringValue), nil
	}
	return Value{}, errNoValue
}

// ToProto converts parameters for the wire.
func (p Parameters) ToProto() map[string]*inferencev1.Value {
	if len(p) == 0 {
		return nil
	}
	out := make(map[string]*inferencev1.Value, len(p))
	for name, value := range p {
		out[name] = value.ToProto()
	}
	return out
}

// ToProto converts the value for the wire.
func (v Value) ToProto() *inferencev1.Value {
	switch v.kind {
	case kindBool:
		return &inferencev1.Value{Kind: &inferencev1.Value_BoolValue{BoolValue: v.bits == 1}}
	case kindInt64:
		return &inferencev1.Value{Kind: &inferencev1.Value_Int64Value{Int64Value: int64(v.bits)}}
	case kindUint64:
		return &inferencev1.Value{Kind: &inferencev1.Value_Uint64Value{Uint64Value: v.bits}}
	case kindDouble:
		return &inferencev1.Value{Kind: &inferencev1.Value_DoubleValue{DoubleValue: math.Float64frombits(v.bits)}}
	default:
		return &inferencev1.Value{Kind: &inferencev1.Value_StringValue{StringValue: v.text}}
	}
}
