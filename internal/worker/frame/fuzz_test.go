package frame_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stagemesh/stagemesh/internal/worker/frame"
)

func seeds() [][]byte {
	var out [][]byte
	for _, c := range vectorCases() {
		data := c.frame
		if c.m != nil {
			var b bytes.Buffer
			if frame.Write(&b, c.m, c.body) == nil {
				data = b.Bytes()
			}
		}
		if len(data) < 4096 {
			out = append(out, data)
		}
	}
	return out
}

func FuzzRead(f *testing.F) {
	for _, data := range seeds() {
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		m, body, err := frame.Read(r, 1<<16)
		if err != nil {
			known := errors.Is(err, frame.ErrViolation) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF)
			if !known || m != nil || body != nil {
				t.Fatalf("%v, %v, %v", m, body, err)
			}
			return
		}
		if took := len(data) - r.Len(); took != 16+len(headerOf(data))+len(body) {
			t.Fatalf("%d bytes were read", took)
		}
		for _, p := range partsOf(m) {
			if raw, err := p.Bytes(body); err != nil || int64(len(raw)) != p.Size {
				t.Fatalf("%d bytes of %+v: %v", len(raw), p, err)
			}
			if x, err := p.Tensor(body); p.IsTensor() && err == nil && x.Validate() != nil {
				t.Fatalf("%+v", x)
			}
		}
	})
}

func FuzzRoundTrip(f *testing.F) {
	for _, data := range seeds() {
		f.Add(string(headerOf(data)))
	}
	f.Fuzz(func(t *testing.T, header string) {
		m, err := frame.Decode([]byte(header))
		if err != nil {
			return
		}
		if !json.Valid([]byte(header)) || !utf8.ValidString(header) {
			t.Fatalf("%q is taken", header)
		}
		end := int64(0)
		for _, p := range partsOf(m) {
			end = max(end, p.At+p.Size)
		}
		head, err := frame.Encode(m, end)
		if errors.Is(err, frame.ErrHeaderSize) {
			return
		}
		if err != nil {
			t.Fatalf("%+v: %v", m, err)
		}
		if back, err := frame.Decode(head[16:]); err != nil || !reflect.DeepEqual(back, m) {
			t.Fatalf("%+v came back as %+v, %v", m, back, err)
		}
	})
}

// What encoding/json takes for one value is the same string here, and what it
// does not take is refused.
func FuzzValuesMatchEncodingJSON(f *testing.F) {
	for _, text := range []string{`"a"`, `"\u00e4\ud83d\ude00\ud83d"`, `"\n\"\\\/"`, `""`, `"`, `"\u12"`, `1`, ` "a" `, `"a",`, "\"\x01\"", `"ä"`} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if !utf8.ValidString(text) || len(text) > 1000 {
			return
		}
		var known *string
		wanted := json.Unmarshal([]byte(text), &known) == nil && known != nil
		if wanted && strings.Contains(*known, "\ufffd") {
			return // half a surrogate pair to encoding/json, and refused here
		}
		m, err := frame.Decode([]byte(`{"type":"state","state":"ERROR","message":` + text + `}`))
		if wanted && (err != nil || m.(*frame.State).Message != *known) {
			t.Fatalf("%q is %q: %+v, %v", text, *known, m, err)
		}
		if !wanted && err == nil && !strings.Contains(text, ",") {
			t.Fatalf("%q is taken for %+v", text, m)
		}
		// An unknown key takes every value.
		_, err = frame.Decode([]byte(`{"type":"pong","n":1,"k":[` + text + `]}`))
		if wanted := json.Valid([]byte("["+text+"]")) && shallow(text); wanted != (err == nil) {
			if !strings.Contains(text, "]") {
				t.Fatalf("%q: %v", text, err)
			}
		}
	})
}

func shallow(text string) bool {
	return strings.Count(text, "[")+strings.Count(text, "{") < 60
}
