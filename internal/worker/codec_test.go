package worker

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// bytesTensor returns a tensor of UINT8 rows of two.
func bytesTensor(raw ...byte) tensor.Tensor {
	return tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{int64(len(raw) / 2), 2}, Raw: raw}
}

func itemWith(rows int, parts ...payload.Part) runner.Item {
	return runner.Item{RequestID: "r", Rows: rows, Inputs: parts}
}

// layout describes parts as "name@item" or, joined, "name", with their bytes.
func layout(t *testing.T, parts []frame.Part, body *frame.Body) []string {
	t.Helper()
	var raw bytes.Buffer
	buffers := body.Buffers(nil)
	if _, err := buffers.WriteTo(&raw); err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, p := range parts {
		data, err := p.Bytes(raw.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		text := p.Name
		if p.Item != nil {
			text += "@" + string(rune('0'+*p.Item))
		}
		out = append(out, text+"="+string(data))
	}
	return out
}

func TestStackableInputsAreJoined(t *testing.T) {
	t.Parallel()
	ab, cd, ef := payload.OfTensor("x", bytesTensor([]byte("ab")...)), payload.OfTensor("x", bytesTensor([]byte("cdCD")...)), payload.OfTensor("x", bytesTensor([]byte("ef")...))
	wide := payload.OfTensor("x", tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{1, 3}, Raw: []byte("xyz")})
	scalar := payload.OfTensor("x", tensor.Tensor{Datatype: tensor.Uint8, Raw: []byte("s")})
	text := payload.OfBlob("t", "text/plain", []byte("blob"))
	own := ef
	own.Parameters = payload.Parameters{"a": payload.Int64(1)}
	for name, test := range map[string]struct {
		axis  runner.BatchAxis
		items []runner.Item
		want  []string
	}{
		"rows":                {runner.BatchRows, []runner.Item{itemWith(1, ab), itemWith(2, cd), itemWith(1, ef)}, []string{"x=abcdCDef"}},
		"one item":            {runner.BatchRows, []runner.Item{itemWith(2, cd)}, []string{"x=cdCD"}},
		"no rows":             {runner.BatchNone, []runner.Item{itemWith(1, ab), itemWith(1, ef)}, []string{"x@0=ab", "x@1=ef"}},
		"other shapes":        {runner.BatchRows, []runner.Item{itemWith(1, ab), itemWith(1, wide)}, []string{"x@0=ab", "x@1=xyz"}},
		"scalars":             {runner.BatchRows, []runner.Item{itemWith(1, scalar), itemWith(1, scalar)}, []string{"x@0=s", "x@1=s"}},
		"other rows":          {runner.BatchRows, []runner.Item{itemWith(3, ab), itemWith(1, ef)}, []string{"x@0=ab", "x@1=ef"}},
		"blobs":               {runner.BatchRows, []runner.Item{itemWith(1, ab, text), itemWith(1, ef, text)}, []string{"x=abef", "t@0=blob", "t@1=blob"}},
		"one without":         {runner.BatchRows, []runner.Item{itemWith(1, ab, text), itemWith(1, ef)}, []string{"x=abef", "t@0=blob"}},
		"an optional one":     {runner.BatchRows, []runner.Item{itemWith(1, text), itemWith(1, ef, text)}, []string{"t@0=blob", "t@1=blob", "x@1=ef"}},
		"with its parameters": {runner.BatchRows, []runner.Item{itemWith(1, ab), itemWith(1, own)}, []string{"x=abef"}},
		"nothing":             {runner.BatchRows, []runner.Item{itemWith(1), itemWith(1)}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, body := encode(7, request{batch: runner.Batch{Items: test.items}}, test.axis, time.Now())
			if got := layout(t, m.Parts, body); !slices.Equal(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
			for i, item := range test.items {
				for _, p := range item.Inputs {
					if got := m.Items[i].InputParameters[p.Name]; !maps.Equal(got, parametersOf(p.Parameters)) {
						t.Errorf("item %d has the parameters %v", i, got)
					}
				}
			}
			if m.Batch != 7 || len(m.Items) != len(test.items) {
				t.Errorf("got %+v", m)
			}
		})
	}
}

