package oipjson_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// one returns a request of one input x.
func one(datatype, shape, data string) []byte {
	return fmt.Appendf(nil, `{"inputs":[{"name":"x","datatype":%q,"shape":%s,"data":%s}]}`, datatype, shape, data)
}

func decode(t *testing.T, body []byte) []payload.Part {
	t.Helper()
	request, err := oipjson.Decode(body, nil)
	if err != nil {
		t.Fatalf("Decode(%.200s): %v", body, err)
	}
	parts, err := request.Parts()
	if err != nil {
		t.Fatalf("Parts: %v", err)
	}
	return parts
}

func TestEveryDatatypeIsExact(t *testing.T) {
	t.Parallel()
	le := binary.LittleEndian
	for _, row := range []struct {
		name, shape, data string
		want              []byte
	}{
		{"BOOL", "[2]", `[true, false]`, []byte{1, 0}},
		{"INT8", "[3]", `[-128, 0, 127]`, []byte{0x80, 0, 0x7f}},
		{"INT16", "[2]", `[-32768,32767]`, []byte{0, 0x80, 0xff, 0x7f}},
		{"INT32", "[1]", `[-2147483648]`, []byte{0, 0, 0, 0x80}},
		{"INT64", "[2]", `[9007199254740993,-9223372036854775808]`, le.AppendUint64(le.AppendUint64(nil, 1<<53+1), 1<<63)},
		{"UINT8", "[2]", `[0,255]`, []byte{0, 255}},
		{"UINT16", "[1]", `[65535]`, []byte{255, 255}},
		{"UINT32", "[1]", `[4294967295]`, []byte{255, 255, 255, 255}},
		{"UINT64", "[1]", `[18446744073709551615]`, le.AppendUint64(nil, math.MaxUint64)},
		{"FP32", "[3]", `[0.1, -2.5e-3, 16777217]`, le.AppendUint32(le.AppendUint32(le.AppendUint32(nil, math.Float32bits(0.1)), math.Float32bits(-2.5e-3)), math.Float32bits(16777216))},
		{"FP64", "[1]", `[0.1]`, le.AppendUint64(nil, math.Float64bits(0.1))},
		{"BYTES", "[3]", `["a", "", "\u00fc\"\\\/"]`, []byte("\x01\x00\x00\x00a\x00\x00\x00\x00\x05\x00\x00\x00ü\"\\/")},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			got := decode(t, one(row.name, row.shape, row.data))[0]
			if got.Name != "x" || string(got.Tensor.Datatype) != row.name || !slices.Equal(got.Tensor.Raw, row.want) {
				t.Errorf("got %s %v % x, want % x", got.Name, got.Tensor.Datatype, got.Tensor.Raw, row.want)
			}
			if err := got.Tensor.Validate(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestDataIsFlatOrNestedAsShape(t *testing.T) {
	t.Parallel()
	want := []byte{1, 2, 3, 4, 5, 6}
	for name, row := range map[string][2]string{
		"flat":              {"[2,3]", "[1,2,3,4,5,6]"},
		"nested":            {"[2,3]", "[[1,2,3],[4,5,6]]"},
		"three axes":        {"[1,2,3]", "[[[1,2,3],[4,5,6]]]"},
		"white space":       {"[ 2 , 3 ]", " [ [ 1 , 2 , 3 ] ,\n\t[ 4 , 5 , 6 ] ] "},
		"columns of one":    {"[6,1]", "[[1],[2],[3],[4],[5],[6]]"},
		"flat, columns too": {"[6,1]", "[1,2,3,4,5,6]"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := decode(t, one("UINT8", row[0], row[1])); !slices.Equal(got[0].Tensor.Raw, want) {
				t.Errorf("got %v", got[0].Tensor.Raw)
			}
		})
	}
}

func TestEmptyTensorsAndScalarsDecode(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		shape, data string
		size        int
	}{
		"no rows":       {"[0,3]", "[]", 0},
		"empty rows":    {"[2,0]", "[[],[]]", 0},
		"empty, flat":   {"[2,0]", "[]", 0},
		"scalar":        {"[]", "[7]", 4},
		"empty, nested": {"[2,0,5]", "[[],[]]", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := decode(t, one("FP32", row.shape, row.data))[0].Tensor; len(got.Raw) != row.size || got.Validate() != nil {
				t.Errorf("got %+v: %v", got, got.Validate())
			}
		})
	}
}

func TestMembersComeInAnyOrder(t *testing.T) {
	t.Parallel()
	got := decode(t, []byte(`{"outputs":[],"inputs":[{"data":[[1],[2]],"shape":[2,1],"extra":{"a":[null,true]},"datatype":"INT8","name":"x"}],"model_name":"m"}`))
	if want := []byte{1, 2}; got[0].Name != "x" || !slices.Equal(got[0].Tensor.Raw, want) {
		t.Errorf("got %+v", got[0])
	}
}

