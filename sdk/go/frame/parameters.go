package frame

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// MarshalJSON implements json.Marshaler: a float64 is written with a point or an
// exponent, so that it comes back as one.
func (p Parameters) MarshalJSON() ([]byte, error) {
	out := make(map[string]json.RawMessage, len(p))
	for name, value := range p {
		text, err := valueText(value)
		if err != nil {
			return nil, fmt.Errorf("parameters.%s: %w", name, err)
		}
		out[name] = text
	}
	return json.Marshal(out)
}

func valueText(value any) (json.RawMessage, error) {
	switch v := value.(type) {
	case bool, int64, uint64, string:
		return json.Marshal(v)
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return nil, fmt.Errorf("%v cannot be said in JSON", v)
		}
		text := strconv.FormatFloat(v, 'g', -1, 64)
		if !strings.ContainsAny(text, ".e") {
			text += ".0"
		}
		return json.RawMessage(text), nil
	}
	return nil, errParameter
}

// UnmarshalJSON implements json.Unmarshaler.
func (p *Parameters) UnmarshalJSON(data []byte) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	var in map[string]any
	if err := d.Decode(&in); err != nil {
		return err
	}
	out := make(Parameters, len(in))
	for name, value := range in {
		v, err := valueOf(value)
		if err != nil {
			return fmt.Errorf("parameters.%.40s: %w", name, err)
		}
		out[name] = v
	}
	*p = out
	return nil
}

func valueOf(value any) (any, error) {
	switch v := value.(type) {
	case bool, string:
		return v, nil
	case json.Number:
		return numberOf(v.String())
	}
	return nil, errParameter
}

// numberOf is whole where the text has neither a point nor an exponent.
func numberOf(text string) (any, error) {
	if strings.ContainsAny(text, ".eE") {
		return strconv.ParseFloat(text, 64)
	}
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return n, nil
	}
	return strconv.ParseUint(text, 10, 64)
}