func TestItemsAreEncodedWhole(t *testing.T) {
	t.Parallel()
	now := time.Now()
	item := runner.Item{
		RequestID: "r", Rows: 2, Deadline: now.Add(1500 * time.Millisecond), Metadata: map[string]string{"a": "b"},
		Parameters: payload.Parameters{"n": payload.Int64(1), "f": payload.Double(1), "u": payload.Uint64(math.MaxUint64), "b": payload.Bool(true), "s": payload.String("x")},
	}
	late := runner.Item{RequestID: "late", Rows: 1, Deadline: now.Add(-time.Second)}
	batch := runner.Batch{Items: []runner.Item{item, late, {RequestID: "ever"}}, Model: payload.ModelRef{Alias: "best", Version: "2"}}
	m, _ := encode(1, request{batch: batch, warmup: true}, runner.BatchRows, now)
	got := m.Items[0]
	if got.ID != "r" || got.Rows != 2 || got.Timeout != 1500 || got.Metadata["a"] != "b" || !m.Warmup {
		t.Errorf("got %+v", got)
	}
	for name, want := range map[string]any{"n": int64(1), "f": float64(1), "u": uint64(math.MaxUint64), "b": true, "s": "x"} {
		if got.Parameters[name] != want {
			t.Errorf("%s is %v, want %v", name, got.Parameters[name], want)
		}
	}
	if m.Items[1].Timeout != 1 || m.Items[2].Timeout != 0 {
		t.Errorf("timeouts %d and %d", m.Items[1].Timeout, m.Items[2].Timeout)
	}
	if *m.Model != (frame.Model{Alias: "best", Version: "2"}) {
		t.Errorf("the model is %+v", m.Model)
	}
}