func TestDecodeReadsAllMembers(t *testing.T) {
	t.Parallel()
	request, err := oipjson.Decode([]byte(`{
		"id": "call-7",
		"parameters": {"text": "t", "yes": true, "whole": -3, "big": 18446744073709551615, "half": 0.5},
		"inputs": [
			{"name": "x", "datatype": "INT8", "shape": [1], "parameters": {"k": 2}, "data": [1]},
			{"name": "y", "datatype": "INT8", "shape": [1], "data": [2]}],
		"outputs": [{"name": "scores", "parameters": {"binary_data": false}}, {"name": "labels"}]}`), nil)
	if err != nil {
		t.Fatal(err)
	}
	want := payload.Parameters{
		"text": payload.String("t"), "yes": payload.Bool(true), "whole": payload.Int64(-3),
		"big": payload.Uint64(math.MaxUint64), "half": payload.Double(0.5),
	}
	if request.ID != "call-7" || !reflect.DeepEqual(request.Parameters, want) {
		t.Errorf("got %q %v", request.ID, request.Parameters)
	}
	if got := request.OutputNames(); !slices.Equal(got, []string{"scores", "labels"}) {
		t.Errorf("outputs %v", got)
	}
	parts, err := request.Parts()
	if err != nil || len(parts) != 2 || parts[0].Parameters["k"] != payload.Int64(2) || parts[1].Tensor.Raw[0] != 2 {
		t.Errorf("got %+v, %v", parts, err)
	}
}

func TestOptionalMembersMayBeNull(t *testing.T) {
	t.Parallel()
	request, err := oipjson.Decode([]byte(`{"id":null,"parameters":null,"outputs":null,"inputs":[{"name":"x","datatype":"BOOL","shape":[0],"data":[]}]}`), nil)
	if err != nil || request.ID != "" || request.Parameters != nil || request.OutputNames() != nil {
		t.Errorf("got %+v, %v", request, err)
	}
	request, err = oipjson.Decode([]byte(`{"inputs":[{"parameters": null,"name":"x","datatype":"BOOL","shape":[0],"data":[]}],"outputs":[{"name":"y","parameters":null}]}`), nil)
	if err != nil || request.Inputs[0].Parameters != nil || request.Outputs[0].Parameters != nil {
		t.Errorf("got %+v, %v", request, err)
	}
}

func TestInputMayOmitData(t *testing.T) {
	t.Parallel()
	request, err := oipjson.Decode([]byte(`{"inputs":[{"name":"x","datatype":"FP16","shape":[2],"parameters":{"binary_data_size":4}}]}`), nil)
	if err != nil || request.Inputs[0].Tensor.Raw != nil {
		t.Fatalf("got %+v, %v", request, err)
	}
	if _, err := request.Parts(); fault.From(err).Reason != fault.InvalidInput {
		t.Errorf("Parts without data: %v", err)
	}
	request.Inputs[0].Tensor.Raw = make([]byte, 4)
	if parts, err := request.Parts(); err != nil || parts[0].Tensor.Datatype != tensor.FP16 {
		t.Errorf("got %+v, %v", parts, err)
	}
}

