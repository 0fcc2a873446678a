package schema

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp/syntax"
	"slices"
	"strings"
	"sync"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
)

// maxWork bounds what it costs to hold one document against its schema, in steps. A
// step is one look at one value, of some 100 ns and 100 bytes where it is the
// dearest. Alternatives that reach themselves double their looks at every level of a
// document, so neither its size nor the schema's says what the two cost together.
// Measured without the count: of the 16 documents of
// TestExcessiveWorkIsRejectedEarly, 15 took over 400 ms and 8 over 4 s.
const maxWork = 250_000

// What is dearer than a step, in bytes per step or steps.
const (
	// An error has the whole path of its value.
	levelsPerStep = 16
	// refusalSteps is what an error costs that no look comes before.
	refusalSteps  = 3
	textPerStep   = 64
	digitsPerStep = 2
	exponentSteps = 32
	// A regular expression looks at each byte with all its instructions at worst.
	matchPerStep = 8
)

// errTooMuchWork is about the document; the schema is bounded when it is compiled.
var errTooMuchWork = fmt.Errorf("is too much work to hold against its schema: more than %d steps", maxWork)

// guarded is a JSON Schema that stops when a document takes too much work. Each
// schema in it counts as it is entered, by the library's own walk, so nothing is
// estimated that could be walked otherwise.
type guarded struct {
	root *jsonschema.Schema
	// mu is for the counter that all schemas in it share: documents take turns, each
	// for as long as maxWork allows.
	mu sync.Mutex
	// evaluated is whether it has unevaluatedItems or unevaluatedProperties: every
	// schema of a value then says which of its elements or members it has looked at.
	evaluated bool
	// path is what every look costs more in a document that nests deep.
	path int
	// left are the steps that may still be taken; below zero it was too much.
	left int
}

// validate returns errTooMuchWork, or what the library returns.
func (g *guarded) validate(doc any) error {
	_, err := g.count(doc)
	return err
}

// count is validate, and returns how many steps it took.
func (g *guarded) count(doc any) (steps int, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.left, g.path = maxWork, nesting(doc)/levelsPerStep
	err = g.root.Validate(doc)
	if g.left < 0 {
		return maxWork - g.left, errTooMuchWork
	}
	return maxWork - g.left, err
}

// take spends steps, and is false where there are not so many.
func (g *guarded) take(steps int) bool {
	if g.left >= 0 {
		g.left -= steps
	}
	return g.left >= 0
}

// guard makes every schema count. The library enters one by its format, before all
// else that takes work but for the type, const and enum, which thereby become the
// guard's own; so does uniqueItems. Their cost grows with a document's size alone.
func (g *guarded) guard(all []*jsonschema.Schema, depth int) {
	g.evaluated = slices.ContainsFunc(all, func(s *jsonschema.Schema) bool {
		return s.UnevaluatedItems != nil || s.UnevaluatedProperties != nil
	})
	for _, s := range all {
		if s.Bool != nil {
			continue
		}
		e := newEntry(g, s, depth)
		if s.UniqueItems {
			s.Extensions = append(s.Extensions, unique{g})
		}
		s.Types, s.Const, s.Enum, s.UniqueItems = nil, nil, nil, false
		s.Format = &jsonschema.Format{Name: "schema", Validate: e.enter}
	}
}

// entry is where values enter one schema.
type entry struct {
	of *guarded
	// types are the names of the types that a value may have; empty for all.
	types []string
	fixed []fixed
	// look is what one look costs, and each what it costs for every element or
	// member besides.
	look, each int
	// match is the size of the patterns for names, and pattern of the one for text.
	match, pattern int
	// bounds are for numbers.
	bounds int
	length bool
}

// fixed are values one of which a value must be: enum or const.
type fixed struct {
	keys map[string]struct{}
	// kinds are the first bytes of the keys.
	kinds string
	error func(got any) jsonschema.ErrorKind
}

func newEntry(g *guarded, s *jsonschema.Schema, depth int) *entry {
	same := 0
	for _, to := range applied(s) {
		same += stepsOf(to)
	}
	e := &entry{
		of:   g,
		look: 1 + depth/16 + same + len(s.Required) + len(s.DependentRequired) + len(s.Dependencies),
		each: 1 + len(s.PatternProperties), length: s.MinLength != nil || s.MaxLength != nil,
	}
	if g.evaluated {
		e.each += same
	}
	if s.Types != nil {
		e.types = s.Types.ToStrings()
	}
	for _, names := range s.DependentRequired {
		e.look += len(names)
	}
	for _, one := range s.Dependencies {
		if names, ok := one.([]string); ok {
			e.look += len(names)
		}
	}
	for pattern := range s.PatternProperties {
		e.match += instructions(pattern)
	}
	if s.Pattern != nil {
		e.pattern = instructions(s.Pattern)
	}
	for _, has := range []bool{s.Minimum != nil, s.Maximum != nil, s.ExclusiveMinimum != nil, s.ExclusiveMaximum != nil, s.MultipleOf != nil} {
		if has {
			e.bounds++
		}
	}
	if s.Const != nil {
		want := *s.Const
		e.fixed = append(e.fixed, newFixed([]any{want}, func(got any) jsonschema.ErrorKind { return &kind.Const{Got: got, Want: want} }))
	}
	if s.Enum != nil {
		want := s.Enum.Values
		e.fixed = append(e.fixed, newFixed(want, func(got any) jsonschema.ErrorKind { return &kind.Enum{Got: got, Want: want} }))
	}
	return e
}