func TestResultsAreCheckedAgainstBatch(t *testing.T) {
	t.Parallel()
	items := []runner.Item{itemWith(1), itemWith(2)}
	three := func(edit func(r *frame.Result, body *frame.Body)) (*frame.Result, *frame.Body) {
		body := &frame.Body{}
		r := &frame.Result{Parts: []frame.Part{body.Tensor("y", -1, bytesTensor([]byte("aabbcc")...))}}
		edit(r, body)
		return r, body
	}
	for name, test := range map[string]struct {
		edit     func(r *frame.Result, body *frame.Body)
		wantText string
	}{
		"as it should be": {func(*frame.Result, *frame.Body) {}, ""},
		"two outputs": {func(r *frame.Result, b *frame.Body) {
			r.Parts = append(r.Parts, b.Tensor("z", -1, bytesTensor([]byte("aabbcc")...)))
		}, ""},
		"an output twice":  {func(r *frame.Result, b *frame.Body) { r.Parts = append(r.Parts, r.Parts[0]) }, "item 0 has it twice"},
		"joined and alone": {func(r *frame.Result, b *frame.Body) { r.Parts = append(r.Parts, b.Blob("y", 1, "", nil)) }, "item 1 has it twice"},
		"too many rows":    {func(r *frame.Result, b *frame.Body) { r.Parts[0].Shape[0], r.Parts[0].Shape[1] = 6, 1 }, `output "y": 3 rows wanted, the tensor has 6`},
		"a scalar": {func(r *frame.Result, b *frame.Body) {
			r.Parts[0] = b.Tensor("y", -1, tensor.Tensor{Datatype: tensor.Bool, Raw: []byte{1}})
		}, "scalar"},
		"a blob of all":         {func(r *frame.Result, b *frame.Body) { r.Parts[0] = b.Blob("y", -1, "", nil) }, "a blob is of one item"},
		"an item that is not":   {func(r *frame.Result, b *frame.Body) { r.Parts[0] = b.Blob("y", 2, "", nil) }, "there is no item 2 in a batch of 2"},
		"an item left out":      {func(r *frame.Result, b *frame.Body) { r.Parts[0] = b.Blob("y", 1, "", nil) }, "item 0 has neither outputs nor a fault"},
		"a fault too much":      {func(r *frame.Result, _ *frame.Body) { r.Faults = []frame.Fault{{Item: 5, Reason: "X"}} }, "there is no item 5"},
		"two faults":            {func(r *frame.Result, _ *frame.Body) { r.Faults = []frame.Fault{{Reason: "X"}, {Reason: "X"}} }, "item 0 has two faults"},
		"metadata for nobody":   {func(r *frame.Result, _ *frame.Body) { r.Metadata = []frame.Metadata{{Item: 9}} }, "there is no item 9"},
		"bytes beyond the body": {func(r *frame.Result, _ *frame.Body) { r.Parts[0].At = 1 << 40 }, "of a body of 6"},
		"a wrong size":          {func(r *frame.Result, _ *frame.Body) { r.Parts[0].Size = 5 }, "takes 6 bytes"},
		"a strange parameter":   {func(r *frame.Result, _ *frame.Body) { r.Parts[0].Parameters = frame.Parameters{"a": []int{}} }, "parameters.a"},
		"all at fault": {func(r *frame.Result, _ *frame.Body) {
			r.Parts, r.Faults = nil, []frame.Fault{{Item: 0, Reason: "X"}, {Item: 1, Reason: "X"}}
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, body := three(test.edit)
			out, err := outcomesOf(items, r, join(t, body), false, false)
			if test.wantText == "" && (err != nil || len(out) != 2) || test.wantText != "" && (err == nil || !strings.Contains(err.Error(), test.wantText)) {
				t.Errorf("got %v, want %q", err, test.wantText)
			}
		})
	}
}

func join(t *testing.T, body *frame.Body) []byte {
	t.Helper()
	var raw bytes.Buffer
	buffers := body.Buffers(nil)
	if _, err := buffers.WriteTo(&raw); err != nil {
		t.Fatal(err)
	}
	return raw.Bytes()
}

func TestRowsGoToTheirItems(t *testing.T) {
	t.Parallel()
	var body frame.Body
	r := &frame.Result{
		Parts:    []frame.Part{body.Tensor("y", -1, bytesTensor([]byte("aabbcc")...)), body.Blob("t", 0, "text/plain", []byte("own"))},
		Faults:   []frame.Fault{{Item: 1, Reason: "RUNNER_OUT_OF_MEMORY", Message: strings.Repeat("x", 5000), Field: "f"}},
		Metadata: []frame.Metadata{{Item: 0, Values: map[string]string{"k": "v"}}},
	}
	out, err := outcomesOf([]runner.Item{itemWith(2), itemWith(1)}, r, join(t, &body), false, false)
	if err != nil {
		t.Fatal(err)
	}
	y := out[0].Parts[0].Tensor
	if string(y.Raw) != "aabb" || !slices.Equal(y.Shape, []int64{2, 2}) || string(out[0].Parts[1].Blob.Data) != "own" || out[0].Metadata["k"] != "v" {
		t.Errorf("got %+v", out[0])
	}
	f := out[1].Fault
	if f == nil || f.Reason != fault.RunnerOutOfMemory || len(f.Message) > maxMessage+3 || f.Violations[0].Field != "inputs.f" || out[1].Parts != nil {
		t.Errorf("got %+v", out[1])
	}
}

