package schema

import (
	"encoding/json"
	"errors"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// MaxWork is the limit of one document.
const MaxWork = maxWork

// Steps returns how many steps a document takes against a schema, and whether it is
// valid. looks counts the visits of schemas to values. An extension counts them, and
// the library calls it in every schema that it does not leave early.
func Steps(schema, text string) (steps, looks int, keeps bool, err error) {
	g, err := compile(runner.PartSpec{Name: "x", Schema: json.RawMessage(schema)})
	if err != nil {
		return 0, 0, false, err
	}
	doc, err := decode([]byte(text))
	if err != nil {
		return 0, 0, false, err
	}
	count := &visitCounter{}
	watch(g.root, count, map[*jsonschema.Schema]bool{})
	steps, err = g.count(doc)
	if err == nil {
		return steps, count.times, true, nil
	}
	if errors.Is(err, errTooMuchWork) {
		return steps, count.times, false, err
	}
	return steps, count.times, false, nil
}

// Keeps is the library's own result for a document, which may take long.
func Keeps(schema, text string) bool {
	doc, err := decode([]byte(schema))
	if err != nil {
		return false
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource(here, doc); err != nil {
		return false
	}
	compiled, err := compiler.Compile(here)
	if err != nil {
		return false
	}
	value, err := decode([]byte(text))
	return err == nil && compiled.Validate(value) == nil
}

type visitCounter struct{ times int }

func (l *visitCounter) Validate(*jsonschema.ValidatorContext, any) { l.times++ }

func watch(s *jsonschema.Schema, by *visitCounter, seen map[*jsonschema.Schema]bool) {
	if seen[s] || s.Bool != nil {
		return
	}
	seen[s] = true
	s.Extensions = append(s.Extensions, by)
	for _, to := range referredSchemas(s) {
		watch(to, by, seen)
	}
}