func TestErrorNamesField(t *testing.T) {
	t.Parallel()
	input := func(members string) string { return `{"inputs":[{` + members + `}]}` }
	for _, row := range []struct {
		name, body string
		// field is the violation's; text is in the message.
		field, text string
	}{
		{"int8 out of range", string(one("INT8", "[2]", "[1,300]")), "inputs.x.data[1]", "300 is not INT8: use whole numbers from -128 to 127"},
		{"uint8 negative", string(one("UINT8", "[1]", "[-1]")), "inputs.x.data[0]", "-1 is not UINT8: use whole numbers from 0 to 255"},
		{"int64 out of range", string(one("INT64", "[1]", "[9223372036854775808]")), "inputs.x.data[0]", "9223372036854775807"},
		{"uint64 out of range", string(one("UINT64", "[1]", "[18446744073709551616]")), "inputs.x.data[0]", "to 18446744073709551615"},
		{"fraction for an integer", string(one("INT32", "[1]", "[1.0]")), "inputs.x.data[0]", "1.0 is not INT32"},
		{"exponent for an integer", string(one("INT32", "[1]", "[1e3]")), "inputs.x.data[0]", "1e3 is not INT32"},
		{"fp32 out of range", string(one("FP32", "[1]", "[1e39]")), "inputs.x.data[0]", "1e39 is beyond FP32"},
		{"fp64 out of range", string(one("FP64", "[1]", "[1e999]")), "inputs.x.data[0]", "beyond FP64"},
		{"string for a number", string(one("FP32", "[1]", `["NaN"]`)), "inputs.x.data[0]", "is not FP32"},
		{"NaN", string(one("FP32", "[2]", "[1, NaN]")), "inputs.x.data[1]", "NaN"},
		{"an infinity", string(one("FP64", "[1]", "[-Infinity]")), "inputs.x.data[0]", "Infinity"},
		{"a list for a number", string(one("FP32", "[2]", "[[1],[2]]")), "inputs.x.data[0]", "nested"},
		{"null for a number", string(one("FP32", "[1]", `[null]`)), "inputs.x.data[0]", "is not FP32"},
		{"number for a bool", string(one("BOOL", "[1]", `[1]`)), "inputs.x.data[0]", "is not BOOL"},
		{"number for a string", string(one("BYTES", "[1]", `[1]`)), "inputs.x.data[0]", "is not BYTES"},
		{"FP16", string(one("FP16", "[1]", "[1]")), "inputs.x.data", "FP16 has no form in JSON"},
		{"BF16", string(one("BF16", "[1]", "[1]")), "inputs.x.data", "BF16 has no form in JSON"},
		{"too few, flat", string(one("INT8", "[3]", "[1,2]")), "inputs.x.data", "has 2 elements, shape [3] takes 3"},
		{"too many, flat", string(one("INT8", "[1]", "[1,2]")), "inputs.x.data", "more than the 1 elements"},
		{"huge shape", string(one("INT8", "[1000000000000]", "[1]")), "inputs.x.data", "fewer elements than shape"},
		{"overflowing shape", string(one("INT8", "[9223372036854775807,2]", "[1]")), "inputs.x.data", "fewer elements than shape"},
		{"too few rows", string(one("INT8", "[2,1]", "[[1]]")), "inputs.x.data", "fewer than the 2 entries on axis 0"},
		{"ragged", string(one("INT8", "[2,2]", "[[1,2],[3]]")), "inputs.x.data", "fewer than the 2 entries on axis 1"},
		{"ragged beyond", string(one("INT8", "[2,2]", "[[1,2],[3,4,5]]")), "inputs.x.data", "more than the 2 entries on axis 1"},
		{"half nested", string(one("INT8", "[2,1]", "[[1],2]")), "inputs.x.data", "neither flat nor nested"},
		{"nested too deep", string(one("INT8", "[1]", "[[1]]")), "inputs.x.data[0]", "is a list"},
		{"negative axis", string(one("INT8", "[-1]", "[1]")), "inputs.x.shape", "axis of -1"},
		{"shape no array", string(one("INT8", "3", "[1]")), "inputs.x.shape", "must be an array"},
		{"17 axes", string(one("INT8", "["+strings.Repeat("1,", 16)+"1]", "[1]")), "inputs.x.shape", "more than 16 axes"},
		{"data no array", string(one("INT8", "[1]", "1")), "inputs.x.data", "must be an array"},
		{"unknown datatype", string(one("FLOAT", "[1]", "[1]")), "inputs.x.datatype", `"FLOAT"`},
		{"unnamed", input(`"datatype":"INT8","shape":[1],"data":[300]`), "inputs[0].data[0]", "300"},
		{"no shape", input(`"name":"x","datatype":"INT8","data":[1]`), "inputs.x.shape", "is missing"},
		{"no datatype", input(`"name":"x","shape":[1],"data":[1]`), "inputs.x.datatype", "is missing"},
		{"no data", input(`"name":"x","shape":[1],"datatype":"INT8"`), "inputs.x.data", "is missing"},
		{"late data", input(`"name":"x","data":[300],"shape":[1],"datatype":"INT8"`), "inputs.x.data[0]", "300"},
		{"name no string", input(`"name":1`), "inputs[0].name", "must be a string"},
		{"long name", input(`"name":"` + strings.Repeat("n", 257) + `"`), "inputs[0].name", "longer than 256"},
		{"twice", input(`"shape":[1],"shape":[2]`), "inputs[0].shape", "is there twice"},
		{"input no object", `{"inputs":[1]}`, "inputs[0]", "must be an object"},
		{"no inputs", `{"id":"7"}`, "inputs", "is missing"},
		{"inputs twice", `{"inputs":[],"inputs":[]}`, "inputs", "is there twice"},
		{"too many inputs", `{"inputs":[` + strings.Repeat(`{"datatype":"BOOL","shape":[0],"data":[]},`, 256) + `{}]}`, "inputs", "at most 256"},
		{"id no string", `{"id":7,"inputs":[]}`, "id", "must be a string"},
		{"nested parameter", `{"parameters":{"p":[1]},"inputs":[]}`, "parameters.p", "must be a string, number or boolean"},
		{"null parameter", `{"parameters":{"p":null},"inputs":[]}`, "parameters.p", "must be a string, number or boolean"},
		{"huge parameter", `{"parameters":{"p":1e999},"inputs":[]}`, "parameters.p", "beyond 64 bits"},
		{"parameter twice", `{"parameters":{"p":1,"p":2},"inputs":[]}`, "parameters.p", "is there twice"},
		{"parameters no object", `{"parameters":[],"inputs":[]}`, "parameters", "must be an object"},
		{"unnamed output", `{"outputs":[{}],"inputs":[]}`, "outputs[0].name", "is missing"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			request, err := oipjson.Decode([]byte(row.body), nil)
			if err == nil {
				_, err = request.Parts()
			}
			f := fault.From(err)
			if f.Reason != fault.InvalidInput || len(f.Violations) != 1 || f.Violations[0].Field != row.field || !strings.Contains(f.Message, row.text) {
				t.Errorf("got %v %+v, want %s ... %s", f, f.Violations, row.field, row.text)
			}
		})
	}
}

