// Package oipjson reads and writes tensors in the JSON of the Open Inference Protocol:
// {"inputs": [{"name", "datatype", "shape", "data"}]} in, {"outputs": [...]} out. docs/http.md
// has what each datatype is in JSON.
//
//	request, err := oipjson.Decode(text, memory)
//	parts, err := request.Parts()
//	...
//	text, err := oipjson.AppendTensor(nil, part)
//
// DecodeFields and AppendValue are for the generate extension, whose members are inputs and
// outputs by name. DecodePacked decodes a request in MessagePack by the same rules.
//
// The body is in memory already. A tensor may take a few times the size of its text (a zero and
// its comma are eight bytes of FP64), so its bytes are reserved in the account of the request before
// they are allocated. Nesting ends at MaxDepth, inputs at payload.MaxParts.
//
// The scanner is our own because encoding/json would build an interface for each of a million
// numbers, accept duplicate members, and match their names in any case. The decoder of
// github.com/go-json-experiment/json/jsontext is as fast (1.03x for a tensor of 1 KiB, 1.00x for one
// of 1 MiB, without the checks here; medians of five alternating runs). But it cannot pass over
// data that is not JSON: Detect reads broken text, and NaN in the data names its input although that
// may come after it. Its AppendUnquote grows by the length of the text, beyond what is reserved for a
// value; jsontext only checks strings with escapes.
//
// Everything is a pure function, safe for concurrent use. Errors are *fault.Fault and name the
// input and the element.
package oipjson

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Request is the body of an inference call.
type Request struct {
	// ID is the caller's own id of the call, to be echoed.
	ID         string
	Parameters payload.Parameters
	Inputs     []Input
	Outputs    []Output
}

// Input is one input tensor.
type Input struct {
	Name string
	// Tensor.Raw is nil if the JSON has no data for it. The protocol's binary
	// extension sends the data behind the JSON.
	Tensor     tensor.Tensor
	Parameters payload.Parameters
}

// Output asks for an output by name.
type Output struct {
	Name       string
	Parameters payload.Parameters
}

// Parts returns the inputs as parts. An input without data is an error.
func (r *Request) Parts() ([]payload.Part, error) {
	out := make([]payload.Part, len(r.Inputs))
	for i, in := range r.Inputs {
		if in.Tensor.Raw == nil {
			return nil, invalidField(payload.Path("inputs", i, in.Name)+".data", "is missing")
		}
		out[i] = payload.OfTensor(in.Name, in.Tensor)
		out[i].Parameters = in.Parameters
	}
	return out, nil
}

// OutputNames returns the names of the requested outputs, or nil for all.
func (r *Request) OutputNames() []string {
	var out []string
	for _, o := range r.Outputs {
		out = append(out, o.Name)
	}
	return out
}

// Detect reports whether the text of a body is a request of the Open Inference
// Protocol: an object whose member inputs is an array whose first element is an object
// with a member datatype. It reads no further than that member.
func Detect(text []byte) bool {
	s := &scanner{data: text}
	found := false
	_ = s.object(func(key string) error {
		if key != "inputs" {
			return s.skip()
		}
		return s.array(func(int) error {
			_ = s.object(func(key string) error {
				if found = key == "datatype"; found {
					return errStop
				}
				return s.skipUnchecked()
			})
			return errStop
		})
	})
	return found
}

var errStop = errors.New("enough was read")

// Decode reads a request. Its tensors are allocated from the memory, and share no
// bytes with the text.
func Decode(text []byte, memory *budget.Account) (*Request, error) {
	return DecodeKnown(text, unknown, memory)
}

// Known returns the datatype and the expected shape of the input of that name; empty where it is not known.
type Known func(name string) (d tensor.Datatype, expected []int64)

func unknown(string) (tensor.Datatype, []int64) { return "", nil }

// DecodeKnown is Decode of tensors that may lack datatype and shape where these are known. The shape
// is the data's, with leading axes of one.
func DecodeKnown(text []byte, known Known, memory *budget.Account) (*Request, error) {
	return decode(&decoder{scanner: scanner{data: text}, known: known, memory: memory})
}

func decode(d *decoder) (*Request, error) {
	var seen keys
	err := d.object(func(key string) error {
		if err := seen.add("", key); err != nil {
			return err
		}
		return d.member(key)
	})
	if err == nil {
		err = d.end()
	}
	if err != nil {
		return nil, d.classify(err)
	}
	if !slices.Contains(seen, "inputs") {
		return nil, invalidField("inputs", "is missing")
	}
	return &d.request, nil
}

// decoder is a scanner that fills a request.
type decoder struct {
	scanner

	known   Known
	memory  *budget.Account
	request Request
}

