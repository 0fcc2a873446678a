package discovery_test

import (
	"errors"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/discovery"
)

func TestSegmentsRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		segments := rapid.SliceOfN(rapid.StringN(1, 20, 60), 1, 4).Draw(t, "segments")
		key := discovery.KeyOf(segments...)
		if strings.Trim(string(key), "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=/") != "" {
			t.Fatalf("key %q has bytes that not every store accepts", key)
		}
		got, err := key.Segments()
		if err != nil || strings.Join(got, "\x00") != strings.Join(segments, "\x00") {
			t.Fatalf("%q is read as %q, %v", segments, got, err)
		}
	})
}

func TestMalformedKeysAreRejected(t *testing.T) {
	t.Parallel()
	for _, key := range []discovery.Key{"", "/", "a/", "/a", "a//b", "a b", "a.b", "ä", "=", "=4", "=2e", "=61", "a/=GG", discovery.Key(strings.Repeat("a", 256)), discovery.KeyOf(strings.Split(strings.Repeat("a/", 600)+"a", "/")...)} {
		if got, err := key.Segments(); !errors.Is(err, discovery.ErrInvalid) {
			t.Errorf("%.20q is read as %q, %v", key, got, err)
		}
	}
	if key := discovery.KeyOf("models", "llama 3.1/8B"); key != "models/llama=203=2E1=2F8B" {
		t.Errorf("the key is %q", key)
	}
}
