package envelope_test

import (
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	requestID   = "01890a5d-ac96-774b-bcce-b302099a8057"
	executionID = "01890a5d-ac96-774b-bcce-b302099a8058"
)

func TestEnvelopesRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := drawEnvelope(t)
		data, err := want.Encode()
		if err != nil {
			t.Fatal(err)
		}
		got, err := envelope.Decode(data)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("got %+v, %v; want %+v", got, err, want)
		}
	})
}

// wire returns an envelope that decodes.
func wire() *meshv1.Envelope {
	return &meshv1.Envelope{
		Mesh: "m", RequestId: requestID, ExecutionId: executionID, Gateway: "g",
		Route:    []*meshv1.Step{{Name: "one", Stage: "a"}, {Name: "two", Stage: "b"}},
		Deadline: &timestamppb.Timestamp{Seconds: 1},
		Parts:    []*inferencev1.Part{{Name: "x", Body: &inferencev1.Part_Blob{}}},
	}
}

func steps(n int) []*meshv1.Step {
	out := make([]*meshv1.Step, n)
	for i := range out {
		out[i] = &meshv1.Step{Name: "s", Stage: "a"}
	}
	return out
}

func TestDecodeRejectsInvalidEnvelopes(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		spoil func(*meshv1.Envelope)
		says  string // empty: it is accepted
	}{
		"nothing wrong":             {func(*meshv1.Envelope) {}, ""},
		"no mesh":                   {func(e *meshv1.Envelope) { e.Mesh = "" }, "mesh name"},
		"a mesh with a dot":         {func(e *meshv1.Envelope) { e.Mesh = "a.b" }, "mesh name"},
		"no gateway":                {func(e *meshv1.Envelope) { e.Gateway = "" }, "gateway name"},
		"a wildcard for a gateway":  {func(e *meshv1.Envelope) { e.Gateway = ">" }, "gateway name"},
		"no request id":             {func(e *meshv1.Envelope) { e.RequestId = "" }, "request id"},
		"a request id of its own":   {func(e *meshv1.Envelope) { e.RequestId = "mine" }, "request id"},
		"an execution id in braces": {func(e *meshv1.Envelope) { e.ExecutionId = "{" + executionID + "}" }, "execution id"},
		"an execution id as URN":    {func(e *meshv1.Envelope) { e.ExecutionId = "urn:uuid:" + executionID }, "execution id"},
		"an execution id undashed":  {func(e *meshv1.Envelope) { e.ExecutionId = strings.ReplaceAll(executionID, "-", "") }, "execution id"},
		"an id with a slash":        {func(e *meshv1.Envelope) { e.ExecutionId = executionID[:35] + "/" }, "execution id"},
		"no deadline":               {func(e *meshv1.Envelope) { e.Deadline = nil }, "deadline"},
		"a deadline that cannot be": {func(e *meshv1.Envelope) { e.Deadline.Nanos = -1 }, "deadline"},
		"the end of time":           {func(e *meshv1.Envelope) { e.Deadline.Seconds = math.MaxInt64 }, "deadline"},
		"an unknown durability":     {func(e *meshv1.Envelope) { e.Durability = 99 }, "durability 99"},
		"no route":                  {func(e *meshv1.Envelope) { e.Route = nil }, "a route of 0 steps"},
		"the longest route":         {func(e *meshv1.Envelope) { e.Route = steps(pipeline.MaxSteps) }, ""},
		"a route that is too long":  {func(e *meshv1.Envelope) { e.Route = steps(pipeline.MaxSteps + 1) }, "a route of 65 steps"},
		"an empty step":             {func(e *meshv1.Envelope) { e.Route[1] = nil }, "route[1]: step name"},
		"a step without stage":      {func(e *meshv1.Envelope) { e.Route[1].Stage = "" }, "route[1]: stage name"},
		"a host that is not a name": {func(e *meshv1.Envelope) { e.Route[0].Host = "*" }, "route[0]: host name"},
		"visiting too much":         {func(e *meshv1.Envelope) { e.Route[0].Visited = make([]string, pipeline.MaxVisited+1) }, "route[0]: visited 5"},
		"keeping too much":          {func(e *meshv1.Envelope) { e.Route[0].Keep = make([]string, payload.MaxParts+1) }, "route[0]: keeps 257"},
		"a parameter without value": {func(e *meshv1.Envelope) { e.Route[0].Parameters = map[string]*inferencev1.Value{"p": {}} }, "route[0]: parameter"},
		"the last position":         {func(e *meshv1.Envelope) { e.Position = 1 }, ""},
		"past the last position":    {func(e *meshv1.Envelope) { e.Position = 2 }, "position 2 in a route of 2"},
		"far past it":               {func(e *meshv1.Envelope) { e.Position = math.MaxUint32 }, "position 4294967295"},
		"a part without body":       {func(e *meshv1.Envelope) { e.Parts[0].Body = nil }, "parts.x: neither"},
		"a kept part without body":  {func(e *meshv1.Envelope) { e.Kept = []*inferencev1.Part{nil} }, "kept[0]: neither"},
		"two parts of a name":       {func(e *meshv1.Envelope) { e.Parts = append(e.Parts, e.Parts[0]) }, "two parts"},
		"as many timings as can be": {func(e *meshv1.Envelope) { e.Timings = make([]*inferencev1.StepTiming, pipeline.MaxSteps-1) }, ""},
		"no place for one more":     {func(e *meshv1.Envelope) { e.Timings = make([]*inferencev1.StepTiming, pipeline.MaxSteps) }, "timings of 64 steps"},
		"no parts":                  {func(e *meshv1.Envelope) { e.Parts = nil }, ""},
		"never admitted":            {func(e *meshv1.Envelope) { e.AdmittedAt = nil }, ""},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			in := wire()
			test.spoil(in)
			data, err := proto.Marshal(in)
			if err != nil {
				t.Fatal(err)
			}
			got, err := envelope.Decode(data)
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

func TestGarbageIsMalformed(t *testing.T) {
	t.Parallel()
	for name, data := range map[string][]byte{
		"text": []byte("hello, world"), "cut off": {0x0a, 0x7f, 'm'}, "nothing": nil, "not UTF-8": {0x0a, 1, 0xff},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := envelope.Decode(data)
			_, errReply := envelope.DecodeReply(data)
			if !errors.Is(err, envelope.ErrMalformed) || !errors.Is(errReply, envelope.ErrMalformed) {
				t.Errorf("got %v and %v", err, errReply)
			}
		})
	}
}

