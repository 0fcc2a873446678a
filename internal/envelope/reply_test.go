package envelope_test

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestRepliesRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := drawReply(t)
		data, err := want.Encode()
		if err != nil {
			t.Fatal(err)
		}
		got, err := envelope.DecodeReply(data)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("got %+v, %v; want %+v", got, err, want)
		}
		if terminal, err := envelope.PeekTerminal(data); err != nil || terminal != want.Terminal() {
			t.Fatalf("a look says terminal = %t, %v", terminal, err)
		}
	})
}

func TestReplyNamesItsRequest(t *testing.T) {
	t.Parallel()
	e := threeSteps()
	e.Timings = []envelope.StepTiming{{Step: "zero"}}
	r := e.NewReply()
	if r.Mesh != e.Mesh || r.RequestID != e.RequestID || r.ExecutionID != e.ExecutionID || r.Seq != 1 || len(r.Timings) != 1 || !r.Terminal() {
		t.Errorf("got %+v", r)
	}
}

func TestFaultEndsTheReply(t *testing.T) {
	t.Parallel()
	r := threeSteps().NewReply()
	r.Chunk, r.Fault = true, fault.New(fault.Internal, "")
	data, err := r.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if terminal, err := envelope.PeekTerminal(data); err != nil || !terminal || !r.Terminal() {
		t.Errorf("terminal = %t and %t, %v", terminal, r.Terminal(), err)
	}
}

// A fault that cannot be sent would leave its caller waiting for the timeout.
func TestAnyRunnerFaultCanBeSent(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("日", 1<<20)
	many := fault.New(fault.RunnerFailed, "many")
	many.Metadata = map[string]string{}
	for i := range 1000 {
		many.Metadata[fmt.Sprint(i)] = long
		many.Violations = append(many.Violations, fault.Violation{Field: long, Description: long})
	}
	tests := map[string]*fault.Fault{
		"not UTF-8":          fault.New("WEIRD\xff", "half a \xe6\x97").At("s\xff", "", "").WithViolation("f\xff", "d\xff").WithMetadata("k\xff", "v\xff"),
		"very long":          fault.New(fault.RunnerFailed, long).WithViolation(long, "%s", long).WithMetadata(long, long),
		"in very many words": many,
	}
	for name, f := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			facts := len(f.Metadata)
			r := threeSteps().NewReply()
			r.Fault = f
			data, err := r.Encode()
			if err != nil || len(data) > 100<<10 {
				t.Fatalf("%d bytes, %v", len(data), err)
			}
			got, err := envelope.DecodeReply(data)
			if err != nil || !utf8.ValidString(got.Fault.Message) || got.Fault.Message == "" {
				t.Fatalf("got %v, %v", got, err)
			}
			if len(got.Fault.Violations) == 0 || len(got.Fault.Metadata) == 0 {
				t.Error("its facts are gone")
			}
			if len(f.Metadata) != facts {
				t.Error("the fault itself has changed")
			}
		})
	}
}

func TestOrdinaryFaultIsSentUnchanged(t *testing.T) {
	t.Parallel()
	want := fault.New(fault.SchemaViolation, strings.Repeat("é", 2000)).At("s", "t", "h").WithViolation("inputs.x", "is 3").WithMetadata("k", "v")
	r := threeSteps().NewReply()
	r.Fault = want
	data, err := r.Encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := envelope.DecodeReply(data)
	if err != nil {
		t.Fatal(err)
	}
	f := got.Fault
	if f.Reason != want.Reason || f.Message != want.Message || f.Stage != "s" || f.Step != "t" || f.Host != "h" ||
		!reflect.DeepEqual(f.Violations, want.Violations) || !maps.Equal(f.Metadata, want.Metadata) || f.GRPCCode() != want.GRPCCode() {
		t.Errorf("got %+v, want %+v", f, want)
	}
}

// reply returns one that decodes.
func reply() *meshv1.Reply {
	return &meshv1.Reply{RequestId: requestID, ExecutionId: executionID, Outcome: &meshv1.Reply_Output{Output: &meshv1.Output{}}}
}

