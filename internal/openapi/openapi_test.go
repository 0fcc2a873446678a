package openapi_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pb33f/libopenapi"
	validator "github.com/pb33f/libopenapi-validator"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/stagemesh/stagemesh/internal/request"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/internal/openapi"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

type object = map[string]any

// single returns a pipeline of one stage with the inputs and outputs of the spec.
func single(name string, spec *stagev1.Spec) openapi.Pipeline {
	p := pipeline.OfStage(pipeline.StageName(name))
	p.Name = pipeline.Name(name)
	return openapi.Pipeline{Pipeline: p, Timeout: time.Second, Specs: map[string]*stagev1.Spec{name: spec}}
}

func tensorPart(name, datatype string, shape ...int64) *stagev1.PartSpec {
	return &stagev1.PartSpec{Name: name, Body: &stagev1.PartSpec_Tensor{Tensor: &stagev1.TensorSpec{Datatype: datatype, Shape: shape}}}
}

func blobPart(name string, contentTypes ...string) *stagev1.PartSpec {
	return &stagev1.PartSpec{Name: name, Body: &stagev1.PartSpec_Blob{Blob: &stagev1.BlobSpec{ContentTypes: contentTypes}}}
}

func jsonPart(name, schema string) *stagev1.PartSpec {
	out := blobPart(name, "application/json")
	out.Schema = schema
	return out
}

func takes(parts ...*stagev1.PartSpec) *stagev1.Spec {
	return &stagev1.Spec{Inputs: parts, Outputs: parts, BatchAxis: stagev1.BatchAxis_BATCH_AXIS_ROWS}
}

