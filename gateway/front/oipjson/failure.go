package oipjson

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// wrong says what is wrong with the field of that path.
func wrong(path, format string, args ...any) *fault.Fault {
	what := fmt.Sprintf(format, args...)
	return fault.Newf(fault.InvalidInput, "%s %s", path, what).WithViolation(path, "%s", what)
}

// classify returns err as a fault: text that is no JSON is the request's own.
func classify(err error) error {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	return fault.Newf(fault.InvalidRequest, "the body is no valid JSON of an inference request: %w", err)
}

// inputPath names an input in messages as everywhere else in the mesh: by name
// where it has one.
func inputPath(i int, name string) string {
	if name == "" {
		return "inputs[" + strconv.Itoa(i) + "]"
	}
	return "inputs." + name
}

// clip shortens what a caller sent to what fits a message.
func clip(s string) string {
	const most = 40
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "..."
	}
	return s
}
