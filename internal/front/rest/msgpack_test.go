package rest_test

import (
	"bytes"
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// pack returns values as MessagePack by a writer that is not the gateway's.
func pack(t testing.TB, value any) string {
	t.Helper()
	out, err := msgp.AppendIntf(nil, value)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// object and list are what AppendIntf knows.
type (
	object = map[string]any
	list   = []any
)

func input(name string, datatype string, shape list, data any) object {
	return object{"name": name, "datatype": datatype, "shape": shape, "data": data}
}

func TestMessagePackIsTensorsOrOneBlob(t *testing.T) {
	t.Parallel()
	x := payload.OfTensor("x", tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{1, 2}, Raw: []byte{0, 0, 0x80, 0x3f, 0xcd, 0xcc, 0xcc, 0x3d}})
	nested := pack(t, object{"inputs": list{input("x", "FP32", list{1, 2}, list{list{1.0, float32(0.1)}})}})
	raw := pack(t, object{"inputs": list{input("x", "FP32", list{1, 2}, x.Tensor.Raw)}})
	prompt := pack(t, object{"prompt": "hi", "image": []byte{1}})
	half := payload.OfTensor("h", tensor.Tensor{Datatype: tensor.FP16, Shape: []int64{0, 3}, Raw: []byte{}})
	for name, row := range map[string]struct {
		contentType, body string
		want              payload.Part
	}{
		"nested numbers":        {"application/msgpack", nested, x},
		"bytes":                 {"application/x-msgpack", raw, x},
		"bytes by demand":       {"application/vnd.msgpack; form=tensors", raw, x},
		"no bytes of no rows":   {"application/msgpack", pack(t, object{"inputs": list{input("h", "FP16", list{0, 3}, []byte{})}}), half},
		"a prompt":              {"application/msgpack", prompt, payload.OfBlob("", "application/msgpack", []byte(prompt))},
		"another of its names":  {"application/x-msgpack", prompt, payload.OfBlob("", "application/msgpack", []byte(prompt))},
		"a blob by demand":      {"application/msgpack; form=blob", raw, payload.OfBlob("", "application/msgpack", []byte(raw))},
		"inputs but no tensors": {"application/msgpack", pack(t, object{"inputs": list{"a"}}), payload.OfBlob("", "application/msgpack", []byte(pack(t, object{"inputs": list{"a"}})))},
		"no map":                {"application/msgpack", pack(t, 7), payload.OfBlob("", "application/msgpack", []byte{7})},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			caller := fronttest.AnswerWith()
			if got := post(row.contentType, row.body).of(t, caller); got.status != 200 {
				t.Fatalf("%d %s", got.status, got.body)
			}
			if got := caller.Last().Inputs; len(got) != 1 || !reflect.DeepEqual(got[0], row.want) {
				t.Errorf("got %+v, want %+v", got, row.want)
			}
		})
	}
}

func TestTensorsInMessagePackHaveAllThatJSONHas(t *testing.T) {
	t.Parallel()
	y := input("y", "BYTES", list{2}, list{"a", "\u00e9"})
	y["parameters"] = object{"scale": 0.5}
	body := pack(t, object{
		"id": "call-7", "parameters": object{"top": 3}, "outputs": list{object{"name": "scores"}},
		"inputs": list{input("x", "UINT64", list{1}, list{uint64(math.MaxUint64)}), y},
	})
	caller := fronttest.AnswerWith()
	got := post("application/msgpack", body).of(t, caller)
	if got.status != 200 || got.header.Get("Content-Type") != "application/msgpack" {
		t.Fatalf("%d %s %s", got.status, got.header.Get("Content-Type"), got.body)
	}
	request := caller.Last()
	if len(request.Inputs) != 2 || !bytes.Equal(request.Inputs[0].Tensor.Raw, bytes.Repeat([]byte{0xff}, 8)) || request.Inputs[1].Parameters["scale"] != payload.Double(0.5) {
		t.Errorf("inputs %+v", request.Inputs)
	}
	if request.Parameters["top"] != payload.Int64(3) || !reflect.DeepEqual(request.Outputs, []string{"scores"}) {
		t.Errorf("got %+v", request)
	}
	if unpackAnswer(t, got.body)["id"] != "call-7" {
		t.Error("the id is not echoed")
	}
}