func TestDecodeReplyRejectsInvalidReplies(t *testing.T) {
	t.Parallel()
	twice := &inferencev1.Part{Name: "x", Body: &inferencev1.Part_Blob{}}
	tests := map[string]struct {
		spoil func(*meshv1.Reply)
		says  string // empty: it is accepted
	}{
		"nothing wrong":          {func(*meshv1.Reply) {}, ""},
		"no request id":          {func(r *meshv1.Reply) { r.RequestId = "" }, "request id"},
		"no execution id":        {func(r *meshv1.Reply) { r.ExecutionId = "1" }, "execution id"},
		"no outcome":             {func(r *meshv1.Reply) { r.Outcome = nil }, "neither output, chunk, fault nor stored"},
		"an output without body": {func(r *meshv1.Reply) { r.Outcome = &meshv1.Reply_Output{} }, ""},
		"two outputs of a name":  {func(r *meshv1.Reply) { r.GetOutput().Parts = []*inferencev1.Part{twice, twice} }, "two outputs"},
		"a chunk that is not a part": {func(r *meshv1.Reply) {
			r.Outcome = &meshv1.Reply_Chunk{Chunk: &meshv1.Output{Parts: []*inferencev1.Part{{}}}}
		}, "outputs[0]: neither"},
		"an empty fault":         {func(r *meshv1.Reply) { r.Outcome = &meshv1.Reply_Fault{} }, ""},
		"as many timings as can": {func(r *meshv1.Reply) { r.Timings = make([]*inferencev1.StepTiming, pipeline.MaxSteps) }, ""},
		"one timing more":        {func(r *meshv1.Reply) { r.Timings = make([]*inferencev1.StepTiming, pipeline.MaxSteps+1) }, "timings of 65 steps"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			in := reply()
			test.spoil(in)
			data, err := proto.Marshal(in)
			if err != nil {
				t.Fatal(err)
			}
			got, err := envelope.DecodeReply(data)
			if test.says == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if got != nil || !errors.Is(err, envelope.ErrMalformed) || !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, %v; want %q", got, err, test.says)
			}
		})
	}
}

func TestFaultWithoutReasonIsInternal(t *testing.T) {
	t.Parallel()
	in := reply()
	in.Outcome = &meshv1.Reply_Fault{Fault: &meshv1.Fault{Code: 1234, Message: "m"}}
	data, err := proto.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	r, err := envelope.DecodeReply(data)
	if err != nil || r.Fault.Reason != fault.Internal || r.Fault.GRPCCode() != fault.Classify(fault.Internal).Code {
		t.Errorf("got %v, %v", r, err)
	}
}

func TestPeekAgreesWithDecode(t *testing.T) {
	t.Parallel()
	head, err := proto.Marshal(&meshv1.Reply{RequestId: requestID, ExecutionId: executionID})
	if err != nil {
		t.Fatal(err)
	}
	fields := (&meshv1.Reply{}).ProtoReflect().Descriptor().Fields()
	output, failed, chunk := fields.ByName("output").Number(), fields.ByName("fault").Number(), fields.ByName("chunk").Number()
	message := func(b []byte, n protowire.Number) []byte {
		return protowire.AppendBytes(protowire.AppendTag(b, n, protowire.BytesType), nil)
	}
	number := func(b []byte, n protowire.Number) []byte {
		return protowire.AppendVarint(protowire.AppendTag(b, n, protowire.VarintType), 1)
	}
	tests := map[string]struct {
		tail     []byte
		terminal bool
		none     bool
	}{
		"output":                         {tail: message(nil, output), terminal: true},
		"fault":                          {tail: message(nil, failed), terminal: true},
		"chunk":                          {tail: message(nil, chunk)},
		"chunk, then output":             {tail: message(message(nil, chunk), output), terminal: true},
		"fault, then chunk":              {tail: message(message(nil, failed), chunk)},
		"fault, then a number for chunk": {tail: number(message(nil, failed), chunk), terminal: true},
		"chunk, then a number for fault": {tail: number(message(nil, chunk), failed)},
		"only a number":                  {tail: number(nil, output), none: true},
		"another field":                  {tail: message(nil, 100), none: true},
		"none":                           {none: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			data := append(append([]byte{}, head...), test.tail...)
			terminal, err := envelope.PeekTerminal(data)
			r, decoding := envelope.DecodeReply(data)
			if test.none {
				if !errors.Is(err, envelope.ErrMalformed) || decoding == nil {
					t.Errorf("got %t, %v; decoding says %v", terminal, err, decoding)
				}
				return
			}
			if err != nil || decoding != nil || terminal != test.terminal || r.Terminal() != test.terminal {
				t.Errorf("got %t, %v; decoding says %v, %v", terminal, err, r, decoding)
			}
		})
	}
}
