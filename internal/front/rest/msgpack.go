package rest

import (
	"errors"
	"fmt"
	"slices"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// looksLikeTensors is oipjson.Detect of valid MessagePack. It passes over keys that are not
// strings; decoding rejects them.
func looksLikeTensors(data []byte) bool {
	inputs, _ := msgpack.Find(data, "inputs")
	first, _ := msgpack.First(inputs)
	_, ok := msgpack.Find(first, "datatype")
	return ok
}

// unpacked turns a request in MessagePack into one in JSON. Everything but the data of
// tensors may have as many bytes as JSON as a body may have.
type unpacked struct {
	text  []byte
	limit int
	// memory is reserved for the text and the tensors; reserved bytes of it are the text's.
	memory   *budget.Account
	reserved int64
	// raw are tensors that came as binary, and lists those that came as lists, by the index of
	// their inputs. They are not in the text.
	raw, lists map[int][]byte
}

// request converts a body: everything but the data of tensors becomes JSON.
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
	return conversionFault("", err)
}

func (u *unpacked) inputs(list []byte) error {
	u.text = append(u.text, '[')
	err := msgpack.Elements(list, func(i int, value []byte) error {
		if i == payload.MaxParts {
			return invalidInput("inputs", fmt.Sprintf("at most %d are allowed", payload.MaxParts))
		}
		u.comma()
		path := payload.Path("inputs", i, nameOf(value))
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
	seen := false
	err := msgpack.Members(value, func(key string, value []byte) error {
		if key == "data" {
			if seen {
				return invalidInput(path+".data", "is there twice")
			}
			seen = true
			if raw, ok := msgpack.Binary(value); ok {
				u.raw = put(u.raw, i, raw)
				return nil
			}
			if msgpack.IsList(value) {
				u.lists = put(u.lists, i, value)
				return nil
			}
		}
		if err := u.key(key); err != nil {
			return err
		}
		return u.value(fault.Member(path, key), value)
	})
	u.text = append(u.text, '}')
	return conversionFault(path, err)
}

// nameOf returns the name of an input, or "" where that is not text.
func nameOf(input []byte) string {
	name, _ := msgpack.Find(input, "name")
	text, err := msgpack.Text(name)
	if err != nil || len(text) > payload.MaxName {
		return ""
	}
	return string(text)
}

// put adds the data of an input, which shares the body's bytes.
func put(by map[int][]byte, i int, data []byte) map[int][]byte {
	if by == nil {
		by = map[int][]byte{}
	}
	by[i] = data
	return by
}

// key begins a member.
func (u *unpacked) key(key string) error {
	if err := u.reserve(len(key)); err != nil {
		return err
	}
	u.comma()
	u.text = append(oipjson.AppendString(u.text, key), ':')
	return nil
}

// comma separates the next element or member from the one before it.
func (u *unpacked) comma() {
	if last := u.text[len(u.text)-1]; last != '{' && last != '[' {
		u.text = append(u.text, ',')
	}
}

func (u *unpacked) value(path string, value []byte) (err error) {
	if err := u.reserve(len(value)); err != nil {
		return err
	}
	u.text, err = msgpack.AppendAsJSON(u.text, value, u.limit)
	return conversionFault(path, err)
}

// conversionFault returns the fault of MessagePack that cannot be converted, with its place.
func conversionFault(path string, err error) error {
	e, ok := errors.AsType[*msgpack.Error](err)
	if !ok {
		return err
	}
	return invalidInput(e.At(path), e.Problem())
}

func invalidInput(field, what string) error {
	if field == "" {
		return fault.Newf(fault.InvalidInput, "the body %s", what)
	}
	return fault.InField(fault.InvalidInput, field, "%s", what)
}

// maxGrowth is how many times its bytes a value of MessagePack takes as JSON at most: false and
// its comma are six, and so is a control character in a string.
const maxGrowth = 6

// decode decodes a request. It drops the text before it decodes lists, so a request holds its
// body and the larger of the two.
func (u *unpacked) decode(data []byte) (*oipjson.Request, error) {
	out, err := u.head(data)
	if err != nil {
		return nil, err
	}
	for i, raw := range u.raw {
		out.Inputs[i].Tensor.Raw = raw
	}
	for i := range out.Inputs {
		if list, ok := u.lists[i]; ok {
			if err := out.Unpack(i, list, u.memory); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// head decodes a request by way of JSON, without the data of its tensors.
func (u *unpacked) head(data []byte) (*oipjson.Request, error) {
	defer func() {
		u.memory.Release(u.reserved)
		u.text, u.reserved = nil, 0
	}()
	if err := u.request(data); err != nil {
		return nil, err
	}
	return oipjson.DecodeUnpacked(u.text, u.memory)
}

// reserve reserves and allocates what the text grows by when n bytes of MessagePack are
// appended.
func (u *unpacked) reserve(n int) error {
	most := min(maxGrowth*n, max(u.limit-len(u.text), 0))
	if most <= cap(u.text)-len(u.text) {
		return nil
	}
	need := int64(len(u.text) + most - cap(u.text))
	if err := u.memory.Reserve(need); err != nil {
		return err
	}
	u.reserved += need
	u.text = slices.Grow(u.text, most)
	return nil
}
