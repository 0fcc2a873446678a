package rest

import (
	"slices"

	"github.com/stagemesh/stagemesh/gateway/front/oipjson"
)

// asJSON is how many times its bytes a value of MessagePack takes as JSON at most:
// false and its comma are six, and so is a control character in a text.
const asJSON = 6

// decode reads a request. The text is gone before a list becomes a tensor, so that a
// request has in hand its body and the larger of the two.
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

// head reads a request by way of JSON, without the data of its tensors.
func (u *unpacked) head(data []byte) (*oipjson.Request, error) {
	defer func() {
		u.memory.ReleaseScratch(u.booked)
		u.text, u.booked = nil, 0
	}()
	if err := u.request(data); err != nil {
		return nil, err
	}
	return oipjson.DecodeUnpacked(u.text, u.memory)
}

// book books what the text grows by when n bytes of MessagePack are appended, and makes
// the space.
func (u *unpacked) book(n int) error {
	most := min(asJSON*n, max(u.limit-len(u.text), 0))
	if most <= cap(u.text)-len(u.text) {
		return nil
	}
	need := int64(len(u.text) + most - cap(u.text))
	if err := u.memory.Scratch(need); err != nil {
		return err
	}
	u.booked += need
	u.text = slices.Grow(u.text, most)
	return nil
}
