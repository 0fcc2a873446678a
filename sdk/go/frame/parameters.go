package frame

import (
	"errors"
	"math"
	"strconv"
	"strings"
)

// Parameters are booleans, whole and other numbers, and strings: bool, int64,
// uint64 above that, float64 and string. A float64 is written with a point or an
// exponent, so that it comes back as one.
type Parameters map[string]any

var errParameter = errors.New("a parameter is true or false, a number or a string")

func (p Parameters) write(w *writer) {
	if len(p) > 0 {
		writeTable(w, "parameters", p, writeParameter)
	}
}

func writeParameter(w *writer, value any) {
	switch v := value.(type) {
	case bool:
		w.buf = strconv.AppendBool(w.buf, v)
	case int64:
		w.buf = strconv.AppendInt(w.buf, v, 10)
	case uint64:
		w.buf = strconv.AppendUint(w.buf, v, 10)
	case float64:
		writeFloat(w, v)
	case string:
		w.buf = appendText(w.buf, v)
	default:
		w.fail("parameters: %w, not a %T", errParameter, value)
	}
}

func writeFloat(w *writer, v float64) {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		w.fail("parameters: %v cannot be said in JSON", v)
		return
	}
	start := len(w.buf)
	w.buf = strconv.AppendFloat(w.buf, v, 'g', -1, 64)
	for _, c := range w.buf[start:] {
		if c == '.' || c == 'e' {
			return
		}
	}
	w.buf = append(w.buf, ".0"...)
}

func readParameters(s *scanner) Parameters { return table(s, readParameter) }

func readParameter(s *scanner) any {
	switch c := s.peek(); {
	case c == '"':
		return s.string()
	case c == 't', c == 'f':
		return s.bool()
	case c == '-', c >= '0' && c <= '9':
		return readNumber(s)
	}
	s.fail("%w", errParameter)
	return nil
}

// readNumber is whole where the text has neither a point nor an exponent.
func readNumber(s *scanner) any {
	text := s.number()
	if s.err != nil {
		return nil
	}
	var value any
	var err error
	if strings.ContainsAny(text, ".eE") {
		value, err = strconv.ParseFloat(text, 64)
	} else if value, err = strconv.ParseInt(text, 10, 64); err != nil {
		value, err = strconv.ParseUint(text, 10, 64)
	}
	if err != nil {
		s.fail("%s is out of range", clip(text))
		return nil
	}
	return value
}