func (d *decoder) member(key string) (err error) {
	if key != "inputs" && d.next() == 'n' {
		return d.word("null")
	}
	switch key {
	case "id":
		d.request.ID, err = d.name("id")
	case "parameters":
		d.request.Parameters, err = d.parameters("parameters")
	case "inputs":
		err = d.array(d.input)
	case "outputs":
		err = d.array(d.output)
	default:
		err = d.skip()
	}
	return err
}

func (d *decoder) output(i int) error {
	path := fmt.Sprintf("outputs[%d]", i)
	if i == payload.MaxParts {
		return invalidField("outputs", "at most %d are allowed", payload.MaxParts)
	}
	var out Output
	var seen keys
	err := d.object(func(key string) (err error) {
		if err := seen.add(path+".", key); err != nil {
			return err
		}
		switch key {
		case "name":
			out.Name, err = d.name(path + ".name")
		case "parameters":
			if d.next() == 'n' {
				return d.skip()
			}
			out.Parameters, err = d.parameters(path + ".parameters")
		default:
			err = d.skip()
		}
		return err
	})
	if err == nil && out.Name == "" {
		err = invalidField(path+".name", "is missing")
	}
	d.request.Outputs = append(d.request.Outputs, out)
	return err
}

// name reads a string that is a name.
func (d *decoder) name(path string) (string, error) {
	if d.next() != '"' {
		return "", invalidField(path, "must be a string")
	}
	name, err := d.text()
	if len(name) > payload.MaxName {
		return "", invalidField(path, "is longer than %d bytes", payload.MaxName)
	}
	return string(name), err
}

// parameterBytes is what a parameter takes in a map, beside its text.
const parameterBytes = 128

func (d *decoder) parameters(path string) (payload.Parameters, error) {
	if d.next() != '{' {
		return nil, invalidField(path, "must be an object")
	}
	out := payload.Parameters{}
	err := d.object(func(key string) (err error) {
		if _, twice := out[key]; twice {
			return invalidField(path+"."+clip(key), "is there twice")
		}
		if len(out) == payload.MaxParameters {
			return invalidField(path, "at most %d are allowed", payload.MaxParameters)
		}
		if err := d.memory.Reserve(parameterBytes); err != nil {
			return err
		}
		out[key], err = d.parameter(path + "." + clip(key))
		return err
	})
	return out, err
}

func (d *decoder) parameter(path string) (payload.Value, error) {
	switch d.next() {
	case '"':
		text, err := d.text()
		return payload.String(string(text)), err
	case 't':
		return payload.Bool(true), d.word("true")
	case 'f':
		return payload.Bool(false), d.word("false")
	case '{', '[', 'n':
		return payload.Value{}, invalidField(path, "must be a string, number or boolean")
	}
	raw, err := d.number()
	if err != nil {
		return payload.Value{}, err
	}
	return numeric(path, string(raw))
}

// numeric returns a number as the exact kind that holds it.
func numeric(path, text string) (payload.Value, error) {
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return payload.Int64(n), nil
	}
	if n, err := strconv.ParseUint(text, 10, 64); err == nil {
		return payload.Uint64(n), nil
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsInf(f, 0) {
		return payload.Value{}, invalidField(path, "%s is beyond 64 bits", clip(text))
	}
	return payload.Double(f), nil
}

// keys are the members of an object so far.
type keys []string

// add rejects a known member that comes twice, because two readers may disagree about
// which one counts.
func (k *keys) add(path, key string) error {
	switch key {
	case "id", "parameters", "inputs", "outputs", "name", "datatype", "shape", "data":
	default:
		return nil
	}
	if slices.Contains(*k, key) {
		return invalidField(path+key, "is there twice")
	}
	*k = append(*k, key)
	return nil
}

// input reads one element of inputs. It first finds the members, which come in any
// order. Then it decodes them, the name first, so that every message has the name.
func (d *decoder) input(i int) error {
	if i == payload.MaxParts {
		return invalidField("inputs", "at most %d are allowed", payload.MaxParts)
	}
	if d.next() != '{' {
		return invalidField(payload.Path("inputs", i, ""), "must be an object")
	}
	members := map[string]scanner{}
	twice := ""
	if err := d.object(func(key string) error {
		switch key {
		case "name", "datatype", "shape", "parameters", "data":
			if _, ok := members[key]; ok && twice == "" {
				twice = key
			}
			members[key] = d.scanner
		}
		if key == "data" {
			return d.skipUnchecked()
		}
		return d.skip()
	}); err != nil {
		return err
	}
	in := inputDecoder{decoder: d, members: members, path: payload.Path("inputs", i, "")}
	if err := in.decode(i, twice); err != nil {
		return err
	}
	d.request.Inputs = append(d.request.Inputs, in.out)
	return nil
}

