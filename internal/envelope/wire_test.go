package envelope_test

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// writesWhatTheContractSays holds the bytes that are written of a value against
// the generated message of it, and what is read of that one's bytes against the
// value.
func writesWhatTheContractSays[V encoder](draw func(*rapid.T) V, toProto func(V) proto.Message, decode func([]byte) (V, error)) func(*rapid.T) {
	return func(t *rapid.T) {
		value := draw(t)
		want := toProto(value)
		data, err := value.Encode()
		if err != nil {
			t.Fatal(err)
		}
		got := want.ProtoReflect().New().Interface()
		if err := proto.Unmarshal(data, got); err != nil || !proto.Equal(got, want) {
			t.Fatalf("wrote %v, %v; want %v", got, err, want)
		}
		if data, err = proto.Marshal(want); err != nil {
			t.Fatal(err)
		}
		if back, err := decode(data); err != nil || !reflect.DeepEqual(back, value) {
			t.Fatalf("read %+v, %v; want %+v", back, err, value)
		}
	}
}

func TestEnvelopesMatchProtobuf(t *testing.T) {
	t.Parallel()
	toProto := func(e *envelope.Envelope) proto.Message { return referenceEnvelope(e) }
	rapid.Check(t, writesWhatTheContractSays(drawEnvelope, toProto, envelope.Decode))
}

func TestRepliesMatchProtobuf(t *testing.T) {
	t.Parallel()
	toProto := func(r *envelope.Reply) proto.Message { return replyToProto(r) }
	rapid.Check(t, writesWhatTheContractSays(drawReply, toProto, envelope.DecodeReply))
}

func TestResultsMatchProtobuf(t *testing.T) {
	t.Parallel()
	toProto := func(r *envelope.Result) proto.Message { return resultToProto(r) }
	rapid.Check(t, writesWhatTheContractSays(drawResult, toProto, envelope.DecodeResult))
}

// failer is a test, or a property's.
type failer interface {
	Helper()
	Fatalf(format string, args ...any)
}

// agree fails where the package and the reference differ on what anybody may send.
func agree[V any](t failer, data []byte, decode, reference func([]byte) (*V, error)) {
	t.Helper()
	got, err := decode(data)
	want, refused := reference(data)
	if (err == nil) != (refused == nil) {
		t.Fatalf("%x: decoding says %v, the reference %v", data, err, refused)
	}
	if err != nil {
		if got != nil || !errors.Is(err, envelope.ErrMalformed) {
			t.Fatalf("%x: got %v, %v", data, got, err)
		}
		return
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("%x: got %+v, want %+v", data, got, want)
	}
}

// inPieces cuts an encoded message's fields apart and says them in another order,
// some of them again, as protobuf lets a sender do.
func inPieces(t *rapid.T, data []byte) []byte {
	var fields [][]byte
	for len(data) > 0 {
		_, _, n := protowire.ConsumeField(data)
		if n < 0 {
			t.Fatal(protowire.ParseError(n))
		}
		fields, data = append(fields, data[:n]), data[n:]
	}
	if len(fields) == 0 {
		return nil
	}
	fields = rapid.Permutation(fields).Draw(t, "order")
	again := rapid.SliceOfN(rapid.SampledFrom(fields), 0, 3).Draw(t, "again")
	return bytes.Join(append(fields, again...), nil)
}

// noise is a field that nobody knows, or one of a wire type that it has not.
func noise(t *rapid.T) []byte {
	number := protowire.Number(rapid.IntRange(1, 30).Draw(t, "number"))
	switch rapid.IntRange(0, 3).Draw(t, "kind") {
	case 0:
		return protowire.AppendVarint(protowire.AppendTag(nil, number, protowire.VarintType), rapid.Uint64().Draw(t, "varint"))
	case 1:
		return protowire.AppendFixed64(protowire.AppendTag(nil, number, protowire.Fixed64Type), rapid.Uint64().Draw(t, "fixed64"))
	case 2:
		return protowire.AppendFixed32(protowire.AppendTag(nil, number, protowire.Fixed32Type), rapid.Uint32().Draw(t, "fixed32"))
	default:
		out := protowire.AppendTag(nil, number, protowire.StartGroupType)
		return protowire.AppendTag(out, number, protowire.EndGroupType)
	}
}

