package rest

import (
	"errors"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/oipjson"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// takePacked reads a body of MessagePack: tensors in the form of the Open Inference
// Protocol, or one blob. What the query said stays. What is not the data of a tensor has
// as JSON as many bytes as a body may have.
func takePacked(out *call.Request, wished *wish, kind kind, data []byte, u *unpacked) error {
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
	request, err := u.decode(data)
	if err != nil {
		return err
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
	// memory is where the text and the tensors are made, and booked what it has of the
	// text, in bytes.
	memory *transport.Reservation
	booked int64
	// raw are the bytes of tensors that came as such, by the index of their inputs, and
	// lists the data of others. They are not in the text.
	raw, lists map[int][]byte
}

// request unpacks a body: all but data that is binary becomes JSON as it is.
func (u *unpacked) request(data []byte) error {
	u.text = append(u.text, '{')
	err := msgpack.Members(data, func(key string, value []byte) error {
		if err := u.key(key); err != nil {
			return err
		}
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
				u.raw = kept(u.raw, i, raw)
				return nil
			}
			if msgpack.IsList(value) {
				u.lists = kept(u.lists, i, value)
				return nil
			}
		}
		if err := u.key(key); err != nil {
			return err
		}
		return u.value(fault.Member(path, key), value)
	})
	u.text = append(u.text, '}')
	return misplaced(path, err)
}

// nameOf is the name of an input, or nothing where that is no text.
func nameOf(input []byte) string {
	name, _ := msgpack.Find(input, "name")
	text, err := msgpack.Text(name)
	if err != nil || len(text) > payload.MaxName {
		return ""
	}
	return string(text)
}

// kept is by with the data of an input, which the body shares.
func kept(by map[int][]byte, i int, data []byte) map[int][]byte {
	if by == nil {
		by = map[int][]byte{}
	}
	by[i] = data
	return by
}

// key begins a member.
func (u *unpacked) key(key string) error {
	if err := u.book(len(key)); err != nil {
		return err
	}
	u.comma()
	u.text = append(oipjson.AppendString(u.text, key), ':')
	return nil
}

// comma parts what follows from what came before it in a list or an object.
func (u *unpacked) comma() {
	if last := u.text[len(u.text)-1]; last != '{' && last != '[' {
		u.text = append(u.text, ',')
	}
}

func (u *unpacked) value(path string, value []byte) (err error) {
	if err := u.book(len(value)); err != nil {
		return err
	}
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