// stepsOf is what it costs to enter a schema. The false one counts before.
func stepsOf(s *jsonschema.Schema) int {
	if s.Bool != nil && !*s.Bool {
		return refusalSteps
	}
	return 1
}

func newFixed(values []any, wrong func(got any) jsonschema.ErrorKind) fixed {
	out := fixed{keys: map[string]struct{}{}, error: wrong}
	for _, one := range values {
		key := string(appendKey(nil, one))
		out.keys[key] = struct{}{}
		if !strings.Contains(out.kinds, key[:1]) {
			out.kinds += key[:1]
		}
	}
	return out
}

// instructions returns the size of the program that a pattern is.
func instructions(pattern jsonschema.Regexp) int {
	parsed, err := syntax.Parse(pattern.String(), syntax.Perl)
	if err != nil {
		return maxWork
	}
	program, err := syntax.Compile(parsed.Simplify())
	if err != nil {
		return maxWork
	}
	return len(program.Inst)
}

// unlike is a violation of what the guard holds itself.
type unlike struct{ jsonschema.ErrorKind }

func (unlike) Error() string { return "is not what the schema says" }

// enter counts a value, and holds it against what the guard took from the schema.
func (e *entry) enter(v any) error {
	if !e.of.take(e.of.path + e.steps(v)) {
		return errTooMuchWork
	}
	if got := typeOf(v); len(e.types) > 0 && !e.takes(got, v) {
		return unlike{&kind.Type{Got: got, Want: e.types}}
	}
	for _, one := range e.fixed {
		ok, err := e.isOne(one, v)
		if err != nil {
			return err
		}
		if !ok {
			return unlike{one.error(v)}
		}
	}
	return nil
}

func (e *entry) takes(got string, v any) bool {
	for _, one := range e.types {
		if one == got || one == "integer" && got == "number" && isWhole(v.(json.Number).String()) {
			return true
		}
	}
	return false
}

func (e *entry) isOne(of fixed, v any) (bool, error) {
	if strings.IndexByte(of.kinds, keyKind(v)) < 0 {
		return false, nil
	}
	key, ok := e.of.key(v)
	if !ok {
		return false, errTooMuchWork
	}
	_, ok = of.keys[key]
	return ok, nil
}

// steps is what the schema costs for the value, but for what is below it.
func (e *entry) steps(v any) int {
	switch v := v.(type) {
	case map[string]any:
		out := e.look + e.each*len(v)
		if e.match == 0 || out > maxWork {
			return out
		}
		for name := range v {
			out += scaled(len(name)+1, e.match)
		}
		return out
	case []any:
		return e.look + e.each*len(v)
	case string:
		out := e.look
		if e.length {
			out += len(v) / textPerStep
		}
		if e.pattern > 0 {
			out += scaled(len(v)+1, e.pattern)
		}
		return out
	case json.Number:
		return e.look + e.bounds*numberSteps(v.String())
	default:
		return e.look
	}
}

// scaled is what a pattern costs, and never overflows.
func scaled(length, size int) int {
	return int(min(int64(length)*int64(size)/matchPerStep, maxWork)) + 1
}

// numberSteps is what it costs to make a number exact.
func numberSteps(text string) int {
	out := 2 + len(text)/digitsPerStep
	if strings.ContainsAny(text, "eE") {
		out += exponentSteps
	}
	return out
}

// key is appendKey of a value that may be large.
func (g *guarded) key(v any) (string, bool) {
	if !g.take(keySteps(v, g.left)) {
		return "", false
	}
	return string(appendKey(nil, v)), true
}

// keySteps is what a key costs. It counts no further than it needs to be too much.
func keySteps(v any, limit int) int {
	out := 1
	switch v := v.(type) {
	case string:
		out += len(v) / textPerStep
	case json.Number:
		out += len(v) / textPerStep
	case []any:
		for _, one := range v {
			if out > limit {
				break
			}
			out += keySteps(one, limit-out)
		}
	case map[string]any:
		for name, one := range v {
			if out > limit {
				break
			}
			out += 1 + len(name)/textPerStep + keySteps(one, limit-out)
		}
	}
	return out
}

// unique is uniqueItems. The library would compare all pairs whose hashes meet, and
// a caller can make them.
type unique struct{ of *guarded }

// Validate implements jsonschema.SchemaExt.
func (u unique) Validate(ctx *jsonschema.ValidatorContext, v any) {
	list, ok := v.([]any)
	if !ok || len(list) < 2 {
		return
	}
	seen := map[string]int{}
	for i, one := range list {
		key, ok := u.of.key(one)
		if !ok {
			return // the document is refused
		}
		if j, twice := seen[key]; twice {
			ctx.AddError(&kind.UniqueItems{Duplicates: [2]int{j, i}})
			return
		}
		seen[key] = i
	}
}

// kindOf is what an error is about. What the guard holds itself comes as a format.
func kindOf(e *jsonschema.ValidationError) jsonschema.ErrorKind {
	if format, ok := e.ErrorKind.(*kind.Format); ok {
		if own, ok := errors.AsType[unlike](format.Err); ok {
			return own.ErrorKind
		}
	}
	return e.ErrorKind
}