// scrambled draws the bytes of a message as another sender might have written
// them: fields in any order, again, and with noise between them.
func scrambled[V encoder](draw func(*rapid.T) V) func(*rapid.T) []byte {
	return func(t *rapid.T) []byte {
		data, err := draw(t).Encode()
		if err != nil {
			t.Fatal(err)
		}
		other, err := draw(t).Encode()
		if err != nil {
			t.Fatal(err)
		}
		out := inPieces(t, data)
		if rapid.Bool().Draw(t, "with another's") {
			out = append(out, inPieces(t, other)...)
		}
		if rapid.Bool().Draw(t, "with noise") {
			out = append(out, noise(t)...)
		}
		if rapid.IntRange(0, 9).Draw(t, "damaged") == 0 && len(out) > 0 {
			out[rapid.IntRange(0, len(out)-1).Draw(t, "at")] ^= rapid.Byte().Draw(t, "by")
		}
		return out
	}
}

func TestEnvelopesDecodeAsProtobufDoes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		agree(t, scrambled(drawEnvelope)(t), envelope.Decode, referenceDecode)
	})
}

func TestRepliesDecodeAsProtobufDoes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		agree(t, scrambled(drawReply)(t), envelope.DecodeReply, referenceDecodeReply)
	})
}

func TestResultsDecodeAsProtobufDoes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		agree(t, scrambled(drawResult)(t), envelope.DecodeResult, referenceDecodeResult)
	})
}

func FuzzDecodeAgreesWithTheReference(f *testing.F) {
	seed(f, drawEnvelope)
	f.Fuzz(func(t *testing.T, data []byte) { agree(t, data, envelope.Decode, referenceDecode) })
}

func FuzzDecodeReplyAgreesWithTheReference(f *testing.F) {
	seed(f, drawReply)
	f.Fuzz(func(t *testing.T, data []byte) { agree(t, data, envelope.DecodeReply, referenceDecodeReply) })
}

func FuzzDecodeResultAgreesWithTheReference(f *testing.F) {
	seed(f, drawResult)
	f.Fuzz(func(t *testing.T, data []byte) { agree(t, data, envelope.DecodeResult, referenceDecodeResult) })
}

// seed adds messages, of this sender and of others.
func seed[V encoder](f *testing.F, draw func(*rapid.T) V) {
	f.Helper()
	own, others := rapid.Custom(draw), rapid.Custom(scrambled(draw))
	for i := range seeds {
		add(f, own.Example(i))
		f.Add(others.Example(i))
	}
	f.Add([]byte{})
}

// field returns an encoded field that holds bytes: the fields of a message, say.
func field(number protowire.Number, fields ...[]byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), bytes.Join(fields, nil))
}

// marshalled returns the bytes of a generated message.
func marshalled(t *testing.T, m proto.Message) []byte {
	t.Helper()
	data, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestLastBodyOfAPartWins(t *testing.T) {
	t.Parallel()
	const parts, blob, tensor, ref = 19, 2, 3, 4
	text, number := field(1, []byte("UINT8")), []byte{2 << 3, 1}
	tests := map[string]struct {
		part []byte
		says string // empty: it is accepted
	}{
		"a blob in two pieces":               {part: append(field(blob, field(1, []byte("a/b"))), field(blob, field(2, []byte("x")))...)},
		"a tensor in two pieces, one number": {part: bytes.Join([][]byte{field(tensor, text, number), field(tensor, field(3, []byte{7}))}, nil)},
		"a shape said twice":                 {part: field(tensor, text, number, field(2, []byte{3}), field(3, []byte{1, 2, 3}))},
		"a tensor, then a blob":              {part: append(field(tensor, text, number), field(blob)...)},
		"a blob, then a tensor, then a blob": {part: bytes.Join([][]byte{field(blob, field(2, []byte("x"))), field(tensor), field(blob)}, nil)},
		"a reference, then a blob":           {part: append(field(ref), field(blob)...)},
		"a blob, then a reference":           {part: append(field(blob), field(ref)...), says: "by reference"},
		"a broken reference, then a blob":    {part: append(field(ref, []byte{0x0a}), field(blob)...), says: "field 4"},
		"a blob, then an empty tensor":       {part: append(field(blob), field(tensor)...), says: "unknown datatype"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			in := wire()
			in.Parts = nil
			data := append(marshalled(t, in), field(parts, test.part)...)
			agree(t, data, envelope.Decode, referenceDecode)
			_, err := envelope.Decode(data)
			if (test.says == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want %q", err, test.says)
			}
		})
	}
}

func TestReservedFieldMustBeWhole(t *testing.T) {
	t.Parallel()
	for name, tail := range map[string][]byte{
		"a claim":             field(22, field(1, []byte("c"))),
		"a place in a stream": field(23, []byte{1 << 3, 1}), "a call": field(24, field(1, []byte("/a/b"))),
		"a claim not in UTF-8":    field(22, field(1, []byte{0xff})),
		"a place that is cut off": field(23, []byte{1 << 3}), "a call that is cut off": field(24, []byte{0x0a}),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			agree(t, append(marshalled(t, wire()), tail...), envelope.Decode, referenceDecode)
		})
	}
}

