package frame_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// filler fills every field of a message, so that one which the codec forgets is
// missed.
type filler struct {
	r    *rand.Rand
	body frame.Body
}

func (f *filler) text() string {
	alphabet := []rune("abc \"\\/\n\x00\x7fäπ\u2028\u2029\ufffd😀<>&'")
	out := []rune{'k'}
	for range f.r.IntN(8) {
		out = append(out, alphabet[f.r.IntN(len(alphabet))])
	}
	return string(out)
}

func pick[T any](f *filler, from ...T) T { return from[f.r.IntN(len(from))] }

// part is one of item n, of none where it is negative.
func (f *filler) part(n int) frame.Part {
	p := f.body.Blob(f.text(), n, f.text(), []byte(f.text()))
	if f.r.IntN(2) == 0 {
		p = f.body.Tensor(f.text(), n, int64s([]int64{2, 1}, 1, 2))
	}
	p.Place = frame.Inline
	p.Parameters = f.parameters()
	return p
}

func (f *filler) parameters() frame.Parameters {
	return frame.Parameters{
		"b": true, "i": f.r.Int64() - 1<<62, "u": f.r.Uint64() | 1<<63, "f": f.r.NormFloat64(), "s": f.text(), f.text(): false,
	}
}

// fill sets what v points to; path is the names of the fields.
func (f *filler) fill(v reflect.Value, path string) {
	switch at := v.Addr().Interface().(type) {
	case *frame.Part:
		n := f.r.IntN(3)
		if strings.Contains(path, "Example") {
			n = -1
		}
		*at = f.part(n)
		return
	case *frame.Chunk:
		*at = frame.Chunk{Batch: 7, Item: 2, Parts: []frame.Part{f.part(2), f.part(-1)}}
		return
	case *frame.Parameters:
		*at = f.parameters()
		return
	case *map[string]frame.Parameters:
		*at = map[string]frame.Parameters{f.text(): f.parameters(), "k": f.parameters()}
		return
	case *json.RawMessage:
		*at = json.RawMessage(`{"a":[1,{"b":null}],"c":"\u003c<"}`)
		return
	case *frame.WorkerState:
		*at = pick(f, frame.Startup, frame.Failed, frame.Shutdown)
		return
	case *tensor.Datatype:
		*at = pick(f, tensor.FP32, tensor.Bytes)
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			f.fill(v.Field(i), path+"."+v.Type().Field(i).Name)
		}
		if e, ok := v.Addr().Interface().(*frame.Error); ok { // of a batch or of a load
			*pick(f, &e.Batch, &e.Load) = nil
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		f.fill(v.Elem(), path)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 3, 3))
		for i := range 3 {
			f.fill(v.Index(i), path)
		}
	case reflect.Map:
		v.Set(reflect.ValueOf(map[string]string{f.text(): f.text(), "k": ""}))
	case reflect.Int, reflect.Int64:
		if v.SetInt(1 + f.r.Int64N(1000)); strings.Contains(path, ".DefaultSize.") {
			v.SetInt(1) // which fits every capacity
		}
	case reflect.Uint64:
		v.SetUint(f.r.Uint64() >> 11)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.String:
		v.SetString(f.word(path))
	default:
		panic(path)
	}
}

// word is a text that the field takes.
func (f *filler) word(path string) string {
	switch {
	case strings.HasSuffix(path, "Error.Kind"):
		return pick(f, frame.Exception, frame.OutOfMemory, frame.Protocol, frame.Unsupported, frame.InvalidModel)
	case strings.HasSuffix(path, "oad.Model"):
		return pick(f, "iris-v1", "π 😀 \"quoted\"\\/")
	case strings.HasSuffix(path, ".BatchAxis"):
		return pick(f, frame.Rows, frame.None)
	case strings.Contains(path, ".Parameters") && strings.HasSuffix(path, ".Type"):
		return pick(f, frame.BoolParameter, frame.IntParameter, frame.FloatParameter, frame.StringParameter)
	case strings.HasSuffix(path, ".Variable"):
		return pick(f, frame.Exact, frame.List, frame.Pad)
	}
	return f.text()
}

func blanks() []frame.Message {
	return []frame.Message{
		&frame.Hello{}, &frame.Welcome{}, &frame.State{}, &frame.Ready{}, &frame.Predict{}, &frame.Result{}, &frame.Chunk{},
		&frame.Error{}, &frame.Cancel{}, &frame.Ping{}, &frame.Pong{}, &frame.Stop{},
		&frame.Load{}, &frame.Loaded{}, &frame.Unload{}, &frame.Unloaded{}, &frame.Size{}, &frame.Sized{},
	}
}

// filled returns a message of every type, with every field set.
func filled(seed uint64) []*filler {
	var out []*filler
	for range blanks() {
		out = append(out, &filler{r: rand.New(rand.NewPCG(seed, uint64(len(out))))})
	}
	return out
}