func TestDecodedPayloadSharesMemoryAndTextDoesNot(t *testing.T) {
	t.Parallel()
	in := wire()
	in.Parts[0].Body = &inferencev1.Part_Blob{Blob: &inferencev1.Blob{Data: []byte("payload")}}
	in.TraceContext = map[string]string{"traceparent": "v"}
	data, err := proto.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	got, err := envelope.Decode(data)
	if err != nil {
		t.Fatal(err)
	}
	bytes := got.Parts[0].Blob.Data
	if len(bytes) != len("payload") || cap(bytes) != len(bytes) || &bytes[0] != &data[strings.Index(string(data), "payload")] {
		t.Errorf("got %q, with room for %d", bytes, cap(bytes))
	}
	clear(data)
	if got.Mesh != "m" || got.Parts[0].Name != "x" || got.Trace.Parent != "v" || got.RequestID != requestID {
		t.Errorf("got %+v", got)
	}
}

func TestMessageIDsDifferByExecutionPositionAndGeneration(t *testing.T) {
	t.Parallel()
	type identity struct {
		execution  string
		position   int
		generation uint32
	}
	rapid.Check(t, func(t *rapid.T) {
		// Few values each, so that some agree, and digits that could run into
		// each other.
		draw := func(label string) identity {
			return identity{
				execution:  rapid.SampledFrom([]string{requestID, executionID}).Draw(t, label),
				position:   rapid.SampledFrom([]int{0, 1, 11, 63}).Draw(t, "position"),
				generation: rapid.SampledFrom([]uint32{0, 1, 11, 111, math.MaxUint32}).Draw(t, "generation"),
			}
		}
		id := func(i identity) string {
			return (&envelope.Envelope{ExecutionID: pipeline.ExecutionID(i.execution), Position: i.position, Generation: i.generation}).MsgID()
		}
		a, b := draw("a"), draw("b")
		if (id(a) == id(b)) != (a == b) {
			t.Fatalf("%v has id %s, %v has %s", a, id(a), b, id(b))
		}
	})
}

