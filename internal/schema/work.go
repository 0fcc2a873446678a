package schema

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"net/url"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
)

const (
	// maxWork bounds the cost of validating one document, in steps of at most some 100 ns.
	// Alternatives that reach themselves double the cost at each level, so neither the
	// document's size nor the schema's bounds it. Of the 16 documents of
	// TestExcessiveWorkIsRejectedEarly, 15 would take over 400 ms and 8 over 4 s.
	maxWork = 250_000
	// maxPlan bounds the work of making a plan, in schemas.
	maxPlan = 1_000_000
)

// Divisors of steps.
const (
	// A visit costs more in a deep document and in a long chain of schemas: an error has
	// the whole path of its value.
	levelsPerStep = 16
	// namesPerStep is for required names, and equalsPerStep for the values of enum.
	namesPerStep  = 8
	equalsPerStep = 20
	// textPerStep is in bytes. In the worst case a regular expression runs all its
	// instructions for each byte.
	textPerStep  = 64
	matchPerStep = 8
)

// cost is the most that the values at one depth of a document cost, in steps: each value, and
// in addition each unit of a number's size and each byte of text. A byte's is in
// steps/textPerStep.
type cost struct{ value, number, text int }

func (c cost) plus(o cost, times int) cost {
	return cost{c.value + o.value*times, c.number + o.number*times, c.text + o.text*times}
}

// most returns the greater of two costs, bounded such that no sum overflows.
func most(a, b cost) cost {
	of := func(a, b int) int { return min(max(a, b), maxWork*textPerStep+1) }
	return cost{of(a.value, b.value), of(a.number, b.number), of(a.text, b.text)}
}

// uses are how often each schema is applied to one value.
type uses map[*jsonschema.Schema]int

// entry is the validation of a value, and of everything in it, against a schema.
type entry struct {
	// closure are the schemas for the value: this one, and those that it applies.
	closure uses
	// chain is the length of the longest chain of them.
	chain int
	// children are the schemas for a member or an element, one for each name that has some of
	// its own, and one for the others. Nil until a value is validated against this schema alone.
	children []uses
	// at is the cost of the values at one depth below this one, and next of those one deeper.
	// each is in addition at every depth below, and child at the first.
	at, next, each, child cost
}

// planner bounds the cost of validation at each depth of a document.
type planner struct {
	doc     any
	entries map[*jsonschema.Schema]*entry
	size    int
	// evaluates is true if a schema tracks what the others have evaluated.
	evaluates bool
}

// plan returns the most that the values at each depth of a document cost. Its error names a
// place in the schema.
func plan(doc any, root *jsonschema.Schema) ([]cost, error) {
	p := &planner{doc: doc, entries: map[*jsonschema.Schema]*entry{}}
	var entries []*entry
	for queue := []*jsonschema.Schema{root}; len(queue) > 0; {
		s := queue[0]
		queue = queue[1:]
		e, err := p.enter(s)
		if err != nil {
			return nil, err
		}
		if e.children != nil {
			continue
		}
		entries = append(entries, e)
		e.children = append(childrenOf(e.closure, members), childrenOf(e.closure, elements)...)
		for _, c := range e.children {
			queue = slices.AppendSeq(queue, maps.Keys(c))
			p.size += len(c)
		}
		if p.size += len(e.children) * len(e.closure); p.size > maxPlan {
			return nil, p.tooLarge(s)
		}
	}
	longest := 0
	for _, e := range entries {
		longest = max(longest, e.chain)
		for s, times := range e.closure {
			own, child, each := p.costsOf(s)
			e.at, e.child, e.each = e.at.plus(own, times), e.child.plus(child, times), e.each.plus(each, times)
		}
	}
	out := make([]cost, maxNesting+1)
	for depth := range out {
		out[depth] = p.entries[root].at
		out[depth].value = out[depth].value * (levelsPerStep + depth + longest) / levelsPerStep
		for _, e := range entries {
			e.next = cost{}
			for _, c := range e.children {
				sum := e.each.plus(e.child, 1)
				for s, times := range c {
					sum = sum.plus(p.entries[s].at, times)
				}
				e.next = most(e.next, sum)
			}
		}
		for _, e := range entries {
			e.at, e.child = e.next, cost{}
		}
	}
	return out, nil
}

