package clientgen_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/clientgen"
	"github.com/stagemesh/stagemesh/internal/openapi"
	"github.com/stagemesh/stagemesh/sdk/python"
)

// document returns the OpenAPI document of pipelines, as far as Read reads it.
func document(t *testing.T, pipelines ...openapi.Spec) []byte {
	t.Helper()
	type object = map[string]any
	paths := object{"/v1/pipelines/{pipeline}:infer": object{"post": object{}}, "/livez": object{"get": object{}}}
	for _, p := range pipelines {
		paths["/v1/pipelines/"+p.Pipeline+":infer"] = object{"post": object{"x-stagemesh": p}}
	}
	text, err := json.Marshal(object{"info": object{"title": "mesh m"}, "paths": paths})
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func read(t *testing.T, pipelines ...openapi.Spec) clientgen.Mesh {
	t.Helper()
	mesh, err := clientgen.Read(document(t, pipelines...))
	if err != nil {
		t.Fatal(err)
	}
	return mesh
}

func tensor(name, datatype string, shape ...int64) openapi.Part {
	return openapi.Part{Name: name, Datatype: datatype, Shape: shape}
}

func blob(name string, types ...string) openapi.Part {
	return openapi.Part{Name: name, ContentTypes: types}
}

func optional(p openapi.Part) openapi.Part {
	p.Optional = true
	return p
}

func withSchema(p openapi.Part, schema string) openapi.Part {
	p.Schema = schema
	return p
}

func parts(p ...openapi.Part) []openapi.Part { return p }

func TestNamesThatCollideAreRefused(t *testing.T) {
	t.Parallel()
	spec := func(name string, inputs ...openapi.Part) openapi.Spec {
		return openapi.Spec{Pipeline: name, Inputs: inputs, Outputs: parts(blob("y"))}
	}
	streamed := spec("a", blob("x"))
	streamed.Stream = true
	for name, test := range map[string]struct {
		pipelines []openapi.Spec
		want      string
	}{
		"pipelines":              {[]openapi.Spec{spec("a.b", blob("x")), spec("a-b", blob("x"))}, `the pipeline "a-b" and the pipeline "a.b" are both a_b in Python; make a file for each, by naming its pipelines`},
		"a pipeline and a twin":  {[]openapi.Spec{spec("a", blob("x")), spec("a-async", blob("x"))}, `the pipeline "a" and the pipeline "a-async" are both a_async in Python; `},
		"a pipeline and chunks":  {[]openapi.Spec{streamed, spec("a.stream", blob("x"))}, `are both a_stream in Python`},
		"types":                  {[]openapi.Spec{spec("a-b", blob("x")), spec("aB", blob("x"))}, `are both ABAnswer in Python`},
		"inputs":                 {[]openapi.Spec{spec("a", blob("x y"), blob("x-y"))}, `pipeline a: the input "x y" and the input "x-y" are both x_y in Python; rename one of them in its stage, or by the inputs of the step`},
		"a reserved word":        {[]openapi.Spec{spec("a", blob("class"), blob("class_"))}, `are both class_ in Python`},
		"names without a letter": {[]openapi.Spec{spec("a", blob("1"), blob("x_1"))}, `are both x_1 in Python`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, err := clientgen.Python(read(t, test.pipelines...), true)
			if err == nil || !strings.Contains(err.Error(), test.want) || out != nil {
				t.Errorf("got %v\nwant %s", err, test.want)
			}
		})
	}
	if _, err := clientgen.TypeScript(read(t, spec("a.b", blob("x")), spec("a-b", blob("x")))); err == nil || !strings.Contains(err.Error(), "are both a_b in TypeScript") {
		t.Errorf("got %v", err)
	}
}

// evil are texts of stages that would be code if they left their literal or comment.
const evil = "\"\"\"\nraise SystemExit('ran')\n'''\\\" */ throw new Error('ran'); /* \u2028\r\x00 ` ${x} \\"

func hostile() openapi.Spec {
	described := withSchema(blob(evil, "text/plain"), `{"const": "*/ \"\"\" \u2028"}`)
	described.Description = evil
	typed := tensor("t", evil, -1)
	typed.Description = evil
	blobs := blob("b", evil)
	return openapi.Spec{Pipeline: "p", Inputs: parts(described, typed, optional(blobs)), Outputs: parts(described, typed, blobs), Stream: true}
}

func TestTextsOfStagesAreNoCodeInPython(t *testing.T) {
	t.Parallel()
	text, err := clientgen.Python(read(t, hostile()), true)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	if err := os.CopyFS(folder, python.Files()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "client.py"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	const script = "import ast, client, pathlib; names = [n.name for n in ast.parse(pathlib.Path(client.__file__).read_text()).body if hasattr(n, 'name')]; print(*names)"
	cmd := exec.CommandContext(t.Context(), "python3", "-B", "-W", "error", "-c", script)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+folder)
	if out, err := cmd.CombinedOutput(); err != nil || string(out) != "PAnswer PChunk p p_async p_stream p_stream_async\n" {
		t.Errorf("%v, %s\n%s", err, out, text)
	}
	specs, err := clientgen.Specs(text)
	if changes := clientgen.Compare(specs, read(t, hostile())); err != nil || len(specs) != 1 || len(changes) > 0 {
		t.Errorf("%d specs, %v, %v", len(specs), changes, err)
	}
}

