package envelope

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

// PeekTerminal reports whether an encoded reply ends its answer, without
// decoding it: what a shared subscription may spend on each message.
func PeekTerminal(data []byte) (terminal bool, err error) {
	fields := (*meshv1.Reply)(nil).ProtoReflect().Descriptor().Fields()
	chunk := fields.ByName("chunk").Number()
	outcomes := []protowire.Number{chunk, fields.ByName("output").Number(), fields.ByName("fault").Number(), fields.ByName("stored").Number()}
	found := false
	for len(data) > 0 {
		number, kind, size := protowire.ConsumeField(data)
		if size < 0 {
			return false, fmt.Errorf("%w: %w", ErrMalformed, protowire.ParseError(size))
		}
		// Of another wire type it is a field that nobody knows.
		if kind == protowire.BytesType && slices.Contains(outcomes, number) {
			terminal, found = number != chunk, true
		}
		data = data[size:]
	}
	if !found {
		return false, fmt.Errorf("%w: neither output, chunk, fault nor stored", ErrMalformed)
	}
	return terminal, nil
}
