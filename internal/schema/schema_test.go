package schema_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// vector is a tensor input or output of rows of 64 FP32.
func vector(name string) runner.PartSpec {
	return runner.PartSpec{Name: name, Datatype: tensor.FP32, Shape: []int64{-1, 64}}
}

func blobSpec(name string, types ...string) runner.PartSpec {
	return runner.PartSpec{Name: name, ContentTypes: types}
}

func optional(s runner.PartSpec) runner.PartSpec {
	s.Optional = true
	return s
}

func takes(axis runner.BatchAxis, inputs ...runner.PartSpec) runner.Spec {
	return runner.Spec{BatchAxis: axis, Inputs: inputs}
}

// filled returns a part whose bytes all have the value.
func filled(name string, d tensor.Datatype, value byte, shape ...int64) payload.Part {
	n, ok := tensor.Elements(shape)
	if !ok {
		panic(fmt.Sprint("shape ", shape))
	}
	raw := make([]byte, int(n)*d.Size())
	for i := range raw {
		raw[i] = value
	}
	return payload.OfTensor(name, tensor.Tensor{Datatype: d, Shape: shape, Raw: raw})
}

func fp32(name string, shape ...int64) payload.Part { return filled(name, tensor.FP32, 0, shape...) }

func text(name, data string) payload.Part { return payload.OfBlob(name, "text/plain", []byte(data)) }

// partTexts lists parts as name=content, where a tensor's content is its shape.
func partTexts(parts []payload.Part) []string {
	out := make([]string, len(parts))
	for i, p := range parts {
		out[i] = p.Name + "=" + string(p.Blob.Data)
		if p.Tensor != nil {
			out[i] = p.Name + "=" + fmt.Sprint(p.Tensor.Shape)
		}
	}
	return out
}