func TestMalformedJSONIsInvalidRequest(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]string{
		"empty":             "",
		"not an object":     "[]",
		"cut off in data":   string(one("INT8", "[2]", "[1,2]"))[:63],
		"cut off behind it": string(one("INT8", "[2]", "[1,2]"))[:66],
		"cut off in shape":  `{"inputs":[{"name":"x","datatype":"INT8","shape":[2`,
		"trailing comma":    string(one("INT8", "[3]", "[1,2,]")),
		"leading zero":      string(one("INT8", "[1]", "[01]")),
		"hexadecimal":       string(one("INT8", "[1]", "[0x1]")),
		"plus":              string(one("INT8", "[1]", "[+1]")),
		"no digit":          string(one("FP32", "[1]", "[-]")),
		"bare point":        string(one("FP32", "[1]", "[1.]")),
		"bare exponent":     string(one("FP32", "[1]", "[1e]")),
		"NaN as an extent":  string(one("FP32", "[NaN]", "[1]")),
		"two documents":     `{"inputs":[]} {}`,
		"control character": "{\"inputs\":[],\"a\x01\":1}",
		"bad escape":        `{"inputs":[],"\x":1}`,
		"not UTF-8":         string(one("BYTES", "[1]", "[\"\xff\"]")),
		"open string":       `{"inputs":[],"a`,
		"open escape":       `{"inputs":[],"a\`,
		"too deep":          `{"inputs":[],"x":` + strings.Repeat("[", 65) + strings.Repeat("]", 65) + "}",
		"bad word":          `{"inputs":[],"x":nul}`,
		"no colon":          `{"inputs" []}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := oipjson.Decode([]byte(body), nil)
			f := fault.From(err)
			if f.Reason != fault.InvalidRequest || !strings.Contains(f.Message, "byte") {
				t.Errorf("got %v", f)
			}
			if cut := strings.HasPrefix(name, "cut off") || strings.HasPrefix(name, "open") || name == "empty"; strings.Contains(f.Message, "ends early") != cut {
				t.Errorf("cut off is %v: got %v", cut, f)
			}
			if strings.Contains(f.Message, "NaN") != strings.HasPrefix(name, "NaN") {
				t.Errorf("got %v", f)
			}
		})
	}
}

func TestDetect(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]bool{
		string(one("INT8", "[1]", "[1]")):                           true,
		`{"inputs":[{"datatype":"?", broken`:                        true,
		`{"id":"a{","x":{"inputs":[]},"inputs":[{"datatype":1}]}`:   true,
		` { "inputs" : [ { "name" : "x" , "datatype" : "FP32" } ] `: true,
		`{"inputs":[{"data":[1,NaN],"datatype":"FP32"}]}`:           true,
		`{"inputs":[{"name":"x"}]}`:                                 false,
		`{"inputs":["a prompt"]}`:                                   false,
		`{"inputs":"a prompt"}`:                                     false,
		`{"inputs":{"datatype":"FP32"}}`:                            false,
		`{"inputs":[]}`:                                             false,
		`{"x":{"inputs":[{"datatype":"FP32"}]}}`:                    false,
		`[{"inputs":[{"datatype":"FP32"}]}]`:                        false,
		`"inputs"`:                                                  false,
		``:                                                          false,
		`{broken`:                                                   false,
	} {
		if got := oipjson.Detect([]byte(body)); got != want {
			t.Errorf("Detect(%s) = %v", body, got)
		}
	}
}
