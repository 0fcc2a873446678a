package oipjson_test

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

func TestTensorsAreWrittenInProtocolForm(t *testing.T) {
	t.Parallel()
	for datatype, row := range map[tensor.Datatype]struct {
		raw  string
		want string
	}{
		tensor.Bool:   {"\x00\x01", "[false,true]"},
		tensor.Int8:   {"\x80\x7f", "[-128,127]"},
		tensor.Int16:  {"\x00\x80\xff\x7f", "[-32768,32767]"},
		tensor.Int32:  {"\x00\x00\x00\x80\x01\x00\x00\x00", "[-2147483648,1]"},
		tensor.Int64:  {"\x01\x00\x00\x00\x00\x00\x20\x00\xff\xff\xff\xff\xff\xff\xff\xff", "[9007199254740993,-1]"},
		tensor.Uint8:  {"\x00\xff", "[0,255]"},
		tensor.Uint16: {"\x00\x00\xff\xff", "[0,65535]"},
		tensor.Uint32: {"\x00\x00\x00\x00\xff\xff\xff\xff", "[0,4294967295]"},
		tensor.Uint64: {"\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff\xff\xff\xff\xff", "[0,18446744073709551615]"},
		tensor.FP32:   {"\xcd\xcc\xcc\x3d\x00\x00\x80\x3f", "[0.1,1]"},
		tensor.FP64:   {"\x9a\x99\x99\x99\x99\x99\xb9\x3f\x00\x00\x00\x00\x00\x00\xf0\x3f", "[0.1,1]"},
		tensor.Bytes:  {"\x01\x00\x00\x00a\x04\x00\x00\x00\"\xc3\xbc\n", `["a","\"ü\n"]`},
	} {
		t.Run(string(datatype), func(t *testing.T) {
			t.Parallel()
			part := payload.OfTensor("out", tensor.Tensor{Datatype: datatype, Shape: []int64{2, 1}, Raw: []byte(row.raw)})
			got, err := oipjson.AppendTensor([]byte("before "), part)
			want := `before {"name":"out","datatype":"` + string(datatype) + `","shape":[2,1],"data":` + row.want + `}`
			if err != nil || string(got) != want {
				t.Errorf("got %s, %v\nwant %s", got, err, want)
			}
		})
	}
}

func TestParametersAndNamesAreEscaped(t *testing.T) {
	t.Parallel()
	part := payload.OfTensor("a\"b\xff<\u2028", tensor.Tensor{Datatype: tensor.Bool, Shape: []int64{0}})
	part.Parameters = payload.Parameters{"k": payload.String("\n"), "n": payload.Uint64(math.MaxUint64)}
	got, err := oipjson.AppendTensor(nil, part)
	if err != nil || !json.Valid(got) || !strings.Contains(string(got), "a\\\"b\uFFFD<\\u2028") || !strings.Contains(string(got), `"parameters":{"k":"\n","n":18446744073709551615}`) {
		t.Errorf("got %s, %v", got, err)
	}
}

func TestUnrepresentableOutputIsFault(t *testing.T) {
	t.Parallel()
	nan := binary.LittleEndian.AppendUint32([]byte{0, 0, 0, 0}, math.Float32bits(float32(math.NaN())))
	infinity := binary.LittleEndian.AppendUint64(nil, math.Float64bits(math.Inf(-1)))
	for name, row := range map[string]struct {
		part   payload.Part
		reason fault.Reason
		text   string
	}{
		"NaN":       {payload.OfTensor("o", tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{2}, Raw: nan}), fault.RunnerOutputInvalid, "outputs.o.data[1] is NaN"},
		"infinity":  {payload.OfTensor("o", tensor.Tensor{Datatype: tensor.FP64, Shape: []int64{1}, Raw: infinity}), fault.RunnerOutputInvalid, "outputs.o.data[0]"},
		"FP16":      {payload.OfTensor("o", tensor.Tensor{Datatype: tensor.FP16, Shape: []int64{1}, Raw: []byte{0, 0}}), fault.NotSupported, "FP16"},
		"bytes":     {payload.OfTensor("o", tensor.Tensor{Datatype: tensor.Bytes, Shape: []int64{1}, Raw: []byte("\x01\x00\x00\x00\xff")}), fault.NotSupported, "outputs.o.data[0]"},
		"invalid":   {payload.OfTensor("o", tensor.Tensor{Datatype: tensor.Int8, Shape: []int64{2}, Raw: []byte{1}}), fault.RunnerOutputInvalid, "outputs.o"},
		"parameter": {payload.Part{Name: "o", Tensor: &tensor.Tensor{Datatype: tensor.Int8, Shape: []int64{0}}, Parameters: payload.Parameters{"p": payload.Double(math.NaN())}}, fault.RunnerOutputInvalid, "outputs.o.parameters"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := oipjson.AppendTensor(nil, row.part)
			if f := fault.From(err); f.Reason != row.reason || !strings.Contains(f.Message, row.text) {
				t.Errorf("got %v", f)
			}
		})
	}
}
