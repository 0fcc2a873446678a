package schema

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp/syntax"
	"slices"
	"strconv"
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
	// A visit costs more in a deep document and in a long chain of schemas: an error has
	// the whole path of its value.
	levelsPerStep = 16
	// refusalSteps is the cost of the schema that allows nothing.
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
	// depth is the length of the longest chain of schemas that apply to one value.
	depth int
	// mu guards the counter that all schemas in it share. Documents take turns, each
	// for at most maxWork.
	mu sync.Mutex
	// perVisit is the additional cost of a visit.
	perVisit int
	// left is how many steps remain; below zero the document takes too much work.
	left int
}

// count validates a document, and returns how many steps it took. Its error is
// errTooMuchWork, or the library's.
func (b *boundedSchema) count(doc any) (steps int, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left, b.perVisit = maxWork, (nesting(doc)+b.depth)/levelsPerStep
	err = b.root.Validate(doc)
	if b.left < 0 {
		err = errTooMuchWork
	}
	return maxWork - b.left, err
}

// take spends steps. It returns false if not enough are left.
func (b *boundedSchema) take(steps int) bool {
	if b.left >= 0 {
		b.left -= steps
	}
	return b.left >= 0
}

// guard makes every schema but true count. The library enters a schema by its format, before
// all other keywords that take work except the schema false, type, const and enum. The guard
// therefore checks these itself, and uniqueItems too. Their cost grows with a document's size
// alone.
func (b *boundedSchema) guard(all []*jsonschema.Schema) {
	evaluates := slices.ContainsFunc(all, func(s *jsonschema.Schema) bool {
		return s.UnevaluatedItems != nil || s.UnevaluatedProperties != nil
	})
	for _, s := range all {
		if s.Bool != nil && *s.Bool {
			continue
		}
		e := newEntry(b, s)
		if evaluates {
			// Every schema of a value records which elements or members it has evaluated.
			e.each += len(appliedSchemas(s))
		}
		if s.UniqueItems {
			s.Extensions = append(s.Extensions, unique{b})
		}
		s.Bool, s.Types, s.Const, s.Enum, s.UniqueItems = nil, nil, nil, nil, false
		s.Format = &jsonschema.Format{Name: "schema", Validate: e.enter}
	}
}

