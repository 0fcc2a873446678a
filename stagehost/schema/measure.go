package schema

import (
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"
)

// Bounds on a document that is validated against a JSON Schema: its decoded size, and
// the size of its numbers when they become exact. The cost of validation depends on
// the document and the schema together, and maxWork bounds it.
const (
	maxValues   = 100_000
	maxNesting  = 64
	maxDigits   = 400
	maxExponent = 999
)

// decode reads a document within the bounds. Numbers stay text.
func decode(data []byte) (any, error) {
	if !json.Valid(data) || !utf8.Valid(data) {
		return nil, notJSON(data)
	}
	m := meter{data: data}
	if err := m.measure(); err != nil {
		return nil, err
	}
	return decodeNumbers(data)
}

func notJSON(data []byte) error {
	var any json.RawMessage
	if err := json.Unmarshal(data, &any); err != nil {
		return fmt.Errorf("is no JSON: %w", err)
	}
	return errors.New("is no JSON: not UTF-8")
}

// meter checks text for the bounds, and that it is JSON, in one pass.
type meter struct {
	data          []byte
	at            int
	values, depth int
}

func (m *meter) measure() error {
	for m.at < len(m.data) {
		if err := m.next(); err != nil {
			return err
		}
	}
	return nil
}

// next passes one token.
func (m *meter) next() error {
	switch c := m.data[m.at]; {
	case c == '"':
		m.text()
		return nil
	case c == '-' || c >= '0' && c <= '9':
		return m.number()
	case c == '[' || c == '{':
		if m.depth++; m.depth > maxNesting {
			return fmt.Errorf("nests deeper than %d, which is too much for a schema", maxNesting)
		}
		return m.value()
	case c == ',':
		return m.value()
	case c == ']' || c == '}':
		m.depth--
	}
	m.at++
	return nil
}

// value counts the value that begins after a bracket or a comma.
func (m *meter) value() error {
	m.at++
	if m.values++; m.values > maxValues {
		return fmt.Errorf("has more than %d values, which is too much for a schema", maxValues)
	}
	return nil
}

func (m *meter) text() {
	for m.at++; m.data[m.at] != '"'; m.at++ {
		if m.data[m.at] == '\\' {
			m.at++
		}
	}
	m.at++
}

// number passes a number. Its exponent may not have more digits than the bound,
// leading zeros included.
func (m *meter) number() error {
	begin, exponent := m.at, -1
	for ; m.at < len(m.data) && numeric(m.data[m.at]); m.at++ {
		if c := m.data[m.at]; c == 'e' || c == 'E' {
			exponent = m.at
		}
	}
	if m.at-begin > maxDigits || exponent >= 0 && m.at-exponent > len("e-999") {
		return fmt.Errorf("has the number %.40s: numbers have at most %d digits and exponents to %d", m.data[begin:m.at], maxDigits, maxExponent)
	}
	return nil
}

func numeric(c byte) bool {
	return c >= '0' && c <= '9' || c == '-' || c == '+' || c == '.' || c == 'e' || c == 'E'
}