func TestInvalidUTF8IsNotSent(t *testing.T) {
	t.Parallel()
	const bad = "\xff"
	for name, spoil := range map[string]func(*envelope.Envelope){
		"the tenant":          func(e *envelope.Envelope) { e.Tenant = bad },
		"a name in metadata":  func(e *envelope.Envelope) { e.Metadata = map[string]string{bad: ""} },
		"a value in metadata": func(e *envelope.Envelope) { e.Metadata = map[string]string{"": bad} },
		"a content type":      func(e *envelope.Envelope) { e.Parts[0].Blob.ContentType = bad },
		"a parameter":         func(e *envelope.Envelope) { e.Parts[0].Parameters = payload.Parameters{"p": payload.String(bad)} },
		"a parameter's name":  func(e *envelope.Envelope) { e.Route[0].Parameters = payload.Parameters{bad: payload.Bool(true)} },
		"a name to keep":      func(e *envelope.Envelope) { e.Route[0].Keep = []string{bad} },
		"a model":             func(e *envelope.Envelope) { e.Route[0].Model.Model = bad },
		"a timing's host":     func(e *envelope.Envelope) { e.Timings = []envelope.StepTiming{{Host: bad}} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := threeSteps()
			spoil(e)
			if data, err := e.Encode(); data != nil || err == nil || !strings.Contains(err.Error(), "UTF-8") {
				t.Errorf("got %x, %v", data, err)
			}
		})
	}
}

// What a message makes its reader hold is in proportion to the message, whatever
// is in it: many things of no size above all.
func TestMemoryIsProportionalToTheMessage(t *testing.T) {
	// Not parallel: it counts what the process allocates.
	const size, most = 1 << 20, 24
	head := marshalled(t, wire())
	output := func(fields ...[]byte) []byte { return field(6, fields...) }
	tests := map[string]struct{ head, again, tail []byte }{
		"empty steps":         {head: head, again: field(9)},
		"empty parts":         {head: head, again: field(19)},
		"empty timings":       {head: head, again: field(21)},
		"empty metadata":      {head: head, again: field(18)},
		"empty trace context": {head: head, again: field(17)},
		"one tenant or other": {head: head, again: field(2, []byte("t"))},
		"names to keep":       {head: head, again: field(9, bytes.Repeat(field(6), 1000))},
		"parameters":          {head: head, again: field(9, bytes.Repeat(field(4), 1000))},
		"empty outputs":       {again: output()},
		"parts of no size":    {again: output(bytes.Repeat(field(1), 1000))},
		"outcomes in turns":   {again: append(output(field(1, field(2))), field(8, field(1, field(2)))...)},
		"axes":                {head: head, again: field(19, field(3, field(2, make([]byte, 1000))))},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			data := append(bytes.Clone(test.head), bytes.Repeat(test.again, size/len(test.again))...)
			for _, decode := range []func(){
				func() { _, _ = envelope.Decode(data) },
				func() { _, _ = envelope.DecodeReply(data) },
			} {
				if took := testbed.Allocated(decode); took > most*uint64(len(data)) {
					t.Errorf("%d bytes took %d", len(data), took)
				}
			}
		})
	}
}

func TestDecodeAllocatesLittle(t *testing.T) {
	// Not parallel: it counts what the process allocates.
	e := plain(1 << 10)
	r := answer(e)
	for name, test := range map[string]struct {
		most   float64
		encode func() ([]byte, error)
		decode func([]byte) error
	}{
		"an envelope": {9, e.Encode, func(data []byte) error { _, err := envelope.Decode(data); return err }},
		"a reply":     {6, r.Encode, func(data []byte) error { _, err := envelope.DecodeReply(data); return err }},
		"a look":      {0, r.Encode, func(data []byte) error { _, err := envelope.PeekTerminal(data); return err }},
	} {
		t.Run(name, func(t *testing.T) {
			data, err := test.encode()
			if err = errors.Join(err, test.decode(data)); err != nil {
				t.Fatal(err)
			}
			if n := testing.AllocsPerRun(100, func() { _, _ = test.encode() }); n > 1 {
				t.Errorf("writing takes %v", n)
			}
			if n := testing.AllocsPerRun(100, func() { _ = test.decode(data) }); n > test.most {
				t.Errorf("reading takes %v, want at most %v", n, test.most)
			}
		})
	}
}