// What is outside of literals and comments has nothing of them.
func TestTextsOfStagesAreNoCodeInTypeScript(t *testing.T) {
	t.Parallel()
	text, err := clientgen.TypeScript(read(t, hostile()))
	if err != nil {
		t.Fatal(err)
	}
	code, inComment := "", false
	for line := range strings.FieldsFuncSeq(string(text), func(r rune) bool { return strings.ContainsRune("\n\r\u2028\u2029", r) }) {
		switch trimmed := strings.TrimSpace(line); {
		case strings.HasPrefix(trimmed, "/*") && !strings.Contains(trimmed, "*/"):
			inComment = true
		case inComment:
			inComment = !strings.Contains(trimmed, "*/")
			if _, rest, _ := strings.Cut(trimmed, "*/"); rest != "" {
				t.Errorf("code follows a comment: %s", trimmed)
			}
		case strings.HasPrefix(trimmed, "/*"):
			if strings.Index(trimmed, "*/") != len(trimmed)-2 {
				t.Errorf("code follows a comment: %s", trimmed)
			}
		case !strings.HasPrefix(trimmed, "//"):
			code += line + "\n"
		}
	}
	literal, _ := json.Marshal(evil)
	if rest := strings.ReplaceAll(code, string(literal), ""); strings.Contains(rest, "throw") || !strings.Contains(rest, "export function p_stream(") {
		t.Errorf("got\n%s", text)
	}
}

func TestDocumentsOfOthersAreRefused(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"":                      "/openapi.json: unexpected end of JSON input",
		"[]":                    "/openapi.json: json: cannot unmarshal array",
		`{"paths": {}}`:         "the gateway describes no pipeline",
		`{"paths": {"/x": {}}}`: "the gateway describes no pipeline",
		string(document(t, openapi.Spec{Pipeline: "p\nimport os"})): `/openapi.json: pipeline name "p\nimport os"`,
	} {
		if _, err := clientgen.Read([]byte(text)); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", text, err, want)
		}
	}
	if _, err := clientgen.Specs([]byte("# stagemesh-spec: {\n")); err == nil || !strings.HasPrefix(err.Error(), "line 1: ") {
		t.Errorf("got %v", err)
	}
}