func TestMessageIDNamesItsParts(t *testing.T) {
	t.Parallel()
	e := &envelope.Envelope{ExecutionID: executionID, Position: 2, Generation: 3}
	if got, want := e.MsgID(), executionID+"/2/3"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// threeSteps returns an envelope for the first of three steps, the first two of
// which keep.
func threeSteps(keep ...string) *envelope.Envelope {
	return &envelope.Envelope{
		Mesh: "m", RequestID: requestID, ExecutionID: executionID, Gateway: "g", Generation: 4,
		Route: []pipeline.Hop{
			{Step: "one", Stage: "a", Keep: keep}, {Step: "two", Stage: "b", Keep: keep}, {Step: "three", Stage: "c"},
		},
		Deadline: time.Unix(1, 0),
		Parts:    []payload.Part{blob("image", "1")},
		Metadata: map[string]string{"k": "v"},
	}
}

func blob(name, text string) payload.Part { return payload.OfBlob(name, "text/plain", []byte(text)) }

func contents(parts []payload.Part) map[string]string {
	out := map[string]string{}
	for _, p := range parts {
		out[p.Name] = string(p.Blob.Data)
	}
	return out
}

func TestTheNextStepGetsTheOutputs(t *testing.T) {
	t.Parallel()
	e := threeSteps()
	next := e.Next(e.Parts, []payload.Part{blob("pixels", "2")}, envelope.StepTiming{Step: "one"})
	if next.Hop().Step != "two" || next.Last() || next.Generation != 0 {
		t.Errorf("got step %s, generation %d", next.Hop().Step, next.Generation)
	}
	if got := contents(next.Parts); !reflect.DeepEqual(got, map[string]string{"pixels": "2"}) || len(next.Kept) != 0 {
		t.Errorf("got parts %v, kept %v", got, contents(next.Kept))
	}
	if next.RequestID != requestID || next.ExecutionID != executionID || next.Metadata["k"] != "v" || !next.Deadline.Equal(e.Deadline) {
		t.Errorf("the request is another one: %+v", next)
	}
	if e.Position != 0 || e.Generation != 4 || len(e.Timings) != 0 || e.Parts[0].Name != "image" {
		t.Errorf("the item before has changed: %+v", e)
	}
	last := next.Next(nil, nil, envelope.StepTiming{Step: "two"})
	if !last.Last() || last.Hop().Step != "three" {
		t.Errorf("got step %s", last.Hop().Step)
	}
}

func TestKeptPartsStayInTheEnvelope(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		keep []string
		// outputs of the first and second step
		first, second []payload.Part
		// kept for the second and third step
		forSecond, forThird map[string]string
	}{
		"nothing": {nil, []payload.Part{blob("image", "2")}, nil, map[string]string{}, map[string]string{}},
		"an input, for good": {
			[]string{"image"},
			[]payload.Part{blob("pixels", "2")},
			[]payload.Part{blob("scores", "3")},
			map[string]string{"image": "1"},
			map[string]string{"image": "1"},
		},
		"an output of the first step": {
			[]string{"pixels"},
			[]payload.Part{blob("pixels", "2")},
			[]payload.Part{blob("scores", "3")},
			map[string]string{"pixels": "2"},
			map[string]string{"pixels": "2"},
		},
		"the latest of a name": {
			[]string{"image"},
			[]payload.Part{blob("image", "2")},
			[]payload.Part{blob("image", "3")},
			map[string]string{"image": "2"},
			map[string]string{"image": "3"},
		},
		"what comes later": {
			[]string{"scores"},
			[]payload.Part{blob("pixels", "2")},
			[]payload.Part{blob("scores", "3")},
			map[string]string{},
			map[string]string{"scores": "3"},
		},
		"a name that is said twice": {
			[]string{"image", "image"}, nil, nil, map[string]string{"image": "1"}, map[string]string{"image": "1"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := threeSteps(test.keep...)
			second := e.Next(e.Parts, test.first, envelope.StepTiming{})
			third := second.Next(second.Parts, test.second, envelope.StepTiming{})
			if got := contents(second.Kept); !reflect.DeepEqual(got, test.forSecond) || len(got) != len(second.Kept) {
				t.Errorf("the second step has %v at hand, want %v", second.Kept, test.forSecond)
			}
			if got := contents(third.Kept); !reflect.DeepEqual(got, test.forThird) || len(got) != len(third.Kept) {
				t.Errorf("the third step has %v at hand, want %v", third.Kept, test.forThird)
			}
		})
	}
}

// Two results of one item, such as a retry's, must not write into each other's
// timeline.
func TestTimelinesOfOneItemAreIndependent(t *testing.T) {
	t.Parallel()
	e := threeSteps()
	e.Timings = append(make([]envelope.StepTiming, 0, 8), envelope.StepTiming{Step: "zero"})
	a := e.Next(nil, nil, envelope.StepTiming{Step: "a"})
	b := e.Next(nil, nil, envelope.StepTiming{Step: "b"})
	if a.Timings[1].Step != "a" || b.Timings[1].Step != "b" || len(e.Timings) != 1 {
		t.Errorf("got %v and %v", a.Timings, b.Timings)
	}
}

// A host cannot answer for an envelope that it cannot read, so whatever a host
// makes of one that it could read must be readable.
func TestNextEnvelopeIsValid(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		data, err := drawEnvelope(t).Encode()
		if err != nil {
			t.Fatal(err)
		}
		e, err := envelope.Decode(data)
		if err != nil || e.Last() {
			return
		}
		next := e.Next(e.Parts, drawParts(t, "outputs"), drawTiming(t))
		if data, err = next.Encode(); err != nil {
			t.Fatal(err)
		}
		if _, err := envelope.Decode(data); err != nil {
			t.Fatal(err)
		}
	})
}
