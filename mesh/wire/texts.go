package wire

import "strings"

// pieceSize is about what the texts of an ordinary message take, in bytes.
const pieceSize = 512

// texts makes strings that share few pieces of memory, for a message has many
// short ones.
type texts struct {
	// piece is the size of the next piece.
	piece   int
	builder strings.Builder
}

func (t *texts) copy(b []byte) string {
	if t == nil {
		return string(b)
	}
	// Never leaves much of a piece unused.
	if len(b) > t.piece/4 && len(b) > t.free() {
		return string(b)
	}
	if len(b) > t.free() {
		t.builder.Reset()
		t.builder.Grow(t.piece)
	}
	start := t.builder.Len()
	t.builder.Write(b)
	return t.builder.String()[start:]
}

func (t *texts) free() int { return t.builder.Cap() - t.builder.Len() }