func TestPartsFeedInputsByName(t *testing.T) {
	t.Parallel()
	two := takes(runner.BatchNone, blobSpec("image"), blobSpec("prompt"))
	one := takes(runner.BatchNone, blobSpec("image"))
	some := takes(runner.BatchNone, blobSpec("image"), optional(blobSpec("mask")))
	tests := map[string]struct {
		spec        runner.Spec
		parts, kept []payload.Part
		rename      map[string]string
		want        []string
	}{
		"in the spec's order":               {spec: two, parts: []payload.Part{text("prompt", "p"), text("image", "i")}, want: []string{"image=i", "prompt=p"}},
		"others are left out":               {spec: one, parts: []payload.Part{text("x", "x"), text("image", "i")}, want: []string{"image=i"}},
		"one and only, whatever its name":   {spec: one, parts: []payload.Part{text("", "i")}, want: []string{"image=i"}},
		"one and only, by another name":     {spec: one, parts: []payload.Part{text("jpeg", "i")}, want: []string{"image=i"}},
		"one and only, optional":            {spec: takes(runner.BatchNone, optional(blobSpec("image"))), parts: []payload.Part{text("", "i")}, want: []string{"image=i"}},
		"what is kept, by name":             {spec: two, parts: []payload.Part{text("image", "i")}, kept: []payload.Part{text("prompt", "p")}, want: []string{"image=i", "prompt=p"}},
		"what came wins over what is kept":  {spec: one, parts: []payload.Part{text("image", "new")}, kept: []payload.Part{text("image", "old")}, want: []string{"image=new"}},
		"what is kept wins over other name": {spec: one, parts: []payload.Part{text("x", "x")}, kept: []payload.Part{text("image", "kept")}, want: []string{"image=kept"}},
		"renamed":                           {spec: one, parts: []payload.Part{text("a", "a"), text("b", "b")}, rename: map[string]string{"image": "b"}, want: []string{"image=b"}},
		"renamed, although the name is there": {
			spec: one, parts: []payload.Part{text("image", "i"), text("b", "b")}, rename: map[string]string{"image": "b"}, want: []string{"image=b"},
		},
		"renamed from what is kept": {
			spec: one, parts: []payload.Part{text("image", "i")}, kept: []payload.Part{text("old", "o")}, rename: map[string]string{"image": "old"}, want: []string{"image=o"},
		},
		"one part for two inputs": {
			spec: two, parts: []payload.Part{text("x", "x")}, rename: map[string]string{"image": "x", "prompt": "x"}, want: []string{"image=x", "prompt=x"},
		},
		"two that change places": {
			spec: two, parts: []payload.Part{text("image", "i"), text("prompt", "p")}, rename: map[string]string{"image": "prompt", "prompt": "image"}, want: []string{"image=p", "prompt=i"},
		},
		"without the optional one":    {spec: some, parts: []payload.Part{text("image", "i")}, want: []string{"image=i"}},
		"with the optional one":       {spec: some, parts: []payload.Part{text("mask", "m"), text("image", "i")}, want: []string{"image=i", "mask=m"}},
		"an optional one not renamed": {spec: some, parts: []payload.Part{text("image", "i")}, rename: map[string]string{"mask": "none"}, want: []string{"image=i"}},
		"anything, as it came":        {parts: []payload.Part{text("b", "b"), text("a", "a")}, kept: []payload.Part{text("k", "k")}, want: []string{"b=b", "a=a"}},
		"anything, renamed":           {parts: []payload.Part{text("b", "b"), text("a", "a")}, rename: map[string]string{"x": "b"}, want: []string{"x=b", "a=a"}},
		"anything, renamed from kept": {parts: []payload.Part{text("b", "b")}, kept: []payload.Part{text("k", "k")}, rename: map[string]string{"x": "k"}, want: []string{"b=b", "x=k"}},
		"anything, over a name there": {parts: []payload.Part{text("b", "b")}, kept: []payload.Part{text("k", "k")}, rename: map[string]string{"b": "k"}, want: []string{"b=k"}},
		"anything, changing places":   {parts: []payload.Part{text("a", "a"), text("b", "b")}, rename: map[string]string{"a": "b", "b": "a"}, want: []string{"b=a", "a=b"}},
		"anything, one for two":       {parts: []payload.Part{text("a", "a")}, rename: map[string]string{"x": "a", "y": "a", "a": "a"}, want: []string{"a=a", "x=a", "y=a"}},
		"anything, kept for two":      {kept: []payload.Part{text("k", "k")}, rename: map[string]string{"x": "k", "y": "k"}, want: []string{"x=k", "y=k"}},
		"nothing for what takes none": {want: []string{}},
		"nothing for all that is optional": {
			spec: takes(runner.BatchNone, optional(blobSpec("image"))), want: []string{},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			before := partTexts(test.parts)
			// Several tries find results that depend on the order of a map.
			for range 20 {
				f, err := contract(t, test.spec).Fit(test.parts, test.kept, test.rename)
				if err != nil || !slices.Equal(partTexts(f.Inputs), test.want) {
					t.Fatalf("got %q, %v; want %q", partTexts(f.Inputs), err, test.want)
				}
			}
			if !slices.Equal(partTexts(test.parts), before) {
				t.Errorf("the item's own parts became %q", partTexts(test.parts))
			}
		})
	}
}

