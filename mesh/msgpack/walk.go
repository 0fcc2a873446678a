package msgpack

import (
	"github.com/tinylib/msgp/msgp"
)

// Members hands each member of the map that data is to visit, whose value is one
// document. Whatever visit returns ends it.
func Members(data []byte, visit func(key string, value []byte) error) error {
	if !IsMap(data) {
		return wrong("is no map")
	}
	n, left, err := msgp.ReadMapHeaderBytes(data)
	if err != nil {
		return unread(err)
	}
	for range n {
		key, value, err := readKey(left)
		if err != nil {
			return err
		}
		if left, err = visitOne(value, func(value []byte) error { return visit(string(key), value) }); err != nil {
			return err
		}
	}
	return ended(left)
}

// Elements hands each element of the list that data is to visit. Whatever visit
// returns ends it.
func Elements(data []byte, visit func(i int, value []byte) error) error {
	if !IsList(data) {
		return wrong("is no list")
	}
	n, left, err := msgp.ReadArrayHeaderBytes(data)
	if err != nil {
		return unread(err)
	}
	for i := range n {
		if left, err = visitOne(left, func(value []byte) error { return visit(int(i), value) }); err != nil {
			return err
		}
	}
	return ended(left)
}

// Find returns the value of the first member of that key, where data is a map that has
// one. It passes over keys that are no strings.
func Find(data []byte, key string) (value []byte, ok bool) {
	if !IsMap(data) {
		return nil, false
	}
	n, left, err := msgp.ReadMapHeaderBytes(data)
	for i := uint32(0); i < n && err == nil; i++ {
		found := false
		if left, err = visitOne(left, func(name []byte) error {
			text, err := Text(name)
			found = err == nil && string(text) == key
			return nil
		}); err != nil {
			return nil, false
		}
		left, err = visitOne(left, func(one []byte) error { value = one; return nil })
		if err == nil && found {
			return value, true
		}
	}
	return nil, false
}

// First returns the first element, where data is a list that has one.
func First(data []byte) (value []byte, ok bool) {
	if !IsList(data) {
		return nil, false
	}
	n, left, err := msgp.ReadArrayHeaderBytes(data)
	if err != nil || n == 0 {
		return nil, false
	}
	_, err = visitOne(left, func(one []byte) error { value = one; return nil })
	return value, err == nil
}

// visitOne visits the document that data begins with, and returns what is after it.
func visitOne(data []byte, visit func(value []byte) error) (left []byte, err error) {
	if left, err = skip(data, 0); err != nil {
		return nil, err
	}
	return left, visit(data[:len(data)-len(left)])
}

// IsMap reports whether data begins with a map.
func IsMap(data []byte) bool { return msgp.NextType(data) == msgp.MapType }

// IsList reports whether data begins with a list.
func IsList(data []byte) bool { return msgp.NextType(data) == msgp.ArrayType }

// IsText reports whether data begins with a string of text.
func IsText(data []byte) bool { return msgp.NextType(data) == msgp.StrType }

// Text returns the text of the one string that data is, which it shares.
func Text(data []byte) ([]byte, error) {
	text, left, err := readText(data)
	if err != nil {
		return nil, err
	}
	return text, ended(left)
}

// Binary returns the bytes of the binary string that data is, which it shares.
func Binary(data []byte) (raw []byte, ok bool) {
	if msgp.NextType(data) != msgp.BinType {
		return nil, false
	}
	raw, left, err := msgp.ReadBytesZC(data)
	return raw, err == nil && len(left) == 0
}