func TestEveryFieldRoundTrips(t *testing.T) {
	t.Parallel()
	for i, m := range blanks() {
		t.Run(frame.Kind(m), func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(50) {
				f, m := filled(seed)[i], blanks()[i]
				f.fill(reflect.ValueOf(m).Elem(), reflect.TypeOf(m).String())
				var out bytes.Buffer
				if err := frame.Write(&out, m, &f.body); err != nil {
					t.Fatal(err)
				}
				back, body, err := frame.Read(&out, 1<<20)
				if err != nil || !reflect.DeepEqual(back, m) || int64(len(body)) != f.body.Len() {
					t.Fatalf("%+v came back as %+v, %v", m, back, err)
				}
			}
		})
	}
}

// The tags of the messages are the protocol's names, and the header is what
// encoding/json makes of them. Floats differ: the header keeps 1.0 apart from 1.
func TestHeadersMatchEncodingJSON(t *testing.T) {
	t.Parallel()
	for i, m := range blanks() {
		t.Run(frame.Kind(m), func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(50) {
				f, m := filled(seed)[i], blanks()[i]
				f.fill(reflect.ValueOf(m).Elem(), reflect.TypeOf(m).String())
				got, err := frame.Encode(m, f.body.Len())
				if err != nil {
					t.Fatal(err)
				}
				if want := byTags(t, m); string(got[16:]) != want {
					t.Fatalf("%s\nwant\n%s", got[16:], want)
				}
			}
		})
	}
}

func byTags(t *testing.T, m frame.Message) string {
	t.Helper()
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	if err := e.Encode(m); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf(`{"type":"%s",%s`, frame.Kind(m), strings.TrimSpace(out.String())[1:])
}

func TestInvalidUTF8IsReplaced(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ text, want string }{
		"a byte":            {"a\xffb", "a\ufffdb"},
		"half a rune":       {"\xe2\x82", "\ufffd\ufffd"},
		"half of a pair":    {"\xed\xa0\x80", "\ufffd\ufffd\ufffd"},
		"the rune itself":   {"\ufffd", "\ufffd"},
		"separators":        {"\u2028\u2029", "\u2028\u2029"},
		"control":           {"\x00\x1f\b\f\n\r\t", "\x00\x1f\b\f\n\r\t"},
		"beyond the planes": {"😀", "😀"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			head, err := frame.Encode(&frame.State{State: frame.Startup, Message: test.text}, 0)
			if err != nil {
				t.Fatal(err)
			}
			m, err := frame.Decode(head[16:])
			if err != nil || m.(*frame.State).Message != test.want {
				t.Errorf("%+v, %v", m, err)
			}
		})
	}
}

func TestHalvesOfSurrogatePairsAreRefused(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`\ud83d\ude00`: "😀",
		`\ud83d`:       "",
		`\ude00`:       "",
		`\ud83dx`:      "",
		`\ud83d\n`:     "",
		`\ud83d\u0041`: "",
		`\ude00\ud83d`: "",
		`\uFFFD\u00e4`: "\ufffdä",
	} {
		m, err := frame.Decode([]byte(`{"type":"state","state":"ERROR","message":"` + text + `"}`))
		if (err != nil) != (want == "") || err == nil && m.(*frame.State).Message != want {
			t.Errorf("%s: %+v, %v", text, m, err)
		}
	}
}

func TestParametersKeepTheirTypes(t *testing.T) {
	t.Parallel()
	tests := map[string]any{
		"0": int64(0), "-0": int64(0), "-1": int64(-1), "9223372036854775807": int64(1<<63 - 1),
		"9223372036854775808": uint64(1 << 63), "-9223372036854775808": int64(-1 << 63),
		"0.0": 0.0, "1e2": 100.0, "1E+2": 100.0, "1e-400": 0.0, "0.1": 0.1, "123456789012345678901234567890.": nil, ".5": nil, "+1": nil,
		"1e": nil, "1e400": nil, "--1": nil, "-": nil, "0x1": nil, "1_0": nil, "00": nil, "Infinity": nil, "tru": nil,
		"true": true, "false": false, `"1"`: "1", "null": nil, "[]": nil, "{}": nil, "18446744073709551616": nil,
	}
	for text, want := range tests {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			m, err := frame.Decode([]byte(`{"type":"predict","batch":1,"items":[{"id":"a","parameters":{"k":` + text + `}}],"parts":[]}`))
			if want == nil {
				if err == nil {
					t.Errorf("it is taken as %v", m.(*frame.Predict).Items[0].Parameters)
				}
				return
			}
			if err != nil || m.(*frame.Predict).Items[0].Parameters["k"] != want {
				t.Errorf("%+v, %v", m, err)
			}
		})
	}
}
