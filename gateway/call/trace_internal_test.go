package call

import (
	"strings"
	"testing"
	"unicode/utf8"
)

// The exporter drops a whole batch of spans for one text that is not UTF-8.
func TestOriginIsUTF8AndBounded(t *testing.T) {
	t.Parallel()
	hostile := strings.Repeat("ä\xff", 1000)
	for protocol, o := range map[string]Origin{
		"http": {Protocol: ProtocolHTTP, Method: "POST", Route: "/v1", Path: hostile, Server: hostile},
		"grpc": {Protocol: "grpc", Method: "service/method", Server: hostile + ":80"},
	} {
		for _, a := range o.attributes() {
			if got := a.Value.String(); !utf8.ValidString(got) || len(got) > 3*maxOriginText {
				t.Errorf("%s: %s is %d bytes, %.20q", protocol, a.Key, len(got), got)
			}
		}
	}
}