func TestCancelledItemsMayLackOutputs(t *testing.T) {
	t.Parallel()
	var body frame.Body
	r := &frame.Result{Parts: []frame.Part{body.Blob("y", 0, "", nil)}}
	gone := make(chan struct{})
	close(gone)
	left := itemWith(1)
	left.Cancelled = gone
	for name, test := range map[string]struct {
		items    []runner.Item
		unwanted bool
	}{
		"one of them": {[]runner.Item{itemWith(1), left}, false},
		"all of them": {[]runner.Item{itemWith(1), itemWith(1)}, true},
	} {
		out, err := outcomesOf(test.items, r, nil, test.unwanted, false)
		if err != nil || out[0].Fault != nil || out[1].Fault == nil || out[1].Fault.Reason != fault.Cancelled {
			t.Errorf("%s: got %+v, %v", name, out, err)
		}
	}
}

func TestItemsMayLackOptionalOutputs(t *testing.T) {
	t.Parallel()
	var body frame.Body
	r := &frame.Result{Parts: []frame.Part{body.Blob("y", 0, "", nil)}}
	out, err := outcomesOf([]runner.Item{itemWith(1), itemWith(1)}, r, nil, false, true)
	if err != nil || len(out[0].Parts) != 1 || out[1].Fault != nil || len(out[1].Parts) != 0 {
		t.Errorf("got %+v, %v", out, err)
	}
}

func TestUnknownReasonsAreRunnerFailed(t *testing.T) {
	t.Parallel()
	for reason, want := range map[string]fault.Reason{
		"INVALID_INPUT": fault.InvalidInput, "SCHEMA_VIOLATION": fault.SchemaViolation,
		"RUNNER_OUT_OF_MEMORY": fault.RunnerOutOfMemory, "RUNNER_FAILED": fault.RunnerFailed,
		"UNAUTHENTICATED": fault.RunnerFailed, "MY_OWN": fault.RunnerFailed,
	} {
		if got := faultOf(frame.Fault{Reason: reason, Message: "m"}); got.Reason != want || got.Message != "m" {
			t.Errorf("%s is %v", reason, got)
		}
	}
}

func FuzzResultsNeverPanic(f *testing.F) {
	f.Add([]byte(`{"type":"result","batch":1,"parts":[{"name":"y","datatype":"UINT8","shape":[3],"at":0,"size":3}]}`), []byte("abc"))
	f.Add([]byte(`{"type":"result","batch":1,"parts":[{"name":"y","item":1,"content_type":"a","at":1,"size":1}],"faults":[{"item":0,"reason":"X","message":""}]}`), []byte("abc"))
	f.Fuzz(func(t *testing.T, header, body []byte) {
		m, err := frame.Decode(header)
		if err != nil {
			return
		}
		r, ok := m.(*frame.Result)
		if !ok {
			return
		}
		out, err := outcomesOf([]runner.Item{itemWith(1), itemWith(2)}, r, body, false, false)
		if err != nil {
			return
		}
		for i, o := range out {
			if o.Fault != nil && o.Parts != nil || o.Fault == nil && len(o.Parts) == 0 && len(r.Parts) > 0 {
				t.Errorf("item %d is %+v", i, o)
			}
		}
	})
}