func TestInvalidMessagePackNamesItsPlace(t *testing.T) {
	t.Parallel()
	good := func() object { return input("x", "FP32", list{1}, list{1.0}) }
	with := func(key string, value any) string {
		in := good()
		in[key] = value
		return pack(t, object{"inputs": list{good(), in}})
	}
	twice := "\x81\xa6inputs\x91\x84\xa8datatype\xa4FP32\xa5shape\x91\x01\xa4data\xc4\x04abcd\xa4data\x91\x01"
	for name, row := range map[string]struct {
		contentType, body string
		reason            fault.Reason
		says              string
	}{
		"cut off":            {"application/msgpack", "\x92\x01", fault.InvalidRequest, "is cut off"},
		"two":                {"application/msgpack", "\x01\x02", fault.InvalidRequest, "goes on after its end"},
		"a length that lies": {"application/msgpack", "\xdd\xff\xff\xff\xff", fault.InvalidRequest, "is cut off"},
		"deep":               {"application/msgpack", strings.Repeat("\x91", 1000) + "\x01", fault.InvalidRequest, "nests deeper than 64"},
		"nothing":            {"application/msgpack", "", fault.InvalidRequest, "the body is empty"},
		"another form":       {"application/msgpack; form=table", "\x01", fault.UnsupportedMedia, "form="},
		"no map":             {"application/msgpack; form=tensors", "\x01", fault.InvalidInput, "the body must be a map"},
		"bytes elsewhere":    {"application/msgpack", with("parameters", object{"t": []byte{1}}), fault.InvalidInput, "inputs.x.parameters.t: is binary"},
		"NaN":                {"application/msgpack", with("data", list{math.NaN()}), fault.InvalidInput, "inputs.x.data[0]: is NaN or infinite, which JSON cannot represent; send data as bytes (bin)"},
		"a key of numbers":   {"application/msgpack; form=tensors", "\x81\x01\x01", fault.InvalidInput, "has a key that is not a string"},
		"a key before it":    {"application/msgpack", "\x82\x01\x02" + with("name", "x")[1:], fault.InvalidInput, "has a key that is not a string"},
		"a key in an input":  {"application/msgpack", "\x81\xa6inputs\x91\x82\x01\x02\xa8datatype\xa4FP32", fault.InvalidInput, "inputs[0]: has a key that is not a string"},
		"half floats listed": {"application/msgpack", with("datatype", "FP16"), fault.InvalidInput, "inputs.x.data: FP16 has no form in a list; send data as bytes (bin)"},
		"text for a shape":   {"application/msgpack", with("shape", list{"a"}), fault.InvalidRequest, "the body is not an inference request"},
		"too few bytes":      {"application/msgpack", with("data", []byte{1}), fault.InvalidInput, "inputs.x"},
		"another datatype":   {"application/msgpack", with("datatype", "FLOAT"), fault.InvalidInput, "inputs.x.datatype"},
		"too many inputs":    {"application/msgpack", pack(t, object{"inputs": slices.Repeat(list{object{"datatype": "FP32", "shape": list{0}, "data": []byte{}}}, 257)}), fault.InvalidInput, "inputs: at most 256 are allowed"},
		"data twice":         {"application/msgpack", twice, fault.InvalidInput, "inputs[0].data: is there twice"},
		"as JSON too long":   {"application/msgpack", with("more", make(list, fronttest.LimitBytes/2)), fault.InvalidInput, "is more than 65536 bytes as JSON"},
		"other JSON":         {"application/ld+json", "{", fault.InvalidRequest, "not valid JSON"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			caller := fronttest.AnswerWith()
			got := post(row.contentType, row.body).of(t, caller)
			var answer struct {
				Error struct{ Reason, Message string }
			}
			if err := json.Unmarshal([]byte(got.body), &answer); err != nil {
				t.Fatalf("a failure is JSON: %q, %v", got.body, err)
			}
			if answer.Error.Reason != string(row.reason) || !strings.Contains(answer.Error.Message, row.says) || caller.Last() != nil {
				t.Errorf("got %d %s", got.status, got.body)
			}
		})
	}
}

// unpackAnswer reads a document by a reader that is not the gateway's.
func unpackAnswer(t *testing.T, body string) map[string]any {
	t.Helper()
	value, left, err := msgp.ReadIntfBytes([]byte(body))
	if err != nil || len(left) > 0 {
		t.Fatalf("%x: %v", body, err)
	}
	document, ok := value.(map[string]any)
	if !ok {
		t.Fatalf("got %+v", value)
	}
	return document
}