func build(t *testing.T, s openapi.Settings) []byte {
	t.Helper()
	text, err := openapi.Build(s)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// at returns the value at a path of a document.
func at(t *testing.T, text []byte, path ...string) any {
	t.Helper()
	var out any
	if err := json.Unmarshal(text, &out); err != nil {
		t.Fatal(err)
	}
	for _, name := range path {
		members, _ := out.(object)
		if out = members[name]; out == nil {
			t.Fatalf("%s of %q is missing", name, path)
		}
	}
	return out
}

func bodyOf(t *testing.T, text []byte, name string) object {
	t.Helper()
	return at(t, text, "paths", "/v1/pipelines/"+name+":infer", "post", "requestBody", "content").(object)
}

// valid validates the document against the schema of OpenAPI 3.1.
func valid(t *testing.T, text []byte) {
	t.Helper()
	parsed, err := libopenapi.NewDocument(text)
	if err != nil {
		t.Fatal(err)
	}
	v, errs := validator.NewValidator(parsed)
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	if ok, wrong := v.ValidateDocument(); !ok {
		t.Fatalf("%v", wrong)
	}
}

// The steps of a pipeline with blocks are those in its blocks too.
func TestPipelineWithBlocksIsDescribed(t *testing.T) {
	t.Parallel()
	branch := func(stage string) pipeline.Branch {
		return pipeline.Branch{Steps: pipeline.OfStage(pipeline.StageName(stage)).Steps}
	}
	text := build(t, openapi.Settings{Mesh: "m", Pipelines: []openapi.Pipeline{{Timeout: time.Second, Pipeline: pipeline.Pipeline{Name: "p", Steps: []pipeline.Step{
		{Name: "both", Block: pipeline.Block{Parallel: &pipeline.Parallel{Branches: map[string]pipeline.Branch{"a": branch("one"), "b": branch("two")}}}},
	}}, Outputs: []*stagev1.PartSpec{tensorPart("y", "FP32", -1)}}}})
	valid(t, text)
	if got := at(t, text, "paths", "/v1/pipelines/p:infer", "post", "description").(string); !strings.Contains(got, "one → two") {
		t.Errorf("the description is %q", got)
	}
}

func TestPatternsTakeWhatCallersSend(t *testing.T) {
	t.Parallel()
	const id = "01a1fc61-c602-7919-8f3a-1abcfc776362"
	hexID := strings.ReplaceAll(id, "-", "")
	text := build(t, openapi.Settings{Mesh: "m", Jobs: true, Batches: true})
	rows := map[string]struct{ good, bad []string }{
		"request_id":            {[]string{id}, []string{"", "x", id + "0"}},
		"job_id":                {[]string{"nightly." + id, "a." + id}, []string{"a." + strings.ToUpper(id), id, "." + id, "A." + id, "nightly." + hexID}},
		"file_id":               {[]string{"file-" + hexID}, []string{hexID, "file-" + id, "file-1"}},
		"batch_id":              {[]string{"batch_" + hexID}, []string{"batch-" + hexID, "batch_1"}},
		"queue":                 {[]string{"nightly", "a"}, []string{"", "-a", "A", "a.b"}},
		"wait":                  {[]string{"0", "250", "5s", "1m30.5s", "+.5h", "1.s"}, []string{"", "-1", "-5s", "123456h", "soon", "5 s", "s", "1.5", ".s"}},
		"ttl":                   {[]string{"0", "250", "6h"}, []string{"", "-1", "soon"}},
		transport.HeaderTimeout: {[]string{"", "250", "5s", "0h5m", "1m30.5s", "+.5h", "1.s", "7ns"}, []string{"0", "0s", "-1", "123456h", "0.0ms", "soon"}},
	}
	all := slices.Collect(maps.Values(at(t, text, "components", "parameters").(object)))
	for _, of := range at(t, text, "paths").(object) {
		for _, operation := range of.(object) {
			parameters, _ := operation.(object)["parameters"].([]any)
			all = append(all, parameters...)
		}
	}
	seen := map[string]bool{}
	for _, one := range all {
		name, _ := one.(object)["name"].(string)
		row, ok := rows[name]
		if !ok {
			continue
		}
		seen[name] = true
		pattern, err := regexp.Compile(fmt.Sprint(one.(object)["schema"].(object)["pattern"]))
		if err != nil || slices.ContainsFunc(row.good, func(v string) bool { return !pattern.MatchString(v) }) || slices.ContainsFunc(row.bad, pattern.MatchString) {
			t.Errorf("%s is %s, %v", name, pattern, err)
		}
	}
	if len(seen) != len(rows) {
		t.Errorf("there are %v", seen)
	}
}

// static.json repeats what the code declares.
func TestStaticPartsMatchTheCode(t *testing.T) {
	t.Parallel()
	text := build(t, openapi.Settings{Mesh: "m", Pipelines: []openapi.Pipeline{single("p", nil)}})
	faults := []string{"200"}
	for name := range at(t, text, "components", "responses").(object) {
		if name != "Fault410" && name != "Fault502" { // those are of jobs
			faults = append(faults, strings.TrimPrefix(name, "Fault"))
		}
	}
	slices.Sort(faults)
	for _, path := range []string{"/v1/pipelines/{pipeline}:infer", "/v1/pipelines/{pipeline}:stream", "/v1/pipelines/p:infer"} {
		want := faults
		if strings.HasSuffix(path, ":infer") { // it may become a job
			want = slices.Insert(slices.Clone(faults), 1, "202")
		}
		if got := slices.Sorted(maps.Keys(at(t, text, "paths", path, "post", "responses").(object))); !slices.Equal(got, want) {
			t.Errorf("responses of %s are %v, want %v", path, got, want)
		}
	}
	reasons := []any{}
	for _, reason := range fault.Reasons() {
		reasons = append(reasons, string(reason))
	}
	states := []any{}
	for state := range len(inferencev1.JobState_name) - 1 {
		states = append(states, strings.ToLower(strings.TrimPrefix(inferencev1.JobState(state+1).String(), "JOB_STATE_"))) //nolint:gosec // there are few
	}
	for _, row := range []struct {
		path []string
		want any
	}{
		{[]string{"schemas", "Job", "properties", "state", "enum"}, states},
		{[]string{"schemas", "Fault", "properties", "error", "properties", "reason", "enum"}, reasons},
		{[]string{"schemas", "Parameters", "maxProperties"}, float64(payload.MaxParameters)},
		{[]string{"schemas", "GenerateRequest", "properties", "id", "maxLength"}, float64(payload.MaxName)},
		{[]string{"parameters", "IdempotencyKey", "schema", "maxLength"}, float64(request.MaxIdempotencyKey)},
		{[]string{"parameters", "Outputs", "schema", "maxItems"}, float64(payload.MaxParts)},
		{[]string{"parameters", "Timeout", "name"}, transport.HeaderTimeout},
		{[]string{"parameters", "Priority", "name"}, transport.HeaderPriority},
		{[]string{"parameters", "Durability", "name"}, transport.HeaderDurability},
		{[]string{"parameters", "WaitForCapacity", "name"}, transport.HeaderWaitForCapacity},
		{[]string{"parameters", "Complete", "name"}, transport.HeaderComplete},
		{[]string{"parameters", "IdempotencyKey", "name"}, transport.HeaderIdempotencyKey},
	} {
		if got := at(t, text, append([]string{"components"}, row.path...)...); !reflect.DeepEqual(got, row.want) {
			t.Errorf("%v is %v, want %v", row.path, got, row.want)
		}
	}
}

func TestQueuesAreDescribedWhereThereAreSome(t *testing.T) {
	t.Parallel()
	for _, row := range []struct{ jobs, batches, openai bool }{{}, {jobs: true}, {jobs: true, batches: true}, {openai: true}} {
		text := build(t, openapi.Settings{Mesh: "m", Jobs: row.jobs, Batches: row.batches, OpenAI: row.openai})
		valid(t, text)
		paths := at(t, text, "paths").(object)
		for path, want := range map[string]bool{"/v1/queues/{queue}/jobs": row.jobs, "/v1/jobs/{job_id}": row.jobs, "/v1/batches": row.batches, "/v1/files/{file_id}": row.batches, "/v1/chat/completions": row.openai, "/v1/models/{model_id}": row.openai, "/v1/requests/{request_id}": true} {
			if got := paths[path] != nil; got != want {
				t.Errorf("%+v: %s is described: %t", row, path, got)
			}
		}
		tags := fmt.Sprint(at(t, text, "tags"))
		if strings.Contains(tags, "name:Jobs") != row.jobs || strings.Contains(tags, "name:Batches") != row.batches || strings.Contains(tags, "name:OpenAI]") != row.openai {
			t.Errorf("%+v: the tags are %s", row, tags)
		}
	}
}

func TestBodiesMatchFirstStageInputs(t *testing.T) {
	t.Parallel()
	optional := blobPart("mask", "image/png")
	optional.Optional = true
	half := tensorPart("h", "FP16", -1, 4)
	half.Optional = true
	for name, row := range map[string]struct {
		spec *stagev1.Spec
		want string
	}{
		"nothing is known":        {nil, "*/* application/json application/msgpack application/octet-stream multipart/form-data text/plain"},
		"it takes anything":       {takes(), "*/* application/json application/msgpack application/octet-stream multipart/form-data text/plain"},
		"an image":                {takes(blobPart("image", "image/png", "image/jpeg")), "image/jpeg image/png multipart/form-data"},
		"any image":               {takes(blobPart("image", "image/*")), "image/* image/jpeg image/png multipart/form-data"},
		"JSON":                    {takes(jsonPart("order", `{"type": "object"}`)), "application/json application/msgpack multipart/form-data"},
		"two blobs":               {takes(blobPart("image", "image/png"), blobPart("prompt", "text/plain")), "multipart/form-data"},
		"one that may be left":    {takes(blobPart("image", "image/png"), optional), "multipart/form-data"},
		"a tensor":                {takes(tensorPart("x", "FP32", -1, 4)), "application/json application/msgpack"},
		"two tensors":             {takes(tensorPart("x", "FP32", -1, 4), tensorPart("y", "BYTES", -1)), "application/json application/msgpack"},
		"a half float":            {takes(tensorPart("x", "FP32", -1, 4), half), "application/json application/msgpack"},
		"unrepresentable in JSON": {takes(tensorPart("x", "FP16", -1, 4)), "application/msgpack"},
		"what is MessagePack":     {takes(blobPart("order", "application/json", "application/x-msgpack")), "application/json application/x-msgpack multipart/form-data"},
		"a tensor and a blob":     {takes(tensorPart("x", "FP32", -1, 4), blobPart("image", "image/png")), "*/* application/json application/msgpack application/octet-stream multipart/form-data text/plain"},
		"names of all kinds":      {takes(jsonPart("ü/~ {}", `{"type": "object"}`)), "application/json application/msgpack multipart/form-data"},
		"a schema that is none":   {takes(jsonPart("order", `{`)), "application/json application/msgpack multipart/form-data"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			text := build(t, openapi.Settings{Mesh: "m", Pipelines: []openapi.Pipeline{single("p", row.spec)}})
			valid(t, text)
			if got := strings.Join(slices.Sorted(maps.Keys(bodyOf(t, text, "p"))), " "); got != row.want {
				t.Errorf("got %s", got)
			}
		})
	}
}