func TestWarmUpSizesAreBounded(t *testing.T) {
	t.Parallel()
	example := func(rows int) runner.Example {
		return runner.Example{Inputs: []payload.Part{payload.OfTensor("x", bytesTensor(make([]byte, 2*rows)...))}}
	}
	for name, test := range map[string]struct {
		example runner.Example
		axis    runner.BatchAxis
		s       Settings
		want    []int
	}{
		"one row":        {example(1), runner.BatchRows, Settings{MaxSize: 8, Limits: Limits{MaxFrame: 1 << 20}}, []int{1, 8}},
		"three rows":     {example(3), runner.BatchRows, Settings{MaxSize: 8, Limits: Limits{MaxFrame: 1 << 20}}, []int{1, 2}},
		"too many rows":  {example(9), runner.BatchRows, Settings{MaxSize: 8, Limits: Limits{MaxFrame: 1 << 20}}, []int{1}},
		"one by one":     {example(3), runner.BatchNone, Settings{MaxSize: 8, Limits: Limits{MaxFrame: 1 << 20}}, []int{1, 8}},
		"no batches":     {example(1), runner.BatchRows, Settings{MaxSize: 1, Limits: Limits{MaxFrame: 1 << 20}}, []int{1}},
		"a small frame":  {example(1), runner.BatchRows, Settings{MaxSize: 8, Limits: Limits{MaxFrame: 10}}, []int{1, 5}},
		"a huge batch":   {example(1), runner.BatchRows, Settings{MaxSize: 1 << 30, Limits: Limits{MaxFrame: 1 << 40}}, []int{1, warmUpParts}},
		"several inputs": {runner.Example{Inputs: make([]payload.Part, 4)}, runner.BatchRows, Settings{MaxSize: 1 << 30, Limits: Limits{MaxFrame: 1 << 40}}, []int{1, warmUpParts / 4}},
		"nothing in it":  {runner.Example{}, runner.BatchRows, Settings{MaxSize: 2, Limits: Limits{MaxFrame: 1}}, []int{1, 2}},
		"without a body": {example(0), runner.BatchRows, Settings{MaxSize: 2, Limits: Limits{MaxFrame: 1}}, []int{1, 2}},
	} {
		if got := sizes(test.example, runner.Spec{BatchAxis: test.axis}, &test.s); !slices.Equal(got, test.want) {
			t.Errorf("%s: got %d, want %d", name, got, test.want)
		}
	}
	if got := sizes(example(1), runner.Spec{OneByOne: true}, &Settings{MaxSize: 8, Limits: Limits{MaxFrame: 1 << 20}}); !slices.Equal(got, []int{1}) {
		t.Errorf("of items one by one: got %d", got)
	}
}

func TestZerosFollowTheSpec(t *testing.T) {
	t.Parallel()
	tensorOf := func(d tensor.Datatype, shape ...int64) runner.PartSpec {
		return runner.PartSpec{Name: "x", Datatype: d, Shape: shape}
	}
	blob := runner.PartSpec{Name: "b"}
	optional := blob
	optional.Optional = true
	for name, test := range map[string]struct {
		inputs []runner.PartSpec
		want   []int64
	}{
		"any extents":      {[]runner.PartSpec{tensorOf(tensor.FP32, -1, 3, -1)}, []int64{1, 3, 1}},
		"texts":            {[]runner.PartSpec{tensorOf(tensor.Bytes, -1, 2)}, []int64{1, 2}},
		"a blob":           {[]runner.PartSpec{tensorOf(tensor.FP32, -1), blob}, nil},
		"an optional blob": {[]runner.PartSpec{tensorOf(tensor.FP32, -1), optional}, []int64{1}},
		"a huge one":       {[]runner.PartSpec{tensorOf(tensor.FP32, -1, 1<<40)}, nil},
		"anything":         {nil, nil},
	} {
		got := examplesOf(runner.Spec{Inputs: test.inputs})
		if test.want == nil {
			if len(got) > 0 {
				t.Errorf("%s: got %+v", name, got)
			}
			continue
		}
		x := got[0].Inputs[0].Tensor
		if !slices.Equal(x.Shape, test.want) || x.Validate() != nil {
			t.Errorf("%s: got %+v, %v", name, x, x.Validate())
		}
	}
}

func TestFaultNamesInputOrParameter(t *testing.T) {
	t.Parallel()
	for field, want := range map[string]string{"x": "inputs.x", "parameters.words": "parameters.words", "parameters": "inputs.parameters"} {
		got := faultOf(frame.Fault{Reason: "INVALID_INPUT", Message: "m", Field: field})
		if len(got.Violations) != 1 || got.Violations[0].Field != want {
			t.Errorf("%s: got %v, want %s", field, got.Violations, want)
		}
	}
}

