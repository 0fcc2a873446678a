// Package passthrough has what gateways and hosts agree on about unary gRPC calls that a gateway
// passes on to the model server of a stage as they are. Such a call is one blob with parameters:
// its method, its headers, and where its message has the model's ID. The answer is a blob with
// headers and trailers. It is pure.
package passthrough

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// Parameters of the blob. Only gateways set a call's: callers may not.
const (
	// Method is package.Service/Method.
	Method = "grpc.method"
	// IDPath is the text of a Path; empty or missing for a message without the ID of its model.
	IDPath   = "grpc.id_path"
	Headers  = "grpc.headers"
	Trailers = "grpc.trailers"
)

// ModelHeader names the model of a call that is passed on, to the gateway and to a model server.
// AliasHeader names an alias instead, to the gateway alone.
const (
	ModelHeader = "mm-model-id"
	AliasHeader = "mm-vmodel-id"
)

// management are the services that load and unload models, or serve the port itself.
var management = []string{"mmesh", "inference", "stagemesh", "grpc"}

// CheckMethod checks the name of a method that may be passed on.
func CheckMethod(name string) error {
	service, method, ok := strings.Cut(name, "/")
	if !ok || service == "" || method == "" || strings.ContainsAny(method, "/ ") {
		return fmt.Errorf("%.80q is not package.Service/Method", name)
	}
	for _, pkg := range management {
		if service == pkg || strings.HasPrefix(service, pkg+".") {
			return fmt.Errorf("methods of %s are not passed on: they are the gateway's own, or manage the model server", pkg)
		}
	}
	return nil
}

// Path leads from a message to a string within it, by the numbers of fields. All fields but the
// last are messages.
type Path []protowire.Number

// maxPath bounds a Path.
const maxPath = 16

// ParsePath parses the numbers, with dots between them.
func ParsePath(s string) (out Path, err error) {
	if s == "" {
		return nil, nil
	}
	for number := range strings.SplitSeq(s, ".") {
		n, err := strconv.ParseInt(number, 10, 32)
		if err != nil || !protowire.Number(n).IsValid() || len(out) == maxPath {
			return nil, fmt.Errorf("%.80q is not a path of at most %d fields, such as 1.2", s, maxPath)
		}
		out = append(out, protowire.Number(n))
	}
	return out, nil
}

var errType = errors.New("is neither a string nor a message")

// fields calls visit with the place of each value of the path's first field in a message, its
// length included.
func (p Path) fields(message []byte, visit func(from, to int) error) error {
	for at := 0; at < len(message); {
		number, kind, n := protowire.ConsumeTag(message[at:])
		if n < 0 {
			return protowire.ParseError(n)
		}
		at += n
		if n = protowire.ConsumeFieldValue(number, kind, message[at:]); n < 0 {
			return protowire.ParseError(n)
		}
		if number == p[0] {
			if kind != protowire.BytesType {
				return fmt.Errorf("field %d %w", number, errType)
			}
			if err := visit(at, at+n); err != nil {
				return err
			}
		}
		at += n
	}
	return nil
}

// Get returns the string in a message, as a decoder finds it: the last one.
func (p Path) Get(message []byte) (out string, err error) {
	err = p.fields(message, func(from, to int) error {
		value, _ := protowire.ConsumeBytes(message[from:to])
		if len(p) == 1 {
			out = string(value)
			return nil
		}
		inner, err := p[1:].Get(value)
		if inner != "" {
			out = inner
		}
		return err
	})
	return out, err
}

// Set returns a message with another string: what a decoder finds is replaced or added. All other
// bytes stay, but for the lengths of messages around it.
func (p Path) Set(message []byte, id string) ([]byte, error) {
	if len(p) == 0 {
		return message, nil
	}
	from, to := len(message), len(message)
	isThere := false
	if err := p.fields(message, func(a, b int) error {
		from, to, isThere = a, b, true
		return nil
	}); err != nil {
		return nil, err
	}
	value := []byte(id)
	if len(p) > 1 {
		inner, _ := protowire.ConsumeBytes(message[from:to])
		var err error
		if value, err = p[1:].Set(inner, id); err != nil {
			return nil, err
		}
	}
	var tag []byte
	if !isThere {
		tag = protowire.AppendTag(nil, p[0], protowire.BytesType)
	}
	return slices.Concat(message[:from], tag, protowire.AppendBytes(nil, value), message[to:]), nil
}

// EncodeHeaders returns headers as text, without the headers of the connection, of gRPC and of the mesh.
// Names are in lower case; the values of names that end in "-bin" are any bytes.
func EncodeHeaders(headers map[string][]string) string {
	out := url.Values{}
	for name, values := range headers {
		for _, value := range values {
			if isForwarded(name) && (strings.HasSuffix(name, "-bin") || !strings.ContainsFunc(value, isUnprintable)) {
				out.Add(name, value)
			}
		}
	}
	return out.Encode()
}

func isUnprintable(r rune) bool { return r < ' ' || r > '~' }

// DecodeHeaders returns the headers of EncodeHeaders.
func DecodeHeaders(text string) map[string][]string {
	out, _ := url.ParseQuery(text) // other text has no headers
	maps.DeleteFunc(out, func(name string, _ []string) bool { return !isForwarded(name) })
	return out
}

func isForwarded(name string) bool {
	switch name {
	case "authorization", "connection", "content-length", "content-type", "date", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "user-agent":
		return false
	}
	for _, prefix := range []string{":", "grpc-", "mm-", "proxy-", "stagemesh-"} {
		if strings.HasPrefix(name, prefix) {
			return false
		}
	}
	return true
}