func TestBodiesAndOutputsHaveTheNamesOfTheSpec(t *testing.T) {
	t.Parallel()
	streams := takes(blobPart("text", "text/plain"))
	streams.Stream = true
	weights := tensorPart("weights", "FP32", -1)
	weights.Optional = true
	text := build(t, openapi.Settings{Mesh: "m", Pipelines: []openapi.Pipeline{
		single("forms", takes(blobPart("a", "text/plain"), blobPart("b", "text/plain"))), single("listed", takes(blobPart("a,b", "text/plain"))),
		single("streams", streams), single("tensors", takes(tensorPart("rows", "INT32", -1, 2), weights)), single("unknown", nil),
	}})
	valid(t, text)
	for name, want := range map[string]any{
		"forms": object{"enum": []any{"a", "b"}}, "tensors": object{"enum": []any{"rows", "weights"}},
		"listed": nil, "streams": nil, "unknown": nil, "{pipeline}": nil,
	} {
		var got any
		for _, p := range at(t, text, "paths", "/v1/pipelines/"+name+":infer", "post", "parameters").([]any) {
			if p.(object)["name"] == "outputs" {
				got = p.(object)["schema"].(object)["items"]
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("outputs of %s are %v, want %v", name, got, want)
		}
	}
	if form := bodyOf(t, text, "forms")["multipart/form-data"].(object)["schema"].(object); form["additionalProperties"] != false {
		t.Errorf("the form is %v", form)
	}
	schema := compiled(t, text, "#/components/schemas/stage.tensors.request")
	const rows, weight = `{"name": "rows", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}`, `{"name": "weights", "datatype": "FP32", "shape": [1], "data": [1]}`
	for inputs, want := range map[string]bool{rows: true, rows + "," + weight: true, weight: false, rows + "," + rows: false, weight + "," + weight: false} {
		if got := schema.Validate(decoded(t, `{"inputs": [`+inputs+`]}`)) == nil; got != want {
			t.Errorf("inputs %s are valid: %t", inputs, got)
		}
	}
}

func TestStreamIsDescribedIfLastStageStreams(t *testing.T) {
	t.Parallel()
	streams := takes(blobPart("text", "text/plain"))
	streams.Stream = true
	text := build(t, openapi.Settings{Mesh: "m", Pipelines: []openapi.Pipeline{single("a", streams), single("b", takes(blobPart("text", "text/plain")))}})
	valid(t, text)
	if !bytes.Contains(text, []byte(`"/v1/pipelines/a:stream"`)) || bytes.Contains(text, []byte(`"/v1/pipelines/b:stream"`)) {
		t.Errorf("%s", text)
	}
	if about := at(t, text, "paths", "/v1/pipelines/a:stream", "post", "description").(string); !strings.Contains(about, "\n\nWhoever closes the connection") {
		t.Errorf("the description is %q", about)
	}
}

func TestInputsHaveCallerNames(t *testing.T) {
	t.Parallel()
	renamed := single("renamed", takes(tensorPart("x", "FP32", -1, 4)))
	renamed.Steps[0].Stage, renamed.Steps[0].Inputs = "s", map[string]string{"x": "pixels"}
	renamed.Specs["s"] = renamed.Specs["renamed"]
	renamed.Specs["s"].Examples = []*stagev1.Example{{Name: "one", Inputs: payload.ToProto([]payload.Part{payload.OfTensor("x", floats(1, 4))})}}
	plain := single("plain", takes(tensorPart("x", "FP32", -1, 4)))
	plain.Steps[0].Stage, plain.Specs["s"] = "s", plain.Specs["plain"]
	text := build(t, openapi.Settings{Mesh: "m", Pipelines: []openapi.Pipeline{renamed, plain}})
	valid(t, text)
	for name, want := range map[string]string{"renamed": "pixels", "plain": "x"} {
		ref := at(t, text, "paths", "/v1/pipelines/"+name+":infer", "post", "requestBody", "content", "application/json", "schema", "$ref").(string)
		text, err := json.Marshal(at(t, text, "components", "schemas", strings.TrimPrefix(ref, "#/components/schemas/")))
		if err != nil || !strings.Contains(string(text), `"const":"`+want+`"`) {
			t.Errorf("%s: %s, %v", name, text, err)
		}
	}
	if got := fmt.Sprint(bodyOf(t, text, "renamed")["application/json"].(object)["examples"]); !strings.Contains(got, "one:") || !strings.Contains(got, "name:pixels") {
		t.Errorf("the example is %s", got)
	}
}

// schemas are JSON Schemas with valid and invalid values.
var schemas = map[string]struct {
	text      string
	good, bad []string
}{
	"definitions": {
		`{"$defs": {"n": {"type": "integer"}}, "type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}`,
		[]string{`{"n": 1}`},
		[]string{`{"n": "1"}`},
	},
	"recursion": {
		`{"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "required": ["v"], "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}}}`,
		[]string{`{"v": 1, "next": {"v": 2}}`},
		[]string{`{"v": 1, "next": {}}`},
	},
	"the root": {
		`{"type": "array", "items": {"anyOf": [{"type": "integer"}, {"$ref": "#"}]}}`,
		[]string{`[1, [2, [3]]]`},
		[]string{`[1, ["2"]]`},
	},
	"anchors": {
		`{"$defs": {"a/b %": {"$anchor": "here", "type": "integer"}}, "items": {"$ref": "#here"}}`,
		[]string{`[1]`},
		[]string{`["1"]`},
	},
	"dynamic anchors": {
		`{"$defs": {"n": {"$dynamicAnchor": "here", "type": "integer"}}, "items": {"$ref": "#here"}}`,
		[]string{`[1]`},
		[]string{`["1"]`},
	},
	"an id of its own": {
		`{"$id": "https://example.com/thing", "$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": {"n": {"type": "integer"}}, "items": {"$ref": "https://example.com/thing#/$defs/n"}}`,
		[]string{`[1]`},
		[]string{`["1"]`},
	},
	"resources of its own": {
		`{"$defs": {"n": {"$id": "https://example.com/n", "type": "integer"}}, "items": {"$ref": "https://example.com/n"}}`,
		[]string{`[1]`},
		[]string{`["1"]`},
	},
	"what only looks like a reference": {
		`{"properties": {"$ref": {"const": {"$ref": "#/nowhere"}}}}`,
		[]string{`{"$ref": {"$ref": "#/nowhere"}}`},
		[]string{`{"$ref": 1}`},
	},
	"true":            {`true`, []string{`1`}, nil},
	"another dialect": {`{"$schema": "http://json-schema.org/draft-07/schema#", "type": "integer"}`, []string{`1`, `"1"`}, nil},
	"no schema":       {`{"type"`, []string{`1`}, nil},
}

func TestStageSchemasKeepTheirMeaningInDocument(t *testing.T) {
	t.Parallel()
	for name, row := range schemas {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			text := build(t, openapi.Settings{Mesh: "m", Pipelines: []openapi.Pipeline{single("p", takes(jsonPart("in", row.text)))}})
			schema := compiled(t, text, "#/paths/~1v1~1pipelines~1p:infer/post/requestBody/content/application~1json/schema")
			for _, one := range row.good {
				if err := schema.Validate(decoded(t, one)); err != nil {
					t.Errorf("%s is rejected: %v", one, err)
				}
			}
			for _, one := range row.bad {
				if schema.Validate(decoded(t, one)) == nil {
					t.Errorf("%s is accepted", one)
				}
			}
		})
	}
}

