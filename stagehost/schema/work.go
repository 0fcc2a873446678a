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

// maxWork bounds the cost of validating one document, in steps. A step is one visit of
// a schema to one value, and takes at most some 100 ns and 100 bytes. Alternatives
// that reach themselves double the visits at every level of a document, so neither the
// document's size nor the schema's bounds the cost. Measured without the count: of the
// 16 documents of TestExcessiveWorkIsRejectedEarly, 15 took over 400 ms and 8 over 4 s.
const maxWork = 250_000

// Costs above one step, in bytes per step or in steps.
const (
	// An error has the whole path of its value.
	levelsPerStep = 16
	// refusalSteps is the cost of an error without a visit before it.
	refusalSteps  = 3
	textPerStep   = 64
	digitsPerStep = 2
	exponentSteps = 32
	// In the worst case a regular expression runs all its instructions for each byte.
	matchPerStep = 8
)

// errTooMuchWork is about the document; compilation bounds the schema.
var errTooMuchWork = fmt.Errorf("is too much work to hold against its schema: more than %d steps", maxWork)

// boundedSchema is a JSON Schema that stops when a document takes too much work. Each schema
// in it counts as the library enters it, so the count follows the library's real walk
// and estimates nothing.
type boundedSchema struct {
	root *jsonschema.Schema
	// mu guards the counter that all schemas in it share. Documents take turns, each
	// for at most maxWork.
	mu sync.Mutex
	// evaluated is true if there is unevaluatedItems or unevaluatedProperties: then
	// every schema of a value records which elements or members it has evaluated.
	evaluated bool
	// path is the additional cost of a visit in a deeply nested document.
	path int
	// left is how many steps remain; below zero the document takes too much work.
	left int
}

// validate returns errTooMuchWork, or the library's result.
func (g *boundedSchema) validate(doc any) error {
	_, err := g.count(doc)
	return err
}

// count is validate, and returns how many steps it took.
func (g *boundedSchema) count(doc any) (steps int, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.left, g.path = maxWork, nesting(doc)/levelsPerStep
	err = g.root.Validate(doc)
	if g.left < 0 {
		return maxWork - g.left, errTooMuchWork
	}
	return maxWork - g.left, err
}

// take spends steps. It returns false if not enough are left.
func (g *boundedSchema) take(steps int) bool {
	if g.left >= 0 {
		g.left -= steps
	}
	return g.left >= 0
}

// guard makes every schema count. The library enters a schema by its format, before
// all other keywords that take work except type, const and enum. The guard therefore
// checks these three itself, and uniqueItems too. Their cost grows with a document's
// size alone.
func (g *boundedSchema) guard(all []*jsonschema.Schema, depth int) {
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

// entry counts and checks the values that enter one schema.
type entry struct {
	of *boundedSchema
	// types are the names of the allowed types; empty allows all.
	types []string
	fixed []fixed
	// look is the cost of one visit, and each the additional cost per element or
	// member.
	look, each int
	// match is the size of the patterns for names, and pattern that of the pattern for
	// text.
	match, pattern int
	// bounds are for numbers.
	bounds int
	length bool
}

// fixed are the allowed values of enum or const.
type fixed struct {
	keys map[string]struct{}
	// kinds are the first bytes of the keys.
	kinds string
	error func(got any) jsonschema.ErrorKind
}

func newEntry(g *boundedSchema, s *jsonschema.Schema, depth int) *entry {
	same := 0
	for _, to := range appliedSchemas(s) {
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

// stepsOf returns the cost of entering a schema. The false schema is counted before.
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

// instructions returns the size of the program of a pattern.
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

// mismatch is a violation that the guard itself found.
type mismatch struct{ jsonschema.ErrorKind }

func (mismatch) Error() string { return "is not what the schema says" }

// enter counts a value, and checks it by the keywords that the guard took from the
// schema.
func (e *entry) enter(v any) error {
	if !e.of.take(e.of.path + e.steps(v)) {
		return errTooMuchWork
	}
	if got := typeOf(v); len(e.types) > 0 && !e.takes(got, v) {
		return mismatch{&kind.Type{Got: got, Want: e.types}}
	}
	for _, one := range e.fixed {
		ok, err := e.isOne(one, v)
		if err != nil {
			return err
		}
		if !ok {
			return mismatch{one.error(v)}
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

// steps returns the cost of the schema for the value, without the schemas below it.
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

// scaled returns the cost of a pattern, and never overflows.
func scaled(length, size int) int {
	return int(min(int64(length)*int64(size)/matchPerStep, maxWork)) + 1
}

// numberSteps returns the cost of making a number exact.
func numberSteps(text string) int {
	out := 2 + len(text)/digitsPerStep
	if strings.ContainsAny(text, "eE") {
		out += exponentSteps
	}
	return out
}

// key is appendKey for a value that may be large.
func (g *boundedSchema) key(v any) (string, bool) {
	if !g.take(keySteps(v, g.left)) {
		return "", false
	}
	return string(appendKey(nil, v)), true
}

// keySteps returns the cost of a key. It stops counting once the limit is exceeded.
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

// unique implements uniqueItems. The library compares all pairs whose hashes collide,
// and a caller can construct collisions.
type unique struct{ of *boundedSchema }

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

// kindOf returns the kind of an error. Errors of the guard arrive as format errors.
func kindOf(e *jsonschema.ValidationError) jsonschema.ErrorKind {
	if format, ok := e.ErrorKind.(*kind.Format); ok {
		if own, ok := errors.AsType[mismatch](format.Err); ok {
			return own.ErrorKind
		}
	}
	return e.ErrorKind
}
