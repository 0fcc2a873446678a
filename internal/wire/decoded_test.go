package wire_test

import (
	"bytes"
	"math"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/apipb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/wire"
)

const (
	nesting = 64
	// growth is how much more a list allocates while it grows; its old elements are garbage.
	growth = 7
	// small is what decoders allocate anyway.
	small = 64 << 10
)

// checkSize checks that the size covers what decoding a message allocates, as far as the message
// is well-formed. Texts may take a few times their bytes.
func checkSize(t *testing.T, data []byte, size int64, decode func() error) {
	t.Helper()
	if size > 64<<20 {
		return // nobody decodes it
	}
	var err error
	if got := int64(testbed.Allocated(func() { err = decode() })); got > growth*(size+int64(len(data)))+small {
		t.Errorf("%d bytes are allocated for %d with elements of %d bytes, %v", got, len(data), size, err)
	}
}

func checkBinary(t *testing.T, data []byte, m proto.Message) int64 {
	t.Helper()
	size := wire.DecodedSize(data, m.ProtoReflect().Descriptor(), nesting, math.MaxInt64)
	checkSize(t, data, size, func() error {
		return proto.UnmarshalOptions{RecursionLimit: nesting, DiscardUnknown: true}.Unmarshal(data, m)
	})
	return size
}

func checkJSON(t *testing.T, data []byte, m proto.Message) int64 {
	t.Helper()
	size := wire.DecodedJSONSize(data, math.MaxInt64)
	checkSize(t, data, size, func() error { return protojson.UnmarshalOptions{RecursionLimit: nesting}.Unmarshal(data, m) })
	return size
}

// messages are of all kinds of fields.
func messages() []proto.Message {
	return []proto.Message{&structpb.Struct{}, &descriptorpb.FileDescriptorProto{}, &descriptorpb.SourceCodeInfo{}, &fieldmaskpb.FieldMask{}, &apipb.Api{}}
}

func field(number protowire.Number, value string) string {
	return string(protowire.AppendString(protowire.AppendTag(nil, number, protowire.BytesType), value))
}

// Not parallel: it counts allocations.
func TestDecodedSizeCoversWhatDecodersAllocate(t *testing.T) {
	const many = 1 << 15
	for name, row := range map[string]struct {
		data  string
		into  proto.Message
		least int64
	}{
		"empty messages":           {strings.Repeat(field(4, ""), many), &descriptorpb.FileDescriptorProto{}, 100 * many},
		"entries of one key":       {strings.Repeat(field(1, ""), many), &structpb.Struct{}, 50 * many},
		"messages with a map":      {strings.Repeat(field(1, field(5, field(1, field(1, "a")+field(2, "")))), many), &structpb.ListValue{}, 500 * many},
		"texts":                    {strings.Repeat(field(1, ""), many), &fieldmaskpb.FieldMask{}, 16 * many},
		"packed numbers":           {field(1, field(1, strings.Repeat("\x00", many))), &descriptorpb.SourceCodeInfo{}, 4 * many},
		"packed numbers, in parts": {field(1, strings.Repeat(field(1, "\x00"), many)), &descriptorpb.SourceCodeInfo{}, 4 * many},
		"packed numbers, merged":   {strings.Repeat(field(9, field(1, field(1, "\x00"))), many), &descriptorpb.FileDescriptorProto{}, 4 * many},
		"packed after not packed":  {field(1, strings.Repeat("\x08\x00", many)+strings.Repeat(field(1, "\x00"), many)), &descriptorpb.SourceCodeInfo{}, 4 * many},
		"numbers not packed":       {field(1, strings.Repeat("\x08\x00", many)), &descriptorpb.SourceCodeInfo{}, 4 * many},
		"other bodies of a oneof":  {field(1, strings.Repeat(field(5, "")+field(6, ""), many)), &structpb.ListValue{}, 100 * many},
		"unknown fields":           {strings.Repeat(field(100, ""), many), &fieldmaskpb.FieldMask{}, many},
		"unknown groups":           {strings.Repeat("\xa3\x06\xa4\x06", many), &fieldmaskpb.FieldMask{}, many},
		"one long text":            {field(1, strings.Repeat("a", many)), &fieldmaskpb.FieldMask{}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			if size := checkBinary(t, []byte(row.data), row.into); size < row.least {
				t.Errorf("the size is %d, and %d at least", size, row.least)
			}
		})
	}
	for name, row := range map[string]struct {
		first, element, last string
		into                 proto.Message
	}{
		"objects in JSON":         {`{"message_type":[`, "{},", "{}]}", &descriptorpb.FileDescriptorProto{}},
		"objects with a map":      {"[", `{"":{}},`, "null]", &structpb.ListValue{}},
		"numbers in JSON":         {`{"location":[{"path":[`, "0,", "0]}]}", &descriptorpb.SourceCodeInfo{}},
		"texts in JSON":           {`{"dependency":[`, `"",`, `""]}`, &descriptorpb.FileDescriptorProto{}},
		"lists in JSON":           {"[", "[],", "[]]", &structpb.ListValue{}},
		"lists of lists in JSON":  {"[", "[[[]]],", "[]]", &structpb.ListValue{}},
		"braces and quotes in it": {`{"name":"`, `{\"[,\\`, `"}`, &descriptorpb.FileDescriptorProto{}},
	} {
		t.Run(name, func(t *testing.T) {
			data := []byte(row.first + strings.Repeat(row.element, many) + row.last)
			size := checkJSON(t, data, row.into)
			if isText := strings.Contains(row.first, `"name"`); isText != (size < 1000) {
				t.Errorf("the size is %d", size)
			}
		})
	}
}

// The bytes are repeated, so that small ones count.
func FuzzDecodedSizeCoversWhatDecodersAllocate(f *testing.F) {
	for _, seed := range []string{field(1, ""), field(4, field(1, "a")), field(1, field(1, "\x00\x00")), "\x08\x00", "\xa3\x06\xa4\x06", field(1, field(5, "")+field(6, ""))} {
		f.Add([]byte(seed), []byte(seed), uint8(0))
	}
	for kind, seed := range []string{`"a":{},`, `{},`, `"dependency":["",""],`, `{"path":[0]},`, `[],`, `null,`} {
		f.Add([]byte(seed), []byte("{["), uint8(kind)|0x80)
	}
	f.Fuzz(func(t *testing.T, repeated, around []byte, kind uint8) {
		if len(repeated) > 1<<10 || len(around) > 1<<10 {
			return
		}
		data := bytes.Repeat(repeated, 1000)
		into := messages()[int(kind&0x7f)%len(messages())]
		if kind&0x80 == 0 {
			checkBinary(t, data, into)
			data = protowire.AppendBytes(protowire.AppendTag(bytes.Clone(around), 1, protowire.BytesType), data)
			checkBinary(t, data, into)
			return
		}
		if _, isValue := into.(*structpb.Struct); isValue {
			return // a number in it is a message, which no message of ours has
		}
		checkJSON(t, append(append(bytes.Clone(around), data...), "null]}"...), into)
	})
}
