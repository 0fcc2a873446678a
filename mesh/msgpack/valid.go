package msgpack

import "github.com/tinylib/msgp/msgp"

// Check makes sure that data is one document of MessagePack, of anything that it
// can say. An error is an *Error.
func Check(data []byte) error {
	left, err := skip(data, 0)
	if err != nil {
		return err
	}
	return ended(left)
}

// ended makes sure that nothing is left after a document.
func ended(left []byte) error {
	if len(left) > 0 {
		return wrong("goes on after its end, for %d bytes", len(left))
	}
	return nil
}

// skip returns what comes after the document that data begins with.
func skip(data []byte, depth int) ([]byte, error) {
	if depth > MaxDepth {
		return nil, wrong("nests deeper than %d", MaxDepth)
	}
	var entries uint32
	var left []byte
	var err error
	each := 1
	switch msgp.NextType(data) {
	case msgp.MapType:
		entries, left, err = msgp.ReadMapHeaderBytes(data)
		each = 2
	case msgp.ArrayType:
		entries, left, err = msgp.ReadArrayHeaderBytes(data)
	default:
		left, err = msgp.Skip(data)
	}
	if err != nil {
		return nil, unread(err)
	}
	for range entries {
		for range each {
			if left, err = skip(left, depth+1); err != nil {
				return nil, err
			}
		}
	}
	return left, nil
}
