package payload_test

import (
	"testing"

	"github.com/stagemesh/stagemesh/mesh/payload"
)

func TestJSONIsRecognizedByContentType(t *testing.T) {
	t.Parallel()
	for contentType, want := range map[string]bool{
		"application/json": true, "Application/JSON; charset=utf-8": true, "application/vnd.x+json": true, "image/x+JSON;a=b": true,
		"": false, "text/plain": false, "application/jsonl": false, "application/json-seq": false, "text/plain; a=x+json": false, "application/*": false,
	} {
		if got := payload.IsJSON(contentType); got != want {
			t.Errorf("%q: %t", contentType, got)
		}
	}
}

func TestPatternAcceptsMatchingTypes(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		pattern, contentType string
		want                 bool
	}{
		{"image/png", "image/png", true},
		{"image/png", "IMAGE/PNG; q=1", true},
		{" Image/PNG;q=1", "image/png", true},
		{"image/png", "image/jpeg", false},
		{"image/*", "image/jpeg", true},
		{"image/*", "text/plain", false},
		{"*/*", "text/plain", true},
		{"*/*", "", true},
		{"application/json", "application/vnd.x+json", true},
		{"application/vnd.x+json", "application/json", false},
		{"application/vnd.x+json", "application/vnd.y+json", false},
		{"text/plain", "application/json", false},
	} {
		if got := payload.AcceptsType(row.pattern, row.contentType); got != row.want {
			t.Errorf("%q takes %q: %t", row.pattern, row.contentType, got)
		}
	}
}
