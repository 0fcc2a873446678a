package schema

import (
	"encoding/json"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Work returns how many steps a document may take against a schema at most, and, if that is
// within the limit, how many visits of schemas to values the library makes and whether the
// document is valid. An extension counts the visits, and the library calls it in every schema
// that it does not leave early.
func Work(schema, text string) (steps, visits int, valid bool, err error) {
	d, err := compile(runner.PartSpec{Name: "x", Schema: json.RawMessage(schema)})
	if err != nil {
		return 0, 0, false, err
	}
	steps, err = measure([]byte(text), d.costs)
	if err != nil {
		return steps, 0, false, err
	}
	doc, err := decode([]byte(text), d.costs)
	if err != nil {
		return steps, 0, false, err
	}
	count := &visitCounter{}
	watch(d.schema, count, map[*jsonschema.Schema]bool{})
	return steps, count.times, d.schema.Validate(doc) == nil, nil
}

// ErrTooMuchWork is the error of a document that exceeds the limit.
var ErrTooMuchWork = errTooMuchWork

// Keeps is the library's own result for a document, which may take long.
func Keeps(schema, text string) (bool, error) {
	doc, err := decode([]byte(schema), make([]cost, maxNesting+1))
	if err != nil {
		return false, err
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource(here, doc); err != nil {
		return false, err
	}
	compiled, err := compiler.Compile(here)
	if err != nil {
		return false, err
	}
	value, err := decode([]byte(text), make([]cost, maxNesting+1))
	return err == nil && compiled.Validate(value) == nil, err
}

type visitCounter struct{ times int }

func (l *visitCounter) Validate(*jsonschema.ValidatorContext, any) { l.times++ }

func watch(s *jsonschema.Schema, by *visitCounter, seen map[*jsonschema.Schema]bool) {
	if seen[s] || s.Bool != nil {
		return
	}
	seen[s] = true
	s.Extensions = append(s.Extensions, by)
	for _, to := range appliedTo(s) {
		watch(to, by, seen)
	}
	for _, a := range []applicators{members(s), elements(s)} {
		for _, to := range a.named {
			watch(to, by, seen)
		}
		for _, to := range append(a.all, a.other) {
			if to != nil {
				watch(to, by, seen)
			}
		}
	}
}
