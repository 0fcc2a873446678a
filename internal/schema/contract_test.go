package schema_test

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"

	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// orderSchema is the schema of an order.
const orderSchema = `{
	"type": "object", "required": ["items"], "additionalProperties": false,
	"properties": {
		"items": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/item"}},
		"note": {"type": "string", "pattern": "^[a-z ]*$"},
		"odd key": {"anyOf": [{"type": "integer"}, {"type": "object", "required": ["x"]}]},
		"7": {"type": "null"},
		"tree": {"$ref": "#/$defs/tree"}
	},
	"$defs": {
		"item": {"type": "object", "required": ["price"], "properties": {"price": {"type": "number", "minimum": 0, "multipleOf": 0.01}, "kind": {"enum": ["a", "b"]}}},
		"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}
	}
}`

func jsonSpec(name, text string, contentTypes ...string) runner.PartSpec {
	return runner.PartSpec{Name: name, ContentTypes: contentTypes, Schema: json.RawMessage(text)}
}

func contract(t interface {
	Helper()
	Fatal(args ...any)
}, spec runner.Spec,
) *schema.Contract {
	t.Helper()
	out, err := schema.Compile(spec)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func orders(t testing.TB) *schema.Contract {
	t.Helper()
	spec := jsonSpec("order", orderSchema, "application/json")
	return contract(t, runner.Spec{Inputs: []runner.PartSpec{spec}, Outputs: []runner.PartSpec{spec}})
}

func blob(name, contentType, data string) payload.Part {
	return payload.OfBlob(name, contentType, []byte(data))
}

func fit(c *schema.Contract, parts ...payload.Part) (schema.Fitted, error) {
	return c.Fit(parts, nil, nil)
}

func isA(t *testing.T, err error, reason fault.Reason) *fault.Fault {
	t.Helper()
	f, ok := errors.AsType[*fault.Fault](err)
	if !ok || f.Reason != reason {
		t.Fatalf("got %v, want %s", err, reason)
	}
	return f
}

// refused is isA for callers that ignore the fault.
func refused(t *testing.T, err error, reason fault.Reason) {
	t.Helper()
	_ = isA(t, err, reason)
}

func TestValidJSONIsPassedUnchanged(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"the least":                     `{"items":[{"price":0}]}`,
		"all of it":                     `{"items":[{"price":12.50,"kind":"a"}],"note":"be quick","odd key":{"x":1},"7":null}`,
		"a number that floats have not": `{"items":[{"price":9007199254740993.01}]}`,
		"with room":                     " {\n\t\"items\" : [ {\"price\":1e2} ] }\n",
		"nested within bounds":          `{"items":[{"price":1}],"tree":` + strings.Repeat("[", 62) + strings.Repeat("]", 62) + `}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, contentType := range []string{"application/json", "", "application/octet-stream", "application/order+json; v=1"} {
				want := cmp.Or(contentType, "application/json") // the spec's
				got, err := fit(orders(t), blob("order", contentType, text))
				if err != nil || string(got.Inputs[0].Blob.Data) != text || got.Inputs[0].Blob.ContentType != want {
					t.Errorf("as %q: got %+v, %v", contentType, got, err)
				}
			}
		})
	}
}

func TestViolationNamesItsPath(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ text, field, wantText string }{
		"a wrong type":           {`{"items":[{"price":1},{"price":2},{"price":3},{"price":"4"}]}`, "inputs.order.items[3].price", "got string, want number"},
		"the document":           {`[]`, "inputs.order", "got array, want object"},
		"something missing":      {`{"items":[{}]}`, "inputs.order.items[0]", "missing property 'price'"},
		"something too much":     {`{"items":[{"price":1}],"more":1}`, "inputs.order", "additional properties 'more' not allowed"},
		"too small":              {`{"items":[{"price":-1}]}`, "inputs.order.items[0].price", "minimum"},
		"exactly not a multiple": {`{"items":[{"price":0.001}]}`, "inputs.order.items[0].price", "multipleOf"},
		"none of the words":      {`{"items":[{"price":1,"kind":"c"}]}`, "inputs.order.items[0].kind", "value must be one of 'a', 'b'"},
		"none of the forms":      {`{"items":[{"price":1}],"odd key":{}}`, `inputs.order["odd key"]`, "matches none of the schemas in anyOf: got object, want integer; missing property 'x'"},
		"a pattern":              {`{"items":[{"price":1}],"note":"LOUD"}`, "inputs.order.note", "does not match pattern"},
		"a key that is a number": {`{"items":[{"price":1}],"7":7}`, "inputs.order.7", "got number, want null"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := fit(orders(t), blob("order", "application/json", test.text))
			f := isA(t, err, fault.SchemaViolation)
			if f.HTTPStatus() != 422 || len(f.Violations) != 1 || f.Violations[0].Field != test.field || !strings.Contains(f.Violations[0].Description, test.wantText) {
				t.Errorf("got %+v; want %q at %s", f.Violations, test.wantText, test.field)
			}
			if !strings.Contains(f.Message, test.field) || !strings.Contains(f.Message, test.wantText) {
				t.Errorf("the message is %q", f.Message)
			}
		})
	}
}

func TestViolationsAreBoundedAndOrdered(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("\u00e9", 10_000)
	text := `{"items":[` + strings.Repeat(`{"price":"x"},`, 500) + `{"kind":"` + long + `"}],"note":"` + long + `","` + long + `":1}`
	_, err := fit(orders(t), blob("order", "application/json", text))
	f := isA(t, err, fault.SchemaViolation)
	want := []string{"inputs.order", "inputs.order.items[0].price", "inputs.order.items[1].price", "inputs.order.items[2].price", "inputs.order.items[3].price"}
	var got []string
	for _, v := range f.Violations {
		got = append(got, v.Field)
		if len(v.Description) > 210 || !utf8.ValidString(v.Description) {
			t.Errorf("a violation of %d bytes", len(v.Description))
		}
	}
	if !slices.Equal(got, want) || len(f.Message) > 400 {
		t.Errorf("got %q and a message of %d bytes", got, len(f.Message))
	}
}

func TestUnreadableDocumentIsInvalidInput(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ contentType, data, wantText string }{
		"no JSON":                {"application/json", `{"items"`, "is not JSON"},
		"nothing":                {"application/json", ``, "is not JSON"},
		"half a surrogate pair":  {"application/json", `"\ud800"`, "surrogate"},
		"not UTF-8":              {"application/json", "\"\xff\"", "UTF-8"},
		"too deep":               {"application/json", strings.Repeat("[", 65) + strings.Repeat("]", 65), "deeper than 64"},
		"too many values":        {"application/json", "[0" + strings.Repeat(",0", 100_000) + "]", "more than 100000 values"},
		"too many digits":        {"application/json", "1" + strings.Repeat("0", 400), "at most 400 digits"},
		"an exponent beyond all": {"application/json", "[1e99999]", "exponents to 999"},
		"a tiny one":             {"application/json", "1E-1000000000", "exponents to 999"},
		"msgpack cut off":        {"application/msgpack", "\x81\xa5items", "cut off"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := fit(orders(t), blob("order", test.contentType, test.data))
			f := isA(t, err, fault.InvalidInput)
			if len(f.Violations) != 1 || !strings.HasPrefix(f.Violations[0].Field, "inputs.order") || !strings.Contains(f.Message, test.wantText) {
				t.Errorf("got %q, %+v", f.Message, f.Violations)
			}
		})
	}
}

func packed(t testing.TB, text string) string {
	t.Helper()
	out, err := msgpack.AppendJSON(nil, []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func TestMessagePackIsConvertedToJSON(t *testing.T) {
	t.Parallel()
	const text = `{"items":[{"price":0.5}]}`
	for name, test := range map[string]struct {
		spec    runner.PartSpec
		becomes string
	}{
		"JSON with a schema":            {jsonSpec("order", orderSchema, "application/json"), "application/json"},
		"JSON without one":              {jsonSpec("order", "", "text/plain", "application/json"), "application/json"},
		"a schema alone":                {jsonSpec("order", orderSchema), "application/json"},
		"both, with a schema":           {jsonSpec("order", orderSchema, "application/json", "application/msgpack"), "application/x-msgpack"},
		"both, by the other name":       {jsonSpec("order", orderSchema, "application/json", "application/vnd.msgpack"), "application/x-msgpack"},
		"MessagePack among any of them": {jsonSpec("order", "", "application/*"), "application/x-msgpack"},
		"anything":                      {jsonSpec("order", ""), "application/x-msgpack"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := contract(t, runner.Spec{Inputs: []runner.PartSpec{test.spec}})
			sent := blob("order", "application/x-msgpack", packed(t, text))
			got, err := fit(c, sent)
			if err != nil {
				t.Fatal(err)
			}
			want := text
			if test.becomes != "application/json" {
				want = packed(t, text)
			}
			if b := got.Inputs[0].Blob; b.ContentType != test.becomes || string(b.Data) != want {
				t.Errorf("got %q of %s", b.Data, b.ContentType)
			}
			if sent.Blob.ContentType != "application/x-msgpack" {
				t.Error("the sent data has changed")
			}
		})
	}
}

func TestMessagePackIsValidatedAgainstSchema(t *testing.T) {
	t.Parallel()
	both := contract(t, runner.Spec{Inputs: []runner.PartSpec{jsonSpec("order", orderSchema, "application/json", "application/msgpack")}})
	for name, c := range map[string]*schema.Contract{"as JSON": orders(t), "as it is": both} {
		_, err := fit(c, blob("order", "application/msgpack", packed(t, `{"items":[{"price":"x"}]}`)))
		if f := isA(t, err, fault.SchemaViolation); f.Violations[0].Field != "inputs.order.items[0].price" {
			t.Errorf("%s: got %+v", name, f.Violations)
		}
		binary := msgp.AppendBytes(msgp.AppendString(msgp.AppendMapHeader(nil, 1), "image"), []byte{1})
		_, err = fit(c, payload.OfBlob("order", "application/msgpack", binary))
		if f := isA(t, err, fault.InvalidInput); f.Violations[0] != (fault.Violation{Field: "inputs.order.image", Description: "is binary, which JSON cannot represent"}) {
			t.Errorf("%s: got %+v", name, f.Violations)
		}
	}
}

func TestOutputSchemaViolationIsRunnerFault(t *testing.T) {
	t.Parallel()
	c := orders(t)
	if _, err := c.Outputs([]payload.Part{blob("order", "application/json", `{"items":[{"price":1}]}`)}, schema.Fitted{Rows: 1}); err != nil {
		t.Errorf("a valid output is rejected: %v", err)
	}
	_, err := c.Outputs([]payload.Part{blob("order", "application/json", `{"items":[{"price":"x"}]}`)}, schema.Fitted{Rows: 1})
	f := isA(t, err, fault.RunnerOutputInvalid)
	if f.Violations[0].Field != "outputs.order.items[0].price" || !strings.Contains(f.Message, `output "order" breaks its schema`) {
		t.Errorf("got %q, %+v", f.Message, f.Violations)
	}
	_, err = c.Outputs([]payload.Part{blob("order", "application/json", `{`)}, schema.Fitted{Rows: 1})
	if f := isA(t, err, fault.RunnerOutputInvalid); !strings.Contains(f.Message, `output "order" is not JSON`) {
		t.Errorf("got %q", f.Message)
	}
}

func TestChunksAreValidatedAndFinalOutputsAreNot(t *testing.T) {
	t.Parallel()
	c := contract(t, runner.Spec{Stream: true, BatchAxis: runner.BatchRows, Outputs: []runner.PartSpec{
		jsonSpec("token", `{"type":"string"}`), vector("scores"),
	}})
	good := map[string][]payload.Part{
		"one of the outputs": {blob("token", "", `"a"`)}, "another": {fp32("scores", 7, 64)}, "both": {blob("token", "", `"a"`), fp32("scores", 1, 64)},
		"nothing": nil, "what no output is": {text("log", "x")},
	}
	for name, chunk := range good {
		if err := c.Chunk(chunk); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, chunk := range map[string][]payload.Part{
		"another form": {blob("token", "", `1`)}, "no JSON": {blob("token", "", `a`)}, "another shape": {fp32("scores", 7, 63)},
		"another kind": {blob("scores", "", `[]`)}, "two of a name": {text("log", "x"), text("log", "x")},
	} {
		if f := isA(t, c.Chunk(chunk), fault.RunnerOutputInvalid); f.Message == "" {
			t.Errorf("%s has no message", name)
		}
	}
	for name, end := range map[string][]payload.Part{"nothing": nil, "all chunks in one": {blob("token", "", `["a","b"]`), fp32("scores", 640)}} {
		if got, err := c.Outputs(end, schema.Fitted{Rows: 1, Lifted: true}); err != nil || len(got) != len(end) {
			t.Errorf("%s: got %v, %v", name, got, err)
		}
	}
	_, err := c.Outputs([]payload.Part{fp32("token", 1)}, schema.Fitted{Rows: 1})
	refused(t, err, fault.RunnerOutputInvalid)
}

func TestInvalidSchemaErrorNamesItsPlace(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ schema, wantText string }{
		"no such type":       {`{"properties":{"price":{"type":"money"}}}`, `inputs[0].schema: of "order": it is not a JSON Schema: schema.properties.price.type: `},
		"no JSON":            {`{"type":`, "it is not JSON"},
		"another document":   {`{"$ref":"https://example.com/x.json"}`, "schemas of other places are not loaded"},
		"a file":             {`{"$ref":"other.json"}`, "schemas of other places are not loaded"},
		"another metaschema": {`{"$schema":"https://example.com/meta"}`, "schemas of other places are not loaded"},
		"nothing there":      {`{"$ref":"#/$defs/none"}`, "$defs/none"},
		"no pattern of RE2":  {`{"pattern":"(?=x)"}`, "schema.pattern"},
		"too large":          {`{"description":"` + strings.Repeat("x", schema.MaxSchema) + `"}`, "at most 262144 are allowed"},
		"too deep":           {strings.Repeat(`{"not":`, 65) + "{}" + strings.Repeat("}", 65), "deeper than 64"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := schema.Compile(runner.Spec{Inputs: []runner.PartSpec{jsonSpec("order", test.schema)}})
			if err == nil || !strings.Contains(err.Error(), test.wantText) || strings.Contains(err.Error(), "stage:///") {
				t.Errorf("got %v; want %q", err, test.wantText)
			}
		})
	}
	tensor := vector("x")
	tensor.Schema = json.RawMessage(`{}`)
	if _, err := schema.Compile(runner.Spec{Outputs: []runner.PartSpec{tensor}}); err == nil || !strings.Contains(err.Error(), `outputs[0].schema: of "x": it is for the JSON of a blob`) {
		t.Errorf("got %v", err)
	}
}

func TestOlderDraftIsAppliedByName(t *testing.T) {
	t.Parallel()
	const list = `"items":[{"type":"string"}]`
	old := contract(t, runner.Spec{Inputs: []runner.PartSpec{jsonSpec("x", `{"$schema":"http://json-schema.org/draft-07/schema#",`+list+`}`)}})
	_, err := fit(old, blob("x", "", "[1]"))
	refused(t, err, fault.SchemaViolation)
	if _, err := schema.Compile(runner.Spec{Inputs: []runner.PartSpec{jsonSpec("x", `{`+list+`}`)}}); err == nil {
		t.Error("2020-12 accepts a list of items")
	}
}

// FuzzContract checks any schema and any document, under any type: nothing panics;
// every rejection is a short fault that names the input; and every accepted document
// is JSON.
func FuzzContract(f *testing.F) {
	f.Add(orderSchema, "application/json", []byte(`{"items":[{"price":"x"}]}`))
	f.Add(`{"uniqueItems":true,"contains":{"type":"string"}}`, "", []byte(`[1,1.0,1e0]`))
	f.Add(`{"oneOf":[{"type":"integer"},{"multipleOf":2}],"not":{"const":7}}`, "application/msgpack", []byte{0x07})
	f.Add(`{"$dynamicRef":"#x","$dynamicAnchor":"x"}`, "", []byte(`{"a":{"b":[]}}`))
	f.Add(`{"unevaluatedProperties":false,"patternProperties":{"^a":true}}`, "", []byte(`{"\u0000":1,"a":2}`))
	f.Fuzz(func(t *testing.T, text, contentType string, data []byte) {
		if len(text) > 4<<10 || len(data) > 4<<10 {
			return
		}
		c, err := schema.Compile(runner.Spec{Inputs: []runner.PartSpec{jsonSpec("x", text)}})
		if err != nil || text == "" {
			return
		}
		got, err := fit(c, payload.OfBlob("x", contentType, bytes.Clone(data)))
		if err == nil {
			if b := got.Inputs[0].Blob; !json.Valid(b.Data) {
				t.Fatalf("accepted %q", b.Data)
			}
			return
		}
		refusal, ok := errors.AsType[*fault.Fault](err)
		if !ok || len(refusal.Violations) == 0 || len(refusal.Violations) > 5 || len(fmt.Sprint(refusal.Violations)) > 5*1200 || !utf8.ValidString(refusal.Message) {
			t.Fatalf("rejected by %+v", err)
		}
		for _, v := range refusal.Violations {
			if !strings.HasPrefix(v.Field, "inputs.x") || !utf8.ValidString(v.Field) || !utf8.ValidString(v.Description) {
				t.Fatalf("rejected at %q: %q", v.Field, v.Description)
			}
		}
	})
}

func BenchmarkFit(b *testing.B) {
	many := `{"items":[` + strings.Repeat(`{"price":12.5,"kind":"a"},`, 99) + `{"price":1}]}`
	plain := contract(b, runner.Spec{Inputs: []runner.PartSpec{jsonSpec("order", "", "application/json")}})
	for _, bench := range []struct {
		name string
		of   *schema.Contract
		text string
	}{
		{"no schema", plain, many},
		{"an order of one item", orders(b), `{"items":[{"price":12.5,"kind":"a"}]}`},
		{"an order of a hundred", orders(b), many},
		{"broken in a hundred places", orders(b), strings.ReplaceAll(many, "12.5", `"x"`)},
	} {
		b.Run(bench.name, func(b *testing.B) {
			part := blob("order", "application/json", bench.text)
			b.ReportAllocs()
			b.SetBytes(int64(len(bench.text)))
			for b.Loop() {
				_, _ = fit(bench.of, part)
			}
		})
	}
}
