package envelope

import (
	"fmt"

	"github.com/stagemesh/stagemesh/mesh/wire"
)

// PeekTerminal reports whether an encoded reply ends its answer, without
// decoding it: what a shared subscription may spend on each message.
func PeekTerminal(data []byte) (terminal bool, err error) {
	found := false
	m := wire.Skim(data)
	for m.Next() {
		if isOutcome(m.Tag) {
			terminal, found = m.Tag != replyChunkTag, true
		}
	}
	if err := m.Err(); err != nil {
		return false, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if !found {
		return false, fmt.Errorf("%w: %w", ErrMalformed, errNoOutcome)
	}
	return terminal, nil
}