// compiled returns the schema at a pointer of a document.
func compiled(t *testing.T, text []byte, pointer string) *jsonschema.Schema {
	t.Helper()
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource("https://example.com/openapi.json", decoded(t, string(text))); err != nil {
		t.Fatal(err)
	}
	out, err := compiler.Compile("https://example.com/openapi.json" + pointer)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func decoded(t *testing.T, text string) any {
	t.Helper()
	out, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestAllOperationsButProbesRequireToken(t *testing.T) {
	t.Parallel()
	if text := build(t, openapi.Settings{Mesh: "m"}); bytes.Contains(text, []byte("securitySchemes")) {
		t.Error("the document requires a token")
	}
	text := build(t, openapi.Settings{Mesh: "m", Tokens: true})
	valid(t, text)
	if got := at(t, text, "components", "securitySchemes", "token", "scheme"); got != "bearer" {
		t.Errorf("the scheme is %v", got)
	}
	if got := at(t, text, "paths", "/livez", "get", "security").([]any); len(got) != 0 {
		t.Errorf("a probe requires %v", got)
	}
}

func TestParametersOfAllStepsAreDescribed(t *testing.T) {
	t.Parallel()
	declares := func(specs ...*stagev1.ParameterSpec) *stagev1.Spec {
		return &stagev1.Spec{Parameters: &stagev1.ParameterSpecs{Specs: specs}}
	}
	one := single("one", declares(&stagev1.ParameterSpec{Name: "k", Type: "int", Description: "How many."}, &stagev1.ParameterSpec{Name: "note"}))
	one.Steps[0].Parameters = payload.Parameters{"k": payload.Int64(3)}
	one.Steps = append(one.Steps, pipeline.Step{Name: "fixed", Stage: "two", Locked: true, Parameters: payload.Parameters{"x": payload.Int64(1)}}, pipeline.Step{Name: "last", Stage: "two"})
	one.Specs["two"] = declares(&stagev1.ParameterSpec{Name: "x", Type: "bool"})
	text := build(t, openapi.Settings{Mesh: "m", Pipelines: []openapi.Pipeline{one}})
	valid(t, text)
	var got []string
	for _, p := range at(t, text, "paths", "/v1/pipelines/one:infer", "post", "parameters").([]any) {
		if name, _ := p.(object)["name"].(string); strings.HasPrefix(name, "steps.") {
			got = append(got, fmt.Sprint(name, ": ", p.(object)["description"], " ", p.(object)["schema"].(object)["type"]))
		}
	}
	want := []string{
		"steps.one.k: Parameter `k` of the step one. How many. The pipeline sets 3. integer",
		"steps.one.note: Parameter `note` of the step one. [string number boolean]",
		"steps.last.x: Parameter `x` of the step last. boolean",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s", strings.Join(got, "\n"))
	}
}

// thousands returns pipelines, each with a stage of its own.
func thousands(n int) []openapi.Pipeline {
	out := make([]openapi.Pipeline, n)
	for i := range out {
		out[i] = single(fmt.Sprintf("pipeline-%06d", i), takes(tensorPart("x", "FP32", -1, 8), jsonPart("thread", schemas["definitions"].text)))
	}
	return out
}

func TestDocumentSizeIsBoundedAndReportsOmissions(t *testing.T) {
	t.Parallel()
	const limit = 256 << 10
	pipelines := thousands(1000)
	slices.Reverse(pipelines)
	text := build(t, openapi.Settings{Mesh: "m", Pipelines: pipelines, MaxBytes: limit})
	described := len(at(t, text, "tags").([]any)) - 5
	if rest := build(t, openapi.Settings{Mesh: "m"}); len(text) > limit*5/4+len(rest) || described < 10 || described >= 1000 {
		t.Errorf("%d bytes of %d pipelines", len(text), described)
	}
	want := fmt.Sprintf("%d pipelines more are served", 1000-described)
	if about := at(t, text, "info", "description").(string); !strings.Contains(about, want) || !bytes.Contains(text, []byte("pipeline-000000:infer")) {
		t.Errorf("the description is %s", about)
	}
	valid(t, text)
}

func TestSamePipelinesGiveSameBytes(t *testing.T) {
	t.Parallel()
	one, other := thousands(20), thousands(20)
	slices.Reverse(other)
	a, b := build(t, openapi.Settings{Mesh: "m", Pipelines: one}), build(t, openapi.Settings{Mesh: "m", Pipelines: other})
	if !bytes.Equal(a, b) {
		t.Error("the documents differ")
	}
}

func FuzzSchemaIsEmbeddedOrOmitted(f *testing.F) {
	for _, row := range schemas {
		f.Add(row.text, "thread")
	}
	f.Fuzz(func(t *testing.T, schema, name string) {
		text, err := openapi.Build(openapi.Settings{Mesh: "m", Pipelines: []openapi.Pipeline{single("p", takes(jsonPart(name, schema)))}})
		if err != nil || !json.Valid(text) {
			t.Errorf("%v, %s", err, text)
		}
	})
}

func BenchmarkThousandsOfPipelines(b *testing.B) {
	for _, n := range []int{10, 1000, 5000} {
		pipelines := thousands(n)
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			size := 0
			for b.Loop() {
				text, err := openapi.Build(openapi.Settings{Mesh: "m", Pipelines: pipelines})
				if err != nil {
					b.Fatal(err)
				}
				size = len(text)
			}
			b.ReportMetric(float64(size), "bytes")
		})
	}
}

