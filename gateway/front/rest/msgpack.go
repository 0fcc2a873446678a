package rest

import (
	"errors"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/oipjson"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// takePacked reads a body of MessagePack: tensors in the form of the Open Inference
// Protocol, or one blob. What the query said stays. As JSON the tensors that are not
// binary have as many bytes as a body may have.
func takePacked(out *call.Request, wished *wish, kind kind, data []byte, limit int64) error {
	if err := msgpack.Check(data); err != nil {
		return fault.Newf(fault.InvalidRequest, "the body is not the MessagePack that its type says: %w", err)
	}
	tensors, err := kind.tensors(func() bool { return looksPacked(data) })
	if err != nil {
		return err
	}
	if !tensors {
		out.Inputs = []payload.Part{payload.OfBlob("", msgpack.Type, data)}
		return nil
	}
	u := unpacked{limit: int(limit)}
	if err := u.request(data); err != nil {
		return err
	}
	request, err := oipjson.DecodeUnpacked(u.text)
	if err != nil {
		return err
	}
	for i, raw := range u.raw {
		request.Inputs[i].Tensor.Raw = raw
	}
	wished.packed = !wished.json
	return takeRequest(out, wished, request)
}

// looksPacked is oipjson.Detect of MessagePack that is whole. Keys that are no strings
// do not hide what it looks for; who reads the tensors refuses them.
func looksPacked(data []byte) bool {
	inputs, _ := msgpack.Find(data, "inputs")
	first, _ := msgpack.First(inputs)
	_, ok := msgpack.Find(first, "datatype")
	return ok
}

// unpacked is a request in MessagePack as one in JSON.
type unpacked struct {
	text  []byte
	limit int
	// raw are the bytes of tensors that came as such, by the index of their inputs.
	// They are not in the text.
	raw map[int][]byte
}

// request unpacks a body: all but data that is binary becomes JSON as it is.
func (u *unpacked) request(data []byte) error {
	u.text = append(u.text, '{')
	err := msgpack.Members(data, func(key string, value []byte) error {
		u.key(key)
		if key != "inputs" || !msgpack.IsList(value) {
			return u.value(fault.Member("", key), value)
		}
		return u.inputs(value)
	})
	u.text = append(u.text, '}')
	return misplaced("", err)
}

func (u *unpacked) inputs(list []byte) error {
	u.text = append(u.text, '[')
	err := msgpack.Elements(list, func(i int, value []byte) error {
		u.comma()
		path := oipjson.InputPath(i, nameOf(value))
		if !msgpack.IsMap(value) {
			return u.value(path, value)
		}
		return u.input(i, path, value)
	})
	u.text = append(u.text, ']')
	return err
}

func (u *unpacked) input(i int, path string, value []byte) error {
	u.text = append(u.text, '{')
	had := false
	err := msgpack.Members(value, func(key string, value []byte) error {
		if key == "data" {
			if had {
				return invalidInput(path+".data", "is there twice")
			}
			had = true
			if raw, ok := msgpack.Binary(value); ok {
				u.keep(i, raw)
				return nil
			}
		}
		u.key(key)
		if key == "data" {
			return u.list(path+".data", value)
		}
		return u.value(fault.Member(path, key), value)
	})
	u.text = append(u.text, '}')
	return misplaced(path, err)
}

// nameOf is the name of an input, or nothing where that is no text.
func nameOf(input []byte) string {
	name, _ := msgpack.Find(input, "name")
	text, _ := msgpack.Text(name)
	if len(text) > payload.MaxName {
		return ""
	}
	return text
}

// list takes a tensor's data that are no bytes, and says that they could be.
func (u *unpacked) list(path string, value []byte) (err error) {
	u.text, err = msgpack.AppendAsJSON(u.text, value, u.limit)
	if e, ok := errors.AsType[*msgpack.Error](err); ok {
		return invalidInput(e.At(path), e.What()+"; send data as bytes (bin)")
	}
	return err
}

// keep keeps the bytes of a tensor, which the body shares.
func (u *unpacked) keep(i int, raw []byte) {
	if u.raw == nil {
		u.raw = map[int][]byte{}
	}
	u.raw[i] = raw
}

// key begins a member.
func (u *unpacked) key(key string) {
	u.comma()
	u.text = append(oipjson.AppendString(u.text, key), ':')
}

// comma parts what follows from what came before it in a list or an object.
func (u *unpacked) comma() {
	if last := u.text[len(u.text)-1]; last != '{' && last != '[' {
		u.text = append(u.text, ',')
	}
}

func (u *unpacked) value(path string, value []byte) (err error) {
	u.text, err = msgpack.AppendAsJSON(u.text, value, u.limit)
	return misplaced(path, err)
}

// misplaced says where in the body MessagePack is not what it should be.
func misplaced(path string, err error) error {
	e, ok := errors.AsType[*msgpack.Error](err)
	if !ok {
		return err
	}
	return invalidInput(e.At(path), e.What())
}

func invalidInput(field, what string) error {
	if field == "" {
		return fault.Newf(fault.InvalidInput, "the body %s", what)
	}
	return fault.Newf(fault.InvalidInput, "%s: %s", field, what).WithViolation(field, "%s", what)
}
