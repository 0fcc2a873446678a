package schema_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// operators is a union that reaches itself in two of its forms.
const operators = `{"anyOf":[
	{"required":["op"],"properties":{"op":{"const":"not"},"arg":{"$ref":"#"}}},
	{"required":["op"],"properties":{"op":{"const":"neg"},"arg":{"$ref":"#"}}},
	{"type":"number"}
]}`

func nest(open, inner, closing string, depth int) string {
	return strings.Repeat(open, depth) + inner + strings.Repeat(closing, depth)
}

func many(one string, n int) string { return "[" + strings.Repeat(one+",", n-1) + one + "]" }

func numbers(n int) string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprint(i)
	}
	return strings.Join(out, ",")
}

func members(n int) string {
	var out strings.Builder
	for i := range n {
		fmt.Fprintf(&out, `"member%d":1,`, i)
	}
	return "{" + out.String() + `"z":1}`
}

// kinds are alternatives whose kinds differ, and which refer to the same form.
func kinds(n int) string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf(`{"required":["kind","body"],"properties":{"kind":{"const":%d},"body":{"properties":{"text":{"type":"string"}}}}}`, i)
	}
	return strings.Join(out, ",")
}

func TestExcessiveWorkIsRejectedEarly(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ schema, text string }{
		"forms that reach themselves": {operators, nest(`{"op":"neg","arg":`, "1", "}", 18)},
		"and as deep as may be":       {operators, nest(`{"op":"neg","arg":`, "1", "}", 60)},
		"one of them":                 {strings.ReplaceAll(operators, "anyOf", "oneOf"), nest(`{"op":"neg","arg":`, "1", "}", 18)},
		"by conditions":               {`{"if":{"items":{"$ref":"#"}},"then":{"items":{"$ref":"#"}},"not":{"const":1}}`, nest("[", "2", "]", 40)},
		"by dependencies":             {`{"$schema":"http://json-schema.org/draft-07/schema#","dependencies":{"a":{"properties":{"a":{"$ref":"#"}}}},"properties":{"a":{"$ref":"#"}}}`, nest(`{"a":`, "1", "}", 40)},
		"patterns of names":           {`{"patternProperties":{"a.{200}$":true,"b.{200}$":true}}`, members(20_000)},
		"a pattern of text":           {`{"items":{"pattern":"(a|aa|b*)*c"}}`, many(`"`+strings.Repeat("a", 1000)+`"`, 1000)},
		"unevaluated members":         {`{"unevaluatedProperties":{"type":"string"},"allOf":[{"properties":{"a":true}},{"anyOf":[{"properties":{"b":true}},{"properties":{"c":true}}]}]}`, members(40_000)},
		"unevaluated items":           {`{"unevaluatedItems":false,"allOf":[{"prefixItems":[true]},{"anyOf":[{"contains":{"const":1}},{"contains":{"const":2}}]}]}`, many("1", 90_000)},
		"lists without equals":        {`{"allOf":[{"uniqueItems":true},{"uniqueItems":true},{"uniqueItems":true}]}`, "[" + numbers(90_000) + "]"},
		"exact numbers":               {`{"items":{"minimum":1,"maximum":2,"multipleOf":0.3}}`, many("1."+strings.Repeat("7", 390)+"e-999", 20_000)},
		"what is required":            {`{"items":{"required":["` + strings.ReplaceAll(numbers(64), ",", `","`) + `"]}}`, many("{}", 49_000)},
		"a list of numbers":           {`{"items":{"enum":[` + numbers(1000) + `]}}`, many("-1", 1000)},
		"names of members":            {`{"propertyNames":{"allOf":[{"minLength":1},{"maxLength":99}]}}`, members(90_000)},
		"false forms":                 {`{"items":{"oneOf":[false,false,false]}}`, many("1", 90_000)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := contract(t, runner.Spec{Inputs: []runner.PartSpec{jsonSpec("x", test.schema)}, Outputs: []runner.PartSpec{jsonSpec("x", test.schema)}})
			_, err := fit(c, blob("x", "", test.text))
			f := isA(t, err, fault.InvalidInput)
			want := fmt.Sprintf(`input "x": %s`, schema.ErrTooMuchWork)
			if f.Message != want || len(f.Violations) != 1 || f.Violations[0].Field != "inputs.x" {
				t.Errorf("got %q, %+v", f.Message, f.Violations)
			}
			_, err = c.Outputs([]payload.Part{blob("x", "", test.text)}, schema.Fitted{Rows: 1})
			if f := isA(t, err, fault.RunnerOutputInvalid); !strings.Contains(f.Message, `output "x" has too many values or levels for its schema`) {
				t.Errorf("got %q", f.Message)
			}
		})
	}
}