func TestMismatchedPartIsRejectedByInput(t *testing.T) {
	t.Parallel()
	image := takes(runner.BatchNone, blobSpec("image", "image/png", "image/jpeg"), blobSpec("prompt"))
	x := takes(runner.BatchRows, vector("x"))
	xy := takes(runner.BatchRows, vector("x"), vector("y"))
	list := takes(runner.BatchNone, vector("x"))
	many := make([]payload.Part, payload.MaxParts)
	for i := range many {
		many[i] = text(strings.Repeat("n", 200)+fmt.Sprint(i), "")
	}
	tests := map[string]struct {
		spec     runner.Spec
		parts    []payload.Part
		rename   map[string]string
		field    string
		wantText string
	}{
		"missing": {
			image, []payload.Part{text("image", "i"), text("x", "x")}, nil, "inputs.prompt", `input "prompt" is missing; got "image", "x"`,
		},
		"nothing": {image, nil, nil, "inputs.image", `input "image" is missing; got nothing`},
		"one part for two inputs": {
			image, []payload.Part{text("x", "x")}, nil, "inputs.image", `input "image" is missing; got "x"`,
		},
		"renamed from what is not there": {
			x, []payload.Part{fp32("x", 1, 64)}, map[string]string{"x": "y"}, "inputs.x", `input "x", fed by "y", is missing; got "x"`,
		},
		"renamed from what is not there, for anything": {
			runner.Spec{}, []payload.Part{text("a", "")}, map[string]string{"x": "y"}, "inputs.x", `input "x", fed by "y", is missing`,
		},
		"renamed to what the stage does not take": {
			x, []payload.Part{fp32("x", 1, 64)}, map[string]string{"z": "x"}, "", `input "z", which the stage does not have; it takes x`,
		},
		"a message that lists names stays small": {
			x, many, nil, "inputs.x", "and 246 more",
		},
		"a tensor for a blob": {
			image, []payload.Part{fp32("image", 2), text("prompt", "")}, nil, "inputs.image", "is a tensor FP32[2], expected a blob of type image/png or image/jpeg",
		},
		"a blob for a tensor": {x, []payload.Part{text("x", "")}, nil, "inputs.x", "is a blob of type text/plain, expected a tensor FP32[-1, 64]"},
		"another type": {
			image, []payload.Part{text("image", ""), text("prompt", "")}, nil, "inputs.image", "is text/plain, expected image/png or image/jpeg",
		},
		"another datatype": {x, []payload.Part{filled("x", tensor.FP64, 0, 1, 64)}, nil, "inputs.x", "is FP64, expected FP32[-1, 64]"},
		"another extent":   {x, []payload.Part{fp32("x", 1, 63)}, nil, "inputs.x", "has shape [1, 63], expected [-1, 64]"},
		"another row":      {x, []payload.Part{fp32("x", 63)}, nil, "inputs.x", "has shape [63], expected [-1, 64]"},
		"too many axes":    {x, []payload.Part{fp32("x", 1, 1, 64)}, nil, "inputs.x", "has shape [1, 1, 64]"},
		"a row for a list": {list, []payload.Part{fp32("x", 64)}, nil, "inputs.x", "has shape [64], expected [-1, 64]"},
		"no rows":          {x, []payload.Part{fp32("x", 0, 64)}, nil, "inputs.x", "has no rows: shape [0, 64]"},
		"no elements, and endless extents": {
			takes(runner.BatchRows, tensorSpec("x", tensor.Bytes, -1, -1, -1)), []payload.Part{filled("x", tensor.Bytes, 0, 1, 1<<31, 0)}, nil, "inputs.x", "has no elements but shape [1, 2147483648, 0]; without elements, extents multiply to at most 1048576",
		},
		"no elements of anything": {
			runner.Spec{}, []payload.Part{fp32("x", 1<<40, 1<<22, 0)}, nil, "inputs.x", "without elements",
		},
		"rows that differ": {
			xy, []payload.Part{fp32("x", 2, 64), fp32("y", 3, 64)}, nil, "inputs.y", `has 3 rows, input "x" has 2`,
		},
		"a row beside rows": {
			xy, []payload.Part{fp32("x", 64), fp32("y", 3, 64)}, nil, "inputs.y", `has 3 rows, input "x" has 1`,
		},
		"a row for a fixed number of rows": {
			takes(runner.BatchRows, runner.PartSpec{Name: "x", Datatype: tensor.FP32, Shape: []int64{4, 64}}),
			[]payload.Part{fp32("x", 64)},
			nil, "inputs.x", "has shape [64], expected [4, 64]",
		},
		"a scalar where anything goes by rows": {
			runner.Spec{BatchAxis: runner.BatchRows}, []payload.Part{fp32("x")}, nil, "inputs.x", "is a scalar, expected rows",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := contract(t, test.spec).Fit(test.parts, nil, test.rename)
			if err == nil {
				t.Fatalf("got %v", got)
			}
			f := fault.From(err)
			reason := fault.InvalidInput
			if strings.Contains(test.wantText, "is text/plain") || strings.Contains(test.wantText, "of type text/plain") {
				reason = fault.UnsupportedMedia
			}
			if f.Reason != reason || !strings.Contains(f.Message, test.wantText) || len(f.Message) > 4<<10 {
				t.Errorf("got %v, want %q", f, test.wantText)
			}
			if test.field != "" && (len(f.Violations) != 1 || f.Violations[0].Field != test.field) {
				t.Errorf("violations %v, want %q", f.Violations, test.field)
			}
		})
	}
}