func (p *planner) tooLarge(s *jsonschema.Schema) error {
	return fmt.Errorf("%s applies too many schemas to one value; use fewer alternatives and references there", placeOf(p.doc, s.Location))
}

// enter returns the entry of a schema with its closure. A schema that applies itself to its own
// value is an error: no document could ever be valid.
func (p *planner) enter(s *jsonschema.Schema) (*entry, error) {
	if e, ok := p.entries[s]; ok {
		if e == nil {
			return nil, fmt.Errorf("%s leads back to itself without a step into the document, so nothing keeps to it", placeOf(p.doc, s.Location))
		}
		return e, nil
	}
	if s.DynamicRef != nil || s.RecursiveRef != nil {
		return nil, fmt.Errorf("%s: $dynamicRef and $recursiveRef are not supported; use $ref", placeOf(p.doc, s.Location))
	}
	p.entries[s] = nil
	s.Format = nil // the library checks it in older drafts
	if s.UniqueItems {
		s.UniqueItems, s.Extensions = false, append(s.Extensions, unique{})
	}
	p.evaluates = p.evaluates || s.UnevaluatedItems != nil || s.UnevaluatedProperties != nil
	out, total := &entry{closure: uses{s: 1}, chain: 1}, 0
	for _, to := range appliedTo(s) {
		e, err := p.enter(to)
		if err != nil {
			return nil, err
		}
		out.chain = max(out.chain, e.chain+1)
		for t, times := range e.closure {
			out.closure[t] += times
			total += times
		}
	}
	if p.size += len(out.closure); p.size > maxPlan || total > maxWork {
		return nil, p.tooLarge(s)
	}
	p.entries[s] = out
	return out, nil
}

// appliedTo returns the schemas that a schema applies to its own value.
func appliedTo(s *jsonschema.Schema) []*jsonschema.Schema {
	out := slices.Concat(s.AllOf, s.AnyOf, s.OneOf, slices.Collect(maps.Values(s.DependentSchemas)))
	out = append(out, s.Ref, s.Not, s.If, s.Then, s.Else)
	for _, to := range s.Dependencies {
		out = append(out, schemaOf(to))
	}
	return slices.DeleteFunc(out, func(s *jsonschema.Schema) bool { return s == nil })
}

// schemaOf returns the schema of a keyword whose value may be something else, or nil.
func schemaOf(v any) *jsonschema.Schema {
	s, _ := v.(*jsonschema.Schema)
	return s
}

// applicators are the schemas for an object's members, or an array's elements: by name, for
// those without a name, and for all.
type applicators struct {
	named map[string]*jsonschema.Schema
	other *jsonschema.Schema
	all   []*jsonschema.Schema
}

func members(s *jsonschema.Schema) applicators {
	all := append(slices.Collect(maps.Values(s.PatternProperties)), s.PropertyNames, s.UnevaluatedProperties)
	return applicators{s.Properties, schemaOf(s.AdditionalProperties), all}
}

func elements(s *jsonschema.Schema) applicators {
	list, other := s.PrefixItems, cmp.Or(s.Items2020, schemaOf(s.Items), schemaOf(s.AdditionalItems))
	if old, ok := s.Items.([]*jsonschema.Schema); ok {
		list = old
	}
	named := map[string]*jsonschema.Schema{}
	for i, one := range list {
		named[strconv.Itoa(i)] = one
	}
	return applicators{named, other, []*jsonschema.Schema{s.Contains, s.UnevaluatedItems}}
}

// childrenOf returns the schemas that a closure applies to a child, for each name.
func childrenOf(closure uses, of func(*jsonschema.Schema) applicators) []uses {
	const unnamed = "\xff" // no text in UTF-8 is this
	byName := map[string]uses{unnamed: {}}
	for s := range closure {
		for name := range of(s).named {
			byName[name] = uses{}
		}
	}
	for s, times := range closure {
		a := of(s)
		for name, to := range byName {
			for _, one := range append(a.all, cmp.Or(a.named[name], a.other)) {
				if one != nil {
					to[one] += times
				}
			}
		}
	}
	return slices.Collect(maps.Values(byName))
}