func TestFormerlySlowSchemasAreCheap(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		schema, text string
		keeps        bool
	}{
		"a list of words":             {`{"items":{"enum":["` + strings.ReplaceAll(numbers(1000), ",", `","`) + `"]}}`, many(`"-1"`, 3000), false},
		"numbers that differ by sign": {`{"uniqueItems":true}`, "[" + numbers(30_000) + ",-1]", true},
		"branches of other names":     {`{"oneOf":[{"type":"object","required":["not"],"properties":{"not":{"$ref":"#"}}},{"type":"object","required":["all"],"properties":{"all":{"type":"array","items":{"$ref":"#"}}}},{"type":"number"}]}`, nest(`{"all":[{"not":`, "1", "}]}", 20), true},
		"many kinds of messages":      {`{"items":{"oneOf":[` + kinds(30) + `]}}`, many(`{"kind":7,"body":{"text":"x"}}`, 500), true},
		"thousands of orders": {
			`{"items":{"type":"object","required":["price"],"properties":{"price":{"type":"number","minimum":0,"multipleOf":0.01},"kind":{"enum":["a","b"]}}}}`, many(`{"price":12.5,"kind":"a"}`, 8_000), true,
		},
		"thousands of nodes": {`{"type":"object","properties":{"next":{"$ref":"#"},"also":{"type":"array","items":{"$ref":"#"}}}}`, `{"also":` + many(`{"next":{"next":{}}}`, 8_000) + `}`, true},
		"a union ten deep":   {operators, nest(`{"op":"neg","arg":`, "1", "}", 10), true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if steps, _, keeps, err := schema.Work(test.schema, test.text); keeps != test.keeps || err != nil {
				t.Errorf("valid is %t, at most %d steps: %v", keeps, steps, err)
			}
		})
	}
}

// generator writes small schemas and documents that match each other in part.
type generator struct{ *rand.Rand }

func (g generator) value(depth int) any {
	switch g.IntN(8 - 2*min(depth, 1)) {
	case 0:
		return nil
	case 1:
		return g.IntN(2) == 0
	case 2, 3:
		return json.Number([]string{"0", "-0.0", "1", "1.0", "10e-1", "-1", "100", "1e2", "0.5", "5E-1"}[g.IntN(10)])
	case 4:
		return g.name()
	case 5:
		return []any{}
	case 6:
		out := make([]any, g.IntN(4))
		for i := range out {
			out[i] = g.value(depth + 1)
		}
		return out
	default:
		out := map[string]any{}
		for range g.IntN(4) {
			out[g.name()] = g.value(depth + 1)
		}
		return out
	}
}

func (g generator) name() string { return []string{"a", "b", "ab", "c"}[g.IntN(4)] }

func (g generator) list(depth int) []any {
	out := make([]any, 1+g.IntN(3))
	for i := range out {
		out[i] = g.schema(depth + 1)
	}
	return out
}

func (g generator) named(depth int) map[string]any {
	out := map[string]any{}
	for range 1 + g.IntN(3) {
		out[g.name()] = g.schema(depth + 1)
	}
	return out
}

// schema has no reference that could lead back without a step into the document.
func (g generator) schema(depth int) any {
	if depth > 3 || g.IntN(12) == 0 {
		return g.IntN(3) > 0
	}
	out := map[string]any{}
	for range 1 + g.IntN(3) {
		g.keyword(out, depth)
	}
	return out
}

func (g generator) keyword(to map[string]any, depth int) {
	down := func(key string) { to[key] = g.schema(depth + 1) }
	switch keys := []string{"not", "if", "then", "else", "items", "contains", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames"}; g.IntN(22) {
	case 0, 1, 2, 3, 4:
		down(keys[g.IntN(len(keys))])
	case 5, 6:
		to[[]string{"allOf", "anyOf", "oneOf", "prefixItems"}[g.IntN(4)]] = g.list(depth)
	case 7, 8:
		to[[]string{"properties", "patternProperties", "dependentSchemas"}[g.IntN(3)]] = g.named(depth)
	case 9, 10, 11:
		to["type"] = []string{"null", "boolean", "number", "integer", "string", "array", "object"}[g.IntN(7)]
	case 12, 13:
		to["const"] = g.value(1)
	case 14, 15:
		to["enum"] = []any{g.value(1), g.value(1), g.value(0)}
	case 16, 17:
		to["uniqueItems"] = true
	case 18:
		to["required"] = []string{g.name()}
	case 19:
		to["pattern"] = g.name()
	case 20:
		to["multipleOf"] = json.Number("0.5")
	default:
		to[[]string{"items", "additionalProperties"}[g.IntN(2)]] = map[string]any{"$ref": "#"}
	}
}

