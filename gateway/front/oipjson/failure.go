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
	return fault.Newf(fault.InvalidInput, "%s: %s", path, what).WithViolation(path, "%s", what)
}

// classify returns err as a fault: text that is no JSON is the request's own.
func classify(err error) error {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	return fault.Newf(fault.InvalidRequest, "the body is no valid JSON of an inference request: %w", err)
}

// classify names the form that the request came in. Only the caller of JSON can find
// an offset.
func (s *scanner) classify(err error) error {
	if _, ok := errors.AsType[*fault.Fault](err); !ok && s.packed {
		return fault.New(fault.InvalidRequest, "the body is no inference request: a number, a string or a list is not where the protocol has one")
	}
	return classify(err)
}

// unspoken says of a tensor's data that no list has them, and how to send them.
func (s *scanner) unspoken(path, datatype string) error {
	if s.packed {
		return noList(path, datatype)
	}
	return wrong(path, "%s cannot be said in JSON; send the tensor by gRPC or Connect", datatype)
}

func noList(path, datatype string) error {
	return wrong(path, "%s cannot be said in a list; send data as bytes (bin)", datatype)
}

// InputPath names an input in messages as everywhere else in the mesh: by name
// where it has one.
func InputPath(i int, name string) string {
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