// costsOf returns what a schema alone costs: for its value, in addition for each child, and in
// addition for everything below.
func (p *planner) costsOf(s *jsonschema.Schema) (own, child, each cost) {
	own, child = cost{value: 1 + len(s.Required)/namesPerStep, text: 1}, cost{value: 1}
	if s.Bool != nil && !*s.Bool {
		own.value++ // for the error
	}
	if s.PropertyNames != nil {
		child.value += 2 // each name begins a validation of its own
	}
	for _, names := range s.DependentRequired {
		own.value += 1 + len(names)/namesPerStep
	}
	for _, one := range s.Dependencies {
		names, _ := one.([]string)
		own.value += 1 + len(names)/namesPerStep
	}
	for _, has := range []bool{s.Minimum != nil, s.Maximum != nil, s.ExclusiveMinimum != nil, s.ExclusiveMaximum != nil, s.MultipleOf != nil, s.Types != nil} {
		if has {
			own.number++
		}
	}
	if s.Pattern != nil {
		own = own.plus(matchCost(s.Pattern), 1)
	}
	for pattern := range s.PatternProperties {
		child = child.plus(matchCost(pattern), 1)
	}
	if p.evaluates {
		child.value += len(appliedTo(s))
	}
	var fixed []any
	if s.Const != nil {
		fixed = append(fixed, *s.Const)
	}
	if s.Enum != nil {
		fixed = append(fixed, s.Enum.Values...)
	}
	own.value += len(fixed) / equalsPerStep
	for _, v := range fixed {
		switch v.(type) {
		case json.Number:
			own.number += 2
		case []any, map[string]any:
			each = each.plus(cost{value: 1, number: 2}, 1)
		}
	}
	if len(s.Extensions) > 0 {
		each = each.plus(cost{value: 2, number: 1, text: 1}, 1)
	}
	return own, child, each
}

// matchCost returns the cost of matching text with a pattern.
func matchCost(pattern jsonschema.Regexp) cost {
	size := maxWork
	if parsed, err := syntax.Parse(pattern.String(), syntax.Perl); err == nil {
		program, _ := syntax.Compile(parsed.Simplify()) // has no errors
		size = len(program.Inst)
	}
	return cost{value: 1 + size/matchPerStep, text: size * textPerStep / matchPerStep}
}

// placeOf returns a schema's place in its document.
func placeOf(doc any, location string) string {
	_, fragment, _ := strings.Cut(location, "#")
	pointer, err := url.PathUnescape(fragment)
	if err != nil || pointer == "" {
		return "schema"
	}
	tokens := strings.Split(pointer, "/")[1:]
	for i, token := range tokens {
		tokens[i] = unescapeToken.Replace(token)
	}
	return pathOf("schema", doc, tokens)
}

var unescapeToken = strings.NewReplacer("~1", "/", "~0", "~")

// unique implements uniqueItems. The library compares all pairs whose hashes collide, and a
// caller can construct collisions.
type unique struct{}

// Validate implements jsonschema.SchemaExt.
func (unique) Validate(ctx *jsonschema.ValidatorContext, v any) {
	list, _ := v.([]any)
	seen := map[string]int{}
	for i, one := range list {
		key := string(appendKey(nil, one))
		if j, twice := seen[key]; twice {
			ctx.AddError(&kind.UniqueItems{Duplicates: [2]int{j, i}})
			return
		}
		seen[key] = i
	}
}

// appendKey appends a key of a JSON value. Two values have the same key exactly if JSON Schema
// calls them equal: numbers are compared by value.
func appendKey(dst []byte, v any) []byte {
	switch v := v.(type) {
	case bool:
		return strconv.AppendBool(dst, v)
	case string:
		return appendSized(append(dst, 's'), v)
	case json.Number:
		number, _ := new(big.Rat).SetString(v.String())
		return append(append(dst, number.RatString()...), ';')
	case []any:
		dst = append(dst, '[')
		for _, one := range v {
			dst = appendKey(dst, one)
		}
		return append(dst, ']')
	case map[string]any:
		dst = append(dst, '{')
		for _, name := range slices.Sorted(maps.Keys(v)) {
			dst = appendKey(appendSized(dst, name), v[name])
		}
		return append(dst, '}')
	}
	return append(dst, 'n')
}