func TestMessagePackResponseHasRawBytes(t *testing.T) {
	t.Parallel()
	nan := payload.OfTensor("scores", tensor.Tensor{Datatype: tensor.FP16, Shape: []int64{1, 2}, Raw: []byte{0, 0x7e, 0, 0}})
	nan.Parameters = payload.Parameters{"k": payload.Double(math.Inf(1))}
	got := post("image/png", "x", "Accept", "application/msgpack").of(t, fronttest.AnswerWith(
		nan,
		payload.OfBlob("caption", "text/plain", []byte("a \"cat\"\n")),
		payload.OfBlob("boxes", "application/geo+json", []byte(`{"n": 9007199254740993, "of": [0.5, null]}`)),
		payload.OfBlob("huge", "application/json", []byte(`1e999`)),
		payload.OfBlob("raw", "", []byte{0xff}),
	))
	if got.status != 200 || got.header.Get("Content-Type") != "application/msgpack" || got.header.Get("Server-Timing") != serverTiming {
		t.Fatalf("%d %v %q", got.status, got.header, got.body)
	}
	out := unpackAnswer(t, got.body)
	want := list{
		object{"name": "scores", "datatype": "FP16", "shape": list{int64(1), int64(2)}, "parameters": object{"k": math.Inf(1)}, "data": nan.Tensor.Raw},
		object{"name": "caption", "content_type": "text/plain", "text": "a \"cat\"\n"},
		object{"name": "boxes", "content_type": "application/geo+json", "json": object{"n": int64(9007199254740993), "of": list{0.5, nil}}},
		object{"name": "huge", "content_type": "application/json", "data": []byte("1e999")},
		object{"name": "raw", "content_type": "application/octet-stream", "data": []byte{0xff}},
	}
	if !reflect.DeepEqual(out["outputs"], want) {
		t.Errorf("got %+v\nwant %+v", out["outputs"], want)
	}
	if out["request_id"] != fronttest.RequestID || out["model_name"] != "photos" || !reflect.DeepEqual(out["metadata"], object{"note": "from the runner"}) {
		t.Errorf("got %+v", out)
	}
	if timeline, ok := out["timeline"].(object); !ok || len(timeline["steps"].(list)) != 1 {
		t.Errorf("the timeline is %+v", out["timeline"])
	}
}

func TestCallerChoosesTheResponseFormat(t *testing.T) {
	t.Parallel()
	packed := pack(t, object{"inputs": list{input("x", "FP32", list{1}, list{1.0})}})
	for name, row := range map[string]struct{ contentType, body, accept, want string }{
		"nothing said":              {"image/png", "x", "", "text/plain"},
		"anything":                  {"image/png", "x", "*/*", "text/plain"},
		"JSON":                      {"image/png", "x", "application/json", "application/json"},
		"MessagePack":               {"image/png", "x", "text/html, application/x-msgpack", "application/msgpack"},
		"the first of two":          {"image/png", "x", "application/msgpack, application/json", "application/msgpack"},
		"the other first":           {"image/png", "x", "application/json, application/msgpack", "application/json"},
		"the preferred":             {"image/png", "x", "application/json;q=0.5, application/msgpack", "application/msgpack"},
		"none of it":                {"image/png", "x", "application/msgpack;q=0", "text/plain"},
		"asked in JSON":             {"application/json", tensorBody, "", "application/json"},
		"asked in MessagePack":      {"application/msgpack", packed, "*/*", "application/msgpack"},
		"asked in it, wanted JSON":  {"application/msgpack", packed, "application/json", "application/json"},
		"asked in JSON, wanted it":  {"application/json", tensorBody, "application/msgpack", "application/msgpack"},
		"a quality that is no such": {"image/png", "x", "application/json;q=0.9, application/msgpack;q=nan", "application/msgpack"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := post(row.contentType, row.body, "Accept", row.accept).of(t, fronttest.AnswerWith(payload.OfBlob("a", "text/plain", []byte("b"))))
			if media := got.header.Get("Content-Type"); got.status != 200 || media != row.want {
				t.Errorf("%d %s %q", got.status, media, got.body)
			}
		})
	}
}

func TestFailureIsAlwaysJSON(t *testing.T) {
	t.Parallel()
	got := post("application/msgpack", "\xc1", "Accept", "application/msgpack").of(t, fronttest.AnswerWith())
	if got.status != 400 || !strings.HasPrefix(got.header.Get("Content-Type"), "application/json") || !json.Valid([]byte(got.body)) {
		t.Errorf("%d %s %q", got.status, got.header.Get("Content-Type"), got.body)
	}
}