// inputDecoder decodes one input from its members.
type inputDecoder struct {
	*decoder

	// members are scanners at the values.
	members map[string]scanner
	path    string
	out     Input
}

func (d *inputDecoder) decode(i int, twice string) (err error) {
	if at, ok := d.members["name"]; ok {
		if d.out.Name, err = d.at(at).name(d.path + ".name"); err != nil {
			return err
		}
		d.path = payload.Path("inputs", i, d.out.Name)
	}
	if twice != "" {
		return invalidField(d.path+"."+twice, "is there twice")
	}
	if err := d.datatype(); err != nil {
		return err
	}
	if err := d.shape(); err != nil {
		return err
	}
	if at, ok := d.members["parameters"]; ok && at.next() != 'n' {
		if d.out.Parameters, err = d.at(at).parameters(d.path + ".parameters"); err != nil {
			return err
		}
	}
	at, ok := d.members["data"]
	if !ok {
		return nil
	}
	var from values = &at
	if d.packed != nil {
		value := at.unpacked()
		if raw, ok := msgpack.Binary(value); ok {
			d.out.Tensor.Raw = raw
			return nil
		}
		from = &packed{value: value}
	}
	if !from.opens() {
		return invalidField(d.path+".data", "must be an array")
	}
	d.out.Tensor.Raw, err = elements(from, d.path+".data", d.out.Tensor, d.memory)
	return err
}

// at returns a decoder of the value at the scanner.
func (d *inputDecoder) at(s scanner) *decoder { return &decoder{scanner: s, memory: d.memory} }

func (d *inputDecoder) datatype() error {
	path := d.path + ".datatype"
	at, ok := d.members["datatype"]
	if !ok {
		if d.out.Tensor.Datatype, _ = d.known(d.out.Name); d.out.Tensor.Datatype == "" {
			return invalidField(path, "is missing")
		}
		return nil
	}
	name, err := d.at(at).name(path)
	if err != nil {
		return err
	}
	d.out.Tensor.Datatype = tensor.Datatype(name)
	if !d.out.Tensor.Datatype.Valid() {
		return invalidField(path, "unknown datatype %q", clip(name))
	}
	return nil
}

func (d *inputDecoder) shape() error {
	path := d.path + ".shape"
	at, ok := d.members["shape"]
	if data, hasData := d.members["data"]; !ok && hasData {
		if datatype, expected := d.known(d.out.Name); datatype != "" {
			shape, err := data.extents(expected)
			d.out.Tensor.Shape = shape
			return err
		}
	}
	if !ok {
		return invalidField(path, "is missing")
	}
	if at.next() != '[' {
		return invalidField(path, "must be an array")
	}
	shape := []int64{}
	err := at.array(func(i int) error {
		if i == tensor.MaxRank {
			return invalidField(path, "has more than %d axes", tensor.MaxRank)
		}
		raw, err := at.number()
		if err != nil {
			return err
		}
		extent, err := strconv.ParseInt(string(raw), 10, 64)
		if err != nil || extent < 0 {
			return invalidField(path, "has an axis of %s", clip(string(raw)))
		}
		shape = append(shape, extent)
		return nil
	})
	d.out.Tensor.Shape = shape
	return err
}

// invalidField returns INVALID_INPUT for the field of that path.
func invalidField(path, format string, args ...any) *fault.Fault {
	return fault.InField(fault.InvalidInput, path, format, args...)
}

// classify returns err as a fault, if there is one. Text that is not JSON is an
// INVALID_REQUEST.
func classify(err error) error {
	if _, ok := errors.AsType[*fault.Fault](err); ok || err == nil {
		return err
	}
	return fault.Newf(fault.InvalidRequest, "the body is not valid JSON of an inference request: %w", err)
}

// classify names the form in which the request came. An offset helps only a caller
// that sent JSON.
func (s *scanner) classify(err error) error {
	if _, ok := errors.AsType[*fault.Fault](err); !ok && s.packed != nil {
		return fault.New(fault.InvalidRequest, "the body is not an inference request: a number, a string or a list is in the wrong place")
	}
	return classify(err)
}

// unsupported returns the fault of a datatype that JSON cannot represent.
func (s *scanner) unsupported(path, datatype string) error {
	if s.packed != nil {
		return noList(path, datatype)
	}
	return invalidField(path, "%s has no form in JSON; send the tensor by gRPC or Connect", datatype)
}

func noList(path, datatype string) error {
	return invalidField(path, "%s has no form in a list; send data as bytes (bin)", datatype)
}

// clip shortens a caller's text to fit a message.
func clip(s string) string {
	const most = 40
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "..."
	}
	return s
}