func TestEmptyTensorMayHaveDeclaredExtents(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		spec  runner.Spec
		shape []int64
	}{
		"declared": {takes(runner.BatchNone, tensorSpec("x", tensor.FP32, -1, 4096, 4096)), []int64{0, 4096, 4096}},
		"few":      {runner.Spec{}, []int64{1 << 20, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := contract(t, test.spec).Fit([]payload.Part{fp32("x", test.shape...)}, nil, nil); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestUnusedPartIsRejected(t *testing.T) {
	t.Parallel()
	one := takes(runner.BatchNone, blobSpec("image"))
	two := takes(runner.BatchNone, blobSpec("image"), optional(blobSpec("mask")))
	maybe := takes(runner.BatchNone, optional(blobSpec("mask")))
	parts := func(names ...string) (out []payload.Part) {
		for _, name := range names {
			out = append(out, text(name, ""))
		}
		return out
	}
	tests := map[string]struct {
		spec   runner.Spec
		parts  []payload.Part
		rename map[string]string
		keep   []string
		// field is at fault; empty if the parts are valid.
		field string
	}{
		"by name":                             {spec: two, parts: parts("mask", "image")},
		"none for an optional input":          {spec: two, parts: parts("image")},
		"nothing at all":                      {spec: maybe},
		"one and only, whatever its name":     {spec: one, parts: parts("x")},
		"anything, without declared inputs":   {parts: parts("x", "y"), rename: map[string]string{"a": "x"}},
		"by another name":                     {spec: two, parts: parts("x", "mask"), rename: map[string]string{"image": "x"}},
		"one for two":                         {spec: two, parts: parts("x"), rename: map[string]string{"image": "x", "mask": "x"}},
		"for a later step":                    {spec: one, parts: parts("image", "prompt"), keep: []string{"prompt"}},
		"for nobody":                          {spec: one, parts: parts("image", "x"), field: "inputs.x"},
		"for nobody, though others are kept":  {spec: one, parts: parts("image", "prompt", "x"), keep: []string{"prompt"}, field: "inputs.x"},
		"none of the input's name":            {spec: two, parts: parts("image", "mascara"), field: "inputs.mascara"},
		"one of its name that another feeds":  {spec: one, parts: parts("image", "x"), rename: map[string]string{"image": "x"}, field: "inputs.image"},
		"one and only, for another's input":   {spec: maybe, parts: parts("x"), rename: map[string]string{"mask": "y"}, field: "inputs.x"},
		"one without a name beside the other": {spec: one, parts: parts("image", ""), field: "inputs[1]"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := schema.AllTaken(test.spec, test.parts, test.rename, test.keep)
			if test.field == "" {
				if err != nil {
					t.Errorf("got %v", err)
				}
				return
			}
			f := fault.From(err)
			if err == nil || f.Reason != fault.InvalidInput || len(f.Violations) != 1 || f.Violations[0].Field != test.field {
				t.Errorf("got %v, want a fault about %s", err, test.field)
			}
		})
	}
}

func TestRowsAreCountedOnAxis0(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		spec   runner.Spec
		parts  []payload.Part
		rows   int
		lifted bool
		want   []string
	}{
		"one row":                 {takes(runner.BatchRows, vector("x")), []payload.Part{fp32("x", 1, 64)}, 1, false, []string{"x=[1 64]"}},
		"several":                 {takes(runner.BatchRows, vector("x")), []payload.Part{fp32("x", 5, 64)}, 5, false, []string{"x=[5 64]"}},
		"a row without axis 0":    {takes(runner.BatchRows, vector("x")), []payload.Part{fp32("x", 64)}, 1, true, []string{"x=[1 64]"}},
		"two rows without axis 0": {takes(runner.BatchRows, vector("x"), vector("y")), []payload.Part{fp32("x", 64), fp32("y", 64)}, 1, true, []string{"x=[1 64]", "y=[1 64]"}},
		"one of two with axis 0":  {takes(runner.BatchRows, vector("x"), vector("y")), []payload.Part{fp32("x", 64), fp32("y", 1, 64)}, 1, false, []string{"x=[1 64]", "y=[1 64]"}},
		"a row beside a blob":     {takes(runner.BatchRows, vector("x"), blobSpec("b")), []payload.Part{fp32("x", 64), text("b", "t")}, 1, true, []string{"x=[1 64]", "b=t"}},
		"a scalar as a row": {
			takes(runner.BatchRows, runner.PartSpec{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1}}), []payload.Part{fp32("x")}, 1, true, []string{"x=[1]"},
		},
		"any extents": {
			takes(runner.BatchRows, runner.PartSpec{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, -1, 3}}), []payload.Part{fp32("x", 2, 7, 3)}, 2, false, []string{"x=[2 7 3]"},
		},
		"an empty trailing axis":     {takes(runner.BatchRows, runner.PartSpec{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, -1}}), []payload.Part{fp32("x", 2, 0)}, 2, false, []string{"x=[2 0]"}},
		"only blobs":                 {takes(runner.BatchRows, blobSpec("b")), []payload.Part{text("b", "t")}, 1, false, []string{"b=t"}},
		"a list, whatever its shape": {takes(runner.BatchNone, vector("x")), []payload.Part{fp32("x", 5, 64)}, 1, false, []string{"x=[5 64]"}},
		"an empty list":              {takes(runner.BatchNone, vector("x")), []payload.Part{fp32("x", 0, 64)}, 1, false, []string{"x=[0 64]"}},
		"anything by rows":           {runner.Spec{BatchAxis: runner.BatchRows}, []payload.Part{fp32("x", 3, 2), fp32("y", 3)}, 3, false, []string{"x=[3 2]", "y=[3]"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			before := partTexts(test.parts)
			f, err := contract(t, test.spec).Fit(test.parts, nil, nil)
			if err != nil || f.Rows != test.rows || f.Lifted != test.lifted || !slices.Equal(partTexts(f.Inputs), test.want) {
				t.Errorf("got %d rows, lifted = %t, %q, %v", f.Rows, f.Lifted, partTexts(f.Inputs), err)
			}
			if !slices.Equal(partTexts(test.parts), before) {
				t.Errorf("the item's own parts became %q", partTexts(test.parts))
			}
		})
	}
}

