package tracing

import (
	"strings"
	"testing"
)

func TestOriginIsBounded(t *testing.T) {
	t.Parallel()
	hostile := strings.Repeat("ä", 1000)
	for protocol, o := range map[string]Origin{
		"http": {Protocol: ProtocolHTTP, Method: "POST", Route: "/v1", Path: hostile, Server: hostile},
		"grpc": {Protocol: "grpc", Method: "service/method", Server: hostile + ":80"},
	} {
		for _, a := range o.Attributes() {
			if got := a.Value.String(); len(got) > maxOriginText {
				t.Errorf("%s: %s is %d bytes, %.20q", protocol, a.Key, len(got), got)
			}
		}
	}
}
