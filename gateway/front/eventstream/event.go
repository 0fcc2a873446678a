package eventstream

import "strconv"

// Event is one event.
type Event struct {
	// ID is the event's number; 0 is none.
	ID uint64
	// Name is what readers branch on, in letters; empty is none, which readers
	// take for "message".
	Name string
	// Data is one JSON document. A line end in it, which is white space there,
	// is sent as a space: every document is one line.
	Data []byte
}

// append appends the event as it is sent.
func (e Event) append(dst []byte) []byte {
	if e.ID > 0 {
		dst = strconv.AppendUint(append(dst, "id: "...), e.ID, 10)
		dst = append(dst, '\n')
	}
	if e.Name != "" {
		dst = append(append(dst, "event: "...), e.Name...)
		dst = append(dst, '\n')
	}
	dst = append(dst, "data: "...)
	start := len(dst)
	dst = append(dst, e.Data...)
	for i := start; i < len(dst); i++ {
		if dst[i] == '\n' || dst[i] == '\r' {
			dst[i] = ' '
		}
	}
	return append(dst, "\n\n"...)
}
