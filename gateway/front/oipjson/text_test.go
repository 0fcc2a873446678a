package oipjson_test

import (
	"encoding/json"
	"testing"

	"github.com/stagemesh/stagemesh/gateway/front/oipjson"
)

// FuzzStringsMatchEncodingJSON compares strings with the standard library.
func FuzzStringsMatchEncodingJSON(f *testing.F) {
	for _, seed := range []string{`a`, `\n\t\b\f\r\"\\\/`, `\u00e9`, `\ud83d\ude00`, `\ud83d`, `\ud83d\u0041`, `\ude00\ud83d`, `\u12`, `\u+123`, `\x`, `\'`, "é"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, between string) {
		text := []byte(`{"inputs":[],"id":"` + between + `"}`)
		var want struct{ ID *string }
		valid := json.Unmarshal(text, &want) == nil && want.ID != nil
		got, err := oipjson.Decode(text, nil)
		if err != nil || !valid {
			return // FuzzDecode covers rejected texts
		}
		if got.ID != *want.ID {
			t.Errorf("%s is %q, and %q to encoding/json", text, got.ID, *want.ID)
		}
	})
}

func TestInvalidStringsAreRejected(t *testing.T) {
	t.Parallel()
	for _, between := range []string{`\u12`, `\u+123`, `\u1_23`, `\x`, `\'`, `\`, `\u`} {
		if _, err := oipjson.Decode([]byte(`{"inputs":[],"id":"`+between+`"}`), nil); err == nil {
			t.Errorf("%s is accepted", between)
		}
	}
}
