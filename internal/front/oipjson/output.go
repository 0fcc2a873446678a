package oipjson

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// AppendTensor appends the tensor of an output part as an object of the
// protocol's outputs: {"name", "datatype", "shape", "parameters"?, "data"},
// with flat data.
func AppendTensor(dst []byte, p payload.Part) ([]byte, error) {
	path := "outputs." + p.Name
	if err := p.Tensor.Validate(); err != nil {
		return dst, invalidOutput(path, err)
	}
	dst, err := AppendHead(dst, p)
	if err != nil {
		return dst, err
	}
	dst, err = appendData(append(dst, `,"data":[`...), path, *p.Tensor)
	return append(dst, `]}`...), err
}

// AppendHead appends the beginning of such an object, up to the data.
func AppendHead(dst []byte, p payload.Part) (_ []byte, err error) {
	dst = AppendString(append(dst, `{"name":`...), p.Name)
	dst = AppendString(append(dst, `,"datatype":`...), string(p.Tensor.Datatype))
	dst = append(dst, `,"shape":[`...)
	for i, extent := range p.Tensor.Shape {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, extent, 10)
	}
	dst = append(dst, ']')
	if len(p.Parameters) > 0 {
		dst, err = AppendParameters(append(dst, `,"parameters":`...), "outputs."+p.Name, p.Parameters)
	}
	return dst, err
}

func invalidOutput(path string, err error) error {
	return fault.Newf(fault.RunnerOutputInvalid, "%s: %w", path, err)
}

// AppendString appends a JSON string. Bytes that are not UTF-8 become U+FFFD.
func AppendString(dst []byte, s string) []byte {
	if !plain(s) {
		quoted, _ := jsontext.AppendQuote(dst, s)
		if strings.ContainsAny(s, "\u2028\u2029") {
			quoted = append(dst, lineEnds.Replace(string(quoted[len(dst):]))...)
		}
		return quoted
	}
	dst = append(dst, '"')
	dst = append(dst, s...)
	return append(dst, '"')
}

// lineEnds escapes what is an end of a line to some who read answers line by line.
var lineEnds = strings.NewReplacer("\u2028", `\u2028`, "\u2029", `\u2029`)

// plain reports whether s is ASCII that needs no escape in a JSON string.
func plain(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c == '"' || c == '\\' || c >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// AppendParameters appends parameters as an object. Messages begin with the path.
func AppendParameters(dst []byte, path string, p payload.Parameters) ([]byte, error) {
	values := make(map[string]any, len(p))
	for name, value := range p {
		values[name] = value.Any()
	}
	out, err := json.Marshal(values)
	if err != nil {
		return dst, fault.Newf(fault.RunnerOutputInvalid, "%s.parameters: JSON has neither NaN nor infinity", path)
	}
	return append(dst, out...), nil
}

// appendData appends the elements of a valid tensor.
func appendData(dst []byte, path string, t tensor.Tensor) ([]byte, error) {
	if t.Datatype == tensor.Bytes {
		return appendTexts(dst, path, t)
	}
	number := formatOf(t.Datatype)
	if number == nil {
		return dst, unsupportedOutput(path, string(t.Datatype))
	}
	size := t.Datatype.Size()
	for at := 0; at < len(t.Raw); at += size {
		if at > 0 {
			dst = append(dst, ',')
		}
		var ok bool
		if dst, ok = number(dst, t.Raw[at:at+size]); !ok {
			return dst, fault.Newf(fault.RunnerOutputInvalid, "%s.data[%d] is NaN or infinite, which JSON cannot represent; ask by gRPC or Connect", path, at/size)
		}
	}
	return dst, nil
}

func appendTexts(dst []byte, path string, t tensor.Tensor) ([]byte, error) {
	elements, err := t.BytesElements()
	if err != nil {
		return dst, err
	}
	for i, e := range elements {
		if !utf8.Valid(e) {
			return dst, unsupportedOutput(fmt.Sprintf("%s.data[%d]", path, i), "BYTES that are not UTF-8")
		}
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = AppendString(dst, string(e))
	}
	return dst, nil
}

func unsupportedOutput(path, what string) error {
	return fault.Newf(fault.NotSupported, "%s: %s has no form in JSON; ask by gRPC or Connect", path, what)
}

// format appends one element, or returns false where JSON cannot represent it.
type format func(dst, raw []byte) ([]byte, bool)

// formatOf returns nil for the datatypes that JSON cannot represent.
func formatOf(d tensor.Datatype) format {
	switch d {
	case tensor.Bool:
		return func(dst, raw []byte) ([]byte, bool) { return strconv.AppendBool(dst, raw[0] != 0), true }
	case tensor.Int8, tensor.Int16, tensor.Int32, tensor.Int64:
		unused := 64 - 8*d.Size() // bits above the sign
		return func(dst, raw []byte) ([]byte, bool) {
			return strconv.AppendInt(dst, int64(unsignedOf(raw)<<unused)>>unused, 10), true
		}
	case tensor.Uint8, tensor.Uint16, tensor.Uint32, tensor.Uint64:
		return func(dst, raw []byte) ([]byte, bool) { return strconv.AppendUint(dst, unsignedOf(raw), 10), true }
	case tensor.FP32:
		return func(dst, raw []byte) ([]byte, bool) {
			return appendFloat(dst, float64(math.Float32frombits(binary.LittleEndian.Uint32(raw))), 32)
		}
	case tensor.FP64:
		return func(dst, raw []byte) ([]byte, bool) {
			return appendFloat(dst, math.Float64frombits(binary.LittleEndian.Uint64(raw)), 64)
		}
	}
	return nil
}

func unsignedOf(raw []byte) uint64 {
	n := uint64(0)
	for i, b := range raw {
		n |= uint64(b) << (8 * i)
	}
	return n
}

func appendFloat(dst []byte, f float64, bits int) ([]byte, bool) {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return dst, false
	}
	return strconv.AppendFloat(dst, f, 'g', -1, bits), true
}
