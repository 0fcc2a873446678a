package clientgen

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"text/template"
	"unicode"

	"github.com/stagemesh/stagemesh/internal/openapi"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// language is a language in which clients are written.
type language struct {
	name, template string
	// reserved are its words, and the names that a client uses itself.
	reserved string
	// keepsNames is true if inputs and outputs keep their names, as literals.
	keepsNames bool
	// escape makes a printable text safe in a comment.
	escape *strings.Replacer
	// input returns the type of values that callers give, and output of those that they receive.
	input, output func(openapi.Part) string
}

// function is a pipeline as a template sees it.
type function struct {
	openapi.Spec
	// ID is the function's name, and Class begins the names of its types.
	ID, Class string
	In, Out   []part
}

// part is an input or an output.
type part struct {
	openapi.Part
	ID, Type, About string
}

// Unknown returns what a pipeline does not declare.
func (f function) Unknown() (out []string) {
	if len(f.In) == 0 {
		out = append(out, fmt.Sprintf("The inputs of %s are not declared: it takes any.", f.Pipeline))
	}
	if len(f.Out) == 0 {
		out = append(out, fmt.Sprintf("The outputs of %s are not declared: they have no types.", f.Pipeline))
	}
	return out
}

// Faults returns what a call may fail with.
func (f function) Faults() string {
	text := "Faults: InvalidArgument for inputs that do not fit"
	if slices.ContainsFunc(f.In, func(p part) bool { return len(p.Schema) > 0 }) {
		text += ", or break their JSON Schema (SCHEMA_VIOLATION)"
	}
	text += "; ResourceExhausted or Unavailable where capacity is missing; DeadlineExceeded; Internal where a stage fails."
	if f.Stream {
		text += " A stream may end early by STREAM_INTERRUPTED, RUNNER_STALLED or SLOW_READER."
	}
	return text
}

// write returns a client.
func (l language) write(m Mesh, numpy bool) ([]byte, error) {
	pipelines := names{language: l.name, reserved: words(l.reserved), owners: map[string]string{}, advice: "make a file for each, by naming its pipelines"}
	data := struct {
		Title     string
		Numpy     bool
		Functions []function
	}{Title: m.Title, Numpy: numpy}
	for _, spec := range m.Pipelines {
		f := function{Spec: spec}
		var err error
		if f.ID, err = pipelines.take("pipeline", spec.Pipeline, "_async", "_stream", "_stream_async"); err != nil {
			return nil, err
		}
		for word := range strings.SplitSeq(f.ID, "_") {
			f.Class += strings.ToUpper(word[:min(1, len(word))]) + word[min(1, len(word)):]
		}
		for _, suffix := range []string{"Answer", "Chunk", "Inputs", "Outputs"} {
			if err := pipelines.claim(f.Class+suffix, fmt.Sprintf("pipeline %q", spec.Pipeline)); err != nil {
				return nil, err
			}
		}
		if f.In, err = l.parts(f, "input", spec.Inputs, l.input); err != nil {
			return nil, err
		}
		if f.Out, err = l.parts(f, "output", spec.Outputs, l.output); err != nil {
			return nil, err
		}
		data.Functions = append(data.Functions, f)
	}
	var out bytes.Buffer
	err := template.Must(template.New(l.name).Funcs(template.FuncMap{
		"q": literal, "json": literal, "text": func(text string) string { return l.escape.Replace(printable(text)) },
	}).Parse(l.template)).Execute(&out, data)
	return out.Bytes(), err
}

// parts names and describes the inputs or the outputs of a pipeline.
func (l language) parts(f function, kind string, specs []openapi.Part, typeOf func(openapi.Part) string) ([]part, error) {
	named := names{language: l.name, reserved: words(l.reserved), owners: map[string]string{}, advice: "rename one of them in its stage, or by the inputs of the step"}
	named.reserved[f.Class+"Answer"], named.reserved[f.Class+"Chunk"] = true, true
	out := make([]part, len(specs))
	for i, p := range specs {
		out[i] = part{Part: p, Type: typeOf(p), About: describe(p)}
		if p.Description != "" {
			out[i].About += "; " + p.Description
		}
		if l.keepsNames {
			continue
		}
		var err error
		if out[i].ID, err = named.take(kind, p.Name); err != nil {
			return nil, fmt.Errorf("pipeline %s: %w", f.Pipeline, err)
		}
		if out[i].ID != p.Name {
			out[i].About = fmt.Sprintf("%q, %s", p.Name, out[i].About)
		}
	}
	return out, nil
}