func floats(shape ...int64) tensor.Tensor {
	n, _ := tensor.Elements(shape)
	out, _ := tensor.FromFP32(shape, make([]float32, n))
	return out
}

// Programs write clients from it.
func TestOperationHasTheSpecOfItsPipeline(t *testing.T) {
	t.Parallel()
	order := jsonPart("order", `{"type": "object"}`)
	order.Optional, order.Description = true, "what to buy"
	anything := blobPart("anything")
	p := single("p", takes(tensorPart("x", "FP32", -1, 2), blobPart("image", "image/png")))
	p.Specs["p"].Stream = true
	p.Inputs = []pipelines.Input{{PartSpec: tensorPart("x", "FP32", -1, 2), Rows: true}, {PartSpec: order}, {PartSpec: anything}, {PartSpec: &stagev1.PartSpec{Name: "mode"}}}
	text := build(t, openapi.Settings{Mesh: "m", Pipelines: []openapi.Pipeline{p}})
	valid(t, text)
	got, err := json.Marshal(at(t, text, "paths", "/v1/pipelines/p:infer", "post", "x-stagemesh"))
	const want = `{"inputs":[{"datatype":"FP32","name":"x","rows":true,"shape":[-1,2]},` +
		`{"content_types":["application/json"],"description":"what to buy","name":"order","optional":true,"schema":"{\"type\": \"object\"}"},` +
		`{"name":"anything"},{"any":true,"name":"mode"}],` +
		`"outputs":[{"datatype":"FP32","name":"x","rows":true,"shape":[-1,2]},{"content_types":["image/png"],"name":"image"}],"pipeline":"p","stream":true}`
	if err != nil || string(got) != want {
		t.Errorf("got  %s, %v\nwant %s", got, err, want)
	}
}
