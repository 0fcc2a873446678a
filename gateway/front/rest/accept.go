package rest

import (
	"mime"
	"net/http"
	"strconv"
	"strings"

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
	for entry := range strings.SplitSeq(strings.Join(h.Values("Accept"), ","), ",") {
		media, params, err := mime.ParseMediaType(entry)
		if err != nil || media != jsonType && !msgpack.Is(media) {
			continue
		}
		if q := quality(params["q"]); q > best {
			best, out = q, wish{json: media == jsonType, packed: media != jsonType}
		}
	}
	return out
}

// quality is how much a caller wants something, from 0 for not at all to 1.
func quality(q string) float64 {
	if q == "" {
		return 1
	}
	out, err := strconv.ParseFloat(q, 64)
	if err != nil || !(out >= 0 && out <= 1) {
		return 1
	}
	return out
}