// The gateway checks the JSON of inputs that have its type.
func TestNumberBeyondFP64IsRejectedWithoutAType(t *testing.T) {
	t.Parallel()
	const text = `{"a": [1, 1e400]}`
	for name, test := range map[string]struct {
		patterns []string
		got      string
		ok       bool
	}{
		"no content type":  {[]string{"application/json"}, "", false},
		"just bytes":       {[]string{"application/geo+json"}, payload.OctetStream, false},
		"perhaps an image": {[]string{"application/json", "image/png"}, "", true},
		"anything":         {nil, "", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := contract(t, takes(runner.BatchNone, blobSpec("b", test.patterns...))).Fit([]payload.Part{payload.OfBlob("b", test.got, []byte(text))}, nil, nil)
			if test.ok != (err == nil) || err != nil && !strings.Contains(err.Error(), "the number 1e400 at byte 10 is beyond FP64") {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestContentTypesAreMatchedByPattern(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		patterns []string
		got      string
		ok       bool
	}{
		"the same":                     {[]string{"image/png"}, "image/png", true},
		"with parameters":              {[]string{"text/plain"}, "text/plain; charset=utf-8", true},
		"in another case":              {[]string{"image/png"}, "Image/PNG", true},
		"a pattern in another case":    {[]string{"Image/PNG", "Audio/*"}, "audio/wav", true},
		"of the family":                {[]string{"image/*"}, "image/webp", true},
		"of no such family":            {[]string{"image/*"}, "imagery/webp", false},
		"anything":                     {[]string{"*/*"}, "video/mp4", true},
		"anything, in short":           {[]string{"*"}, "video/mp4", true},
		"one of several":               {[]string{"image/png", "image/jpeg"}, "image/jpeg", true},
		"none of several":              {[]string{"image/png", "image/jpeg"}, "image/gif", false},
		"the start of a type":          {[]string{"image/pn"}, "image/png", false},
		"no content type":              {[]string{"image/png"}, "", true},
		"just bytes":                   {[]string{"image/png"}, payload.OctetStream, true},
		"a stage that takes all":       {nil, "video/mp4", true},
		"a type that is not a type":    {[]string{"image/png"}, "png", false},
		"a family that is not the one": {[]string{"audio/*", "image/png"}, "image/jpeg", false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := contract(t, takes(runner.BatchNone, blobSpec("b", test.patterns...))).Fit([]payload.Part{payload.OfBlob("b", test.got, nil)}, nil, nil)
			if (err == nil) != test.ok {
				t.Errorf("got %v", err)
			}
		})
	}
}