// entry counts and checks the values that enter one schema.
type entry struct {
	of *boundedSchema
	// isFalse is true for the schema that allows nothing.
	isFalse bool
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

// fixed are the allowed values of enum or const, by their keys.
type fixed struct {
	keys  map[string]struct{}
	types []string
	error func(got any) jsonschema.ErrorKind
}

func newEntry(b *boundedSchema, s *jsonschema.Schema) *entry {
	e := &entry{
		of: b, isFalse: s.Bool != nil && !*s.Bool,
		look: 1 + len(s.Required) + len(s.DependentRequired) + len(s.Dependencies),
		each: 1 + len(s.PatternProperties), length: s.MinLength != nil || s.MaxLength != nil,
	}
	if e.isFalse {
		e.look = refusalSteps
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

func newFixed(values []any, wrong func(got any) jsonschema.ErrorKind) fixed {
	out := fixed{keys: map[string]struct{}{}, error: wrong}
	for _, one := range values {
		out.keys[string(appendKey(nil, one))] = struct{}{}
		if !slices.Contains(out.types, typeOf(one)) {
			out.types = append(out.types, typeOf(one))
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

func (mismatch) Error() string { return "does not match the schema" }

// kindOf returns the kind of an error. Errors of the guard arrive as format errors.
func kindOf(e *jsonschema.ValidationError) jsonschema.ErrorKind {
	if format, ok := e.ErrorKind.(*kind.Format); ok {
		if own, ok := errors.AsType[mismatch](format.Err); ok {
			return own.ErrorKind
		}
	}
	return e.ErrorKind
}

// enter counts a value, and checks it by the keywords that the guard took from the
// schema.
func (e *entry) enter(v any) error {
	if !e.of.take(e.of.perVisit + e.steps(v)) {
		return errTooMuchWork
	}
	if e.isFalse {
		return mismatch{&kind.FalseSchema{}}
	}
	got := typeOf(v)
	if len(e.types) > 0 && !slices.Contains(e.types, got) && (!slices.Contains(e.types, "integer") || !isWhole(v)) {
		return mismatch{&kind.Type{Got: got, Want: e.types}}
	}
	for _, one := range e.fixed {
		is := slices.Contains(one.types, got)
		if is {
			key, ok := e.of.key(v)
			if !ok {
				return errTooMuchWork
			}
			_, is = one.keys[key]
		}
		if !is {
			return mismatch{one.error(v)}
		}
	}
	return nil
}

// steps returns the cost of the schema for the value, without the schemas below it.
func (e *entry) steps(v any) int {
	out := e.look
	switch v := v.(type) {
	case map[string]any:
		out += e.each * len(v)
		if e.match == 0 || out > maxWork {
			break
		}
		for name := range v {
			out += patternSteps(len(name), e.match)
		}
	case []any:
		out += e.each * len(v)
	case string:
		if e.length {
			out += len(v) / textPerStep
		}
		if e.pattern > 0 {
			out += patternSteps(len(v), e.pattern)
		}
	case json.Number:
		if each := 2 + len(v)/digitsPerStep; strings.ContainsAny(v.String(), "eE") {
			out += e.bounds * (each + exponentSteps)
		} else {
			out += e.bounds * each
		}
	}
	return out
}

// patternSteps returns the cost of matching a text, and never overflows.
func patternSteps(length, instructions int) int {
	return int(min(int64(length+1)*int64(instructions)/matchPerStep, maxWork)) + 1
}

// unique implements uniqueItems. The library compares all pairs whose hashes collide,
// and a caller can construct collisions.
type unique struct{ of *boundedSchema }

// Validate implements jsonschema.SchemaExt.
func (u unique) Validate(ctx *jsonschema.ValidatorContext, v any) {
	list, _ := v.([]any)
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

// key is appendKey for a value that may be large. It returns false if not enough steps are
// left.
func (b *boundedSchema) key(v any) (string, bool) {
	if !b.take(keySteps(v, b.left)) {
		return "", false
	}
	var scratch [64]byte
	return string(appendKey(scratch[:0], v)), true
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

// appendKey appends a key of a JSON value: its type, and its content. Two values have the same
// key exactly if JSON Schema calls them equal. Numbers are compared by value.
func appendKey(dst []byte, v any) []byte {
	dst = append(dst, typeOf(v)...)
	switch v := v.(type) {
	case bool:
		return strconv.AppendBool(dst, v)
	case string:
		return appendSized(dst, v)
	case json.Number:
		digits, exponent := decimal(v.String())
		if v[0] == '-' && digits != "" {
			dst = append(dst, '-')
		}
		return append(strconv.AppendInt(append(append(dst, digits...), 'e'), int64(exponent), 10), ';')
	case []any:
		for _, one := range v {
			dst = appendKey(dst, one)
		}
		return append(dst, ']')
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(v)) {
			dst = appendKey(appendSized(dst, name), v[name])
		}
		return append(dst, '}')
	}
	return dst
}

// typeOf returns the name of a value's type in JSON Schema; every number is "number".
func typeOf(v any) string {
	switch v.(type) {
	case bool:
		return "boolean"
	case string:
		return "string"
	case json.Number:
		return "number"
	case []any:
		return "array"
	case map[string]any:
		return "object"
	default:
		return "null"
	}
}

// decimal returns the digits of a JSON number without zeros at either end, and the power
// of ten to multiply them by: 100, 1e2 and 100.0 are the same. Zero has no digits.
func decimal(text string) (digits string, exponent int) {
	if at := strings.IndexAny(text, "eE"); at >= 0 {
		exponent, _ = strconv.Atoi(text[at+1:]) // bounded by decode
		text = text[:at]
	}
	whole, fraction, _ := strings.Cut(strings.TrimPrefix(text, "-"), ".")
	digits = strings.TrimLeft(whole+fraction, "0")
	short := strings.TrimRight(digits, "0")
	if short == "" {
		return "", 0
	}
	return short, exponent - len(fraction) + len(digits) - len(short)
}

// isWhole reports whether a value is a whole number.
func isWhole(v any) bool {
	number, ok := v.(json.Number)
	if !ok {
		return false
	}
	_, exponent := decimal(number.String())
	return exponent >= 0
}

// nesting returns how deep a document nests; a scalar has depth zero.
func nesting(v any) int {
	deepest := 0
	switch v := v.(type) {
	case []any:
		for _, one := range v {
			deepest = max(deepest, 1+nesting(one))
		}
	case map[string]any:
		for _, one := range v {
			deepest = max(deepest, 1+nesting(one))
		}
	}
	return deepest
}