func TestSpansAreCutToBounds(t *testing.T) {
	t.Parallel()
	start := time.UnixMicro(1_700_000_000_000_000)
	end := start.Add(100 * time.Microsecond)
	at := func(name string, from, to int64) frame.Span {
		return frame.Span{Name: name, Start: start.UnixMicro() + from, End: start.UnixMicro() + to}
	}
	below := func(parent int, s frame.Span) frame.Span {
		s.Parent = &parent
		return s
	}
	attributes := func(n int, value any) frame.Span {
		s := at("a", 0, 1)
		s.Attributes = frame.Parameters{}
		for i := range n {
			s.Attributes[fmt.Sprintf("k%02d", i)] = value
		}
		return s
	}
	long := strings.Repeat("ä", 200)
	cut := strings.Repeat("ä", 128) + "..."
	for name, test := range map[string]struct {
		spans []frame.Span
		// want is each span's name, parent, times since the start in microseconds, and attributes.
		want    []string
		wantCut int
	}{
		"none":             {},
		"a tree":           {[]frame.Span{at("a", 0, 100), below(0, at("b", 1, 2)), below(1, at("c", 1, 1))}, []string{"a -1 0 100 []", "b 0 1 2 []", "c 1 1 1 []"}, 0},
		"before the run":   {[]frame.Span{at("a", -5, -1), at("b", -1, 0)}, []string{"b -1 0 0 []"}, 2},
		"after the run":    {[]frame.Span{at("a", 101, 102), at("b", 99, 101)}, []string{"b -1 99 100 []"}, 2},
		"backwards":        {[]frame.Span{at("a", 2, 1)}, nil, 1},
		"all of time":      {[]frame.Span{{Name: "a", End: 1<<53 - 1}}, []string{"a -1 0 100 []"}, 1},
		"a child of one":   {[]frame.Span{at("a", 0, 1), below(0, at("b", -2, -1)), below(1, at("c", 0, 1))}, []string{"a -1 0 1 []", "c 0 0 1 []"}, 1},
		"its own parent":   {[]frame.Span{below(0, at("a", 0, 1)), below(7, at("b", 0, 1))}, []string{"a -1 0 1 []", "b -1 0 1 []"}, 2},
		"a long name":      {[]frame.Span{at(long, 0, 1)}, []string{cut + " -1 0 1 []"}, 1},
		"a long text":      {[]frame.Span{attributes(1, long)}, []string{"a -1 0 1 [k00=" + cut + "]"}, 1},
		"a large number":   {[]frame.Span{attributes(1, uint64(math.MaxUint64))}, []string{"a -1 0 1 [k00=18446744073709551615]"}, 0},
		"kinds of numbers": {[]frame.Span{attributes(1, int64(-1)), attributes(1, 0.5), attributes(1, true)}, []string{"a -1 0 1 [k00=-1]", "a -1 0 1 [k00=0.5]", "a -1 0 1 [k00=true]"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, cut := spansOf(test.spans, start, end)
			var texts []string
			for _, s := range got {
				var attributes []string
				for _, a := range s.Attributes {
					attributes = append(attributes, string(a.Key)+"="+a.Value.String())
				}
				texts = append(texts, fmt.Sprintf("%s %d %d %d %v", s.Name, s.Parent, s.Start.Sub(start).Microseconds(), s.End.Sub(start).Microseconds(), attributes))
			}
			if !slices.Equal(texts, test.want) || cut != test.wantCut {
				t.Errorf("got %q, %d cut, want %q, %d cut", texts, cut, test.want, test.wantCut)
			}
		})
	}
	many := slices.Repeat([]frame.Span{attributes(40, true)}, 200)
	if got, cut := spansOf(many, start, end); len(got) != maxSpans || cut != 200 || len(got[0].Attributes) != maxSpanAttributes {
		t.Errorf("%d spans, %d cut", len(got), cut)
	}
}