func TestEveryVisitIsWithinTheBound(t *testing.T) {
	t.Parallel()
	g := generator{rand.New(rand.NewPCG(1, 2))}
	results := map[bool]int{}
	for range 1_500 {
		form, err := json.Marshal(g.schema(0))
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(g.value(0))
		if err != nil {
			t.Fatal(err)
		}
		steps, visits, keeps, err := schema.Work(string(form), string(text))
		if errors.Is(err, schema.ErrTooMuchWork) {
			continue
		}
		if err != nil {
			t.Fatalf("%s against %s: %v", text, form, err)
		}
		if want, err := schema.Keeps(string(form), string(text)); keeps != want || err != nil {
			t.Fatalf("%s is valid against %s: %t, want %t, %v", text, form, keeps, want, err)
		}
		if steps < visits {
			t.Fatalf("%s against %s takes %d visits, at most %d were expected", text, form, visits, steps)
		}
		results[keeps]++
	}
	if results[true] < 150 || results[false] < 150 {
		t.Errorf("all results %v are equal", results)
	}
}

func TestSelfReferringSchemaIsRejectedByPlace(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ schema, place string }{
		"at once":           {`{"$ref":"#"}`, "schema leads"},
		"by another":        {`{"properties":{"a b":{"$ref":"#/$defs/a"}},"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}`, "schema.$defs."},
		"all of it":         {`{"allOf":[{"type":"string"},{"$ref":"#"}]}`, "schema leads"},
		"any of it":         {`{"anyOf":[{"type":"string"},{"$ref":"#"}]}`, "schema leads"},
		"one of it":         {`{"oneOf":[{"$ref":"#"}]}`, "schema leads"},
		"not itself":        {`{"not":{"$ref":"#"}}`, "schema leads"},
		"if itself":         {`{"if":{"$ref":"#"}}`, "schema leads"},
		"then itself":       {`{"if":true,"then":{"$ref":"#"}}`, "schema leads"},
		"where a member is": {`{"dependentSchemas":{"a":{"$ref":"#"}}}`, "schema leads"},
		"below":             {`{"items":{"properties":{"x":{"$ref":"#/items/properties/x"}}}}`, "schema.items.properties.x leads"},
		"where none looks":  {`{"items":{"$ref":"#/$defs/n"},"$defs":{"n":{"$ref":"#/$defs/n"}}}`, "schema.$defs.n leads"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := schema.Compile(runner.Spec{Inputs: list(jsonSpec("x", test.schema))})
			if err == nil || !strings.Contains(err.Error(), `inputs[0].schema: of "x": `+test.place) || strings.Contains(err.Error(), "stage:///") {
				t.Errorf("got %v; want %q", err, test.place)
			}
		})
	}
	for name, text := range map[string]string{
		"through a member":  `{"properties":{"a":{"$ref":"#"}}}`,
		"through an item":   `{"anyOf":[{"items":{"$ref":"#"}},{"not":{"items":{"$ref":"#"}}}]}`,
		"the same twice":    `{"allOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/a"}],"$defs":{"a":{"type":"string"}}}`,
		"through its names": `{"propertyNames":{"$ref":"#"}}`,
	} {
		if _, err := schema.Compile(runner.Spec{Inputs: list(jsonSpec("x", text))}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSlowSchemaIsRejectedByPlace(t *testing.T) {
	t.Parallel()
	doubling := `{"items":{"$ref":"#/$defs/a0"},"$defs":{`
	for i := range 20 {
		doubling += fmt.Sprintf(`"a%d":{"allOf":[{"$ref":"#/$defs/a%d"},{"$ref":"#/$defs/a%d"}]},`, i, i+1, i+1)
	}
	for name, test := range map[string]struct{ schema, want string }{
		"doubled references": {doubling + `"a20":{}}}`, "schema.$defs.a4 applies too many schemas to one value; use fewer alternatives and references there"},
		"a dynamic reference": {
			`{"$dynamicAnchor":"x","properties":{"a":{"$dynamicRef":"#x"}}}`, "schema.properties.a: $dynamicRef and $recursiveRef are not supported; use $ref",
		},
		"one that leads back": {`{"$dynamicAnchor":"x","$dynamicRef":"#x"}`, "schema: $dynamicRef and $recursiveRef are not supported; use $ref"},
		"a recursive reference": {
			`{"$schema":"https://json-schema.org/draft/2019-09/schema","$recursiveAnchor":true,"items":{"$recursiveRef":"#"}}`, "schema.items: $dynamicRef and $recursiveRef are not supported; use $ref",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := schema.Compile(runner.Spec{Inputs: list(jsonSpec("x", test.schema))})
			if err == nil || err.Error() != `inputs[0].schema: of "x": `+test.want {
				t.Errorf("got %v; want %s", err, test.want)
			}
		})
	}
}

func TestFormatIsIgnoredInEveryDraft(t *testing.T) {
	t.Parallel()
	for _, draft := range []string{"http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"} {
		c := contract(t, runner.Spec{Inputs: list(jsonSpec("x", `{"$schema":"`+draft+`","format":"date"}`))})
		if _, err := fit(c, blob("x", "", `"tomorrow"`)); err != nil {
			t.Errorf("%s: %v", draft, err)
		}
	}
}