func TestChangesThatBreakClientsAreFound(t *testing.T) {
	t.Parallel()
	x, y := tensor("x", "FP32", -1, 2), blob("y", "text/plain")
	rows := x
	rows.Rows = true
	base := openapi.Spec{Pipeline: "p", Inputs: parts(x), Outputs: parts(y)}
	inputs := func(p ...openapi.Part) openapi.Spec {
		return openapi.Spec{Pipeline: "p", Inputs: p, Outputs: base.Outputs}
	}
	outputs := func(p ...openapi.Part) openapi.Spec {
		return openapi.Spec{Pipeline: "p", Inputs: base.Inputs, Outputs: p}
	}
	streamed := base
	streamed.Stream = true
	const object, strict = `{"type": "object"}`, `{"type": "object", "required": ["n"]}`
	document := blob("d", "application/json")
	for name, test := range map[string]struct {
		old, now openapi.Spec
		// want are the changes; those that break a client begin with "!".
		want []string
	}{
		"nothing":                   {base, base, nil},
		"another pipeline":          {base, openapi.Spec{Pipeline: "q"}, []string{`!pipeline p: is no longer there; there is q`}},
		"another description":       {base, inputs(openapi.Part{Name: "x", Datatype: "FP32", Shape: x.Shape, Description: "new"}), nil},
		"an input removed":          {inputs(x, blob("z")), inputs(x), []string{`!pipeline p, input "z": is no longer there`}},
		"an input renamed":          {inputs(x), inputs(tensor("w", "FP32", -1, 2)), []string{`!pipeline p, input "x": is no longer there`, `!pipeline p, input "w": is new: FP32[any, 2]`}},
		"a required input added":    {inputs(x), inputs(x, blob("z", "image/png")), []string{`!pipeline p, input "z": is new: image/png`}},
		"an optional input added":   {inputs(x), inputs(x, optional(blob("z"))), []string{`pipeline p, input "z": is new: bytes of any type, optional`}},
		"an input required":         {inputs(optional(x)), inputs(x), []string{`!pipeline p, input "x": is FP32[any, 2] now, and was FP32[any, 2], optional`}},
		"an input optional":         {inputs(x), inputs(optional(x)), []string{`pipeline p, input "x": is FP32[any, 2], optional now, and was FP32[any, 2]`}},
		"another datatype":          {inputs(x), inputs(tensor("x", "FP64", -1, 2)), []string{`!pipeline p, input "x": is FP64[any, 2] now, and was FP32[any, 2]`}},
		"a blob":                    {inputs(x), inputs(blob("x", "image/png")), []string{`!pipeline p, input "x": is image/png now, and was FP32[any, 2]`}},
		"a narrower input":          {inputs(x), inputs(tensor("x", "FP32", 1, 2)), []string{`!pipeline p, input "x": is FP32[1, 2] now, and was FP32[any, 2]`}},
		"a wider input":             {inputs(x), inputs(tensor("x", "FP32", -1, -1)), []string{`pipeline p, input "x": is FP32[any, any] now, and was FP32[any, 2]`}},
		"another rank":              {inputs(x), inputs(tensor("x", "FP32", -1)), []string{`!pipeline p, input "x": is FP32[any] now, and was FP32[any, 2]`}},
		"single rows no more":       {inputs(rows), inputs(x), []string{`!pipeline p, input "x": is FP32[any, 2] now, and was FP32[any, 2] or one row without axis 0`}},
		"single rows":               {inputs(x), inputs(rows), []string{`pipeline p, input "x": is FP32[any, 2] or one row without axis 0 now, and was FP32[any, 2]`}},
		"a type less":               {inputs(blob("x", "image/png", "image/jpeg")), inputs(blob("x", "image/png")), []string{`!pipeline p, input "x": is image/png now, and was image/png or image/jpeg`}},
		"a type more":               {inputs(blob("x", "image/png")), inputs(blob("x", "image/*")), []string{`pipeline p, input "x": is image/* now, and was image/png`}},
		"any type no more":          {inputs(blob("x")), inputs(blob("x", "image/png")), []string{`!pipeline p, input "x": is image/png now, and was bytes of any type`}},
		"a new schema":              {inputs(document), inputs(withSchema(document, object)), []string{`!pipeline p, input "d": is application/json by a JSON Schema now, and was application/json`}},
		"another schema":            {inputs(withSchema(document, object)), inputs(withSchema(document, strict)), []string{`!pipeline p, input "d": has another JSON Schema`}},
		"a schema less":             {inputs(withSchema(document, object)), inputs(document), []string{`pipeline p, input "d": is application/json now, and was application/json by a JSON Schema`}},
		"a schema in other words":   {inputs(withSchema(document, object)), inputs(withSchema(document, `{"title": "T", "type":"object"}`)), nil},
		"an output removed":         {outputs(y, blob("z")), outputs(y), []string{`!pipeline p, output "z": is no longer there`}},
		"an output added":           {outputs(y), outputs(y, blob("z")), []string{`pipeline p, output "z": is new: bytes of any type`}},
		"an output optional":        {outputs(y), outputs(optional(y)), []string{`!pipeline p, output "y": is text/plain, optional now, and was text/plain`}},
		"an output required":        {outputs(optional(y)), outputs(y), []string{`pipeline p, output "y": is text/plain now, and was text/plain, optional`}},
		"a wider output":            {outputs(tensor("y", "FP32", 2)), outputs(tensor("y", "FP32", -1)), []string{`!pipeline p, output "y": is FP32[any] now, and was FP32[2]`}},
		"a narrower output":         {outputs(tensor("y", "FP32", -1)), outputs(tensor("y", "FP32", 2)), []string{`pipeline p, output "y": is FP32[2] now, and was FP32[any]`}},
		"an output of another type": {outputs(y), outputs(blob("y", "image/png")), []string{`!pipeline p, output "y": is image/png now, and was text/plain`}},
		"an output of a type less":  {outputs(blob("y", "text/plain", "image/png")), outputs(y), []string{`pipeline p, output "y": is text/plain now, and was text/plain or image/png`}},
		"an output's schema":        {outputs(document), outputs(withSchema(document, object)), []string{`pipeline p, output "d": is application/json by a JSON Schema now, and was application/json`}},
		"no output's schema":        {outputs(withSchema(document, object)), outputs(document), []string{`!pipeline p, output "d": is application/json now, and was application/json by a JSON Schema`}},
		"inputs no longer known":    {base, openapi.Spec{Pipeline: "p", Outputs: base.Outputs}, []string{`!pipeline p: its inputs are not declared now, so they cannot be compared; does each stage have a host?`}},
		"inputs known now":          {openapi.Spec{Pipeline: "p", Outputs: base.Outputs}, base, []string{`pipeline p: its inputs are declared now; make the client again for their types`}},
		"nothing is known":          {openapi.Spec{Pipeline: "p"}, openapi.Spec{Pipeline: "p"}, nil},
		"a stream":                  {base, streamed, []string{`pipeline p: streams its answer now`}},
		"no stream":                 {streamed, base, []string{`!pipeline p: no longer streams its answer`}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// Through a client, as the command does.
			text, err := clientgen.TypeScript(read(t, test.old))
			if err != nil {
				t.Fatal(err)
			}
			specs, err := clientgen.Specs(text)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, c := range clientgen.Compare(specs, read(t, test.now)) {
				got = append(got, map[bool]string{true: "!"}[c.Breaks]+c.Text)
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(test.want, "\n"))
			}
		})
	}
}
