package rest

import (
	"net/http"

	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/msgpack"
)

// wish is how a caller wants its answer.
type wish struct {
	// json asks for JSON, and packed for MessagePack, even where the answer is one
	// blob; one of them at most is true.
	json, packed bool
	// id is echoed.
	id string
}

// wishOf reads what a caller lists among what it accepts: JSON, or MessagePack, by
// its own preference, and of equal ones the first.
func wishOf(h http.Header) (out wish) {
	best := 0.0
	for media, q := range transport.AcceptedValues(h.Values("Accept")) {
		if (media == jsonType || msgpack.Is(media)) && q > best {
			best, out = q, wish{json: media == jsonType, packed: media != jsonType}
		}
	}
	return out
}
