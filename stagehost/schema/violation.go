package schema

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Bounds on the report of a document that violates its schema.
const (
	maxViolations  = 5
	maxDescription = 200
	maxPlaces      = 16
	// maxCompared bounds the violations among which the first ones are picked.
	maxCompared = 1000
)

// violated is a place of a document that violates the schema.
type violated = fault.Violation

// violations returns the first violations of a document, at least one, in the
// document's order where it has an order. The path is that of the document.
func violations(path string, doc any, invalid *jsonschema.ValidationError) []violated {
	leaves := collect(nil, invalid)
	slices.SortStableFunc(leaves, func(a, b *jsonschema.ValidationError) int {
		return slices.CompareFunc(a.InstanceLocation, b.InstanceLocation, comparePlaces)
	})
	var out []violated
	for _, leaf := range leaves {
		one := violated{Field: pathOf(path, doc, leaf.InstanceLocation), Description: describe(leaf)}
		if !slices.Contains(out, one) {
			out = append(out, one)
		}
		if len(out) == maxViolations {
			break
		}
	}
	return out
}

// collect adds the errors that describe a violation themselves. If no alternative
// matches, that error stands for the alternatives.
func collect(to []*jsonschema.ValidationError, e *jsonschema.ValidationError) []*jsonschema.ValidationError {
	if len(to) == maxCompared {
		return to
	}
	switch kindOf(e).(type) {
	case *kind.AnyOf, *kind.OneOf, *kind.Contains, *kind.MinContains:
		return append(to, e)
	}
	if len(e.Causes) == 0 {
		return append(to, e)
	}
	for _, cause := range e.Causes {
		to = collect(to, cause)
	}
	return to
}

// comparePlaces orders elements by their index, and members by their key.
func comparePlaces(a, b string) int {
	x, notA := strconv.Atoi(a)
	y, notB := strconv.Atoi(b)
	if notA == nil && notB == nil {
		return cmp.Compare(x, y)
	}
	return cmp.Compare(a, b)
}

// pathOf returns the path to a place. Only the document distinguishes an index from a
// key that is a number.
func pathOf(path string, doc any, location []string) string {
	for i, element := range location {
		if i == maxPlaces {
			return path + "..."
		}
		switch at := doc.(type) {
		case []any:
			n, err := strconv.Atoi(element)
			if err != nil || n < 0 || n >= len(at) {
				return path
			}
			path, doc = fault.Element(path, n), at[n]
		case map[string]any:
			path, doc = fault.Member(path, element), at[element]
		}
	}
	return path
}

func describe(e *jsonschema.ValidationError) string {
	var out string
	switch k := kindOf(e).(type) {
	case *kind.AnyOf:
		out = "is none of the forms that anyOf has: " + alternatives(e)
	case *kind.OneOf:
		if len(k.Subschemas) > 0 {
			out = "is more than one of the forms that oneOf has"
		} else {
			out = "is none of the forms that oneOf has: " + alternatives(e)
		}
	case *kind.Contains, *kind.MinContains:
		out = "has too few elements of the form that contains has"
	case *kind.Not:
		out = "is of the form that not has"
	case *kind.FalseSchema:
		out = "is not allowed"
	default:
		out = describePlain(e)
	}
	return clip(out)
}

// describePlain describes an error in the library's words. It escapes unprintable text that
// the error quotes. It leaves out the cause, which may contain all of a document.
func describePlain(e *jsonschema.ValidationError) string {
	alone := jsonschema.ValidationError{SchemaURL: e.SchemaURL, InstanceLocation: e.InstanceLocation, ErrorKind: kindOf(e)}
	if out := alone.BasicOutput(); out.Error != nil {
		return printable(out.Error.String())
	}
	return fmt.Sprintf("breaks %s", strings.Join(alone.ErrorKind.KeywordPath(), "."))
}

// alternatives describes the wanted alternatives, as far as space permits.
func alternatives(e *jsonschema.ValidationError) string {
	var out []string
	for _, cause := range e.Causes[:min(len(e.Causes), maxViolations)] {
		leaf := collect(nil, cause)[0]
		what := describePlain(leaf)
		if below := leaf.InstanceLocation[min(len(e.InstanceLocation), len(leaf.InstanceLocation)):]; len(below) > 0 {
			what = clip(strings.Join(below, ".")) + " " + what
		}
		out = append(out, what)
	}
	return printable(strings.Join(out, "; "))
}

func clip(s string) string {
	if len(s) > maxDescription {
		return strings.ToValidUTF8(s[:maxDescription], "") + "..."
	}
	return s
}

func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if strconv.IsPrint(r) {
			return r
		}
		return '\uFFFD'
	}, s)
}