// names gives identifiers to names of a mesh, and refuses two names for one identifier.
type names struct {
	language, advice string
	reserved         map[string]bool
	owners           map[string]string
}

func words(text string) map[string]bool {
	out := map[string]bool{}
	for word := range strings.FieldsSeq(text) {
		out[word] = true
	}
	return out
}

// take returns the identifier of a name: every character that is not a letter, a digit or _ becomes
// _. A name that does not begin with a letter begins with x_, and a reserved one ends with _. The
// identifier with each suffix is taken, too. Kind is for the message: "pipeline".
func (n names) take(kind, name string, suffixes ...string) (string, error) {
	isLetter := func(r rune) bool { return r <= unicode.MaxASCII && unicode.IsLetter(r) }
	out := strings.Map(func(r rune) rune {
		if isLetter(r) || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, name)
	if out == "" || !isLetter(rune(out[0])) {
		out = "x_" + out
	}
	if n.reserved[out] {
		out += "_"
	}
	for _, suffix := range append([]string{""}, suffixes...) {
		if err := n.claim(out+suffix, fmt.Sprintf("%s %q", kind, name)); err != nil {
			return "", err
		}
	}
	return out, nil
}

// claim records that something has an identifier.
func (n names) claim(identifier, owner string) error {
	if other, isTaken := n.owners[identifier]; isTaken {
		return fmt.Errorf("the %s and the %s are both %s in %s; %s", other, owner, identifier, n.language, n.advice)
	}
	n.owners[identifier] = owner
	return nil
}

// literal returns a value as JSON. That of a string is a literal of Python and TypeScript, too.
func literal(value any) (string, error) {
	out, err := json.Marshal(value)
	return string(out), err
}

// describe returns what a part may be.
func describe(p openapi.Part) string {
	text := strings.Join(p.ContentTypes, " or ")
	switch {
	case p.Any:
		text = "any value"
	case p.IsTensor():
		text = p.Datatype + strings.ReplaceAll(strings.ReplaceAll(fmt.Sprint(p.Shape), " ", ", "), "-1", "any")
	case text == "":
		text = "bytes of any type"
	}
	if p.Rows {
		text += " or one row without axis 0"
	}
	if len(p.Schema) > 0 {
		text += " by a JSON Schema"
	}
	if p.Optional {
		text += ", optional"
	}
	return text
}

// printable returns a text on one line, without characters that a reader does not see.
func printable(text string) string {
	return strings.Join(strings.FieldsFunc(text, func(r rune) bool { return r == ' ' || !unicode.IsPrint(r) }), " ")
}

// takes reports whether a blob may have a content type.
func takes(p openapi.Part, contentType string) bool {
	return len(p.ContentTypes) == 0 || slices.ContainsFunc(p.ContentTypes, func(pattern string) bool { return payload.AcceptsType(pattern, contentType) })
}

const textType = "text/plain"

// blobTypes returns the types of a part's blobs for those who receive them; value is the type of all.
func blobTypes(p openapi.Part, text, document, data, value string) string {
	var out []string
	add := func(one string) {
		if !slices.Contains(out, one) {
			out = append(out, one)
		}
	}
	for _, one := range p.ContentTypes {
		switch bare := payload.BareType(one); {
		case bare == "*/*", bare == "application/*":
			return value
		case payload.IsJSON(bare):
			add(document)
		case strings.HasPrefix(bare, "text/"):
			add(text)
		default:
			add(data)
		}
	}
	if len(out) == 0 {
		return value
	}
	slices.Sort(out)
	return strings.Join(out, " | ")
}
